"""Scores a model on a held-out corpus: BLEU, chrF and TER, each with its signature and confidence interval."""

import json
import os
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from rich.table import Table
from transformers import AutoTokenizer

from relpos.model_cards.card import write_card
from relpos.model_cards.figures import line_style, new_figure, save_figure
from relpos.pipeline_relpos import language_tags

from .corpus import BUNDLED_LANGUAGES, bundled_splits, parse_corpora, read_corpus
from .loading import LoadedModel, ModelError, check_folder, into_language, load_config, load_model
from .metric import BLEU, CHRF, TER
from .tokenized import check_installed, split_for_bleu
from .translation import Translation, translate_sentences

BOOTSTRAP_SAMPLES = 1000
# Words of the shortest source in each bucket but the first.
LENGTHS = (6, 11, 21, 31, 41, 61)


class EvaluationError(ValueError):
    """A corpus or an option that cannot be evaluated with; the message is one sentence for the user."""


def open_held_out(
    corpus: Sequence[str] | None, *, split: str, languages: tuple[str, str]
) -> tuple[datasets.Dataset, str]:
    """The pairs and the name of a corpus, named and read as in training; None is the bundled corpus.

    Raises:
        CorpusError: the corpus cannot be read.
        EvaluationError: there are several corpora, or the bundled one has no such split or no such language.
    """
    if corpus:
        named = parse_corpora(corpus, languages=languages)
        if len(named) > 1:
            raise EvaluationError(
                f"corpus is {' and '.join(corpus)}, which is not one corpus; name one, or two files of plain text that "
                "exist, source first."
            )
        return read_corpus(named[0][1], languages=languages, split=split), " and ".join(corpus)
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


@dataclass(frozen=True)
class CorpusTranslation:
    """What a model made of a corpus.

    Attributes:
        model: name of the model.
        beams: beam size.
        translations: one for each source.
        seconds: how long that took.
    """

    model: str
    beams: int
    translations: list[Translation]
    seconds: float

    @property
    def texts(self) -> list[str]:
        """The translations alone."""
        return [translation.text for translation in self.translations]


def translate_corpus(
    loaded: LoadedModel, sources: Sequence[str], *, beams: Sequence[int] = (1, 4), **options: Any
) -> list[CorpusTranslation]:
    """Translate a corpus once per beam size; options are those of `translate_sentences`.

    Raises:
        EvaluationError: the corpus is empty.
        TranslationError: a number is out of its range, or a source is too long for the model.
    """
    if not sources:
        raise EvaluationError("The corpus is empty; there is nothing to score.")
    translated = []
    for beam_size in beams:
        start = time.perf_counter()
        translations = translate_sentences(loaded, sources, beams=beam_size, **options)
        translated.append(CorpusTranslation(loaded.name, beam_size, translations, time.perf_counter() - start))
    return translated


def translate_by_models(
    models: Sequence[str], sources: Sequence[str], *, language: str, **options: Any
) -> list[CorpusTranslation]:
    """`translate_corpus` by one model after another, so that only one of them is in memory.

    Args:
        models: saved folders, or models on the Hub.
        sources: the corpus.
        language: the target language, for a model that has several.
        options: those of `translate_corpus`.
    """
    translated = []
    for model in models:
        loaded = load_model(model)
        loaded = into_language(loaded, language if loaded.languages else None)
        translated += translate_corpus(loaded, sources, **options)
    return translated


