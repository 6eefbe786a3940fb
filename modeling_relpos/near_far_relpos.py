"""Self-attention with relative positions for long sequences on CPU, at the price of PyTorch's fused attention.

Clipping makes most of the pairs ordinary. With k the clipping distance and a query at i,

- *behind*, keys up to i - k all have row 0 of the tables;
- *ahead*, keys from i + k + 1 on all have row 2k;
- *near*, the 2k keys in between have a row each.

A constant may be added to all scores of a query, and weights sum to one. With row 0 as the reference, its terms vanish
behind, where attention is the plain fused kernel on the keys and values as they are; ahead, the kernel gets keys and
values moved by the difference of rows 2k and 0; near is a band of 2k diagonals, computed in blocks of queries against
windows of keys. Every part gives an output and its log-sum-exp, and they are merged as the shards of ring attention are.
Backward, each part gets the merged output and log-sum-exp, which makes its gradients those of the whole softmax, and the
band is computed again. Nothing of size n x n is stored.

Behind and ahead are triangles. They are cut into squares, and all squares at the same distance from the diagonal go
through the kernel as if they were heads: it loses nothing to masked pairs except in the squares on the diagonal, and
squares of this size fit into a core's cache better than the kernel's own choice for long sequences does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .skewed_relpos import NEVER, empty_like_projections, split_table

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Side of the squares of the far field: the kernel took 4.3 ns per pair for 256 queries and keys, 4.8 for 2048, 8 for 128.
SQUARE = 256
# Queries of a block of the band, at least.
BLOCK = 64
# Numbers of [heads, n, dim] in work at a time, and queries of the band: what limits memory beside inputs and outputs.
CHUNK = 2**18
BAND_QUERIES = 2**10


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
    """Pairs of the far field that go through the kernel together: blocks of queries, each with its block of keys.

    Attributes:
        ahead: The keys are ahead of the queries.
        queries, keys: Positions.
        blocks: The number of blocks that both are cut into.
        diagonal: Half of each block: behind, its query a sees its keys up to a; ahead, those from a on.
    """

    ahead: bool
    queries: slice
    keys: slice
    blocks: int
    diagonal: bool

    def of_queries(self, states: torch.Tensor) -> torch.Tensor:
        """The part's queries in [heads, n, ...], as a view [heads, blocks, queries, ...]."""
        return states[:, self.queries].unflatten(1, (self.blocks, -1))

    def of_keys(self, states: torch.Tensor) -> torch.Tensor:
        """The part's keys in [heads, n, ...], as a view [heads, blocks, keys, ...]."""
        return states[:, self.keys].unflatten(1, (self.blocks, -1))

    def mask(self, like: torch.Tensor) -> dict[str, Any]:
        """What the kernel is told of the pairs that are left out. No query is left without a key."""
        if not (self.diagonal and self.ahead):
            return {"is_causal": self.diagonal, "attn_mask": None}
        side = (self.queries.stop - self.queries.start) // self.blocks
        hidden = torch.ones(side, side, dtype=torch.bool).tril(-1)
        return {"is_causal": False, "attn_mask": like.new_zeros(1, 1, side, side).masked_fill(hidden, -torch.inf)}


def far_parts(n: int, span: tuple[int, int], reach: int, is_causal: bool) -> Iterator[Part]:
    """The far field of the queries 0 to n - 1 over the keys of a span, every pair in exactly one part.

    Behind, the query at `start + reach` sees the first key, and every further query one more, until there are no more.
    Ahead is the mirror image, one offset farther off.
    """
    start, end = span
    if start >= end:
        return
    if reach == 0 and not is_causal:  # a single row for all pairs
        yield Part(False, slice(0, n), slice(start, end), 1, False)
        return
    shift = start + reach
    for queries, keys, blocks, diagonal in _staircase(n - shift, min(end - start, n - shift)):
        yield Part(False, _moved(queries, shift), _moved(keys, start), blocks, diagonal)
    if not is_causal:
        shift = end - reach - 1
        for queries, keys, blocks, diagonal in _staircase(shift, min(end - start, shift)):
            yield Part(True, _mirrored(queries, shift), _mirrored(keys, end), blocks, diagonal)


