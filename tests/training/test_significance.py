"""significance.py: the verdicts on systems whose difference is known, and against tests written out here."""

import random

import numpy as np
import pytest
import sacrebleu
from rich.console import Console

from relpos.training import significance
from relpos.training.evaluation import CorpusTranslation
from relpos.training.translation import Translation

WORDS = ["the", "a", "cat", "dog", "house", "runs", "sits", "on", "under", "green", "old", "quickly", "and", "never"]


@pytest.fixture(scope="module")
def references():
    chosen = random.Random(1)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(5, 14))) for _ in range(150)]


def damaged(references, share, seed):
    """Some of the words, each replaced with another."""
    chosen = random.Random(seed)
    return [
        " ".join(chosen.choice(WORDS) if chosen.random() < share else word for word in text.split())
        for text in references
    ]


@pytest.fixture(scope="module")
def comparison(references):
    systems = [("good", damaged(references, 0.2, 2)), ("as good", damaged(references, 0.2, 3))]
    return significance.compare_systems([*systems, ("bad", damaged(references, 0.4, 4))], references)


def test_a_real_difference_is_told_from_luck(comparison):
    as_good, bad = ({score["metric"]: score for score in system["metrics"]} for system in comparison["systems"])
    for metric in ("BLEU", "chrF2"):
        assert bad[metric]["difference"] < -5
        assert max(bad[metric]["bootstrap_p"], bad[metric]["randomization_p"]) < 0.01
        assert min(as_good[metric]["bootstrap_p"], as_good[metric]["randomization_p"]) > 0.05


def test_the_scores_and_signatures_are_sacrebleus(comparison, references):
    bad = damaged(references, 0.4, 4)
    scores = {score["metric"]: score["score"] for score in comparison["systems"][1]["metrics"]}
    assert scores["BLEU"] == pytest.approx(sacrebleu.corpus_bleu(bad, [references]).score)
    assert scores["chrF2"] == pytest.approx(sacrebleu.corpus_chrf(bad, [references]).score)
    assert "bs:1000|seed:12345" in comparison["signatures"]["bootstrap"]["BLEU"]
    assert "ar:10000|seed:12345" in comparison["signatures"]["randomization"]["BLEU"]


def test_the_bootstrap_is_koehns(comparison, references):
    """Written out: resamples of the corpus, each scored as a corpus, and how often their difference exceeds ours."""
    good, as_good = damaged(references, 0.2, 2), damaged(references, 0.2, 3)
    score = lambda texts, rows: sacrebleu.corpus_bleu([texts[r] for r in rows], [[references[r] for r in rows]]).score
    difference = lambda rows: score(as_good, rows) - score(good, rows)
    draw = np.random.default_rng(7)
    resampled = np.abs([difference(draw.integers(0, len(references), len(references))) for _ in range(80)])
    observed = abs(difference(range(len(references))))
    expected = np.mean(resampled - resampled.mean() > observed)
    assert comparison["systems"][0]["metrics"][0]["bootstrap_p"] == pytest.approx(expected, abs=0.2)


def test_a_system_against_itself_differs_by_nothing(references):
    texts = damaged(references, 0.2, 2)
    answer = significance.compare_systems([("one", texts), ("the same", texts)], references)
    for score in answer["systems"][0]["metrics"]:
        assert (score["difference"], score["bootstrap_p"], score["randomization_p"]) == (0, 1, 1)


def test_systems_are_compared_at_each_beam_size_that_they_share(references):
    references = references[:20]
    translated = [
        CorpusTranslation(model, beams, [Translation(text, 1, True) for text in damaged(references, share, 5)], 1.0)
        for model, share, sizes in (("base", 0.2, (1, 4)), ("other", 0.3, (1, 4)), ("third", 0.3, (8,)))
        for beams in sizes
    ]
    comparisons = significance.compare_by_beams(translated, references)
    assert [(one["beams"], one["baseline"], len(one["systems"])) for one in comparisons] == [
        (1, "base", 1),
        (4, "base", 1),
    ]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(significance.comparison_table(comparisons[0]))
    assert "Difference from base, greedy" in shown.get()
    assert "other" in shown.get()
    assert len(significance.comparison_notes(comparisons)) == 1
    assert significance.compare_by_beams(translated[:2], references) == significance.comparison_notes([]) == []
