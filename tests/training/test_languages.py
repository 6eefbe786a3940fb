"""One model of several target languages: tags, sampling, and how a language is asked for."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

from relpos import cli
from relpos.model_cards.plot import attention_bias
from relpos.pipeline_relpos import language_tags
from relpos.training import pictures
from relpos.training.evaluation import EvaluationError, choose_languages
from relpos.training.loading import ModelError, into_language, load_model
from relpos.training.preparation import make_tokenizer, read_corpora, tokenize_corpora
from relpos.training.recipe import DataArguments, ModelArguments, RecipeError
from relpos.training.run_translation import main
from relpos.training.translation import translate_sentences

NOUNS = [
    ("house", "Haus", "logis"),
    ("file", "Blatt", "papier"),
    ("table", "Pult", "bureau"),
    ("book", "Buch", "livre"),
    ("glass", "Glas", "verre"),
]
VERBS = [
    ("Open", "Öffne", "Ouvre"),
    ("Close", "Schließe", "Ferme"),
    ("Take", "Nimm", "Prends"),
    ("See", "Sieh", "Vois"),
]
SENTENCES = {
    (f"{verb[0]} the {noun[0]}.", f"{verb[1]} das {noun[1]}!", f"{verb[2]} le {noun[2]} !")
    for verb in VERBS
    for noun in NOUNS
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """English to German, to French, and a little to Dutch, as a recipe names them."""
    folder = tmp_path_factory.mktemp("corpora")
    for side, language in ((1, "de"), (2, "fr")):
        lines = sorted(f"{sentence[0]}\t{sentence[side]}\n" for sentence in SENTENCES)
        (folder / f"{language}.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "nl.tsv").write_text("Open the house.\tOpen het huis!\n")
    return {language: f"en-{language}={folder / language}.tsv" for language in ("de", "fr", "nl")}


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    """A model that learned both languages by heart, in about ten seconds."""
    names = [corpora["de"], corpora["fr"]]
    sizes = {f"{side}_{field}": size for side in ("encoder", "decoder") for field, size in SMALL.items()}
    fields = {"model": "tiny", "vocab_size": 440, "d_model": 64, **sizes, "use_cpu": "true", "save_strategy": "no"}
    fields |= {"max_steps": 220, "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
    fields |= {"max_tokens": 400, "max_length": 64, "output_dir": tmp_path_factory.mktemp("models") / "both"}
    arguments = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    return main([*arguments, "--train_corpus", *names, "--validation_corpus", *names])


SMALL = {"layers": 1, "attention_heads": 4, "ffn_dim": 128}


def test_the_same_sentences_go_into_either_language(trained):
    sources = [sentence[0] for sentence in SENTENCES]
    loaded = load_model(str(trained))
    assert loaded.languages == ["de", "fr"]
    translate = pipeline("translation", model=str(trained))
    for side, language in ((1, "de"), (2, "fr")):
        expected = [sentence[side] for sentence in SENTENCES]
        found = translate_sentences(into_language(loaded, language), sources, beams=1)
        assert np.mean([translation.text == text for translation, text in zip(found, expected)]) > 0.8
        records = translate(sources, tgt_lang=language, batch_size=8, num_beams=1)
        assert [record["translation_text"] for record in records] == [translation.text for translation in found]
    named = pipeline("translation_en_to_fr", model=str(trained), num_beams=1)
    assert named(sources) == records


def test_a_language_must_be_named_and_known(trained):
    loaded = load_model(str(trained))
    with pytest.raises(ModelError, match="must be told which language to translate into; it knows de, fr"):
        into_language(loaded, None)
    with pytest.raises(ModelError, match="does not translate into es; it knows de, fr"):
        into_language(loaded, "es")
    translate = pipeline("translation", model=str(trained))
    with pytest.raises(ValueError, match=r"tgt_lang.*it knows \['de', 'fr'\]|this model knows \['de', 'fr'\]"):
        translate("Open the house.")
    with pytest.raises(ValueError, match=r"`tgt_lang` is 'es'.* knows \['de', 'fr'\]"):
        translate("Open the house.", tgt_lang="es")
    with pytest.raises(ValueError, match=r"`tgt_lang` is 'es'"):
        pipeline("translation_en_to_es", model=str(trained))


@pytest.fixture
def relpos_command(monkeypatch):
    """A function that runs `relpos` in this process; the exit code."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["relpos", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code

    return call