def evaluate_model(
    loaded: LoadedModel, sources: Sequence[str], references: Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """Translate a corpus once per beam size and score it; options are those of `translate_corpus`.

    Returns:
        One dictionary per beam size, see `evaluate_corpus`.

    Raises:
        EvaluationError: the corpus is empty, or its two sides have different lengths.
        TranslationError: a number is out of its range, or a source is too long for the model.
    """
    _check_sides(sources, references)
    return [evaluate_corpus(one, sources, references) for one in translate_corpus(loaded, sources, **options)]


def evaluate_corpus(
    translated: CorpusTranslation, sources: Sequence[str], references: Sequence[str], *, tokenized: str | None = None
) -> dict[str, Any]:
    """Score what a model made of a corpus.

    Returns:
        Ready for JSON: `model`, `beams`, `pairs`, `seconds`, `sentences_per_second`, `cut_off` (translations that ran
        into the limit on new tokens), `scores`, see `score_translations`, and `by_length`, see `score_by_length`.
    """
    seconds = max(translated.seconds, 1e-9)
    return {
        "model": translated.model,
        "beams": translated.beams,
        "pairs": len(sources),
        "seconds": round(seconds, 2),
        "sentences_per_second": round(len(sources) / seconds, 2),
        "cut_off": sum(not translation.complete for translation in translated.translations),
        "scores": score_translations(translated.texts, references, tokenized=tokenized),
        "by_length": score_by_length(sources, translated.texts, references),
    }


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    metrics: Sequence[type] = (BLEU, CHRF, TER),
    tokenized: str | None = None,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
) -> list[dict[str, Any]]:
    """BLEU, chrF (higher is better) and TER (lower is better) of a corpus by sacreBLEU.

    Args:
        hypotheses, references: one of each per sentence.
        metrics: which of them.
        tokenized: the language of both, to add the BLEU of tokens with split compounds, see `split_for_bleu`.
        bootstrap_samples: resamples of the corpus for the intervals.

    Returns:
        One dictionary per metric: `metric`, `score`, `confidence_mean` and `confidence` (the mean and half the width
        of the 95 % interval over bootstrap resamples of the corpus, sacreBLEU's seed) and `signature`.
    """
    _check_sides(hypotheses, references)
    scores = [_score(metric(), hypotheses, references, bootstrap_samples) for metric in metrics]
    if tokenized:
        # as multi-bleu.perl, which scored the papers: no smoothing, and no tokens but those that are there
        metric = BLEU(tokenize="none", smooth_method="none", force=True)
        sides = (split_for_bleu(side, language=tokenized) for side in (hypotheses, references))
        score = _score(metric, *sides, bootstrap_samples)
        signature = score["signature"].replace("tok:none", f"tok:moses-{tokenized}-split-compounds")
        scores.append({**score, "metric": "tokenized BLEU", "signature": signature})
    return scores


def score_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
) -> list[dict[str, Any]]:
    """BLEU of the sentences of similar length, measured in words of the source between spaces.

    Returns:
        For each bucket that is not empty, shortest sources first: `words` (the shortest and the longest, None for no
        bound), `pairs`, and the keys of `score_translations`.
    """
    buckets: dict[int, list[int]] = {}
    for row, source in enumerate(sources):
        buckets.setdefault(bisect(LENGTHS, len(source.split())), []).append(row)
    starts, ends = (None, *LENGTHS), (*(start - 1 for start in LENGTHS), None)
    return [
        {
            "words": [starts[bucket], ends[bucket]],
            "pairs": len(rows),
            **_score(BLEU(), [hypotheses[row] for row in rows], [references[row] for row in rows], bootstrap_samples),
        }
        for bucket, rows in sorted(buckets.items())
    ]


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str], bootstrap_samples: int) -> dict[str, Any]:
    result = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=bootstrap_samples)
    # The interval is public only in the JSON form, rounded to the width that is asked for.
    shown = json.loads(result.format(width=4, signature=str(metric.get_signature()), is_json=True))
    return {
        "metric": result.name,
        "score": shown["score"],
        # sacreBLEU leaves the interval out where every resample scores zero.
        "confidence_mean": shown.get("confidence_mean", 0.0),
        "confidence": shown.get("confidence_var", 0.0),
        "signature": shown["signature"],
    }


def results_table(results: Sequence[dict[str, Any]], *, title: str) -> Table:
    """The results for a terminal, one row per model and beam size."""
    table = Table(title=title, title_justify="left")
    several = _models(results) > 1
    if several:
        table.add_column("model", overflow="fold")
    table.add_column("beams", justify="right")
    for score in results[0]["scores"]:
        table.add_column(score["metric"], justify="right")
    table.add_column("sentences/s", justify="right")
    for result in results:
        scores = [f"{score['score']:.1f} ± {score['confidence']:.1f}" for score in result["scores"]]
        name = [result["model"]] if several else []
        table.add_row(*name, str(result["beams"]), *scores, f"{result['sentences_per_second']:.1f}")
    return table


