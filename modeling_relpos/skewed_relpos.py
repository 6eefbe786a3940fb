"""Self-attention with relative positions for short sequences on CPU, forward and backward in one function.

Among thirty tokens the position terms multiply as many numbers as attention itself, and every further pass over [queries,
keys] is felt. Compared with `attention_by_rows`, which takes any labelling of the pairs, this saves:

- Gathering and scattering. A buffer with a column per offset, [queries, 2n - 1], shows the same numbers by key, [queries,
  keys], through a stride that is one shorter: skewing (Huang et al. 2018, arXiv 1809.04281). Products with the tables are
  written into it and read from it as they are.
- One row of the table. A constant may be added to all scores of a query, and weights sum to one: the row of the farthest
  offset behind drops out of the scores and moves into the values. The other rows enter as their steps from it, 2k of
  them, and k where no query looks ahead; a matrix product with 32 columns takes two thirds of the time of one with 33.
- Memory traffic. Heads pass one after another through the same buffers, which stay in the processor's cache.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

# Bytes of the buffers that a head of some sequences passes through. 2 MiB measured best of 0.5, 1, 2 and 4 (8 heads of
# 64; 32 sequences of 32 tokens, 16 of 128).
BUFFER_BYTES = 2**21
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


def of_head(tables: torch.Tensor | None, head: int) -> torch.Tensor | None:
    """One head's [..., dim] of [tables, ..., dim]; None where there is nothing, not a single row."""
    if tables is None or tables.shape[1] == 0:
        return None
    return tables[head if len(tables) > 1 else 0]


def empty_like_projections(states: torch.Tensor) -> torch.Tensor:
    """Room for [batch, heads, n, dim], laid out as [batch, n, heads, dim], as the projections write and read it."""
    batch, heads, n, dim = states.shape
    return states.new_empty(batch, n, heads, dim).transpose(1, 2)


