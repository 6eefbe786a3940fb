"""evaluation.py: scores equal to sacreBLEU's, intervals, corpora, and options that are refused."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import sacrebleu
from rich.console import Console

from relpos.model_cards.figures import PlotError, check_picture
from relpos.training import evaluation
from relpos.training.corpus import CorpusError
from relpos.training.evaluation import EvaluationError
from relpos.training.loading import ModelError, load_model

HYPOTHESES = ["The cat sat on the mat.", "A dog ran home", "Nothing here is right at all"]
REFERENCES = ["The cat sat on the mat.", "The dog ran home.", "Completely different words follow, in this one."]


@pytest.fixture(scope="module")
def loaded(learned_model):
    return load_model(str(learned_model))


def test_scores_are_those_of_sacrebleu():
    bleu, chrf, ter = evaluation.score_translations(HYPOTHESES, REFERENCES)
    assert bleu["score"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, abs=1e-4)
    assert chrf["score"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score, abs=1e-4)
    assert ter["score"] == pytest.approx(sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score, abs=1e-4)
    assert bleu["signature"].startswith("nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert all(score["confidence"] > 0 for score in (bleu, chrf, ter))


def test_interval_where_some_resamples_score_nothing():
    """sacreBLEU 2.6 raises TypeError on such a corpus by itself: it averages float and numpy.float32."""
    bleu, _, _ = evaluation.score_translations(["a b c d e f", "zz"], ["a b c d e g", "qq"])
    assert 0 < bleu["confidence_mean"] < bleu["score"]
    nothing, _, _ = evaluation.score_translations(["", "zz"], ["a b c d e g", "qq"])
    assert nothing["score"] == nothing["confidence"] == 0


def test_interval_is_narrower_for_a_larger_corpus():
    small = evaluation.score_translations(HYPOTHESES, REFERENCES, bootstrap_samples=200)[1]
    large = evaluation.score_translations(HYPOTHESES * 20, REFERENCES * 20, bootstrap_samples=200)[1]
    assert large["score"] == pytest.approx(small["score"], abs=1e-3)
    assert large["confidence"] < small["confidence"] / 2


def test_model_that_is_always_right(loaded, learned_pairs):
    sources, references = zip(*learned_pairs)
    done = []
    results = evaluation.evaluate_model(loaded, sources, references, beams=[1, 3], on_progress=done.append)
    assert [result["beams"] for result in results] == [1, 3]
    assert sum(done) == 2 * len(sources)
    for result in results:
        assert {score["metric"]: score["score"] for score in result["scores"]} == pytest.approx(
            {"BLEU": 100, "chrF2": 100, "TER": 0}, abs=1e-3
        )
        assert result["pairs"] == len(sources)
        assert result["cut_off"] == 0
        assert result["sentences_per_second"] > 0


def test_translations_that_were_cut_off_are_counted(loaded, learned_pairs):
    sources, references = zip(*learned_pairs)
    results = evaluation.evaluate_model(loaded, sources, references, beams=[1], max_new_tokens=1)
    assert results[0]["cut_off"] == len(sources)
    assert any("8 of 8 translations were cut off" in note for note in evaluation.results_notes(results))


LENGTHS = [0, 1, 5, 6, 10, 11, 20, 21, 30, 31, 40, 41, 60, 61, 500]


def test_bleu_by_length_is_that_of_the_sentences_of_each_length():
    sources = ["word " * length for length in LENGTHS]
    references = [f"the {length} small cats sat on a mat" for length in LENGTHS]
    hypotheses = [reference.replace("small ", "") if row % 2 else reference for row, reference in enumerate(references)]
    buckets = evaluation.score_by_length(sources, hypotheses, references, bootstrap_samples=10)
    assert [evaluation.words_label(bucket["words"]) for bucket in buckets] == [
        "≤ 5",
        "6–10",
        "11–20",
        "21–30",
        "31–40",
        "41–60",
        "≥ 61",
    ]
    assert [bucket["pairs"] for bucket in buckets] == [3, 2, 2, 2, 2, 2, 2]
    for start, bucket in zip((0, 3, 5, 7, 9, 11, 13), buckets):
        rows = slice(start, start + bucket["pairs"])
        expected = sacrebleu.corpus_bleu(hypotheses[rows], [references[rows]]).score
        assert bucket["score"] == pytest.approx(expected, abs=1e-4)


def test_lengths_that_no_source_has_are_left_out():
    (bucket,) = evaluation.score_by_length(["one two three four five six"] * 2, ["a b"] * 2, ["a b"] * 2)
    assert bucket["words"] == [6, 10]


@pytest.fixture(scope="module")
def two_results(loaded, learned_pairs):
    sources, references = zip(*learned_pairs)
    translated = evaluation.translate_corpus(loaded, sources, beams=[1])
    other = replace(translated[0], model="another", translations=translated[0].translations[::-1])
    return [evaluation.evaluate_corpus(one, sources, references) for one in (*translated, other)]


def test_tables_name_the_models_where_there_are_several(two_results):
    console = Console(width=150)
    with console.capture() as shown:
        console.print(evaluation.results_table(two_results, title="two"))
        console.print(evaluation.lengths_table(two_results))
    assert "another, greedy" in shown.get()
    with console.capture() as shown:
        console.print(evaluation.results_table(two_results[1:], title="one"))
        console.print(evaluation.lengths_table(two_results[1:]))
    assert "another" not in shown.get()
    assert "greedy" in shown.get()


def test_one_sentence_has_no_interval():
    texts = ["one two three four"] * 2 + ["one two three four five six"]
    result = {"model": "a", "beams": 1, "by_length": evaluation.score_by_length(texts, texts, texts)}
    console = Console(width=150)
    with console.capture() as shown:
        console.print(evaluation.lengths_table([result]))
    assert "100.0 ± 0.0 │" in shown.get()
    assert "100.0 │" in shown.get()


def test_models_translate_in_turn_into_the_language_that_is_asked_for(learned_model, learned_pairs, tmp_path):
    copy = shutil.copytree(learned_model, tmp_path / "copy")
    sources, references = zip(*learned_pairs)
    models = [str(learned_model), str(copy)]
    translated = evaluation.translate_by_models(models, sources, language="de", beams=[1])
    assert [one.model for one in translated] == models
    assert all(one.texts == list(references) for one in translated)


def test_the_picture_by_length_is_drawn(two_results, tmp_path):
    pytest.importorskip("matplotlib")
    path = evaluation.plot_by_length(two_results, tmp_path / "lengths.png", title="two")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_scores_go_on_the_card(learned_model, two_results, tmp_path):
    folder = shutil.copytree(learned_model, tmp_path / "model")
    evaluation.add_to_cards([{**two_results[0], "model": str(folder)}], corpus="eight sentences")
    facts = json.loads((folder / "card.json").read_text())["facts"]
    assert facts["test_corpus"] == "eight sentences"
    assert [score["score"] for score in facts["results"][0]["scores"]] == pytest.approx([100, 100, 0], abs=1e-3)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "8 sentence pairs of eight sentences" in card
    assert facts["results"][0]["scores"][0]["signature"] in card


def test_requests_that_would_fail_at_the_end(learned_model, tmp_path):
    check = partial(evaluation.check_request, json=None, tokenized=False, card=False)
    check([str(learned_model)])
    with pytest.raises(EvaluationError, match="named twice"):
        check([str(learned_model)] * 2)
    with pytest.raises(ModelError, match="does not exist"):
        check([str(learned_model), str(tmp_path / "none")])
    with pytest.raises(EvaluationError, match="is no saved folder of a RelPos model"):
        check(["user/name"], card=True)


def test_sides_must_match_and_not_be_empty(loaded):
    with pytest.raises(EvaluationError, match="1 sentences for 2 references"):
        evaluation.evaluate_model(loaded, ["Yes"], ["Ja", "Nein"])
    with pytest.raises(EvaluationError, match="corpus is empty"):
        evaluation.evaluate_model(loaded, [], [])


def test_corpus_of_either_direction(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"translation": {"en": "Yes", "de": "Ja"}}\n')
    assert evaluation.read_held_out([str(file)], split="test", languages=("de", "en"))[:2] == (["Ja"], ["Yes"])
    with pytest.raises(CorpusError):
        evaluation.read_held_out([str(tmp_path / "none.tsv")], split="test", languages=("en", "de"))


def test_a_corpus_may_say_its_languages_and_is_only_one(learned_model, tmp_path):
    file = tmp_path / "corpus.tsv"
    file.write_text("Yes\tOui\n")
    named = [f"en-fr={file}"]
    assert evaluation.choose_languages([str(learned_model)], corpus=named, languages=None) == ("en", "fr")
    assert evaluation.read_held_out(named, split="test", languages=("en", "fr")) == (["Yes"], ["Oui"], named[0])
    with pytest.raises(EvaluationError, match="is not one corpus"):  # and not lines of plain text, with tabs in them
        evaluation.read_held_out([str(file)] * 2, split="test", languages=("en", "fr"))


def test_a_damaged_tokenizer_is_said_in_a_sentence(learned_model, tmp_path):
    folder = shutil.copytree(learned_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be opened"):
        evaluation.choose_languages([str(folder)], corpus=None, languages=None)


def test_bundled_corpus_is_held_out_by_default():
    english, german, name = evaluation.read_held_out(None, split="test", languages=("en", "de"))
    assert len(english) == len(german) == 1000
    assert "bundled" in name
    assert evaluation.read_held_out(None, split="test", languages=("de", "en"))[:2] == (german, english)
    with pytest.raises(EvaluationError, match="split is 'dev'; the bundled corpus has train, validation, test"):
        evaluation.read_held_out(None, split="dev", languages=("en", "de"))
    with pytest.raises(EvaluationError, match="languages is en,fr"):
        evaluation.read_held_out(None, split="test", languages=("en", "fr"))


@pytest.mark.parametrize(("text", "sizes"), [("1,4", [1, 4]), (" 2 ", [2]), ("4,1,4", [4, 1])])
def test_beams(text, sizes):
    assert evaluation.parse_beams(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1 2", "-1", "two", "1.5"])
def test_beams_that_are_none(text):
    with pytest.raises(EvaluationError, match="must be numbers of at least 1"):
        evaluation.parse_beams(text)


def test_languages(loaded):
    assert evaluation.parse_languages(None, loaded.model.config) == ("en", "de")
    assert evaluation.parse_languages("fr, it", loaded.model.config) == ("fr", "it")
    assert evaluation.parse_languages(None, object()) == ("en", "de")
    with pytest.raises(EvaluationError, match="several languages on one side; say which, as --languages SOURCE,de"):
        evaluation.parse_languages(None, SimpleNamespace(source_language=None, target_language="de"))
    for text in ("en", "en,en", "en,", "a,b,c"):
        with pytest.raises(EvaluationError, match="must be two different languages"):
            evaluation.parse_languages(text, loaded.model.config)


def test_json_is_whole_or_absent(tmp_path):
    file = tmp_path / "scores.json"
    with pytest.raises(TypeError):
        evaluation.write_json(file, {"model": object()})
    assert not list(tmp_path.iterdir())
    evaluation.write_json(file, {"model": "größer"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"model": "größer"}
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]
    for path in (tmp_path, tmp_path / "no" / "scores.json"):
        with pytest.raises(EvaluationError, match="cannot be written"):
            evaluation.check_writable(path)
    evaluation.check_writable(file)


def test_read_only_folders_are_refused_before_the_work(loaded, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    check = partial(evaluation.check_request, [str(folder)], tokenized=False)
    check(json=tmp_path / "scores.json", card=True)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    with pytest.raises(EvaluationError, match="folder is missing or read-only"):
        check(json=tmp_path / "scores.json", card=False)
    with pytest.raises(EvaluationError, match="is read-only, so no scores can be put on its card"):
        check(json=None, card=True)
    with pytest.raises(PlotError, match="folder is missing or read-only"):
        check_picture(tmp_path / "curves.png")


def test_a_corpus_in_other_languages_than_the_models_is_remarked(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "source_language", "en")
    monkeypatch.setattr(loaded.model.config, "target_language", "de")
    loaded.model.save_pretrained(tmp_path)
    assert not list(evaluation.remarks_on_languages([str(tmp_path)], ("en", "de")))
    (remark,) = evaluation.remarks_on_languages([str(tmp_path)], ("en", "fr"))
    assert remark == f"{tmp_path} translates en into de, and the corpus is read as en and fr"
