"""Teacher-forced log-probabilities: how likely a model finds given translations, for re-ranking and for filtering."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import torch
from torch import nn

from .loading import LoadedModel
from .sentences import check_lengths, check_options, tokenize

# Pairs are sorted by length within windows of this many, so that batches have little padding and few are in memory.
PAIRS_PER_WINDOW = 4096
# Of a batch and side, with padding; the logits of a vocabulary of 32,768 then take half a gigabyte.
MAX_TOKENS = 4096


@dataclass(frozen=True)
class PairScore:
    """The natural logarithm of the probability of a target, given its source.

    Attributes:
        token_log_probabilities: one for each token of the target, `</s>` included.
    """

    token_log_probabilities: tuple[float, ...]

    @property
    def log_probability(self) -> float:
        """Of the whole target."""
        return sum(self.token_log_probabilities)

    @property
    def per_token(self) -> float:
        """The mean over the tokens, which does not fall with length; minus its exponential is the perplexity."""
        return self.log_probability / max(len(self.token_log_probabilities), 1)


def score_pairs(
    loaded: LoadedModel,
    pairs: Iterable[tuple[str, str]],
    *,
    max_tokens: int = MAX_TOKENS,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[PairScore]:
    """Score pairs as training reads them, in their order; a pair is never cut, and may have an empty side.

    Args:
        loaded: the model and its tokenizer.
        pairs: sources and targets. They are taken a window at a time, so that any number of them needs little memory.
        max_tokens: tokens of a batch per side, with padding; a longer pair is a batch of its own.
        on_progress: called with the number of pairs that each batch finished.

    Yields:
        One PairScore per pair.

    Raises:
        TranslationError: max_tokens is below 1, or a side is longer than the model's table of learned positions.
    """
    check_options(max_tokens=max_tokens)
    pairs = iter(pairs)
    while window := list(islice(pairs, PAIRS_PER_WINDOW)):
        yield from _score_window(loaded, window, max_tokens, on_progress or (lambda count: None))


def write_scores(scores: Iterable[PairScore], target: BinaryIO, *, as_json: bool = False) -> None:
    """Write one line of text for each pair: its log-probability, a tab, the mean per token; or an object of JSON, which
    holds that of each token too."""
    for score in scores:
        if as_json:
            names = ("log_probability", "per_token", "token_log_probabilities")
            line = json.dumps({name: getattr(score, name) for name in names})
        else:
            line = f"{score.log_probability:.4f}\t{score.per_token:.4f}"
        target.write(f"{line}\n".encode())
    target.flush()


def _score_window(
    loaded: LoadedModel, pairs: list[tuple[str, str]], max_tokens: int, on_progress: Callable[[int], None]
) -> list[PairScore]:
    sources = tokenize(loaded, [source for source, _ in pairs])
    targets = tokenize(loaded, [target for _, target in pairs], as_target=True)
    check_lengths(loaded, sources)
    check_lengths(loaded, targets, side="target")
    scores: dict[int, PairScore] = {}
    for batch in _batches(sources, targets, max_tokens):
        scores |= zip(batch, _score_batch(loaded, [sources[row] for row in batch], [targets[row] for row in batch]))
        on_progress(len(batch))
    return [scores[row] for row in range(len(pairs))]


def _batches(sources: list[list[int]], targets: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
    """Rows of similar lengths, longest first; a longest side times the rows of a batch is at most `max_tokens`."""
    longest = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    order = sorted(range(len(longest)), key=lambda row: (-longest[row], -len(targets[row])))
    start = 0
    while start < len(order):
        stop = start + max(max_tokens // max(longest[order[start]], 1), 1)
        yield order[start:stop]
        start = stop


def _score_batch(loaded: LoadedModel, sources: list[list[int]], targets: list[list[int]]) -> list[PairScore]:
    device = loaded.model.device
    inputs = loaded.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(device)
    padding = loaded.tokenizer.pad_token_id
    rows = [torch.tensor(target, dtype=torch.long) for target in targets]
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding).to(device)
    decoder_input_ids = loaded.model.prepare_decoder_input_ids_from_labels(labels=labels)
    values = token_log_probabilities(loaded.model, inputs, decoder_input_ids, labels).tolist()
    return [PairScore(tuple(row[: len(target)])) for row, target in zip(values, targets, strict=True)]


@torch.inference_mode()
def token_log_probabilities(
    model: Any, inputs: Mapping[str, torch.Tensor], decoder_input_ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each label after the labels before it.

    Args:
        model: a sequence-to-sequence model in evaluation mode.
        inputs: `input_ids` and `attention_mask`, [batch, sources].
        decoder_input_ids: [batch, targets], what the decoder reads: the labels behind the start token.
        labels: [batch, targets], padded with any token of the vocabulary.

    Returns:
        [batch, targets] in float32 at least; without meaning at padding.
    """
    logits = model(**inputs, decoder_input_ids=decoder_input_ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)  # [batch, vocabulary, targets]
    return -nn.functional.cross_entropy(logits, labels, reduction="none")