class ByOffset:
    """Room for one number per pair of [blocks, queries, keys], laid out by offset.

    Attributes:
        by_key: [blocks, queries, keys].
        band: [blocks * queries, offsets], the same memory: the offsets that have a step of their own.
    """

    def __init__(
        self,
        like: torch.Tensor,
        blocks: int,
        queries: int,
        keys: int,
        *,
        offsets: range,
        looks_ahead: bool,
    ):
        """
        Args:
            offsets: Those that have a step of their own. Those behind them have nothing.
            looks_ahead: Offsets ahead of them have the last step; else nothing.
        """
        width = queries + keys - 1
        same = queries - 1  # offset r stands in column `same` + r
        memory = like.new_zeros(blocks * queries, width)
        self.by_key = memory.as_strided((blocks, queries, keys), (queries * width, width - 1, 1), queries - 1)
        self.band = memory[:, same + offsets.start : same + offsets.stop]
        spread = looks_ahead and offsets and same + offsets.stop < width
        self.ahead = memory[:, same + offsets.stop :] if spread else None
        self.ones = like.new_ones(self.ahead.shape[1]) if spread else None

    def place(self, states: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Products of [blocks * queries, dim] with [offsets, dim] steps, by key: [blocks, queries, keys]."""
        torch.mm(states, steps.t(), out=self.band)
        if self.ahead is not None:
            self.ahead.copy_(self.band[:, -1:])
        return self.by_key

    def sum(self, pairs: torch.Tensor) -> torch.Tensor:
        """[blocks, queries, keys] numbers summed by step: [blocks * queries, offsets]."""
        self.by_key.copy_(pairs)
        if self.ahead is not None:
            self.band[:, -1].addmv_(self.ahead, self.ones)
        return self.band


class _Buffers:
    """What one head of some sequences passes through."""

    def __init__(self, like: torch.Tensor, sequences: int, reach: int, is_causal: bool):
        n, dim = like.shape[2:]
        self.scores = like.new_empty(sequences, n, n)
        self.states = like.new_empty(sequences, n, dim)
        offsets = range(1 - reach, 1 if is_causal else reach + 1)
        # two, since each leaves numbers where the other relies on zeros
        self.placing, self.summing = (
            ByOffset(like, sequences, n, n, offsets=offsets, looks_ahead=not is_causal) for _ in range(2)
        )


def _pieces(query: torch.Tensor, reach: int, is_causal: bool) -> Iterator[tuple[tuple[slice, int], _Buffers]]:
    """Where [batch, heads, n, dim] is cut: (sequences, head), and the buffers for them."""
    batch, heads, n, dim = query.shape
    size = max(1, BUFFER_BYTES // (n * (5 * n + dim) * query.element_size()))
    buffers = None
    for start in range(0, batch, size):
        sequences = min(size, batch - start)
        if buffers is None or len(buffers.scores) != sequences:
            buffers = _Buffers(query, sequences, reach, is_causal)
        for head in range(heads):
            yield (slice(start, start + sequences), head), buffers


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


def _part(tensor: torch.Tensor | None, sequences: slice) -> torch.Tensor | None:
    return tensor if tensor is None or len(tensor) == 1 else tensor[sequences]


class _SkewedAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx, query, key, value, key_steps, farthest, value_steps, real, scaling, reach, is_causal, keep_weights
    ):
        dim = query.shape[-1]
        visible, seeing = _visible_keys(real, query.shape[2], is_causal)
        output = empty_like_projections(query)
        kept = []
        for (at, head), buffers in _pieces(query, reach, is_causal):
            q, k, v = query[at, head], key[at, head], value[at, head]
            steps = of_head(key_steps, head)
            placed = None if steps is None else buffers.placing.place(q.reshape(-1, dim), steps * scaling)
            scores = start_scores(buffers.scores, placed, _part(visible, at))
            weights = scores.baddbmm_(q, k.transpose(1, 2), alpha=scaling).softmax(-1)
            if seeing is not None:
                weights.mul_(_part(seeing, at))
            states = torch.bmm(weights, v, out=buffers.states)
            steps = of_head(value_steps, head)
            if steps is not None:
                states.view(-1, dim).addmm_(buffers.summing.sum(weights), steps)
            first = of_head(farthest, head)
            if first is not None:
                states.add_(first if seeing is None else first * _part(seeing, at))
            output[at, head] = states
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
        dim = query.shape[-1]
        d_query, d_key, d_value = (empty_like_projections(query) for _ in range(3))
        d_key_steps, d_farthest, d_value_steps = (
            None if tables is None else torch.zeros_like(tables) for tables in (key_steps, farthest, value_steps)
        )
        for ((at, head), buffers), weights in zip(_pieces(query, reach, is_causal), kept):
            q, k, v, out, g = (tensor[at, head] for tensor in (query, key, value, output, grad))
            flat_q, flat_g = q.reshape(-1, dim), g.reshape(-1, dim)
            scores, states = buffers.scores, buffers.states

            # gradient of the scores: weights * (g . (v + a^V) - g . output), all relative to the farthest row of a^V
            first = of_head(farthest, head)
            own = torch.mul(out if first is None else out - first, g, out=states).sum(-1, keepdim=True)
            steps = of_head(value_steps, head)
            if steps is None:
                scores.copy_(own.neg_())
            else:
                torch.sub(buffers.placing.place(flat_g, steps), own, out=scores)
                of_head(d_value_steps, head).addmm_(buffers.summing.sum(weights).t(), flat_g)
            scores.baddbmm_(g, v.transpose(1, 2)).mul_(weights)

            if first is not None:
                seen = g if seeing is None else g * _part(seeing, at)
                of_head(d_farthest, head).add_(seen.sum((0, 1)))
            d_value[at, head] = torch.bmm(weights.transpose(1, 2), g, out=states)
            d_key[at, head] = torch.baddbmm(states, scores.transpose(1, 2), q, beta=0, alpha=scaling, out=states)
            torch.baddbmm(states, scores, k, beta=0, alpha=scaling, out=states)
            steps = of_head(key_steps, head)
            if steps is not None:
                summed = buffers.summing.sum(scores)
                states.view(-1, dim).addmm_(summed, steps, alpha=scaling)
                of_head(d_key_steps, head).addmm_(summed.t(), flat_q, alpha=scaling)
            d_query[at, head] = states
        return d_query, d_key, d_value, d_key_steps, d_farthest, d_value_steps, *(None,) * 5


def start_scores(scores: torch.Tensor, placed: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor:
    """What the products of queries and keys are added to: the position terms, and `NEVER` where a query may not look."""
    if placed is None:
        return scores.zero_() if visible is None else scores.copy_(torch.where(visible, 0.0, NEVER))
    if visible is None:
        return scores.copy_(placed)
    return torch.where(visible, placed, scores.new_tensor(NEVER), out=scores)


__all__ = ["skewed_attention"]
