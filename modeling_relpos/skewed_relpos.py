"""Self-attention with relative positions for short sequences on CPU, forward and backward in one function.

Among thirty tokens the position terms multiply as many numbers as attention itself, and every further pass over [queries,
keys] is felt. Compared with `attention_by_rows`, which takes any labelling of the pairs, this saves:

- Gathering and scattering. A buffer with a column per offset, [queries, 2n - 1], shows the same numbers by key, [queries,
  keys], through a stride that is one shorter: skewing (Huang et al. 2018, arXiv 1809.04281). Products with the tables are
  written into it and read from it as they are.
- One row of the table. A constant may be added to all scores of a query, and weights sum to one: the row of the farthest
  offset behind drops out of the scores and moves into the values. The other rows enter as their steps from it, 2k of
  them, and k where no query looks ahead; a matrix product with 32 columns takes two thirds of the time of one with 33.
- Memory traffic. Some sequences and heads pass after others through the same buffers, which stay in the processor's cache,
  and so do those of the next layer, for which the buffers are kept.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

# Bytes of the buffers that some sequences and heads pass through. 8 MiB measured best of 2 to 14 (8 heads of 64; 32
# sequences of 32 tokens, 16 of 128, 8 of 256; one and two threads), where one thread would like 4 for 32 tokens.
BUFFER_BYTES = 2**23
# How many buffers each thread keeps: those of an encoder's layers and those of a decoder's; and of how many bytes at most.
# Few blocks of a long sequence have more, and would be held for the rest of the process.
KEPT = 2
KEPT_BYTES = 2**25
# The score where a query may not look. Its weight is zero exactly, and a query that may look nowhere gets no NaN.
NEVER = -1e30

_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.out

_kept = threading.local()


def skewed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    max_relative_position: int,
    key_table: torch.Tensor | None = None,
    value_table: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of sequences to themselves, equations 3 to 5 of the paper. Time and memory grow with n^2.

    Half precision is computed in float32. Gradients can be taken once, not of gradients.

    Args:
        query, key, value: [batch, heads, n, dim], positions 0 to n - 1, on CPU.
        scaling: Factor of both terms of the score, usually dim^-0.5.
        max_relative_position: The clipping distance k, at least 0.
        key_table, value_table: a^K and a^V, [2k + 1, dim] or [heads, 2k + 1, dim]; None where the model has none.
        real: [batch, n] booleans, False at padding; None where there is none.
        is_causal: Queries do not look ahead.

    Returns:
        [batch, heads, n, dim]. A query that may look nowhere gets zeros.
    """
    if query.numel() == 0:
        return with_gradients_of(query, key, value, key_table, value_table)
    reach = min(max_relative_position, query.shape[2] - 1)
    options = (scaling, reach, is_causal, torch.is_grad_enabled())
    return _SkewedAttention.apply(query, key, value, key_table, value_table, real, *options)