def _staircase(queries: int, keys: int) -> Iterator[tuple[slice, slice, int, bool]]:
    """Squares for a field in which query a sees the keys 0 to a: queries, keys, blocks and whether on the diagonal."""
    if keys <= 0:
        return
    squares = keys // SQUARE
    whole = squares * SQUARE
    for lag in range(squares):  # in squares from the diagonal
        yield slice(lag * SQUARE, whole), slice(0, whole - lag * SQUARE), squares - lag, lag == 0
    if whole and queries > whole:
        yield slice(whole, queries), slice(0, whole), 1, False
    if keys > whole:
        yield slice(whole, keys), slice(whole, keys), 1, True
    if queries > keys > whole:
        yield slice(keys, queries), slice(whole, keys), 1, False


def _moved(at: slice, by: int) -> slice:
    return slice(at.start + by, at.stop + by)


def _mirrored(at: slice, end: int) -> slice:
    return slice(end - at.stop, end - at.start)


class Band:
    """The near field of some queries: blocks of them against windows of keys.

    Below, `blocks` counts those of all heads together, and a window has `width` keys, of which a query sees `offsets`.
    """

    def __init__(self, queries: slice, n: int, span: tuple[int, int], reach: int, is_causal: bool, like: torch.Tensor):
        self.at = queries
        self.span = span
        self.length = queries.stop - queries.start
        self.nearest_start = 1 - reach  # the first offset
        self.offsets = reach if is_causal else 2 * reach
        self.block = max(BLOCK, -(-self.offsets // 16) * 16)
        self.width = self.block + self.offsets
        self.blocks_per_head = -(-self.length // self.block)
        self.first_key = queries.start + self.nearest_start
        self.keys = slice(max(self.first_key, 0), min(self.first_key + self._reached(), n))
        self.like = like

    def _reached(self) -> int:
        return self.blocks_per_head * self.block + self.offsets

    def blocks(self, states: torch.Tensor) -> torch.Tensor:
        """The band's queries in [heads, n, dim]: [blocks, block, dim], zeros where the last block has no more."""
        heads, _, dim = states.shape
        padded = self.like.new_zeros(heads, self.blocks_per_head * self.block, dim)
        padded[:, : self.length] = states[:, self.at]
        return padded.view(-1, self.block, dim)

    def unblock(self, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, block, dim] -> [heads, queries, dim]."""
        return blocks.view(-1, self.blocks_per_head * self.block, blocks.shape[-1])[:, : self.length]

    def windows(self, states: torch.Tensor) -> torch.Tensor:
        """The keys or values that the blocks meet, in [heads, n, dim]: [blocks, width, dim], zeros where there are none."""
        heads, _, dim = states.shape
        padded = self.like.new_zeros(heads, self._reached(), dim)
        padded[:, _moved(self.keys, -self.first_key)] = states[:, self.keys]
        shape = heads, self.blocks_per_head, self.width, dim
        return padded.as_strided(shape, (padded.stride(0), self.block * dim, dim, 1)).reshape(-1, self.width, dim)

    def add_windows(self, windows: torch.Tensor, total: torch.Tensor) -> None:
        """Add [blocks, width, dim] to [heads, n, dim] where `windows` takes them from."""
        heads, _, dim = total.shape
        windows = windows.view(heads, self.blocks_per_head, self.width, dim)
        # a window is a block and the first rows of the next one
        padded = self.like.new_zeros(heads, self.blocks_per_head + 1, self.block, dim)
        padded[:, :-1] = windows[:, :, : self.block]
        padded[:, 1:, : self.offsets] += windows[:, :, self.block :]
        total[:, self.keys] += padded.flatten(1, 2)[:, _moved(self.keys, -self.first_key)]

    def diagonals(self, dense: torch.Tensor) -> torch.Tensor:
        """[blocks, block, width] by offset: a view [blocks, block, offsets]."""
        strides = self.block * self.width, self.width + 1, 1
        return dense.as_strided((len(dense), self.block, self.offsets), strides)

    def spread(self, band: torch.Tensor) -> torch.Tensor:
        """[blocks, block, offsets] -> [blocks, block, width], zeros outside the band."""
        dense = band.new_zeros(len(band), self.block, self.width)
        self.diagonals(dense).copy_(band)
        return dense

    def products(self, blocks: torch.Tensor, windows: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Of every query with its keys, each with its step added: [blocks, block, offsets]."""
        by_key = self.diagonals(torch.bmm(blocks, windows.transpose(1, 2)))
        if steps is None:
            return by_key.contiguous()
        by_step = torch.bmm(blocks.view(len(steps), -1, blocks.shape[-1]), steps.transpose(1, 2))
        return by_step.view(by_key.shape).add_(by_key)

    def sums(self, weights: torch.Tensor, windows: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Of every query's values, each with its step added, by [blocks, block, offsets] weights: [blocks, block, dim]."""
        total = torch.bmm(self.spread(weights), windows)
        if steps is not None:
            total.view(len(steps), -1, total.shape[-1]).baddbmm_(self.by_table(weights, steps), steps)
        return total

    def by_table(self, band: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """[blocks, block, ...] as [tables, queries, ...]."""
        return band.view(len(steps), -1, band.shape[-1])

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Give [blocks, block, offsets] scores of keys outside the span the score of keys that may not be seen."""
        start, end = self.span
        if self.first_key >= start and self.first_key + self._reached() <= end:
            return scores
        queries = torch.arange(self.at.start, self.at.start + self.blocks_per_head * self.block)
        keys = queries[:, None] + torch.arange(self.nearest_start, self.nearest_start + self.offsets)
        scores.view(-1, *keys.shape).masked_fill_((keys < start) | (keys >= end), NEVER)
        return scores


def _bands(n: int, span: tuple[int, int], reach: int, is_causal: bool, like: torch.Tensor) -> Iterator[Band]:
    if reach:
        for start in range(0, n, BAND_QUERIES):
            yield Band(slice(start, min(start + BAND_QUERIES, n)), n, span, reach, is_causal, like)


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
            out, lse = like.new_zeros(q.shape), logsumexps[sequence, heads].fill_(NEVER)
            for band in _bands(n, span, reach, is_causal, like):
                _near(band, q, k, v, k_steps, v_steps, scaling, out, lse)
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
                seeing = g[:, _blind(span, n, is_causal).stop :]
                d_first += _sum_to(d_first, seeing)
            dq, dk, dv = (like.new_zeros(q.shape) for _ in range(3))
            own = (out * g).sum(-1, keepdim=True, dtype=like.dtype)
            for band in _bands(n, span, reach, is_causal, like):
                _near_backward(band, q, k, v, g, own, lse, k_steps, v_steps, scaling, dq, dk, dv, d_k_steps, d_v_steps)
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


def _near(band, q, k, v, k_steps, v_steps, scaling, out, lse) -> None:
    """Set the band's rows of `out`, [heads, n, dim], and `lse`, [heads, n], to the attention of the near field alone."""
    scores = band.hide(band.products(band.blocks(q).mul_(scaling), band.windows(k), k_steps))
    total = scores.logsumexp(-1, keepdim=True)
    weights = scores.sub_(total).exp_()
    out[:, band.at] = band.unblock(band.sums(weights, band.windows(v), v_steps))
    lse[:, band.at] = band.unblock(total)[..., 0]


def _near_backward(band, q, k, v, g, own, lse, k_steps, v_steps, scaling, dq, dk, dv, d_k_steps, d_v_steps) -> None:
    """Set the band's rows of dq, and add to the other gradients, what comes from the near field."""
    q, g, k, v = band.blocks(q).mul_(scaling), band.blocks(g), band.windows(k), band.windows(v)
    weights = band.hide(band.products(q, k, k_steps)).sub_(band.blocks(lse[..., None])).exp_()
    d_scores = band.products(g, v, v_steps).sub_(band.blocks(own)).mul_(weights)
    dq[:, band.at] = band.unblock(band.sums(d_scores, k, k_steps)).mul_(scaling)
    band.add_windows(torch.bmm(band.spread(d_scores).transpose(1, 2), q), dk)
    band.add_windows(torch.bmm(band.spread(weights).transpose(1, 2), g), dv)
    for d_steps, pairs, states in ((d_k_steps, d_scores, q), (d_v_steps, weights, g)):
        if d_steps is not None:
            d_steps.baddbmm_(band.by_table(pairs, d_steps).transpose(1, 2), band.by_table(states, d_steps))


def _far(part, q, k, v, scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a part alone: [heads, blocks, queries, dim], and log-sum-exps [heads, blocks, queries]."""
    states = part.of_queries(q), part.of_keys(k), part.of_keys(v)
    return _FLASH(*states, 0.0, scale=scaling, **part.mask(q))


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
    return _FLASH_BACKWARD(*states, *whole, 0.0, scale=scaling, **part.mask(q))


def _sum_to(tables: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[heads, rows, dim] summed to [tables, 1, dim]."""
    return states.reshape(len(tables), -1, states.shape[-1]).sum(1, keepdim=True, dtype=tables.dtype)


__all__ = ["near_far_attention"]
