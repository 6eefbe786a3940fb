"""Self-attention with relative positions for long sequences on CPU, at the price of PyTorch's fused attention.

Clipping makes most pairs ordinary: with k the clipping distance, keys up to i - k all have row 0 of the tables for a query
at i, and keys from i + k on all have row 2k. The sequence is cut into blocks of queries, and the keys of a block fall into

- its *window*, the keys from k before it to k after it, for which all pairs are computed, by skewing;
- those *behind* the window, with row 0 throughout, and those *ahead* of it, with row 2k: attention as the fused kernel does
  it. A constant may be added to all scores of a query, and weights sum to one. With row 0 as the reference its terms
  vanish, so that the kernel gets keys and values as they are behind, and moved by the step from row 0 to row 2k ahead.

Every part gives an output and its log-sum-exp, and these are merged as the shards of ring attention are. Backward, each
part gets the merged output and log-sum-exp, which makes its gradients those of the whole softmax, and windows are computed
again. Nothing of size n x n is stored.

Behind and ahead, the keys are cut into strips as long as the blocks. All pairs of a block and a strip that lie equally far
apart go through the kernel together, as if they were heads: squares of this size fit into a core's cache, for which the
kernel's own choice for long sequences is too large.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .skewed_relpos import ByOffset, empty_like_projections, of_head, split_table, start_scores

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries of a block, and keys of a strip: the kernel took 4.3 ns per pair for 256 of each, 4.8 for 2048, 8 for 128.
BLOCK = 256
# Numbers of [heads, n, dim] in work at a time, and bytes of the buffers for windows: beside inputs and outputs, these are
# what memory goes into.
CHUNK = 2**18
WINDOW_BYTES = 2**22


def near_far_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    max_relative_position: int,
    key_table: torch.Tensor | None = None,
    value_table: torch.Tensor | None = None,
    spans: list[tuple[int, int]] | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of a sequence to itself, equations 3 to 5 of the paper. Time grows with n^2, memory with n.

    Gradients can be taken once, not of gradients.

    Args:
        query, key, value: [batch, heads, n, dim], positions 0 to n - 1, on CPU.
        scaling: Factor of both terms of the score, usually dim^-0.5.
        max_relative_position: The clipping distance k, at least 0.
        key_table, value_table: a^K and a^V, [2k + 1, dim] or [heads, 2k + 1, dim]; None where the model has none.
        spans: The first real token of each sequence and the one after its last, where there is padding.
        is_causal: Queries do not look ahead.

    Returns:
        [batch, heads, n, dim]. A query that may look nowhere gets zeros.
    """
    if query.numel() == 0:
        return torch.zeros_like(query)
    batch, _, n, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    reach = min(max_relative_position, n - 1)
    _, key_steps = split_table(key_table, reach, is_causal, dtype)
    farthest, value_steps = split_table(value_table, reach, is_causal, dtype)
    spans = spans if spans is not None else [(0, n)] * batch
    states = (_for_kernel(tensor) for tensor in (query, key, value))
    return _NearFarAttention.apply(*states, key_steps, farthest, value_steps, spans, scaling, reach, is_causal)


def _for_kernel(states: torch.Tensor) -> torch.Tensor:
    """The kernel reads vectors as if their numbers lay side by side, without asking."""
    return states if states.stride(-1) == 1 else states.contiguous()


class Part(NamedTuple):
    """Pairs of blocks of queries with strips of keys that go through the kernel together.

    Attributes:
        ahead: The keys are ahead of the queries.
        queries, keys: Positions.
        blocks: The number of blocks, and of strips, that these are cut into: the first with the first, and so on.
    """

    ahead: bool
    queries: slice
    keys: slice
    blocks: int

    def of_queries(self, states: torch.Tensor) -> torch.Tensor:
        """The part's queries in [heads, n, ...], as a view [heads, blocks, queries, ...]."""
        return states[:, self.queries].unflatten(1, (self.blocks, -1))

    def of_keys(self, states: torch.Tensor) -> torch.Tensor:
        """The part's keys in [heads, n, ...], as a view [heads, blocks, keys, ...]."""
        return states[:, self.keys].unflatten(1, (self.blocks, -1))


