"""Training on a stream: pairs are read, tokenized and cut into batches as they are trained on, and not kept on disk."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import IterableDataset, interleave_datasets

from .batching import TokenBatchSampler
from .corpus import CorpusError


def drop_empty_pairs(stream: IterableDataset) -> IterableDataset:
    """The pairs with text on both sides."""
    return stream.filter(lambda row: all((text or "").strip() for text in row["translation"].values()))


def tokenize_streams(
    streams: list[IterableDataset],
    encoders: list[Callable[[dict[str, list]], dict[str, list]]],
    *,
    max_length: int,
    max_ratio: float | None,
) -> IterableDataset:
    """Token ids of the pairs of sensible lengths, those of several streams in turn.

    Args:
        streams: Rows as `read_corpus` returns them.
        encoders: For each stream, what makes `input_ids` and `labels` of a batch of its rows.
        max_length, max_ratio: As for `drop_by_length`.
    """

    def is_sensible(row: dict[str, list]) -> bool:
        shorter, longer = sorted((len(row["input_ids"]), len(row["labels"])))
        return longer <= max_length and (max_ratio is None or longer <= max_ratio * shorter)

    parts = [
        stream.map(encode, batched=True, remove_columns=["translation"]).filter(is_sensible)
        for stream, encode in zip(streams, encoders)
    ]
    return interleave_datasets(parts, stopping_strategy="all_exhausted_without_replacement")


class StreamedBatches(torch.utils.data.IterableDataset):
    """Batches by tokens of a stream that begins anew at its end, each a list of rows; it never ends itself.

    A window of pairs is read and cut into batches of similar length, as TokenBatchSampler does it, which come in a random
    order; then the next window. Every process reads the whole stream and takes its share of the batches.

    Args:
        rows: Rows with `input_ids` and `labels`.
        max_tokens: The budget of a batch, in tokens per side.
        window: Pairs that are read at a time.
        seed: Seed of the order.
        process, processes: Which share of the batches, of how many.

    Raises:
        CorpusError: On iterating, where the stream has fewer pairs than there are processes.
    """

    def __init__(
        self, rows: IterableDataset, *, max_tokens: int, window: int, seed: int, process: int = 0, processes: int = 1
    ) -> None:
        self._rows = rows
        self._max_tokens = max_tokens
        self._window = window
        self._seed = seed
        self._process, self._processes = process, processes

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        number = 0
        while True:
            before = number
            for columns in self._rows.iter(batch_size=self._window):
                rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
                if len(rows) >= self._processes:  # a shorter one, at the end of the stream, cannot be shared
                    yield from self._batches(rows, number)
                    number += 1
            if number == before:
                raise CorpusError(f"The stream has fewer than {self._processes} pairs to train on.")

    def _batches(self, rows: list[dict[str, Any]], number: int) -> Iterator[list[dict[str, Any]]]:
        sampler = TokenBatchSampler(
            *([len(row[side]) for row in rows] for side in ("input_ids", "labels")),
            max_tokens=self._max_tokens,
            window=self._window,
            seed=self._seed + number,
            multiple_of=self._processes,
        )
        for place, batch in enumerate(sampler):
            if place % self._processes == self._process:
                yield [rows[index] for index in batch]
