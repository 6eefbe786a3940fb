"""Scores a model on a held-out corpus: BLEU, chrF and TER, each with its signature and confidence interval."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF, TER

from .corpus import BUNDLED_LANGUAGES, bundled_splits, read_corpus
from .loading import LoadedModel
from .translation import translate_sentences

BOOTSTRAP_SAMPLES = 1000


class _PlainFloats:
    """Lets sacreBLEU average its resamples: where some score 0 they mix float with numpy's float32, and it raises."""

    def _compute_score_from_stats(self, stats: Any) -> Any:
        result = super()._compute_score_from_stats(stats)
        result.score = float(result.score)
        return result


class _BLEU(_PlainFloats, BLEU):
    pass


class _CHRF(_PlainFloats, CHRF):
    pass


class _TER(_PlainFloats, TER):
    pass


class EvaluationError(ValueError):
    """A corpus or an option that cannot be evaluated with; the message is one sentence for the user."""


def open_held_out(
    corpus: Sequence[str] | None, *, split: str, languages: tuple[str, str]
) -> tuple[datasets.Dataset, str]:
    """The pairs and the name of a corpus, read as training reads it; None is the bundled corpus.

    Raises:
        CorpusError: the corpus cannot be read.
        EvaluationError: the bundled corpus has no such split or no such language.
    """
    if corpus:
        pairs = read_corpus(corpus[0] if len(corpus) == 1 else corpus, languages=languages, split=split)
        return pairs, " and ".join(corpus)
    if set(languages) != set(BUNDLED_LANGUAGES):
        raise EvaluationError(
            f"languages is {','.join(languages)}, which the bundled corpus has not; name a corpus of your own."
        )
    splits = bundled_splits()
    if split not in splits:
        raise EvaluationError(f"split is {split!r}; the bundled corpus has {', '.join(splits)}.")
    return splits[split], f"the {split} part of the bundled corpus"


def read_held_out(
    corpus: Sequence[str] | None, *, split: str, languages: tuple[str, str]
) -> tuple[list[str], list[str], str]:
    """Sources, references and the name of a corpus; as `open_held_out`, but in memory."""
    pairs, name = open_held_out(corpus, split=split, languages=languages)
    rows = pairs["translation"][:]
    source_language, target_language = languages
    return [row[source_language] for row in rows], [row[target_language] for row in rows], name


def evaluate_model(
    loaded: LoadedModel,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    beams: Sequence[int] = (1, 4),
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Translate a corpus once per beam size and score it.

    Returns:
        One dictionary per beam size, ready for JSON: `beams`, `pairs`, `seconds`, `sentences_per_second`, `cut_off`
        (translations that ran into the limit on new tokens) and `scores`, see `score_translations`.

    Raises:
        EvaluationError: the corpus is empty, or its two sides have different lengths.
        TranslationError: a number is below 1, or a source is too long for the model.
    """
    _check_sides(sources, references)
    results = []
    for beam_size in beams:
        start = time.perf_counter()
        translations = translate_sentences(
            loaded,
            sources,
            beams=beam_size,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            on_progress=on_progress,
        )
        seconds = time.perf_counter() - start
        results.append(
            {
                "beams": beam_size,
                "pairs": len(sources),
                "seconds": round(seconds, 2),
                "sentences_per_second": round(len(sources) / seconds, 2),
                "cut_off": sum(not translation.complete for translation in translations),
                "scores": score_translations([translation.text for translation in translations], references),
            }
        )
    return results


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, bootstrap_samples: int = BOOTSTRAP_SAMPLES
) -> list[dict[str, Any]]:
    """BLEU, chrF (higher is better) and TER (lower is better) of a corpus by sacreBLEU.

    Returns:
        One dictionary per metric: `metric`, `score`, `confidence_mean` and `confidence` (the mean and half the width
        of the 95 % interval over bootstrap resamples of the corpus, sacreBLEU's seed) and `signature`.
    """
    _check_sides(hypotheses, references)
    scores = []
    for metric in (_BLEU(), _CHRF(), _TER()):
        result = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=bootstrap_samples)
        # The interval is public only in the JSON form, rounded to the width that is asked for.
        shown = json.loads(result.format(width=4, signature=str(metric.get_signature()), is_json=True))
        scores.append(
            {
                "metric": result.name,
                "score": shown["score"],
                # sacreBLEU leaves the interval out where every resample scores zero.
                "confidence_mean": shown.get("confidence_mean", 0.0),
                "confidence": shown.get("confidence_var", 0.0),
                "signature": shown["signature"],
            }
        )
    return scores


def results_table(results: Sequence[dict[str, Any]], *, title: str) -> Table:
    """The results for a terminal, one row per beam size."""
    table = Table(title=title, title_justify="left")
    table.add_column("beams", justify="right")
    for score in results[0]["scores"]:
        table.add_column(score["metric"], justify="right")
    table.add_column("sentences/s", justify="right")
    for result in results:
        scores = [f"{score['score']:.1f} ± {score['confidence']:.1f}" for score in result["scores"]]
        table.add_row(str(result["beams"]), *scores, f"{result['sentences_per_second']:.1f}")
    return table


def results_notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """What stands below the table: the signatures, and how many translations were not finished."""
    notes = [f"± is half the 95 % interval over {BOOTSTRAP_SAMPLES:,} bootstrap resamples."]
    notes += [f"{score['metric']}: {score['signature']}" for score in results[0]["scores"]]
    return notes + [
        f"beams {result['beams']}: {result['cut_off']:,} of {result['pairs']:,} translations were cut off at the limit "
        "on new tokens"
        for result in results
        if result["cut_off"]
    ]


def check_writable(file: Path | None) -> None:
    """Raise EvaluationError for a file that could not be written at the end of the work."""
    if file and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise EvaluationError(f"The file {file} cannot be written: its folder is missing, or it is a folder itself.")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)


def parse_languages(text: str | None, config: Any) -> tuple[str, str]:
    """Source and target language from "en,de", else those that training wrote into the model's configuration, else
    the bundled corpus's; raises EvaluationError for any other text."""
    if text is None:
        saved = getattr(config, "source_language", None), getattr(config, "target_language", None)
        return saved if all(saved) else BUNDLED_LANGUAGES
    languages = tuple(part.strip() for part in text.split(","))
    if len(languages) != 2 or not all(languages) or languages[0] == languages[1]:
        raise EvaluationError(f"languages is {text!r}; it must be two different languages such as en,de.")
    return languages


def parse_beams(text: str) -> list[int]:
    """Beam sizes from a list such as "1,4"; raises EvaluationError for anything else."""
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise EvaluationError(f"beams is {text!r}; it must be numbers of at least 1 with commas between, such as 1,4.")
    return list(dict.fromkeys(map(int, sizes)))


def _check_sides(sources: Sequence[str], references: Sequence[str]) -> None:
    if len(sources) != len(references):
        raise EvaluationError(
            f"There are {len(sources)} sentences for {len(references)} references; each needs exactly one."
        )
    if not sources:
        raise EvaluationError("The corpus is empty; there is nothing to score.")