def far_parts(n: int, span: tuple[int, int], reach: int, is_causal: bool) -> Iterator[Part]:
    """What lies outside of the windows of the queries 0 to n - 1, over the keys of a span; every pair in one part."""
    blocks = n // BLOCK
    whole = blocks * BLOCK
    start, end = span
    # behind: strip s ends where the window of block s + 1 begins
    full, cut = _strips(-reach, blocks, span)
    for lag in range(1, blocks):
        count = min(full.stop, blocks - lag) - full.start
        if count > 0:
            yield Part(False, _blocks(full.start + lag, count), _blocks(full.start, count, -reach), count)
    for strip, keys in cut:
        if (strip + 1) * BLOCK < whole:
            yield Part(False, slice((strip + 1) * BLOCK, whole), keys, 1)
    if whole < n and start < min(end, whole - reach):  # the last block, which is shorter
        yield Part(False, slice(whole, n), slice(start, min(end, whole - reach)), 1)
    if is_causal:
        return
    # ahead: strip s begins where the window of block s - 1 ends
    full, cut = _strips(reach, blocks + 1, span)
    for lag in range(1, blocks + 1):
        first = max(full.start, lag)
        count = full.stop - first
        if count > 0:
            yield Part(True, _blocks(first - lag, count), _blocks(first, count, reach), count)
    for strip, keys in cut:
        if strip:
            yield Part(True, slice(0, strip * BLOCK), keys, 1)


def _blocks(first: int, count: int, shift: int = 0) -> slice:
    return slice(first * BLOCK + shift, (first + count) * BLOCK + shift)


