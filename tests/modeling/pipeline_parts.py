"""Texts, tokenizers and small models for the tests of the translation pipeline."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAIRS = {
    "Save the file.": "Speichern Sie die Datei.",
    "Close the window.": "Schließen Sie das Fenster.",
    "Open the file again, please.": "Öffnen Sie die Datei bitte noch einmal.",
    "The cell is empty.": "Die Zelle ist leer.",
    "Choose a colour for the cell and close the window.": "Wählen Sie eine Farbe für die Zelle und schließen Sie das Fenster.",
}
SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())
SPECIALS = ("<pad>", "</s>", "<unk>")
TINY = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


@functools.cache  # training it again may number the pieces differently
def unigram(specials: tuple[str, ...]) -> str:
    """A Unigram tokenizer of PAIRS, serialised."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=list(specials), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SOURCES + TARGETS, trainer)
    return tokenizer.to_str()


def unigram_vocabulary(*specials: str) -> list[tuple[str, float]]:
    return [tuple(entry) for entry in json.loads(unigram(specials))["model"]["vocab"]]


def fast_tokenizer(**kwargs) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(unigram(SPECIALS))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", **kwargs
    )


def marian(tokenizer, **overrides) -> MarianMTModel:
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1}
    fields |= {"decoder_start_token_id": 0, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**TINY, **{**fields, **overrides})).eval()


def record_generate(monkeypatch, model: PreTrainedModel) -> list[dict]:
    """Arguments of each call of this model's `generate`."""
    calls, original = [], model.generate

    def generate(**kwargs):
        calls.append(kwargs)
        return original(**kwargs)

    monkeypatch.setattr(model, "generate", generate)
    return calls


def texts_of(results: list[dict]) -> list[str]:
    assert all(set(result) == {"translation_text"} for result in results)
    return [result["translation_text"] for result in results]