def lengths_table(results: Sequence[dict[str, Any]]) -> Table:
    """BLEU by the length of the source, one column per model and beam size."""
    table = Table(title="BLEU by words of the source", title_justify="left")
    for heading in ("words", "pairs", *map(result_name, results, [_models(results) > 1] * len(results))):
        table.add_column(heading, justify="right", overflow="fold")
    for buckets in zip(*(result["by_length"] for result in results)):
        # resamples of one sentence are all alike, which is no certainty
        scores = [
            f"{bucket['score']:.1f}" + (f" ± {bucket['confidence']:.1f}" if bucket["pairs"] > 1 else "")
            for bucket in buckets
        ]
        table.add_row(words_label(buckets[0]["words"]), f"{buckets[0]['pairs']:,}", *scores)
    return table


def result_name(result: dict[str, Any], with_model: bool = True) -> str:
    """What to call a result among others."""
    beams = "greedy" if result["beams"] == 1 else f"{result['beams']} beams"
    return f"{result['model']}, {beams}" if with_model else beams


def words_label(words: Sequence[int | None]) -> str:
    """A bucket of lengths, such as 6–10."""
    shortest, longest = words
    return f"≤ {longest}" if shortest is None else f"≥ {shortest}" if longest is None else f"{shortest}–{longest}"


def results_notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """What stands below the tables: the signatures, and how many translations were not finished."""
    notes = [f"± is half the 95 % interval over {BOOTSTRAP_SAMPLES:,} bootstrap resamples."]
    notes += [f"{score['metric']}: {score['signature']}" for score in results[0]["scores"]]
    return notes + [
        f"{result_name(result, _models(results) > 1)}: {result['cut_off']:,} of {result['pairs']:,} translations were "
        "cut off at the limit on new tokens"
        for result in results
        if result["cut_off"]
    ]


def _models(results: Sequence[dict[str, Any]]) -> int:
    return len({result["model"] for result in results})


def plot_by_length(results: Sequence[dict[str, Any]], path: Path, *, title: str) -> Path:
    """Draw BLEU by the length of the source, with its 95 % intervals, one line per result of `evaluate_corpus`."""
    buckets = results[0]["by_length"]
    figure = new_figure(height=3.6 + 0.1 * len(results))
    panel = figure.subplots()
    for number, result in enumerate(results):
        shift = 0.12 * (number - (len(results) - 1) / 2)  # or the intervals would hide one another
        panel.errorbar(
            [place + shift for place in range(len(buckets))],
            [bucket["score"] for bucket in result["by_length"]],
            [bucket["confidence"] for bucket in result["by_length"]],
            label=result_name(result, _models(results) > 1),
            **line_style(number),
            capsize=2,
        )
    panel.set_xticks(
        range(len(buckets)), [f"{words_label(bucket['words'])}\n({bucket['pairs']:,})" for bucket in buckets]
    )
    panel.set(title=title, xlabel="words of the source (number of pairs)", ylabel="BLEU")
    panel.set_xlim(-0.5, len(buckets) - 0.5)
    panel.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return save_figure(figure, path)


def add_to_cards(results: Sequence[dict[str, Any]], *, corpus: str) -> None:
    """Put the scores on the cards of the folders that `model` of the results names."""
    for model in dict.fromkeys(result["model"] for result in results):
        own = [
            {name: result[name] for name in ("beams", "pairs", "scores")}
            for result in results
            if result["model"] == model
        ]
        write_card(Path(model), {"test_corpus": corpus, "results": own})


