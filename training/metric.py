"""BLEU, chrF and TER by sacreBLEU, as a metric of `evaluate`, and as Trainer's `compute_metrics`."""

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import sacrebleu
from transformers import EvalPrediction, PreTrainedTokenizerBase


class _PlainFloats:
    """Lets sacreBLEU average its resamples: where some score 0 they mix float with numpy's float32, and it raises."""

    def _compute_score_from_stats(self, stats: Any) -> Any:
        result = super()._compute_score_from_stats(stats)
        result.score = float(result.score)
        return result


class BLEU(_PlainFloats, sacrebleu.BLEU):
    """sacreBLEU's."""


class CHRF(_PlainFloats, sacrebleu.CHRF):
    """sacreBLEU's."""


class TER(_PlainFloats, sacrebleu.TER):
    """sacreBLEU's."""


_DESCRIPTION = "BLEU, chrF and TER of a corpus by sacreBLEU, each with the signature that makes it comparable."
_INPUTS = """
Args:
    predictions: Translations, plain text.
    references: One reference per translation, or a list of them of equal number for all.
    metrics: Which of "bleu", "chrf" and "ter" to compute.
Returns:
    bleu, chrf (higher is better), ter (lower is better), and the signature of each.
"""
_METRICS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}


class TranslationScores(evaluate.Metric):
    """The scores of a translated corpus. Made directly, since `evaluate.load` needs a network even for local names."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**{"keep_in_memory": True, **kwargs})

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str] | list[list[str]],
        metrics: Sequence[str] = tuple(_METRICS),
    ) -> dict[str, float | str]:
        if unknown := set(metrics) - set(_METRICS):
            raise ValueError(f"metrics must be among {', '.join(_METRICS)}, not {', '.join(sorted(unknown))}.")
        if isinstance(references[0], str):
            references = [[reference] for reference in references]
        if len({len(alternatives) for alternatives in references}) != 1:
            raise ValueError("references must hold the same number of references for every prediction.")
        streams = [list(stream) for stream in zip(*references)]
        scores = {}
        for name in metrics:
            metric = _METRICS[name]()
            scores[name] = float(metric.corpus_score(predictions, streams).score)
            scores[f"{name}_signature"] = str(metric.get_signature())
        return scores


def compute_metrics_with(
    tokenizer: PreTrainedTokenizerBase, references: Sequence[str] | None = None
) -> Callable[[EvalPrediction], dict[str, float]]:
    """The `compute_metrics` of a Seq2SeqTrainer with `predict_with_generate`.

    Args:
        tokenizer: The model's.
        references: The targets of the evaluated set as they are, in its order. Without them, the labels are decoded, which
            have lost what the vocabulary lacks: the scores are then too good, and not those of the corpus.

    What it returns takes token ids [pairs, length] as Trainer collects them: predictions and labels, filled up with
    padding or with -100. It gives bleu, chrf and the mean length of the translations in tokens. TER is for the end: its
    search for shifts takes many minutes on the endless repetitions of a model that has just begun to train.
    """
    metric = TranslationScores()

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        ids = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        texts = decode_padded(tokenizer, prediction.label_ids) if references is None else list(references)
        ids = ids[: len(texts)]  # where several processes share a set, its first rows come again at the end
        scores = metric.compute(predictions=decode_padded(tokenizer, ids), references=texts, metrics=("bleu", "chrf"))
        scores = {name: round(score, 2) for name, score in scores.items() if not isinstance(score, str)}
        special = {tokenizer.pad_token_id, -100}
        return {**scores, "tokens": round(float((~np.isin(ids, list(special))).sum(axis=1).mean()), 1)}

    return compute_metrics


def decode_padded(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """Text of rows of token ids [rows, length], without special tokens and without the -100 of Trainer's padding."""
    return tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
