"""Self-attention with relative positions for short sequences on CPU, forward and backward in one function.

Among thirty tokens the position terms multiply as many numbers as attention itself, and every further pass over [queries,
keys] is felt. Compared with `attention_by_rows`, which takes any labelling of the pairs, this saves:

- Gathering and scattering. A buffer with a column per offset, [queries, 2n - 1], shows the same numbers by key, [queries,
  keys], through a stride that is one shorter: skewing (Huang et al. 2018, arXiv 1809.04281). Products with the tables are
  written into it and read from it as they are.
- One row of the table. A constant may be added to all scores of a query, and weights sum to one: the row of the farthest
  offset behind drops out of the scores and moves into the values. The other rows enter as their steps from it, 2k of
  them, and k where no query looks ahead; a matrix product with 32 columns takes two thirds of the time of one with 33.
- Memory traffic. Some sequences and heads pass after others through the same buffers, which stay in the processor's cache.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

# Bytes of the buffers that some sequences and heads pass through. 4 MiB measured best of 1, 2, 4 and 8 (8 heads of 64; 32
# sequences of 32 tokens, 16 of 128, 4 of 512).
BUFFER_BYTES = 2**22
# The score where a query may not look. Its weight is zero exactly, and a query that may look nowhere gets no NaN.
NEVER = -1e30


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
        return query.clone()  # of the same shape, and with a gradient
    dtype = torch.promote_types(query.dtype, torch.float32)
    reach = min(max_relative_position, query.shape[2] - 1)
    _, key_steps = split_table(key_table, reach, is_causal, dtype)
    farthest, value_steps = split_table(value_table, reach, is_causal, dtype)
    states = (tensor.to(dtype) for tensor in (query, key, value))
    output = _SkewedAttention.apply(
        *states, key_steps, farthest, value_steps, real, scaling, reach, is_causal, torch.is_grad_enabled()
    )
    return output.to(query.dtype)


def split_table(
    table: torch.Tensor | None, reach: int, is_causal: bool, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The row of the farthest offset behind, -reach, and the steps from it to the rows of the others.

    Args:
        table: [2k + 1, dim] or [heads, 2k + 1, dim].
        reach: The farthest offset that has a row of its own, at most k.
        is_causal: Leave out the rows of offsets ahead.

    Returns:
        [tables, 1, dim] and [tables, offsets, dim], for the offsets 1 - reach to `reach`, or to 0. There is one table for
        all heads, or one for each.
    """
    if table is None:
        return None, None
    table = (table if table.dim() == 3 else table[None]).to(dtype)
    middle = table.shape[1] // 2
    first, last = middle - reach, middle + (0 if is_causal else reach)
    farthest = table[:, first : first + 1]
    return farthest, table[:, first + 1 : last + 1] - farthest