def test_the_command_line_asks_for_the_language(trained, tmp_path, relpos_command, capsys):
    sentences = sorted(SENTENCES)
    (tmp_path / "in.txt").write_text("".join(f"{sentence[0]}\n" for sentence in sentences))

    def translate(*options):
        files = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt"]
        return relpos_command("translate", trained, *files, "--beams", 1, *options)

    for options in ((), ("--to", "es")):
        assert translate(*options) == 2
        assert "it knows de, fr" in capsys.readouterr().err
        assert not (tmp_path / "out.txt").exists()
    assert translate("--to", "fr") == 0
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    assert np.mean([line == sentence[2] for line, sentence in zip(lines, sentences, strict=True)]) > 0.8


@pytest.mark.parametrize("verb", ["evaluate", "score"])
def test_what_scores_asks_for_the_language_of_the_references(trained, corpora, relpos_command, capsys, verb):
    file = corpora["fr"].partition("=")[2]
    for options, sentence in (
        ([], "--languages en,de; it knows de, fr"),
        (["--corpus", file], "must be told which language to translate into, such as by --languages en,de; it knows"),
        (["--corpus", file, "--languages", "en,es"], "does not translate into es; it knows de, fr"),
        (["--corpus", corpora["nl"]], "does not translate into nl; it knows de, fr"),
        (["--corpus", corpora["fr"], "--languages", "en,de"], f"languages is en,de, but corpus is {corpora['fr']}"),
        (["--corpus", corpora["de"], "--corpus", corpora["fr"]], "which is not one corpus"),
    ):
        assert relpos_command(verb, trained, *options) == 2
        shown = capsys.readouterr()
        assert sentence in shown.err
        assert len(shown.err.splitlines()) == 1
        assert shown.out == ""


@pytest.mark.parametrize("language", ["de", "fr"])
def test_what_scores_puts_the_language_before_the_sources(trained, corpora, tmp_path, relpos_command, language):
    json_file, text_file = tmp_path / "scores.json", tmp_path / "scores.tsv"
    file = corpora[language].partition("=")[2]
    for named in (["--corpus", corpora[language]], ["--corpus", file, "--languages", f"en,{language}"]):
        assert relpos_command("evaluate", trained, *named, "--beams", 1, "--json", json_file) == 0
        written = json.loads(json_file.read_text())
        assert written["languages"] == ["en", language]
        assert written["results"][0]["scores"][0]["score"] > 70
        assert relpos_command("score", trained, *named, "--output", text_file) == 0
        per_token = [float(line.split("\t")[1]) for line in text_file.read_text().splitlines()]
        assert np.mean(per_token) > -0.6


def test_languages_of_models_that_differ(trained, learned_model):
    both, german = str(trained), str(learned_model)
    choose = lambda models, languages=None: choose_languages(models, corpus=None, languages=languages)
    assert choose([german, both]) == ("en", "de")
    assert choose([both, german], "en,fr") == ("en", "fr")
    with pytest.raises(EvaluationError, match="must be told"):
        choose([both, german])
    with pytest.raises(ModelError, match=f"{both} does not translate into it; it knows de, fr"):
        choose([german, both], "en,it")


@pytest.mark.parametrize("language", [None, "fr"])
def test_the_picture_is_of_one_language_and_says_which(trained, corpora, tmp_path, monkeypatch, language):
    pytest.importorskip("matplotlib")
    drawn = {}
    monkeypatch.setattr(pictures, "read_history", lambda run: [])
    monkeypatch.setattr(
        pictures, "plot_attention_bias", lambda bias, path, *, title: drawn.update(bias=bias, title=title)
    )
    file = corpora[language or "de"].partition("=")[2]
    list(pictures.draw(str(trained), tmp_path, corpus=[file], languages=language and f"en,{language}"))
    shown, side = language or "de", 2 if language else 1
    loaded = into_language(load_model(str(trained)), shown)
    sources, targets = zip(*sorted((sentence[0], sentence[side]) for sentence in SENTENCES))
    expected = attention_bias(
        loaded.model, loaded.tokenizer, sources, targets, source_prefix=[language_tags(loaded.tokenizer)[shown]]
    )
    assert drawn["title"] == f"sources for {shown}"
    torch.testing.assert_close(drawn["bias"], expected, equal_nan=True)


def test_a_model_of_one_language_takes_its_own_alone(learned_model):
    loaded = load_model(str(learned_model))
    assert loaded.languages == []
    assert into_language(loaded, None) == into_language(loaded, "de") == loaded
    with pytest.raises(ModelError, match="one target language, de, and not fr"):
        into_language(loaded, "fr")


