import numpy as np
import pytest
import sacrebleu
from transformers import EvalPrediction

from relpos.training.metric import TranslationScores, compute_metrics_with, decode_padded
from relpos.training.subwords import train_tokenizer

HYPOTHESES = ["Das ist ein kleines Haus.", "Wählen Sie Extras.", ""]
REFERENCES = ["Das ist ein kleines Haus am See.", "Wählen Sie Extras.", "Nein."]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(HYPOTHESES + REFERENCES, vocab_size=400)


def test_scores_are_those_of_sacrebleu():
    scores = TranslationScores().compute(predictions=HYPOTHESES, references=REFERENCES)
    for name in ("bleu", "chrf", "ter"):
        assert scores[name] == pytest.approx(getattr(sacrebleu, f"corpus_{name}")(HYPOTHESES, [REFERENCES]).score)
        assert f"version:{sacrebleu.__version__}" in scores[f"{name}_signature"]
    assert "tok:13a" in scores["bleu_signature"]


def test_several_references():
    references = [[reference, hypothesis] for reference, hypothesis in zip(REFERENCES, HYPOTHESES)]
    scores = TranslationScores().compute(predictions=HYPOTHESES, references=references)
    assert scores["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError, match="same number"):
        TranslationScores().compute(predictions=["a", "b"], references=[["a"], ["a", "b"]])


def test_a_choice_of_metrics():
    scores = TranslationScores().compute(predictions=["a"], references=["a"], metrics=["chrf"])
    assert set(scores) == {"chrf", "chrf_signature"}
    with pytest.raises(ValueError, match="rouge"):
        TranslationScores().compute(predictions=["a"], references=["a"], metrics=["rouge"])


def test_references_are_taken_as_they_are(tokenizer):
    """Labels have lost what the vocabulary lacks, here all of it."""
    ids = padded(tokenizer(HYPOTHESES)["input_ids"], -100)
    lost = np.full_like(ids, tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.eos_token_id)
    scores = compute_metrics_with(tokenizer, REFERENCES)(EvalPrediction(predictions=ids, label_ids=lost))
    expected = TranslationScores().compute(predictions=HYPOTHESES, references=REFERENCES)
    assert scores["bleu"] == pytest.approx(expected["bleu"], abs=0.01)


def padded(rows, fill):
    width = max(map(len, rows)) + 3
    return np.array([row + [fill] * (width - len(row)) for row in rows])


def test_compute_metrics_cleans_both_kinds_of_padding(tokenizer):
    predictions = [[tokenizer.pad_token_id, *ids] for ids in tokenizer(HYPOTHESES)["input_ids"]]
    labels = tokenizer(REFERENCES)["input_ids"]
    expected = TranslationScores().compute(predictions=HYPOTHESES, references=REFERENCES)
    for fills in ((-100, -100), (tokenizer.pad_token_id, -100), (-100, tokenizer.pad_token_id)):
        arrays = [padded(rows, fill) for rows, fill in zip((predictions, labels), fills)]
        assert decode_padded(tokenizer, arrays[0]) == HYPOTHESES
        for ids in (arrays[0], (arrays[0], None)):
            scores = compute_metrics_with(tokenizer)(EvalPrediction(predictions=ids, label_ids=arrays[1]))
            assert scores["bleu"] == pytest.approx(expected["bleu"], abs=0.01)
            assert scores["chrf"] == pytest.approx(expected["chrf"], abs=0.01)
            assert scores["tokens"] == pytest.approx(np.mean([len(row) - 1 for row in predictions]), abs=0.05)