def of_heads(tables: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    """Some heads' [tables, ..., dim], or the one for all; None where there is nothing, not a single row."""
    if tables is None or tables.shape[1] == 0:
        return None
    return tables[heads] if len(tables) > 1 else tables


def by_table(tables: torch.Tensor, *rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Each of the tables with the rows that it is for: all, or those of one head after another."""
    return zip(tables, *(each.chunk(len(tables)) for each in rows))


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


class ByOffset:
    """Room for one number per pair of a window, laid out by offset: a row per query and a column per offset.

    Attributes:
        by_key: [blocks, queries, keys].
        band: [blocks * queries, offsets], the same memory: the offsets that have a step of their own.
        ahead: [blocks * queries, ...], those ahead of them, where these have the last step; else None.
    """

    def __init__(self, memory: torch.Tensor, window: Window, largest: Window, offsets: range, looks_ahead: bool):
        """
        Args:
            memory: [queries of all blocks, width] of the largest window.
            offsets: Those that have a step of their own. Those behind them have nothing.
            looks_ahead: Offsets ahead of them have the last step.
        """
        width = memory.shape[1]
        same = largest.queries - 1 + largest.before  # the column of offset 0
        first, last = same + offsets.start, same + offsets.stop
        self.rows = memory[: window.blocks * window.queries]
        # from one row to the next, keys move on by a column
        strides = (window.queries * width, width - 1, 1)
        self.by_key = memory.as_strided(window[:3], strides, same - window.before)
        self.band = self.rows[:, first:last]
        self.ahead = self.rows[:, last:] if looks_ahead and offsets and last < width else None
        self.ones = None if self.ahead is None else memory.new_ones(width - last)
        self.is_cut = window[1:] != largest[1:]

    def place(self, states: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Products of [blocks * queries, dim] with [tables, offsets, dim] steps, by key: [blocks, queries, keys]."""
        if steps is None:
            self.band.zero_()
        else:
            for table, rows, products in by_table(steps, states, self.band):
                torch.mm(rows, table.t(), out=products)
        if self.ahead is not None:
            self.ahead.copy_(self.band[:, -1:])
        return self.by_key

    def sum(self, pairs: torch.Tensor) -> torch.Tensor:
        """[blocks, queries, keys] numbers summed by step: [blocks * queries, offsets]."""
        if self.is_cut:  # where there are no keys, there are numbers of another window
            self.rows.zero_()
        self.by_key.copy_(pairs)
        if self.ahead is not None:
            self.band[:, -1].addmv_(self.ahead, self.ones)
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
        self.offsets, self.looks_ahead = range(1 - reach, 1 if is_causal else reach + 1), not is_causal
        self.scores = like.new_empty(blocks * queries * keys)
        self.states = like.new_empty(blocks * keys * like.shape[-1])
        # two, since each leaves numbers where the other relies on zeros
        self.placing, self.summing = (like.new_zeros(blocks * queries, queries + keys - 1) for _ in range(2))
        if is_causal:
            self.placing[:, queries + before :] = NEVER
        self.views: dict[Window, Views] = {}

    def of(self, window: Window) -> "Views":
        """What a window uses, made once."""
        if window not in self.views:
            self.views[window] = Views(self, window)
        return self.views[window]


class Views:
    """The part of the buffers that a window uses, and what is computed in it.

    Blocks are [blocks, queries or keys, dim], those of one head before those of the next. What is returned is to be used
    before the next call.
    """

    def __init__(self, buffers: Buffers, window: Window):
        self.window, self._states = window, buffers.states
        self._scores = _view(buffers.scores, window[:3])
        self.placing, self.summing = (
            ByOffset(memory, window, buffers.largest, buffers.offsets, buffers.looks_ahead)
            for memory in (buffers.placing, buffers.summing)
        )

    def scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        steps: torch.Tensor | None,
        scaling: float,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores of all pairs relative to the farthest key behind, [blocks, queries, keys].

        Args:
            visible: [sequences, 1, keys] booleans, False for keys that no query may see; there are blocks of all sequences.
        """
        placed = self.placing.place(flat(q), None if steps is None else steps * scaling)
        scores = self._scores
        if visible is None:
            scores.copy_(placed)
        else:
            by_sequence = (-1, len(visible))
            never = scores.new_tensor(NEVER)
            torch.where(visible, placed.unflatten(0, by_sequence), never, out=scores.unflatten(0, by_sequence))
        return scores.baddbmm_(q, k.transpose(1, 2), alpha=scaling)

    def summed(self, weights: torch.Tensor, v: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Sums of values by weights, each value with its step added, [blocks, queries, dim]."""
        states = torch.bmm(weights, v, out=_view(self._states, (*self.window[:2], v.shape[2])))
        if steps is not None:
            for table, rows, out in by_table(steps, self.summing.sum(weights), flat(states)):
                out.addmm_(rows, table)
        return states

    def gradients(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        own: torch.Tensor,
        weights: torch.Tensor,
        key_steps: torch.Tensor | None,
        value_steps: torch.Tensor | None,
        d_key_steps: torch.Tensor | None,
        d_value_steps: torch.Tensor | None,
        scaling: float,
    ) -> Iterator[torch.Tensor]:
        """Gradients of values, keys and queries, in this order; those of the steps are added to the tensors for them.

        Args:
            g: Gradient of the output.
            own: [blocks, queries, 1], g . output, where output and values are relative to the farthest key's.
        """
        of_keys, of_queries = _view(self._states, k.shape), _view(self._states, q.shape)
        yield torch.bmm(weights.transpose(1, 2), g, out=of_keys)
        # gradient of the scores: weights * (g . (v + a^V) - g . output)
        placed = self.placing.place(flat(g), value_steps)
        scores = torch.sub(placed, own, out=self._scores)
        scores.baddbmm_(g, v.transpose(1, 2)).mul_(weights)
        if value_steps is not None:
            for d_table, rows, some in by_table(d_value_steps, self.summing.sum(weights), flat(g)):
                d_table.addmm_(rows.t(), some)
        yield torch.baddbmm(of_keys, scores.transpose(1, 2), q, beta=0, alpha=scaling, out=of_keys)
        torch.baddbmm(of_queries, scores, k, beta=0, alpha=scaling, out=of_queries)
        if key_steps is not None:
            summed = self.summing.sum(scores)
            for table, rows, out in by_table(key_steps, summed, flat(of_queries)):
                out.addmm_(rows, table, alpha=scaling)
            for d_table, rows, some in by_table(d_key_steps, summed, flat(q)):
                d_table.addmm_(rows.t(), some, alpha=scaling)
        yield of_queries


class _Piece(NamedTuple):
    """Some heads of some sequences. Their blocks, one per head and sequence, are those of one head after another."""

    sequences: slice
    heads: slice
    views: Views

    def blocks_of(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, heads, n, dim] -> [blocks, n, dim], not a copy where there is one head."""
        return states[self.sequences, self.heads].transpose(0, 1).flatten(0, 1)

    def put(self, blocks: torch.Tensor, total: torch.Tensor) -> None:
        """Write [blocks, n, dim] to where `blocks_of` takes them from."""
        place = total[self.sequences, self.heads].transpose(0, 1)
        place.copy_(blocks.view(place.shape))

    def by_head(self, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, ...] -> [heads, sequences, ...], of the piece."""
        return blocks.unflatten(0, (self.heads.stop - self.heads.start, -1))

    def of_sequences(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """[batch, ...] -> [sequences, ...]."""
        return None if tensor is None else tensor[self.sequences]


def _pieces(query: torch.Tensor, reach: int, is_causal: bool) -> Iterator[_Piece]:
    """Where [batch, heads, n, dim] is cut: as many blocks as the buffers hold, heads before sequences."""
    batch, heads, n, dim = query.shape
    blocks = max(1, BUFFER_BYTES // (n * (5 * n + dim) * query.element_size()))
    together = min(heads, blocks)
    size = max(1, blocks // together)
    buffers = None
    for start in range(0, batch, size):
        for head in range(0, heads, together):
            sequences, some = slice(start, min(start + size, batch)), slice(head, min(head + together, heads))
            window = Window((sequences.stop - start) * (some.stop - head), n, n)
            buffers = buffers or Buffers(query, window, reach, is_causal)
            yield _Piece(sequences, some, buffers.of(window))


def _which_see(real: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    """The queries that see any key, [batch, n or 1, 1] as booleans; None for all."""
    if real is None:
        return None
    seeing = real.cummax(-1).values if is_causal else real.any(-1, keepdim=True)
    return None if seeing.all() else seeing[..., None]


class _SkewedAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx, query, key, value, key_steps, farthest, value_steps, real, scaling, reach, is_causal, keep_weights
    ):
        visible, seeing = None if real is None else real[:, None], _which_see(real, is_causal)
        output = empty_like_projections(query)
        kept = []
        for piece in _pieces(query, reach, is_causal):
            q, k, v = (piece.blocks_of(states) for states in (query, key, value))
            k_steps, v_steps = (of_heads(tables, piece.heads) for tables in (key_steps, value_steps))
            scores = piece.views.scores(q, k, k_steps, scaling, piece.of_sequences(visible))
            weights = scores.softmax(-1)
            if seeing is not None:
                piece.by_head(weights).mul_(piece.of_sequences(seeing))
            piece.put(piece.views.summed(weights, v, v_steps), output)
            if keep_weights:
                kept.append(weights)
        if farthest is not None:
            output += farthest if seeing is None else farthest * seeing[:, None]
        ctx.save_for_backward(query, key, value, key_steps, farthest, value_steps, seeing, output, *kept)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad):
        query, key, value, key_steps, farthest, value_steps, seeing, output, *kept = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        totals = [empty_like_projections(query) for _ in range(3)]
        d_key_steps, d_value_steps = (None if t is None else torch.zeros_like(t) for t in (key_steps, value_steps))
        d_farthest = None
        if farthest is None:
            owns = output * grad
        else:
            owns = (output - farthest).mul_(grad)  # where nothing is seen, all weights are zero, and it does not count
            seen = grad if seeing is None else grad * seeing[:, None]
            d_farthest = seen.sum((0, 2)).view(len(farthest), -1, query.shape[-1]).sum(1, keepdim=True)
        owns = owns.sum(-1, keepdim=True)
        for piece, weights in zip(_pieces(query, reach, is_causal), kept):
            q, k, v, g, own = (piece.blocks_of(states) for states in (query, key, value, grad, owns))
            tables = (of_heads(t, piece.heads) for t in (key_steps, value_steps, d_key_steps, d_value_steps))
            found = piece.views.gradients(q, k, v, g, own, weights, *tables, scaling)
            for total, blocks in zip(reversed(totals), found):
                piece.put(blocks, total)
        return *totals, d_key_steps, d_farthest, d_value_steps, *(None,) * 5


def flat(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, n, dim] -> [blocks * n, dim]."""
    return blocks.reshape(-1, blocks.shape[-1])


def _view(room: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return room[: math.prod(shape)].view(shape)


__all__ = ["skewed_attention"]
