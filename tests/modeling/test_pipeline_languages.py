"""pipeline("translation") into a language of several: the languages and prefixes of mBART, NLLB, M2M100, T5 and Marian."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    pipeline,
)

from relpos import pipeline_relpos as module

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_parts import SOURCES, SPECIALS, TARGETS, TINY, fast_tokenizer, marian, record_generate, unigram_vocabulary


def mbart_parts() -> tuple:
    vocabulary = unigram_vocabulary("<s>", "<pad>", "</s>", "<unk>")
    vocabulary += [(code, 0.0) for code in ("en_XX", "de_DE", "fr_XX")] + [("<mask>", 0.0)]
    tokenizer = MBartTokenizer(vocab=vocabulary)
    return tokenizer, MBartForConditionalGeneration(many_languages(MBartConfig, tokenizer)).eval()


def mbart50_parts() -> tuple:
    vocabulary = unigram_vocabulary("<unk>", "<s>", "</s>")
    tokenizer = MBart50Tokenizer(vocab=vocabulary)
    return tokenizer, MBartForConditionalGeneration(many_languages(MBartConfig, tokenizer)).eval()


def nllb_parts() -> tuple:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False)
    backend.train_from_iterator(SOURCES + TARGETS, trainer)
    state = json.loads(backend.to_str())["model"]
    tokenizer = NllbTokenizer(vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]])
    return tokenizer, M2M100ForConditionalGeneration(many_languages(M2M100Config, tokenizer)).eval()


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sentencepiece") / "text"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCES + TARGETS), model_prefix=str(path), vocab_size=60, minloglevel=2
    )
    return path.with_suffix(".model")


def m2m_parts(sentencepiece_model: Path) -> tuple:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    pieces = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces += [piece for piece in map(processor.id_to_piece, range(len(processor))) if piece not in pieces]
    vocabulary = sentencepiece_model.with_name("m2m.json")
    vocabulary.write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    tokenizer = M2M100Tokenizer(vocab_file=str(vocabulary), spm_file=str(sentencepiece_model))
    return tokenizer, M2M100ForConditionalGeneration(many_languages(M2M100Config, tokenizer)).eval()


def many_languages(config_class: type, tokenizer) -> MBartConfig | M2M100Config:
    size = max([len(tokenizer), *getattr(tokenizer, "lang_code_to_id", {"": 0}).values()]) + 1
    return config_class(
        **TINY,
        vocab_size=size,
        max_position_embeddings=16,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
    )


@pytest.fixture(scope="module", params=["mbart", "mbart50", "nllb", "m2m"])
def multilingual(request) -> tuple:
    """Tokenizer, model, codes of English, German and French, and a function from code to token id."""
    torch.manual_seed(0)
    if request.param == "m2m":
        tokenizer, model = m2m_parts(request.getfixturevalue("sentencepiece_model"))
        return tokenizer, model, ("en", "de", "fr"), tokenizer.get_lang_id
    parts = {"mbart": mbart_parts, "mbart50": mbart50_parts, "nllb": nllb_parts}[request.param]
    codes = ("eng_Latn", "deu_Latn", "fra_Latn") if request.param == "nllb" else ("en_XX", "de_DE", "fr_XX")
    tokenizer, model = parts()
    return tokenizer, model, codes, tokenizer.convert_tokens_to_ids


@pytest.mark.parametrize("batch_size", [1, 2])
def test_languages_reach_tokenizer_and_generation(multilingual, batch_size, monkeypatch):
    tokenizer, model, (english, german, french), language_id = multilingual
    assert len({language_id(code) for code in (english, german, french)}) == 3
    calls = record_generate(monkeypatch, model)
    named = pipeline(f"translation_{english}_to_{german}", model=model, tokenizer=tokenizer)
    plain = pipeline("translation", model=model, tokenizer=tokenizer, src_lang=english)
    options = {"return_tensors": True, "max_new_tokens": 4, "batch_size": batch_size}
    texts = ["Save", "Close the", "The cell"]

    def check(results: list[dict], source: str, target: str) -> None:
        for result in results:
            assert result["translation_token_ids"][1] == language_id(target)
        for call in calls:
            assert call["forced_bos_token_id"] == language_id(target)
            assert (call["input_ids"] == language_id(source)).any(-1).all()
        calls.clear()

    check(named(texts, **options), english, german)
    check(named(texts, tgt_lang=french, **options), english, french)
    check(named(texts, src_lang=french, **options), french, german)
    check(plain(texts, tgt_lang=german, **options), english, german)
    check(named(texts, **options), english, german)  # a call changes nothing for the next one
    both = pipeline(f"translation_{english}_to_{german}", model=model, tokenizer=tokenizer, tgt_lang=french)
    check(both(texts, **options), english, french)

    named("Save", forced_bos_token_id=5, max_new_tokens=2)
    assert calls[0]["forced_bos_token_id"] == 5
    calls.clear()
    named("Save", generation_config=GenerationConfig(max_new_tokens=2))
    assert calls[0]["generation_config"].forced_bos_token_id == language_id(german)


def test_languages_that_are_missing_or_unknown_are_refused(multilingual):
    tokenizer, model, (english, german, _), _ = multilingual
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="requires a `src_lang` and a `tgt_lang`"):
        translator("Save", src_lang=english)
    with pytest.raises(ValueError, match=f"`tgt_lang` is 'klingon'.* it knows .*'{german}'"):
        translator("Save", src_lang=english, tgt_lang="klingon")
    with pytest.raises(ValueError, match="`src_lang` is 'klingon'"):
        pipeline("translation", model=model, tokenizer=tokenizer, src_lang="klingon")
    with pytest.raises(ValueError, match="`src_lang` is 'klingon'"):
        pipeline(f"translation_klingon_to_{german}", model=model, tokenizer=tokenizer)


def test_positions_that_grow_are_no_ceiling(sentencepiece_model):
    tokenizer, model = m2m_parts(sentencepiece_model)
    translator = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer)
    text = " ".join(SOURCES)
    assert len(tokenizer(text)["input_ids"]) > model.config.max_position_embeddings
    assert len(translator(text)) == 1


def test_target_vocabulary_of_its_own(sentencepiece_model, tmp_path):
    """Marian with separate vocabularies: the target's ids are decoded by the target's side."""
    target_pieces = ["<unk>", "</s>", "<pad>", "▁Datei", "▁speichern"]
    for name, pieces in {"source": ["<unk>", "</s>", "<pad>", "▁S"], "target": target_pieces}.items():
        (tmp_path / name).write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    tokenizer = MarianTokenizer(
        str(sentencepiece_model),
        str(sentencepiece_model),
        str(tmp_path / "source"),
        target_vocab_file=str(tmp_path / "target"),
        separate_vocabs=True,
    )
    model = marian(
        target_pieces,
        pad_token_id=2,
        decoder_start_token_id=2,
        decoder_vocab_size=len(target_pieces),
        vocab_size=4,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.final_logits_bias = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    assert translator("Save", max_new_tokens=2) == [{"translation_text": "Datei Datei"}]


@pytest.fixture
def t5() -> tuple:
    torch.manual_seed(0)
    tokenizer = T5Tokenizer(vocab=unigram_vocabulary(*SPECIALS), extra_ids=0, additional_special_tokens=None)
    pairs = {"de": "German", "fr": "French"}
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        task_specific_params={
            "summarization": {"prefix": "summarize: "},
            **{
                f"translation_en_to_{code}": {
                    "prefix": f"translate English to {name}: ",
                    "max_length": 7,
                    "num_beams": 2,
                    "early_stopping": True,
                }
                for code, name in pairs.items()
            },
        },
    )
    return tokenizer, T5ForConditionalGeneration(config).eval()


def test_prefix_and_settings_of_t5(t5, monkeypatch):
    tokenizer, model = t5
    before = model.config.to_dict(), model.generation_config.to_dict()
    calls = record_generate(monkeypatch, model)
    named = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer)
    plain = pipeline("translation", model=model, tokenizer=tokenizer)

    def check(prefix: str, **settings) -> None:
        call = calls.pop()
        assert call["input_ids"].tolist() == [tokenizer(f"{prefix}Save the file.")["input_ids"]]
        for name, value in settings.items():
            assert call.get(name) == value

    named("Save the file.")
    check("translate English to German: ", num_beams=2, early_stopping=True, max_length=7, max_new_tokens=None)
    named("Save the file.", tgt_lang="fr")
    check("translate English to French: ", num_beams=2)
    plain("Save the file.", src_lang="en", tgt_lang="de")
    check("translate English to German: ", num_beams=2, max_length=7)
    named("Save the file.", num_beams=1, max_new_tokens=3)
    check("translate English to German: ", num_beams=1, max_new_tokens=3, max_length=None)
    length = 2 * len(tokenizer("Save the file.")["input_ids"]) + 50
    plain("Save the file.")
    check("", num_beams=None, max_new_tokens=length)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


@pytest.mark.parametrize(
    ("languages", "named"),
    [
        ({"src_lang": "en", "tgt_lang": "nl"}, "src_lang='en' and tgt_lang='nl'"),
        ({"tgt_lang": "de"}, "src_lang=None and tgt_lang='de'"),
    ],
)
def test_a_pair_without_settings_is_reported(t5, languages, named, caplog, monkeypatch):
    tokenizer, model = t5
    monkeypatch.setattr(module.logger, "propagate", True)
    type(module.logger).warning_once.cache_clear()
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    translator("Save", max_new_tokens=2)
    assert caplog.text == ""
    translator("Save", max_new_tokens=2, **languages)
    assert f"no settings for {named}, but for translation_en_to_de, translation_en_to_fr" in caplog.text


def test_prefix_of_the_config(monkeypatch):
    tokenizer = fast_tokenizer()
    model = marian(tokenizer, prefix=">>de<< ")
    calls = record_generate(monkeypatch, model)
    pipeline("translation", model=model, tokenizer=tokenizer)("Save", max_new_tokens=2)
    assert calls[0]["input_ids"].tolist() == [tokenizer(">>de<< Save")["input_ids"]]
