"""Batches cut by a budget of tokens instead of a number of pairs."""

import hashlib
from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import pyarrow.compute
from torch.utils.data import Sampler
from transformers.utils import logging

logger = logging.get_logger(__name__)


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of pairs of similar length, each within a budget of tokens per side, padding included.

    The shapes of the batches are planned once: pairs are shuffled, sorted by length within windows, and cut as soon as
    one more pair would make (longest source or longest target) x (pairs) exceed the budget. Every epoch then deals the
    pairs of each length anew among the places that this length has in the plan, and shuffles the batches. So all
    epochs have the same number of batches, which Trainer counts on when it resumes in the middle of one, but not the
    same batches. All of it follows from `seed` and the epoch, on every process alike.

    Every pair is in exactly one batch per epoch, or in as many as `copies` says. A pair that is longer than the budget is
    a batch of its own.

    Args:
        source_lengths: Tokens of each source.
        target_lengths: Tokens of each target.
        max_tokens: The budget, in tokens per side.
        window: Pairs that are sorted together. A larger one wastes less on padding, a smaller one mixes more.
        seed: Seed of the plan and of the epochs.
        multiple_of: Make the number of batches a multiple of this, the number of processes that share them, by halving
            the batches with most pairs.
        copies: How often each pair comes in an epoch, 1 or more: at 1.5 once, and once more for half of the pairs of its
            lengths with the same number, which are drawn anew for each epoch. Once by default.

    Raises:
        ValueError: No pairs, unequal numbers of lengths, or a number below 1.
    """

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        *,
        max_tokens: int,
        window: int = 100_000,
        seed: int = 0,
        multiple_of: int = 1,
        copies: Sequence[float] | None = None,
    ) -> None:
        source = np.asarray(source_lengths, dtype=np.int64)
        target = np.asarray(target_lengths, dtype=np.int64)
        if len(source) != len(target):
            raise ValueError(f"There are {len(source)} source_lengths but {len(target)} target_lengths.")
        if not len(source):
            raise ValueError("source_lengths is empty; there must be at least one pair to make batches of.")
        for name, value in (("max_tokens", max_tokens), ("window", window), ("multiple_of", multiple_of)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        # Pairs of equal lengths on both sides can stand in for one another.
        shape = source * (target.max() + 1) + target
        self._repeats = None if copies is None else _Repeats(shape, copies)
        rows = slice(None) if copies is None else self._repeats.rows
        self._source, self._target, self._shape = source[rows], target[rows], shape[rows]
        if multiple_of > len(self._source):
            raise ValueError(f"{len(self._source)} pairs cannot be shared by multiple_of={multiple_of} processes.")
        self.max_tokens = max_tokens
        self.seed = seed
        self.epoch = 0
        self._longest = np.maximum(self._source, self._target)
        self._warn_of_long_pairs()
        places = self._sorted_in_windows(window)
        self._ends = _split_to_multiple(self._cut(places), multiple_of)
        self._places = np.argsort(self._shape[places], kind="stable")  # groups the plan by lengths
        self._padded = self._count_padded(places)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0, that the next iteration gives the batches of."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches, the same in every epoch."""
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng((self.seed, self.epoch + 1))
        shuffled = random.permutation(len(self._shape))
        dealt = np.empty_like(shuffled)
        dealt[self._places] = shuffled[np.argsort(self._shape[shuffled], kind="stable")]
        if self._repeats is not None:
            dealt = self._repeats.draw(random)[dealt]
        batches = np.split(dealt, self._ends[:-1])
        for index in random.permutation(len(batches)):
            yield batches[index].tolist()

    @property
    def fingerprint(self) -> str:
        """The same for two samplers that give the same batches in every epoch, and different otherwise."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self._source, self._target, self._places, np.asarray([*self._ends, self.seed])):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def padding(self) -> tuple[float, float]:
        """Share of padding in all tokens of the sources and in all of the targets, the same in every epoch."""
        source, target = self._padded
        return 1 - self._source.sum() / max(source, 1), 1 - self._target.sum() / max(target, 1)

    def _warn_of_long_pairs(self) -> None:
        long = int((self._longest > self.max_tokens).sum())
        if long:
            logger.warning(
                f"{long} of {len(self._longest)} pairs are longer than max_tokens={self.max_tokens}, the longest has "
                f"{self._longest.max()} tokens; each of them becomes a batch of its own."
            )

    def _sorted_in_windows(self, window: int) -> np.ndarray:
        shuffled = np.random.default_rng((self.seed, 0)).permutation(len(self._longest))
        windows = [shuffled[start : start + window] for start in range(0, len(shuffled), window)]
        # By the longer side first: that is what the budget is about, and it wastes least on the two sides together.
        keys = (self._source, self._target, self._longest)
        return np.concatenate([part[np.lexsort([key[part] for key in keys])] for part in windows])

    def _cut(self, places: np.ndarray) -> list[int]:
        """Where each batch ends in `places`."""
        ends, start, longest = [], 0, 0
        for position, length in enumerate(self._longest[places].tolist()):
            longest = max(longest, length)
            if position > start and longest * (position + 1 - start) > self.max_tokens:
                ends.append(position)
                start, longest = position, length
        return [*ends, len(places)]

    def _count_padded(self, places: np.ndarray) -> tuple[int, int]:
        starts = np.array([0, *self._ends[:-1]])
        sizes = np.diff([0, *self._ends])
        source, target = (np.maximum.reduceat(side[places], starts) for side in (self._source, self._target))
        return int((source * sizes).sum()), int((target * sizes).sum())


class _Repeats:
    """Which pair stands in which row, where some pairs have several rows.

    Args:
        shape: A number for the lengths of each pair, the same for pairs of equal lengths.
        copies: Rows of each pair on average; what is beyond a whole number is rounded over the pairs of one shape.
    """

    def __init__(self, shape: np.ndarray, copies: Sequence[float]) -> None:
        copies = np.asarray(copies, dtype=np.float64)
        if len(copies) != len(shape):
            raise ValueError(f"There are {len(shape)} pairs but copies for {len(copies)}.")
        if not copies.min() >= 1:
            raise ValueError(f"copies must be at least 1 for every pair, not {copies.min()}.")
        whole = np.floor(copies).astype(np.int64)
        self._whole = np.repeat(np.arange(len(shape)), whole)
        # Groups of pairs that can stand in for one another, in order: rounding their running total loses no row.
        order = np.lexsort((shape, copies))
        new = np.diff(shape[order], prepend=-1).astype(bool) | np.diff(copies[order], prepend=0).astype(bool)
        self._start = np.flatnonzero(new)
        self._group = np.empty(len(shape), dtype=np.int64)
        self._group[order] = np.cumsum(new) - 1
        share = np.add.reduceat((copies - whole)[order], self._start)
        more = np.diff(np.floor(np.cumsum(share) + 0.5), prepend=0).astype(np.int64)
        self._more_start = np.repeat(self._start, more)
        self._rank = np.arange(more.sum()) - np.repeat(np.cumsum(more) - more, more)
        self.rows = np.concatenate([self._whole, order[self._more_start + self._rank]])
        """A pair of the right lengths for each row."""

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """The pair of each row in one epoch: in the last rows, which hold once more some pairs of a group, others."""
        order = np.lexsort((random.random(len(self._group)), self._group))
        return np.concatenate([self._whole, order[self._more_start + self._rank]])


def _split_to_multiple(ends: list[int], multiple_of: int) -> list[int]:
    while len(ends) % multiple_of:
        starts = [0, *ends[:-1]]
        largest = max(range(len(ends)), key=lambda index: ends[index] - starts[index])
        ends = [*ends[:largest], (starts[largest] + ends[largest]) // 2, *ends[largest:]]
    return ends


def sequence_lengths(dataset: datasets.Dataset, column: str) -> np.ndarray:
    """Lengths of a column of token ids, read in pieces, without making Python objects of the ids."""
    batches = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    lengths = [pyarrow.compute.list_value_length(batch[column]).to_numpy() for batch in batches]
    return np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