def test_the_saved_model_says_its_languages(trained):
    config = json.loads((trained / "config.json").read_text())
    assert (config["source_language"], config.get("target_language")) == ("en", None)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    tags = language_tags(tokenizer)
    assert list(tags) == ["de", "fr"]
    assert tokenizer.decode([tags["fr"], *tokenizer("a b")["input_ids"]], skip_special_tokens=True) == "a b"
    text = ">>de<< Open"
    assert tags["de"] not in tokenizer(text)["input_ids"], "text that spells a tag is text"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    tagged = tokenizer(text, split_special_tokens=False)["input_ids"]
    assert tagged == [tags["de"], *tokenizer("Open")["input_ids"]]
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "from `en` to `de`, `fr`" in card
    assert "- en\n- de\n- fr\n" in card


def test_a_further_language_is_added_by_fine_tuning(trained, corpora, tmp_path):
    arguments = ["--model", str(trained), "--max_steps", "1", "--learning_rate", "0", "--use_cpu", "true"]
    folder = main([*arguments, "--train_corpus", corpora["nl"], "--output_dir", str(tmp_path / "three")])
    three, both = load_model(str(folder)), load_model(str(trained))
    assert three.languages == ["de", "fr", "nl"]
    assert three.model.config.vocab_size == both.model.config.vocab_size + 1
    assert language_tags(three.tokenizer).items() >= language_tags(both.tokenizer).items()
    (found,) = translate_sentences(into_language(three, "fr"), ["Open the book."], beams=1)
    (expected,) = translate_sentences(into_language(both, "fr"), ["Open the book."], beams=1)
    assert found.text == expected.text


def prepare(data):
    corpora = read_corpora(data)
    tokenizer = make_tokenizer(ModelArguments(vocab_size=440), data, corpora)
    return tokenize_corpora(corpora, tokenizer, data), tokenizer, corpora


@pytest.mark.parametrize("languages", [["de"], ["de", "fr"]])
def test_sources_begin_with_a_tag_where_there_are_several_targets(corpora, languages):
    sets, tokenizer, _ = prepare(DataArguments(train_corpus=[corpora[language] for language in languages]))
    first = [row["input_ids"][0] for row in sets.train]
    tags = language_tags(tokenizer)
    assert len(first) == 20 * len(languages)
    assert set(tags) == (set(languages) if len(languages) > 1 else set())
    assert not tags or first == [tags["de"]] * 20 + [tags["fr"]] * 20
    assert not {token for row in sets.train for token in row["labels"]} & set(tags.values())


@pytest.mark.parametrize(("temperature", "times"), [(1, None), (2, (400 / 20) ** 0.5), (1e9, 400 / 20)])
def test_temperature_repeats_the_smaller_corpora(corpora, tmp_path, temperature, times):
    large = tmp_path / "large.tsv"
    large.write_text("".join(f"Take {n} of {n}.\tNimm {n} von {n}!\n" for n in range(400)))
    data = DataArguments(train_corpus=[f"en-de={large}", corpora["fr"]], sampling_temperature=temperature)
    sets, _, _ = prepare(data)
    if times is None:
        assert sets.copies is None
    else:
        np.testing.assert_allclose(sets.copies, np.repeat([1.0, times], [400, 20]), rtol=1e-6)


def test_two_corpora_of_a_pair_are_one_and_cleaned_together(corpora, tmp_path):
    again = tmp_path / "again.tsv"
    again.write_text("Open the house.\tÖffne das Haus!\nnew\tneu\n\tleer\n", encoding="utf-8")
    data = DataArguments(train_corpus=[corpora["de"], str(again)], drop_duplicates=True)
    sets, _, read = prepare(data)
    assert len(sets.train) == 21
    assert dict(read.dropped) == {"an empty side": 1, "duplicate": 1, "too long": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_corpus": ["nl"]}, "validation_corpus has the target language nl, but train_corpus only de, fr"),
        ({"max_length": 2}, "max_length=2 leaves no pair of en-de to train on"),
        ({"max_length": 2, "max_ratio": 3.0}, "max_length=2 and max_ratio=3.0 leaves no pair"),
    ],
)
def test_sets_that_cannot_be(corpora, fields, message):
    fields = {
        name: [corpora[part] for part in value] if isinstance(value, list) else value for name, value in fields.items()
    }
    data = DataArguments(train_corpus=[corpora["de"], corpora["fr"]], **fields)
    with pytest.raises(RecipeError, match=message):
        prepare(data)
