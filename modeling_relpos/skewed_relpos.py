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
        return torch.zeros_like(query)
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


class ByOffset:
    """Room for one number per pair of [blocks, n, n], laid out by offset.

    Attributes:
        by_key: [blocks, n, n].
        band: [blocks * n, offsets], the same memory: the offsets that have a step of their own.
    """

    def __init__(self, like: torch.Tensor, blocks: int, n: int, *, offsets: range, looks_ahead: bool):
        """
        Args:
            offsets: Those that have a step of their own. Those behind them have nothing.
            looks_ahead: Offsets ahead of them have the last step; else nothing.
        """
        width = 2 * n - 1
        same = n - 1  # offset r stands in column `same` + r
        memory = like.new_zeros(blocks * n, width)
        self.by_key = memory.as_strided((blocks, n, n), (n * width, width - 1, 1), same)
        self.band = memory[:, same + offsets.start : same + offsets.stop]
        spread = looks_ahead and offsets and same + offsets.stop < width
        self.ahead = memory[:, same + offsets.stop :] if spread else None
        self.ones = like.new_ones(self.ahead.shape[1]) if spread else None

    def place(self, states: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Products of [blocks * n, dim] with [tables, offsets, dim] steps, by key: [blocks, n, n]."""
        for table, rows, products in by_table(steps, states, self.band):
            torch.mm(rows, table.t(), out=products)
        if self.ahead is not None:
            self.ahead.copy_(self.band[:, -1:])
        return self.by_key

    def sum(self, pairs: torch.Tensor) -> torch.Tensor:
        """[blocks, n, n] numbers summed by step: [blocks * n, offsets]."""
        self.by_key.copy_(pairs)
        if self.ahead is not None:
            self.band[:, -1].addmv_(self.ahead, self.ones)
        return self.band


class _Buffers:
    """What some heads of some sequences pass through."""

    def __init__(self, like: torch.Tensor, blocks: int, reach: int, is_causal: bool):
        n, dim = like.shape[2:]
        self.scores = like.new_empty(blocks, n, n)
        self.states = like.new_empty(blocks, n, dim)
        offsets = range(1 - reach, 1 if is_causal else reach + 1)
        # two, since each leaves numbers where the other relies on zeros
        self.placing, self.summing = (
            ByOffset(like, blocks, n, offsets=offsets, looks_ahead=not is_causal) for _ in range(2)
        )


class _Piece(NamedTuple):
    """Some heads of some sequences. Their blocks, one per head and sequence, are those of one head after another."""

    sequences: slice
    heads: slice
    buffers: _Buffers

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
        """[batch, ...] -> [sequences, ...]; what is the same for all stays."""
        return tensor if tensor is None or len(tensor) == 1 else tensor[self.sequences]


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
            blocks = (sequences.stop - start) * (some.stop - head)
            if buffers is None or len(buffers.scores) != blocks:
                buffers = _Buffers(query, blocks, reach, is_causal)
            yield _Piece(sequences, some, buffers)


def _visible_keys(
    real: torch.Tensor | None, n: int, is_causal: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which keys a query may see, [batch or 1, n or 1, n], and which queries see any, [batch, n or 1, 1], as numbers; None
    for all."""
    visible = torch.ones(1, n, n, dtype=torch.bool).tril() if is_causal else None
    if real is None:
        return visible, None
    visible = real[:, None] if visible is None else real[:, None] & visible
    seeing = visible.any(-1, keepdim=True)
    return visible, None if seeing.all() else seeing


class _SkewedAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx, query, key, value, key_steps, farthest, value_steps, real, scaling, reach, is_causal, keep_weights
    ):
        visible, seeing = _visible_keys(real, query.shape[2], is_causal)
        output = empty_like_projections(query)
        kept = []
        for piece in _pieces(query, reach, is_causal):
            q, k, v = (piece.blocks_of(states) for states in (query, key, value))
            steps, buffers = of_heads(key_steps, piece.heads), piece.buffers
            placed = None if steps is None else piece.by_head(buffers.placing.place(flat(q), steps * scaling))
            start_scores(piece.by_head(buffers.scores), placed, piece.of_sequences(visible))
            weights = buffers.scores.baddbmm_(q, k.transpose(1, 2), alpha=scaling).softmax(-1)
            if seeing is not None:
                piece.by_head(weights).mul_(piece.of_sequences(seeing))
            states = torch.bmm(weights, v, out=buffers.states)
            steps = of_heads(value_steps, piece.heads)
            if steps is not None:
                for table, rows, out in by_table(steps, buffers.summing.sum(weights), flat(states)):
                    out.addmm_(rows, table)
            first = of_heads(farthest, piece.heads)
            if first is not None:
                piece.by_head(states).add_(_where_seeing(first[:, None], piece.of_sequences(seeing)))
            piece.put(states, output)
            if keep_weights:
                kept.append(weights)
        ctx.save_for_backward(query, key, value, key_steps, farthest, value_steps, seeing, output, *kept)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad):
        query, key, value, key_steps, farthest, value_steps, seeing, output, *kept = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        d_query, d_key, d_value = (empty_like_projections(query) for _ in range(3))
        d_key_steps, d_farthest, d_value_steps = (
            None if tables is None else torch.zeros_like(tables) for tables in (key_steps, farthest, value_steps)
        )
        for piece, weights in zip(_pieces(query, reach, is_causal), kept):
            q, k, v, out, g = (piece.blocks_of(states) for states in (query, key, value, output, grad))
            buffers = piece.buffers
            scores, states = buffers.scores, buffers.states

            # gradient of the scores: weights * (g . (v + a^V) - g . output), all relative to the farthest row of a^V
            first = of_heads(farthest, piece.heads)
            if first is not None:
                out = torch.sub(piece.by_head(out), first[:, None], out=piece.by_head(states)).flatten(0, 1)
                seen = _where_seeing(piece.by_head(g), piece.of_sequences(seeing)).flatten(0, 2)
                for d_table, rows in by_table(of_heads(d_farthest, piece.heads), seen):
                    d_table.add_(rows.sum(0))
            own = torch.mul(out, g, out=states).sum(-1, keepdim=True)
            steps = of_heads(value_steps, piece.heads)
            if steps is None:
                scores.copy_(own.neg_())
            else:
                torch.sub(buffers.placing.place(flat(g), steps), own, out=scores)
                d_steps = of_heads(d_value_steps, piece.heads)
                for d_table, rows, gradients in by_table(d_steps, buffers.summing.sum(weights), flat(g)):
                    d_table.addmm_(rows.t(), gradients)
            scores.baddbmm_(g, v.transpose(1, 2)).mul_(weights)

            piece.put(torch.bmm(weights.transpose(1, 2), g, out=states), d_value)
            piece.put(torch.baddbmm(states, scores.transpose(1, 2), q, beta=0, alpha=scaling, out=states), d_key)
            torch.baddbmm(states, scores, k, beta=0, alpha=scaling, out=states)
            steps = of_heads(key_steps, piece.heads)
            if steps is not None:
                d_steps, summed = of_heads(d_key_steps, piece.heads), buffers.summing.sum(scores)
                for table, rows, d_rows in by_table(steps, summed, flat(states)):
                    d_rows.addmm_(rows, table, alpha=scaling)
                for d_table, rows, queries in by_table(d_steps, summed, flat(q)):
                    d_table.addmm_(rows.t(), queries, alpha=scaling)
            piece.put(states, d_query)
        return d_query, d_key, d_value, d_key_steps, d_farthest, d_value_steps, *(None,) * 5


def flat(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, n, dim] -> [blocks * n, dim]."""
    return blocks.reshape(-1, blocks.shape[-1])


def _where_seeing(states: torch.Tensor, seeing: torch.Tensor | None) -> torch.Tensor:
    return states if seeing is None else states * seeing


def start_scores(scores: torch.Tensor, placed: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor:
    """What the products of queries and keys are added to: the position terms, and `NEVER` where a query may not look."""
    if placed is None:
        return scores.zero_() if visible is None else scores.copy_(torch.where(visible, 0.0, NEVER))
    if visible is None:
        return scores.copy_(placed)
    return torch.where(visible, placed, scores.new_tensor(NEVER), out=scores)


__all__ = ["skewed_attention"]
