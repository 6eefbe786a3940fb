"""What all tests share: few threads, since pytest runs several processes, and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("relpos", deadline=None, derandomize=True)
settings.load_profile("relpos")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


LEARNED_PAIRS = [
    ("Save the file.", "Speichern Sie die Datei."),
    ("Open the file.", "Öffnen Sie die Datei."),
    ("Close the window.", "Schließen Sie das Fenster."),
    ("Open the window.", "Öffnen Sie das Fenster."),
    ("Delete the selected row and the column beside it.", "Löschen Sie die gewählte Zeile und die Spalte daneben."),
    ("Yes", "Ja"),
    ("Choose a colour for the text.", "Wählen Sie eine Farbe für den Text."),
    ("The table is empty.", "Die Tabelle ist leer."),
]


@pytest.fixture(scope="session")
def learned_pairs():
    """What the model of `learned_model` was trained on, and translates without a mistake."""
    return LEARNED_PAIRS


@pytest.fixture(scope="session")
def learned_model(tmp_path_factory):
    """A saved folder with a small model that learned eight sentences by heart, in about three seconds."""
    from relpos import RelPosConfig, RelPosForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = _byte_level_tokenizer(text for pair in LEARNED_PAIRS for text in pair)
    sizes = {f"{side}_{field}": size for side in ("encoder", "decoder") for field, size in _ONE_SMALL_LAYER.items()}
    config = RelPosConfig(vocab_size=len(tokenizer), d_model=64, max_relative_position=4, dropout=0.0, **sizes)
    model = RelPosForConditionalGeneration(config)
    batch = tokenizer([source for source, _ in LEARNED_PAIRS], padding=True, return_tensors="pt")
    labels = tokenizer([target for _, target in LEARNED_PAIRS], padding=True, return_tensors="pt")["input_ids"]
    batch["labels"] = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.max_length = 64
    model.config.longest_training_source = batch["input_ids"].shape[1]
    model.config.source_language, model.config.target_language = "en", "de"
    folder = tmp_path_factory.mktemp("models") / "learned"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_ONE_SMALL_LAYER = {"layers": 1, "attention_heads": 4, "ffn_dim": 128}


def _byte_level_tokenizer(texts):
    """Any text in bytes, with `</s>` at its end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