def _strips(shift: int, strips: int, span: tuple[int, int]) -> tuple[slice, list[tuple[int, slice]]]:
    """Strips that lie in a span as a whole, and those of which it cuts off something: their numbers and what is left."""
    start, end = span
    full = slice(max(0, -(-(start - shift) // BLOCK)), max(0, min(strips, (end - shift) // BLOCK)))
    cut = []
    for strip in range(strips):
        keys = slice(max(start, strip * BLOCK + shift), min(end, (strip + 1) * BLOCK + shift))
        if keys.start < keys.stop and not full.start <= strip < full.stop:
            cut.append((strip, keys))
    return full, cut


class Windows:
    """Blocks of queries of one head, each against the window of keys around it.

    Below, [blocks, block, ...] are numbers of queries and [blocks, width, ...] those of keys.
    """

    def __init__(
        self, blocks: int, block: int, n: int, span: tuple[int, int], reach: int, is_causal: bool, like: torch.Tensor
    ):
        """Room for a number of blocks at a time; `load` says which."""
        self.n, self.span, self.reach, self.is_causal = n, span, reach, is_causal
        self.blocks, self.block = blocks, block
        self.width = reach + block + (0 if is_causal else reach)
        self.scores = like.new_empty(blocks, block, self.width)
        self.placing, self.summing = (
            ByOffset(like, blocks, block, self.width, first=reach, reach=reach, is_causal=is_causal) for _ in range(2)
        )

    def load(self, first: int) -> None:
        """Turn to the block at position `first`, and those after it."""
        self.first = first
        self.queries = slice(first, min(first + self.blocks * self.block, self.n))
        self.first_key = first - self.reach
        self.reached = (self.blocks - 1) * self.block + self.width
        self.keys = slice(max(self.first_key, 0), min(self.first_key + self.reached, self.n))
        self.visible = self._visible()

    def _visible(self) -> torch.Tensor | None:
        """Which keys are seen, [blocks or 1, block or 1, width]; None for all."""
        start, end = self.span
        visible = None
        if self.first_key < start or self.first_key + self.reached > end:
            keys = self.first_key + self._windows(torch.arange(self.reached)[:, None]).transpose(1, 2)
            visible = (keys >= start) & (keys < end)
        if self.is_causal:
            past = torch.ones(1, self.block, self.width, dtype=torch.bool).tril(self.reach)
            visible = past if visible is None else visible & past
        return visible

    def of_queries(self, states: torch.Tensor) -> torch.Tensor:
        """[n, dim] -> [blocks, block, dim], zeros where the last block has no more queries."""
        states = states[self.queries]
        missing = self.blocks * self.block - len(states)
        return nn.functional.pad(states, (0, 0, 0, missing)).to(self.scores.dtype).unflatten(0, (self.blocks, -1))

    def of_keys(self, states: torch.Tensor) -> torch.Tensor:
        """[n, dim] -> [blocks, width, dim], zeros where there are no keys. Windows overlap: a view, not to be written to."""
        before = self.keys.start - self.first_key
        after = self.reached - before - (self.keys.stop - self.keys.start)
        return self._windows(nn.functional.pad(states[self.keys], (0, 0, before, after)).to(self.scores.dtype))

    def _windows(self, keys: torch.Tensor) -> torch.Tensor:
        row = keys.stride(0)
        return keys.as_strided((self.blocks, self.width, keys.shape[1]), (self.block * row, row, 1))

    def set_queries(self, total: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write [blocks, block, ...] to where `of_queries` takes them from, in [n, ...]."""
        total[self.queries] = blocks.flatten(0, 1)[: self.queries.stop - self.queries.start]

    def add_keys(self, total: torch.Tensor, windows: torch.Tensor) -> None:
        """Add [blocks, width, dim] to where `of_keys` takes them from, in [n, dim]."""
        for number, window in enumerate(windows):
            begin = self.first_key + number * self.block
            at = slice(max(begin, 0), min(begin + self.width, self.n))
            total[at] += window[at.start - begin : at.stop - begin]

    def scored(self, queries: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Products of queries with their keys, each with its step added: [blocks, block, width]."""
        placed = None if steps is None else self.placing.place(queries.flatten(0, 1), steps)
        return start_scores(self.scores, placed, self.visible).baddbmm_(queries, keys.transpose(1, 2))

    def summed(self, weights: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Sums of values by [blocks, block, width] weights, each with its step added: [blocks, block, dim]."""
        total = torch.bmm(weights, keys)
        if steps is not None:
            total.flatten(0, 1).addmm_(self.summing.sum(weights), steps)
        return total


def _windows(n: int, span: tuple[int, int], reach: int, is_causal: bool, like: torch.Tensor) -> Iterator[Windows]:
    """All blocks of a sequence, some at a time."""
    block = min(BLOCK, n)
    total = -(-n // block)
    at_a_time = max(1, min(total, WINDOW_BYTES // (like.element_size() * block * (5 * block + 8 * reach))))
    windows = None
    for first in range(0, total, at_a_time):
        blocks = min(at_a_time, total - first)
        if windows is None or blocks != windows.blocks:
            windows = Windows(blocks, block, n, span, reach, is_causal, like)
        windows.load(first * block)
        yield windows


def _pieces(query: torch.Tensor, spans: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, slice], tuple[int, int]]]:
    """Where [batch, heads, n, dim] is cut: (sequence, heads), and the sequence's span."""
    batch, heads, n, dim = query.shape
    size = max(1, CHUNK // (n * dim))
    for sequence in range(batch):
        for head in range(0, heads, size):
            yield (sequence, slice(head, min(head + size, heads))), spans[sequence]


def _of_heads(tables: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    """The heads' tables, or the one for all; None where there is nothing, not a single row."""
    if tables is None or tables.shape[1] == 0:
        return None
    return tables if len(tables) == 1 else tables[heads]


def _step_ahead(states: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
    """[heads, n, dim] keys or values as queries far behind them see them."""
    return states if steps is None else (states + steps[:, -1:]).to(states.dtype)


def _blind(span: tuple[int, int], n: int, is_causal: bool) -> slice:
    """The queries that may look nowhere."""
    start, end = span
    return slice(0, n if start >= end else start if is_causal else 0)


class _NearFarAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, query, key, value, key_steps, farthest, value_steps, spans, scaling, reach, is_causal):
        n = query.shape[2]
        like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
        output = empty_like_projections(query)
        logsumexps = like.new_empty(query.shape[:3])
        for (sequence, heads), span in _pieces(query, spans):
            q, k, v = query[sequence, heads], key[sequence, heads], value[sequence, heads]
            k_steps, v_steps, first = (_of_heads(tables, heads) for tables in (key_steps, value_steps, farthest))
            out, lse = like.new_empty(q.shape), logsumexps[sequence, heads]
            for windows in _windows(n, span, reach, is_causal, like):
                for h in range(len(q)):
                    _near(windows, q[h], k[h], v[h], of_head(k_steps, h), of_head(v_steps, h), scaling, out[h], lse[h])
            k_ahead, v_ahead = (k, v) if is_causal else (_step_ahead(k, k_steps), _step_ahead(v, v_steps))
            for part in far_parts(n, span, reach, is_causal):
                _merge(part, *_far(part, q, *((k_ahead, v_ahead) if part.ahead else (k, v)), scaling), out, lse)
            if first is not None:
                out += first
            blind = _blind(span, n, is_causal)
            out[:, blind] = 0
            lse[:, blind] = torch.inf  # backward, all of their weights are zero
            output[sequence, heads] = out
        ctx.save_for_backward(query, key, value, key_steps, farthest, value_steps, output, logsumexps)
        ctx.constants = spans, scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad):
        query, key, value, key_steps, farthest, value_steps, output, logsumexps = ctx.saved_tensors
        spans, scaling, reach, is_causal = ctx.constants
        n = query.shape[2]
        grad = _for_kernel(grad)
        like = logsumexps.new_empty(0)
        d_states = [empty_like_projections(query) for _ in range(3)]
        d_tables = [None if t is None else torch.zeros_like(t) for t in (key_steps, farthest, value_steps)]
        for (sequence, heads), span in _pieces(query, spans):
            q, k, v, g, out, lse = (t[sequence, heads] for t in (query, key, value, grad, output, logsumexps))
            k_steps, first, v_steps = (_of_heads(tables, heads) for tables in (key_steps, farthest, value_steps))
            d_k_steps, d_first, d_v_steps = (_of_heads(tables, heads) for tables in d_tables)
            if first is not None:
                out = (out - first).to(q.dtype)
                d_first += _sum_to(d_first, g[:, _blind(span, n, is_causal).stop :])
            own = (out * g).sum(-1, keepdim=True, dtype=like.dtype)
            dq, dk, dv = like.new_empty(q.shape), like.new_zeros(q.shape), like.new_zeros(q.shape)
            for windows in _windows(n, span, reach, is_causal, like):
                for h in range(len(q)):
                    states = q[h], k[h], v[h], g[h], own[h], lse[h, :, None]
                    steps = (of_head(tables, h) for tables in (k_steps, v_steps, d_k_steps, d_v_steps))
                    _near_backward(windows, *states, *steps, scaling, dq[h], dk[h], dv[h])
            k_ahead, v_ahead = (k, v) if is_causal else (_step_ahead(k, k_steps), _step_ahead(v, v_steps))
            for part in far_parts(n, span, reach, is_causal):
                keys, values = (k_ahead, v_ahead) if part.ahead else (k, v)
                part_dq, part_dk, part_dv = _far_backward(part, g, q, keys, values, out, lse, scaling)
                part.of_queries(dq).add_(part_dq)
                part.of_keys(dk).add_(part_dk)
                part.of_keys(dv).add_(part_dv)
                if part.ahead:
                    for d_steps, d_keys in ((d_k_steps, part_dk), (d_v_steps, part_dv)):
                        if d_steps is not None:
                            d_steps[:, -1:] += _sum_to(d_steps, d_keys.flatten(1, 2))
            for total, piece in zip(d_states, (dq, dk, dv)):
                total[sequence, heads] = piece
        return *d_states, *d_tables, *(None,) * 4


def _near(windows, q, k, v, k_steps, v_steps, scaling, out, lse) -> None:
    """Set some queries of `out`, [n, dim], and `lse`, [n], to the attention to their windows alone."""
    scores = windows.scored(windows.of_queries(q) * scaling, windows.of_keys(k), k_steps)
    weights = scores.softmax(-1)
    # a weight is exp(score - log-sum-exp), the largest one of the largest score
    windows.set_queries(lse, scores.amax(-1) - weights.amax(-1).log())
    windows.set_queries(out, windows.summed(weights, windows.of_keys(v), v_steps))


def _near_backward(windows, q, k, v, g, own, lse, k_steps, v_steps, d_k_steps, d_v_steps, scaling, dq, dk, dv) -> None:
    """Set some queries of dq, and add to the other gradients, what comes from their windows."""
    q, g, k, v = windows.of_queries(q) * scaling, windows.of_queries(g), windows.of_keys(k), windows.of_keys(v)
    weights = windows.scored(q, k, k_steps).sub(windows.of_queries(lse)).exp_()
    windows.add_keys(dv, torch.bmm(weights.transpose(1, 2), g))
    if d_v_steps is not None:
        d_v_steps.addmm_(windows.summing.sum(weights).t(), g.flatten(0, 1))
    # where nothing is seen, a score is the large negative number once more, and its weight is zero
    d_scores = windows.scored(g, v, v_steps).sub_(windows.of_queries(own)).mul_(weights)
    windows.set_queries(dq, windows.summed(d_scores, k, k_steps).mul_(scaling))
    windows.add_keys(dk, torch.bmm(d_scores.transpose(1, 2), q))
    if d_k_steps is not None:
        d_k_steps.addmm_(windows.summing.sum(d_scores).t(), q.flatten(0, 1))


def _far(part, q, k, v, scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a part alone: [heads, blocks, queries, dim], and log-sum-exps [heads, blocks, queries]."""
    return _FLASH(part.of_queries(q), part.of_keys(k), part.of_keys(v), 0.0, False, scale=scaling)


def _merge(part, part_out, part_lse, out, lse) -> None:
    """Take a part into the output and log-sum-exps so far."""
    out, lse = part.of_queries(out), part.of_queries(lse)
    out.lerp_(part_out.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _far_backward(part, g, q, k, v, out, lse, scaling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a part's queries, keys and values, [heads, blocks, ..., dim]. With the output and the log-sum-exps of
    the whole, the kernel's weights are those of the whole."""
    states = part.of_queries(g), part.of_queries(q), part.of_keys(k), part.of_keys(v)
    whole = part.of_queries(out), part.of_queries(lse)
    return _FLASH_BACKWARD(*states, *whole, 0.0, False, scale=scaling)


def _sum_to(tables: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[heads, rows, dim] summed to [tables, 1, dim]."""
    return states.reshape(len(tables), -1, states.shape[-1]).sum(1, keepdim=True, dtype=tables.dtype)


__all__ = ["near_far_attention"]