def check_request(models: Sequence[str], *, json: Path | None, tokenized: bool, card: bool) -> None:
    """Raise EvaluationError for what would fail at the end of the work, or make no sense."""
    check_writable(json)
    if tokenized:
        check_installed()
    twice = [model for model in dict.fromkeys(models) if models.count(model) > 1]
    if twice:
        raise EvaluationError(f"The model {twice[0]} is named twice; models that are compared must differ.")
    for model in models:
        check_folder(model)
    for model in models if card else []:
        if not Path(model).is_dir() or load_config(model).model_type != "relpos":
            raise EvaluationError(
                f"The model {model} is no saved folder of a RelPos model, so it has no card to put scores on."
            )
        if not os.access(model, os.W_OK):
            raise EvaluationError(f"The folder {model} is read-only, so no scores can be put on its card.")


def check_writable(file: Path | None) -> None:
    """Raise EvaluationError for a file that could not be written at the end of the work."""
    if file and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise EvaluationError(
            f"The file {file} cannot be written: its folder is missing or read-only, or it is a folder itself."
        )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)


def choose_languages(
    models: Sequence[str], *, corpus: Sequence[str] | None, languages: str | None, any_target: bool = False
) -> tuple[str, str]:
    """Source and target language of a corpus: those given, else those in its name, else those of the first model.

    Args:
        models: saved folders, or models on the Hub.
        corpus: as for `open_held_out`; in `en-fr=corpus.tsv` the name has languages.
        languages: such as "en,fr".
        any_target: where nothing says it, take the first target language of a model that has several.

    Raises:
        ModelError: a model cannot be opened, or has several target languages but not this one.
        EvaluationError: nothing says the languages, or two things say different ones.
    """
    config = load_config(models[0])
    known = {model: known_targets(model) for model in models}
    given = parse_languages(languages, config) if languages is not None else None
    named = _languages_in_name(corpus) if corpus else None
    if given and named and given != named:
        raise EvaluationError(
            f"languages is {languages}, but corpus is {corpus[0]}; say the same with both, or one alone."
        )
    pair = given or named
    targets = known[models[0]]
    if not pair and len(targets) > 1:
        source = getattr(config, "source_language", None)
        if not (any_target and source):
            raise EvaluationError(
                f"The model {models[0]} must be told which language to translate into, such as by --languages "
                f"{source or 'SOURCE'},{targets[0]}; it knows {', '.join(targets)}."
            )
        pair = source, targets[0]
    pair = pair or parse_languages(None, config)
    for model, targets in known.items():
        if targets and pair[1] not in targets:
            raise ModelError(f"The model {model} does not translate into {pair[1]}; it knows {', '.join(targets)}.")
    return pair


def remarks_on_languages(models: Sequence[str], pair: tuple[str, str]) -> Iterator[str]:
    """What the user should know where a corpus is read in other languages than those of a model of one pair; corpora may
    have names of their own for them, so that this is no error."""
    for model in models:
        config = load_config(model)
        own = tuple(getattr(config, f"{side}_language", None) for side in ("source", "target"))
        if all(isinstance(language, str) for language in own) and own != tuple(pair):
            yield f"{model} translates {own[0]} into {own[1]}, and the corpus is read as {pair[0]} and {pair[1]}"


def known_targets(model: str) -> list[str]:
    """The target languages that a model has to choose from, as `LoadedModel.languages`, without loading its weights."""
    load_config(model)
    try:
        return list(language_tags(AutoTokenizer.from_pretrained(model)))
    except Exception:  # there are many kinds of damage; opening the whole model says in one sentence what it is
        return load_model(model).languages


def _languages_in_name(corpus: Sequence[str]) -> tuple[str, str] | None:
    unsaid = ("source", "target")
    (languages, _), *_ = parse_corpora(corpus, languages=unsaid)
    return None if languages == unsaid else languages


def parse_languages(text: str | None, config: Any) -> tuple[str, str]:
    """Source and target language from "en,de", else those that training wrote into the model's configuration, else
    the bundled corpus's; raises EvaluationError for any other text, or where the model has several on a side."""
    if text is None:
        saved = getattr(config, "source_language", None), getattr(config, "target_language", None)
        if any(saved) and not all(saved):
            example = ",".join(language or side for language, side in zip(saved, ("SOURCE", "TARGET")))
            raise EvaluationError(f"The model has several languages on one side; say which, as --languages {example}.")
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
