"""evaluation.py: scores equal to sacreBLEU's, intervals, corpora, and options that are refused."""

import json

import pytest
import sacrebleu

from relpos.training import evaluation
from relpos.training.corpus import CorpusError
from relpos.training.evaluation import EvaluationError
from relpos.training.loading import load_model

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
