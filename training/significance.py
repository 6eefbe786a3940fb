"""Whether one system is better than another, or had luck with the sentences: sacreBLEU's paired tests."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from sacrebleu.significance import PairedTest

from .evaluation import CorpusTranslation
from .metric import BLEU, CHRF

BOOTSTRAP_SAMPLES = 1000
RANDOMIZATION_TRIALS = 10_000
_TESTS = {"bootstrap": ("bs", BOOTSTRAP_SAMPLES), "randomization": ("ar", RANDOMIZATION_TRIALS)}


def compare_systems(systems: Sequence[tuple[str, Sequence[str]]], references: Sequence[str]) -> dict[str, Any]:
    """Test every system against the first one, by BLEU and by chrF, on the same sentences.

    The paired bootstrap (Koehn 2004) draws sentences anew; approximate randomization (Riezler and Maxwell 2005) swaps
    the translations of the two systems at random, and is the more cautious of the two.

    Args:
        systems: names and translations; the first is the baseline.
        references: one per sentence.

    Returns:
        Ready for JSON: `baseline`, `signatures` (test to metric to sacreBLEU's signature), and `systems`, for each
        but the first its `system` and `metrics`: `metric`, `score`, `difference` from the baseline, and the
        probability of one as large by chance, `bootstrap_p` and `randomization_p`.
    """
    signatures, answers = {}, {}
    for test, (kind, samples) in _TESTS.items():
        metrics = {metric.__name__: metric() for metric in (BLEU, CHRF)}
        paired = PairedTest(
            [(name, list(texts)) for name, texts in systems], metrics, [list(references)], kind, n_samples=samples
        )
        found, answers[test] = paired()
        signatures[test] = {name: str(signature) for name, signature in found.items()}
    (baseline, texts), *others = systems
    rows = []
    for place, (name, own) in enumerate(others, start=1):
        metrics = [_answer(answers, metric, place) for metric in signatures["bootstrap"]]
        if list(own) == list(texts):  # of which sacreBLEU says that they surely differ, by nothing
            metrics = [{**metric, **{f"{test}_p": 1.0 for test in _TESTS}} for metric in metrics]
        rows.append({"system": name, "metrics": metrics})
    return {"baseline": baseline, "signatures": signatures, "systems": rows}


def compare_by_beams(translated: Sequence[CorpusTranslation], references: Sequence[str]) -> list[dict[str, Any]]:
    """`compare_systems` for each beam size that several models translated with; the answers have `beams` too."""
    by_beams: dict[int, list[tuple[str, list[str]]]] = {}
    for one in translated:
        by_beams.setdefault(one.beams, []).append((one.model, one.texts))
    return [
        {"beams": beams, **compare_systems(systems, references)}
        for beams, systems in by_beams.items()
        if len(systems) > 1
    ]


def _answer(answers: dict[str, Any], metric: str, place: int) -> dict[str, Any]:
    baseline, own = answers["bootstrap"][metric][0], answers["bootstrap"][metric][place]
    return {
        "metric": metric,
        "score": float(own.score),
        "difference": float(own.score - baseline.score),
        **{f"{test}_p": float(answers[test][metric][place].p_value) for test in _TESTS},
    }


def comparison_table(comparison: dict[str, Any]) -> Table:
    """An answer of `compare_by_beams` for a terminal."""
    beams = comparison["beams"]
    table = Table(
        title=f"Difference from {comparison['baseline']}, {'greedy' if beams == 1 else f'{beams} beams'}",
        title_justify="left",
    )
    table.add_column("model", overflow="fold")
    for score in comparison["systems"][0]["metrics"]:
        for heading in (score["metric"], "p, bootstrap", "p, randomization"):
            table.add_column(heading, justify="right")
    for system in comparison["systems"]:
        cells = [
            cell
            for score in system["metrics"]
            for cell in (f"{score['difference']:+.1f}", *(f"{score[f'{test}_p']:.4f}" for test in _TESTS))
        ]
        table.add_row(system["system"], *cells)
    return table


def comparison_notes(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """What stands below the tables of `comparison_table`."""
    if not comparisons:
        return []
    return [
        "p is the probability of a difference as large between equal models, by the paired bootstrap "
        f"({BOOTSTRAP_SAMPLES:,} resamples) and by approximate randomization ({RANDOMIZATION_TRIALS:,} trials)."
    ]