def without_autocast(function: Callable) -> Callable:
    """A function that computes in the precision of its arguments. (torch.autocast as a decorator is one object for all
    calls, and gives one thread's setting to another.)"""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def with_gradients_of(output: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """An output that does not depend on other states and tables, for which they get zeros all the same: distributed
    training waits for a gradient of every parameter."""
    for other in others:
        if other is not None:
            output = output + other[..., :0, :].sum().to(output.dtype)
    return output


class Tables(NamedTuple):
    """What a computation makes of a^K and a^V, or gradients of that, in at least float32. There is one table for all heads,
    or one for each; a part is None where the model does not have that table.

    Attributes:
        farthest: Of the values, the row of the farthest offset behind, -reach: [tables, 1, dim].
        key_steps: The steps from that row of the keys to those of the offsets from 1 - reach to `reach`, or to 0, times
            the factor of the scores: [tables, offsets, dim].
        value_steps: The same of the values, as they are.
    """

    farthest: torch.Tensor | None
    key_steps: torch.Tensor | None
    value_steps: torch.Tensor | None

    @classmethod
    def of(
        cls,
        key_table: torch.Tensor | None,
        value_table: torch.Tensor | None,
        reach: int,
        is_causal: bool,
        scaling: float,
        dtype: torch.dtype,
    ) -> "Tables":
        """
        Args:
            key_table, value_table: [2k + 1, dim] or [heads, 2k + 1, dim].
            reach: The farthest offset that has a row of its own, at most k.
            is_causal: Leave out the rows of offsets ahead.
            scaling: Factor of the scores.
            dtype: Of the parts.
        """
        parts = []
        for table in (key_table, value_table):
            first, others = _rows(None if table is None else table.to(dtype), reach, is_causal)
            parts.append((first, None if table is None else others - first))
        (_, key_steps), (farthest, value_steps) = parts
        return cls(farthest, None if key_steps is None else key_steps.mul_(scaling), value_steps)

    def steps(self) -> "Steps":
        """The steps of all heads."""
        parts = self.key_steps, self.value_steps
        return Steps(*(None if part is None or part.shape[1] == 0 else list(part.unbind()) for part in parts))


class TableGradients:
    """Gradients of a^K and a^V, to which those of what `Tables` makes of them are added.

    Attributes:
        parts: Room for the latter.
    """

    def __init__(
        self,
        key_table: torch.Tensor | None,
        value_table: torch.Tensor | None,
        reach: int,
        is_causal: bool,
        scaling: float,
        dtype: torch.dtype,
    ):
        """Arguments as for `Tables.of`."""
        self._tables, self._scaling = (key_table, value_table), scaling
        self._totals = [None if t is None else torch.zeros_like(t, dtype=dtype) for t in self._tables]
        (self._of_key, key_steps), (farthest, value_steps) = (_rows(t, reach, is_causal) for t in self._totals)
        self.parts = Tables(farthest, key_steps, value_steps)

    def finish(self) -> Iterator[torch.Tensor | None]:
        """The gradients of the two tables; to be called once."""
        for first, steps in ((self._of_key, self.parts.key_steps), (self.parts.farthest, self.parts.value_steps)):
            if first is not None:
                first -= steps.sum(1, keepdim=True)
        for table, total, factor in zip(self._tables, self._totals, (self._scaling, 1.0)):
            yield None if table is None else total.mul_(factor).to(table.dtype)


def _rows(table: torch.Tensor | None, reach: int, is_causal: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of [2k + 1, dim] or [heads, 2k + 1, dim], the row of the farthest offset behind, [tables, 1, dim], and those of the
    offsets from 1 - reach to `reach`, or to 0, [tables, offsets, dim]."""
    if table is None:
        return None, None
    table = table if table.dim() == 3 else table[None]
    middle = table.shape[1] // 2
    first, last = middle - reach, middle + (0 if is_causal else reach)
    return table[:, first : first + 1], table[:, first + 1 : last + 1]


class Steps(NamedTuple):
    """The steps of `Tables` as matrices [offsets, dim], one for all heads or one for each; None where there are none."""

    keys: list[torch.Tensor] | None
    values: list[torch.Tensor] | None

    def of_heads(self, heads: slice) -> "Steps":
        """Those of some heads."""
        return Steps(*(tables if tables is None or len(tables) == 1 else tables[heads] for tables in self))


def of_heads(tables: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    """Some heads' [tables, ..., dim], or the one for all."""
    return tables if tables is None or tables.shape[0] == 1 else tables[heads]


def by_table(tables: list[torch.Tensor], *rows: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Each of the tables with the rows that it is for: all, or those of one head after another."""
    if len(tables) == 1:
        return ((tables[0], *rows),)
    return zip(tables, *(each.chunk(len(tables)) for each in rows))


def even_share(number: int, most: int) -> int:
    """How many of so many to take at a time, at most `most`, for pieces of the same size."""
    return -(-number // -(-number // most))


def empty_like_projections(states: torch.Tensor) -> torch.Tensor:
    """Room for [batch, heads, n, dim], laid out as [batch, n, heads, dim], as the projections write and read it."""
    batch, heads, n, dim = states.shape
    return states.new_empty(batch, n, heads, dim).transpose(1, 2)


class Window(NamedTuple):
    """Blocks of queries that follow one another, with the keys that each block meets, which do so, too.

    Attributes:
        blocks: Of heads and sequences.
        queries, keys: Of each block.
        before: Keys before the first query's own.
    """

    blocks: int
    queries: int
    keys: int
    before: int = 0

    def numbers(self, dim: int) -> int:
        """How many numbers its buffers have."""
        pairs = 2 * self.keys + 2 * (self.queries + self.keys - 1)
        return self.blocks * (self.queries * (pairs + 2 * dim) + self.keys * 3 * dim)


class Memory:
    """Memory for `ByOffset`.

    Attributes:
        numbers: [rows, columns].
        shape: Queries, keys and keys before, of the windows that have left numbers in it; None where all are zeros.
    """

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers
        self.shape: tuple[int, ...] | None = None

    def clear_for(self, shape: tuple[int, ...]) -> None:
        """Make it zeros, unless windows of this shape alone have left numbers, which another one writes over."""
        if self.shape != shape:
            self.numbers.zero_()
            self.shape = shape


class ByOffset:
    """Room for one number per pair of a window, laid out by offset: a row per query and a column per offset.

    Attributes:
        by_key: [blocks, queries, keys].
        band: [blocks * queries, offsets], the same memory: the offsets that have a step of their own.
        last: [blocks * queries, 1], the last of these.
        ahead: [blocks * queries, ...], the offsets ahead of them, where these have the last step; else None.
    """

    def __init__(self, memory: Memory, window: Window, largest: Window, offsets: range, looks_ahead: bool):
        """
        Args:
            memory: A row for every query of all blocks of the largest window.
            offsets: Those that have a step of their own. Those behind them have nothing.
            looks_ahead: Offsets ahead of them have the last step.
        """
        self._memory, self._shape, memory = memory, window[1:], memory.numbers
        width, end = memory.shape[1], largest.queries + largest.keys - 1
        same = largest.queries - 1 + largest.before  # the column of offset 0
        first, last = same + offsets.start, same + offsets.stop
        rows = memory[: window.blocks * window.queries]
        # from one row to the next, keys move on by a column
        strides = (window.queries * width, width - 1, 1)
        self.by_key = memory.as_strided(window[:3], strides, same - window.before)
        self.band, self.last = rows[:, first:last], rows[:, last - 1 : last]
        self.ahead = rows[:, last:end] if looks_ahead and offsets and last < end else None
        self.ones = None if self.ahead is None else memory.new_ones(end - last)

    def place(self, states: torch.Tensor, steps: list[torch.Tensor] | None) -> torch.Tensor:
        """Products of [blocks * queries, dim] with the steps, by key: [blocks, queries, keys]."""
        if steps is None:
            self.band.zero_()
        else:
            for table, rows, products in by_table(steps, states, self.band):
                torch.mm(rows, table.t(), out=products)
        if self.ahead is not None:
            self.ahead.copy_(self.last)
        return self.by_key

    def sum(self, pairs: torch.Tensor) -> torch.Tensor:
        """[blocks, queries, keys] numbers summed by step: [blocks * queries, offsets]."""
        self._memory.clear_for(self._shape)
        self.by_key.copy_(pairs)
        if self.ahead is not None:
            self.last[:, 0].addmv_(self.ahead, self.ones)
        return self.band


class Buffers:
    """Memory that windows pass through, one after another."""

    def __init__(self, like: torch.Tensor, largest: Window, reach: int, is_causal: bool):
        """
        Args:
            like: [..., dim] states, of the dtype and device.
            largest: Windows may have fewer blocks, queries, and keys at either end.
            reach: The farthest offset that has a row of its own.
        """
        blocks, queries, keys, before = self.largest = largest
        self.dim, self.dtype = like.shape[-1], like.dtype
        self.offsets, self.looks_ahead = range(1 - reach, 1 if is_causal else reach + 1), not is_causal
        self.pairs = [like.new_empty(blocks * queries * keys) for _ in range(2)]
        self.of_queries = [like.new_empty(blocks * queries * self.dim) for _ in range(2)]
        self.of_keys = [like.new_empty(blocks * keys * self.dim) for _ in range(3)]
        columns = queries + keys - 1
        # two, since each leaves numbers where the other relies on zeros; rows of 63 numbers would begin anywhere, and
        # attention with gradients, of 32 tokens, would take 1.04 of its time
        self.by_offset = [Memory(like.new_zeros(blocks * queries, columns + -columns % 4)) for _ in range(2)]
        if is_causal:
            self.by_offset[0].numbers[:, queries + before :] = NEVER
        self.views: dict[Window, Views] = {}
        self.pieces: dict[tuple[int, int], list[_Piece]] = {}

    @classmethod
    def kept(cls, like: torch.Tensor, largest: Window, reach: int, is_causal: bool) -> "Buffers":
        """Those of this thread's last calls, where these were for the same; else new ones, which are kept instead unless
        they are too large."""
        too_large = largest.numbers(like.shape[-1]) * like.element_size() > KEPT_BYTES
        if too_large or type(like) is not torch.Tensor:  # such as FakeTensor, of which nothing must be left over
            return cls(like, largest, reach, is_causal)
        made_for = (largest, like.shape[-1], like.dtype, like.device, reach, is_causal)
        all_kept = _kept.__dict__.setdefault("buffers", {})
        with torch.inference_mode(False):  # or nothing could be written to them outside of it
            buffers = all_kept.pop(made_for, None) or cls(like, largest, reach, is_causal)
        all_kept[made_for] = buffers  # the last one used is the last one in it
        while len(all_kept) > KEPT:
            del all_kept[next(iter(all_kept))]
        return buffers

    def of(self, window: Window) -> "Views":
        """What a window uses, made once."""
        if window not in self.views:
            with torch.inference_mode(False):
                self.views[window] = Views(self, window)
        return self.views[window]


class Views:
    """The part of the buffers that a window uses, and what is computed in it.

    Blocks are [blocks, queries or keys, dim], those of one head before those of the next. What is returned is to be used
    before the next call.

    Attributes:
        q, g, k, v: Room for blocks of queries, gradients of the output, keys and values.
        weights: [blocks, queries, keys], room for them.
    """

    def __init__(self, buffers: Buffers, window: Window):
        blocks, queries, keys, _ = window
        view = lambda room, *shape: room[: blocks * shape[0] * shape[1]].view(blocks, *shape)
        self._scores, self.weights = (view(room, queries, keys) for room in buffers.pairs)
        self.q, self.g = (view(room, queries, buffers.dim) for room in buffers.of_queries)
        self.k, self.v, self._for_keys = (view(room, keys, buffers.dim) for room in buffers.of_keys)
        self._for_queries = view(buffers.of_keys[2], queries, buffers.dim)  # one after the other
        self._flat_q, self._flat_g, self._flat_for_queries = (
            t.flatten(0, 1) for t in (self.q, self.g, self._for_queries)
        )
        self.placing, self.summing = (
            ByOffset(memory, window, buffers.largest, buffers.offsets, buffers.looks_ahead)
            for memory in buffers.by_offset
        )

    def scores(
        self,
        k: torch.Tensor,
        steps: list[torch.Tensor] | None,
        scaling: float,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores of all pairs of `q` and `k` relative to the farthest key behind, [blocks, queries, keys].

        Args:
            steps: Those of the keys.
            hidden: [sequences, 1, keys], NEVER for keys that no query may see, else 0; there are blocks of all sequences.
        """
        placed, scores = self.placing.place(self._flat_q, steps), self._scores
        if hidden is None:
            scores.copy_(placed)
        else:
            by_sequence = (-1, hidden.shape[0])
            torch.add(placed.unflatten(0, by_sequence), hidden, out=scores.unflatten(0, by_sequence))
        return scores.baddbmm_(self.q, k.mT, alpha=scaling)

    def summed(self, weights: torch.Tensor, v: torch.Tensor, steps: list[torch.Tensor] | None) -> torch.Tensor:
        """Sums of values by weights, each value with its step added, [blocks, queries, dim]."""
        torch.bmm(weights, v, out=self._for_queries)
        if steps is not None:
            for table, rows, out in by_table(steps, self.summing.sum(weights), self._flat_for_queries):
                out.addmm_(rows, table)
        return self._for_queries

    def gradients(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        weights: torch.Tensor,
        steps: Steps,
        d_steps: Steps,
        scaling: float,
        own: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        """Gradients of values, keys and queries, in this order, from `q`, `g` and the weights of their pairs; those of the
        steps are added to `d_steps`.

        Args:
            own: [blocks, queries, 1], g . output, where output and values are relative to the farthest key's; None where
                there are no pairs but these, from which it follows.
        """
        yield torch.bmm(weights.mT, self.g, out=self._for_keys)
        if steps.values is not None:
            for d_table, rows, g in by_table(d_steps.values, self.summing.sum(weights), self._flat_g):
                d_table.addmm_(rows.t(), g)
        scores = self._gradient_of_scores(v, weights, steps.values, own)
        yield torch.baddbmm(self._for_keys, scores.mT, self.q, beta=0, alpha=scaling, out=self._for_keys)
        torch.baddbmm(self._for_queries, scores, k, beta=0, alpha=scaling, out=self._for_queries)
        if steps.keys is not None:
            summed = self.summing.sum(scores)
            for table, rows, out in by_table(steps.keys, summed, self._flat_for_queries):
                out.addmm_(rows, table)
            for d_table, rows, q in by_table(d_steps.keys, summed, self._flat_q):
                d_table.addmm_(rows.t(), q)
        yield self._for_queries

    def _gradient_of_scores(
        self, v: torch.Tensor, weights: torch.Tensor, steps: list[torch.Tensor] | None, own: torch.Tensor | None
    ) -> torch.Tensor:
        """weights * (g . (v + a^V) - g . output), [blocks, queries, keys]."""
        placed, scores = self.placing.place(self._flat_g, steps), self._scores
        if own is None:
            scores.copy_(placed).baddbmm_(self.g, v.mT)
            return _SOFTMAX_BACKWARD(scores, weights, -1, scores.dtype, grad_input=self.weights)
        return torch.sub(placed, own, out=scores).baddbmm_(self.g, v.mT).mul_(weights)


class _Piece:
    """Some heads of some sequences. Their blocks, one per head and sequence, are those of one head after another."""

    def __init__(self, sequences: slice, heads: slice, views: Views):
        self.sequences, self.heads, self.views = sequences, heads, views
        self._of_sequences = (heads.stop - heads.start, sequences.stop - sequences.start)
        self._rooms = [self.by_sequence(room) for room in (views.q, views.k, views.v, views.g)]

    def take(self, *states: torch.Tensor) -> None:
        """Copy the blocks of queries, keys, values and gradients, [batch, heads, n, dim] each, to the rooms for them."""
        for room, each in zip(self._rooms, states):
            room.copy_(each[self.sequences, self.heads])

    def put(self, blocks: torch.Tensor, total: torch.Tensor, more: torch.Tensor | None = None) -> None:
        """Write [blocks, n, dim] to their place in [batch, heads, n, dim], with `more` added, [tables, 1, dim]."""
        place, blocks = total[self.sequences, self.heads], self.by_sequence(blocks)
        if more is None:
            place.copy_(blocks)
        else:
            torch.add(blocks, more, out=place)

    def by_sequence(self, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, ...] -> [sequences, heads, ...]."""
        return blocks.unflatten(0, self._of_sequences).transpose(0, 1)


def _pieces(query: torch.Tensor, reach: int, is_causal: bool, dtype: torch.dtype) -> list[_Piece]:
    """Where [batch, heads, n, dim] is cut: as many blocks as the buffers hold, heads before sequences."""
    batch, heads, n, dim = query.shape
    like = query.new_empty(0, dim, dtype=dtype)
    blocks = max(1, BUFFER_BYTES // (Window(1, n, n).numbers(dim) * like.element_size()))
    together = even_share(heads, blocks)
    size = even_share(batch, max(1, blocks // together))
    buffers = Buffers.kept(like, Window(size * together, n, n), reach, is_causal)
    if (batch, heads) not in buffers.pieces:
        pieces = []  # kept when all are made: an interrupt must not leave some of them
        for start in range(0, batch, size):
            for head in range(0, heads, together):
                sequences, some = slice(start, min(start + size, batch)), slice(head, min(head + together, heads))
                window = Window((sequences.stop - start) * (some.stop - head), n, n)
                pieces.append(_Piece(sequences, some, buffers.of(window)))
        buffers.pieces[batch, heads] = pieces
    return buffers.pieces[batch, heads]


def _which_see(real: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    """The queries that see any key, [batch, 1, n or 1, 1] as booleans; None for all."""
    if real is None:
        return None
    seeing = real.cummax(-1).values if is_causal else real.any(-1, keepdim=True)
    return None if seeing.all() else seeing[:, None, :, None]


class _SkewedAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, query, key, value, key_table, value_table, real, scaling, reach, is_causal, keep_weights):
        dtype = torch.promote_types(query.dtype, torch.float32)
        hidden = None if real is None else (~real[:, None]).to(dtype).mul_(NEVER)
        seeing = _which_see(real, is_causal)
        tables = Tables.of(key_table, value_table, reach, is_causal, scaling, dtype)
        output, all_steps, kept = empty_like_projections(query), tables.steps(), []
        for piece in _pieces(query, reach, is_causal, dtype):
            views, steps = piece.views, all_steps.of_heads(piece.heads)
            piece.take(query, key, value)
            scores = views.scores(views.k, steps.keys, scaling, None if hidden is None else hidden[piece.sequences])
            weights = torch.empty_like(scores) if keep_weights else views.weights
            torch.softmax(scores, -1, out=weights)
            if seeing is not None:
                piece.by_sequence(weights).mul_(seeing[piece.sequences])
            piece.put(views.summed(weights, views.v, steps.values), output, of_heads(tables.farthest, piece.heads))
            if keep_weights:
                kept.append(weights)
        if seeing is not None and value_table is not None:
            output.mul_(seeing)
        ctx.save_for_backward(query, key, value, key_table, value_table, *tables, seeing, *kept)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad):
        query, key, value, key_table, value_table, farthest, key_steps, value_steps, seeing, *kept = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        dtype = kept[0].dtype
        d_tables = TableGradients(key_table, value_table, reach, is_causal, scaling, dtype)
        all_steps, all_d_steps = Tables(farthest, key_steps, value_steps).steps(), d_tables.parts.steps()
        totals = [empty_like_projections(query) for _ in range(3)]
        for piece, weights in zip(_pieces(query, reach, is_causal, dtype), kept):
            views, steps, d_steps = piece.views, all_steps.of_heads(piece.heads), all_d_steps.of_heads(piece.heads)
            piece.take(query, key, value, grad)
            found = views.gradients(views.k, views.v, weights, steps, d_steps, scaling)
            for total, blocks in zip(reversed(totals), found):
                piece.put(blocks, total)
        if value_table is not None:
            seen = grad if seeing is None else grad * seeing
            d_tables.parts.farthest.add_(sum_to(farthest, seen.transpose(0, 1).sum(2, dtype=dtype)))
        return *totals, *d_tables.finish(), *(None,) * 5


def sum_to(tables: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[heads, rows, dim] summed to [tables, 1, dim]."""
    return states.reshape(len(tables), -1, states.shape[-1]).sum(1, keepdim=True, dtype=tables.dtype)


__all__ = ["skewed_attention"]
