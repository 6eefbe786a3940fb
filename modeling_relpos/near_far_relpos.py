"""Self-attention with relative positions for long sequences on CPU, at the price of PyTorch's fused attention.

Clipping makes most pairs ordinary: with k the clipping distance, keys up to i - k all have row 0 of the tables for a query
at i, and keys from i + k on all have row 2k. So a sequence is cut into tiles of queries, and the pairs fall into three:

- those *near*: each tile meets its own keys and k - 1 more on either side, by skewing, as short sequences do;
- those *behind*, a staircase of keys before the windows of the tiles, and those *ahead*, another one: attention as the fused
  kernel does it. A constant may be added to all scores of a query, and weights sum to one. With row 0 as the reference its
  terms vanish, so that the kernel gets keys and values as they are behind, and moved by the step from row 0 to row 2k ahead.

A staircase is a square of half its length and two staircases of that length, so that the kernel gets squares alone and
computes nothing in vain.

Every part gives an output and its log-sum-exp, and these are merged as the shards of ring attention are. Backward, each
part gets the merged output and log-sum-exp, which makes its gradients those of the whole softmax, and the near pairs are
computed again. Nothing of size n x n is stored.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .skewed_relpos import Buffers, Window, empty_like_projections, of_heads, split_table

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries of a tile, which meet as many keys and 2k - 2 more.
TILE = 128
# Bytes of the buffers that the tiles of some heads pass through.
BUFFER_BYTES = 2**22
# Numbers of [heads, n, dim] in work at a time: beside inputs, outputs and buffers, this is what memory goes into.
CHUNK = 2**20


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
        [batch, heads, n, dim], zeros at padding.
    """
    options = (scaling, max_relative_position, key_table, value_table, is_causal)
    if spans is None:
        return _without_padding(query, key, value, *options)
    n = query.shape[2]
    outputs = []
    for sequence, (start, end) in enumerate(spans):
        states = (tensor[sequence : sequence + 1, :, start:end] for tensor in (query, key, value))
        outputs.append(nn.functional.pad(_without_padding(*states, *options), (0, 0, start, n - end)))
    return torch.cat(outputs)


def _without_padding(query, key, value, scaling, max_relative_position, key_table, value_table, is_causal):
    if query.numel() == 0:
        return query.clone()  # of the same shape, and with a gradient
    dtype = torch.promote_types(query.dtype, torch.float32)
    reach = min(max_relative_position, query.shape[2] - 1)
    _, key_steps = split_table(key_table, reach, is_causal, dtype)
    farthest, value_steps = split_table(value_table, reach, is_causal, dtype)
    if reach == 0:  # one row for all pairs
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scaling)
        return output if farthest is None else (output + farthest).to(query.dtype)
    states = (_for_kernel(tensor) for tensor in (query, key, value))
    return _NearFarAttention.apply(*states, key_steps, farthest, value_steps, scaling, reach, is_causal)


def _for_kernel(states: torch.Tensor) -> torch.Tensor:
    """The kernel reads vectors as if their numbers lay side by side, without asking."""
    return states if states.stride(-1) == 1 else states.contiguous()


class Groups(NamedTuple):
    """Groups of tokens, `size` of them from `start` on, and again from `start + step`, and so on."""

    start: int
    size: int
    step: int
    count: int

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """A view of [heads, n, ...] as [heads, groups, tokens, ...]."""
        return states[:, self.start :].unfold(1, self.size, self.step)[:, : self.count].movedim(-1, 2)


class Part(NamedTuple):
    """Groups of queries, each with its group of keys, that go through the kernel together."""

    queries: Groups
    keys: Groups
    ahead: bool


def far_parts(n: int, tile: int, reach: int, is_causal: bool) -> Iterator[Part]:
    """All pairs of n tokens that are in no tile's window, each in one part."""
    around, size = reach - 1, tile
    while size < n:
        middles = range(size, n, 2 * size)
        behind = [((m, min(m + size, n)), (max(0, m - size - around), m - around)) for m in middles]
        ahead = [((m - size, m), (m + around, min(m + around + size, n))) for m in middles if m + around < n]
        yield from _grouped(behind, step=2 * size, ahead=False)
        if not is_causal:
            yield from _grouped(ahead, step=2 * size, ahead=True)
        size *= 2


def _grouped(pairs: list[tuple[tuple[int, int], tuple[int, int]]], step: int, ahead: bool) -> Iterator[Part]:
    """Queries from one token to another, with keys from one to another, together where they are equally many."""
    for sizes, group in groupby(pairs, key=lambda pair: tuple(stop - start for start, stop in pair)):
        group = list(group)
        yield Part(*(Groups(start, size, step, len(group)) for (start, _), size in zip(group[0], sizes)), ahead)


class Tile(NamedTuple):
    """Queries, and the keys of their window."""

    queries: slice
    keys: slice

    def window(self, heads: int) -> Window:
        queries, keys = (tokens.stop - tokens.start for tokens in self)
        return Window(heads, queries, keys, self.queries.start - self.keys.start)


def _tile_size(n: int, reach: int) -> int:
    """Queries of all tiles but the last, which has a few less."""
    wanted = max(TILE, reach)  # more where most keys would be of the tokens around
    return -(-n // max(1, n // wanted))


def tiles(n: int, size: int, reach: int, is_causal: bool) -> Iterator[Tile]:
    """All queries of a sequence."""
    for start in range(0, n, size):
        stop = min(start + size, n)
        last = stop if is_causal else min(stop + reach - 1, n)
        yield Tile(slice(start, stop), slice(max(0, start - reach + 1), last))


def _pieces(query: torch.Tensor, buffers: Buffers) -> Iterator[tuple[int, slice]]:
    """Where [batch, heads, n, dim] is cut: (sequence, heads)."""
    batch, heads = query.shape[:2]
    size = buffers.largest.blocks
    for sequence in range(batch):
        for head in range(0, heads, size):
            yield sequence, slice(head, min(head + size, heads))


def _buffers(query: torch.Tensor, numbers: int, reach: int, is_causal: bool) -> Buffers:
    """For the tiles of some heads of [batch, heads, n, dim], which have no more than `numbers` together, or of one head."""
    _, heads, n, dim = query.shape
    tile, around = _tile_size(n, reach), reach - 1
    keys = tile + around * (1 if is_causal else 2)
    like = query.new_empty(0, dim, dtype=torch.promote_types(query.dtype, torch.float32))
    of_a_head = tile * (2 * keys + 2 * (tile + keys)) * like.element_size()  # twice as scores, twice by offset
    together = max(1, min(heads, numbers // (n * dim), BUFFER_BYTES // of_a_head))
    return Buffers(like, Window(together, tile, keys, around), reach, is_causal)


def _step_ahead(states: torch.Tensor, steps: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """[heads, n, dim] keys or values as queries far behind them see them."""
    return states if steps is None or is_causal else (states + steps[:, -1:]).to(states.dtype)


class _NearFarAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, query, key, value, key_steps, farthest, value_steps, scaling, reach, is_causal):
        n = query.shape[2]
        buffers = _buffers(query, CHUNK, reach, is_causal)
        tile = buffers.largest.queries
        output = empty_like_projections(query)
        logsumexps, near_logsumexps = (buffers.scores.new_empty(query.shape[:3]) for _ in range(2))
        for sequence, heads in _pieces(query, buffers):
            q, k, v = query[sequence, heads], key[sequence, heads], value[sequence, heads]
            k_steps, v_steps, first = (of_heads(tables, heads) for tables in (key_steps, value_steps, farthest))
            out, lse = output[sequence, heads].to(logsumexps.dtype), logsumexps[sequence, heads]
            for near in tiles(n, tile, reach, is_causal):
                _near(near, buffers, q, k, v, k_steps, v_steps, scaling, out, lse)
            near_logsumexps[sequence, heads] = lse
            k_ahead, v_ahead = (None if steps is None else steps[:, -1:] for steps in (k_steps, v_steps))
            shift = None if k_ahead is None or is_causal else (q.to(lse.dtype) @ k_ahead.mT)[..., 0] * scaling
            for part in far_parts(n, tile, reach, is_causal):
                _far(part, q, k, v, scaling, out, lse, *((shift, v_ahead) if part.ahead else (None, None)))
            if first is not None:
                out += first
            if query.dtype != out.dtype:  # else `out` is a view, and it is there already
                output[sequence, heads] = out
        ctx.save_for_backward(query, key, value, key_steps, farthest, value_steps, output, logsumexps, near_logsumexps)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad):
        query, key, value, key_steps, farthest, value_steps, output, logsumexps, near_logsumexps = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        n = query.shape[2]
        buffers = _buffers(query, CHUNK // 2, reach, is_causal)
        tile = buffers.largest.queries
        grad = _for_kernel(grad)
        d_states = [empty_like_projections(query).zero_() for _ in range(3)]
        d_tables = [None if t is None else torch.zeros_like(t) for t in (key_steps, farthest, value_steps)]
        for sequence, heads in _pieces(query, buffers):
            q, k, v, g, out, lse = (t[sequence, heads] for t in (query, key, value, grad, output, logsumexps))
            k_steps, first, v_steps = (of_heads(tables, heads) for tables in (key_steps, farthest, value_steps))
            d_k_steps, d_first, d_v_steps = (of_heads(tables, heads) for tables in d_tables)
            if first is not None:
                out = (out - first).to(q.dtype)
                d_first += _sum_to(d_first, g)
            own = (out * g).sum(-1, keepdim=True, dtype=lse.dtype)
            share = (near_logsumexps[sequence, heads] - lse).exp()[..., None]
            dq, dk, dv = (total[sequence, heads].to(lse.dtype) for total in d_states)
            steps = k_steps, v_steps, d_k_steps, d_v_steps
            for near in tiles(n, tile, reach, is_causal):
                _near_backward(near, buffers, q, k, v, g, own, share, *steps, scaling, dq, dk, dv)
            k_ahead, v_ahead = _step_ahead(k, k_steps, is_causal), _step_ahead(v, v_steps, is_causal)
            for part in far_parts(n, tile, reach, is_causal):
                keys, values = (k_ahead, v_ahead) if part.ahead else (k, v)
                part_dk, part_dv = _far_backward(part, g, q, keys, values, out, lse, scaling, dq, dk, dv)
                if part.ahead:
                    for d_steps, d_keys in ((d_k_steps, part_dk), (d_v_steps, part_dv)):
                        if d_steps is not None:
                            d_steps[:, -1:] += _sum_to(d_steps, d_keys.flatten(1, 2))
            if query.dtype != lse.dtype:  # else they are views, and it is there already
                for total, piece in zip(d_states, (dq, dk, dv)):
                    total[sequence, heads] = piece
        return *d_states, *d_tables, *(None,) * 3


def _near(tile, buffers, q, k, v, k_steps, v_steps, scaling, out, lse) -> None:
    """Set a tile's queries of `out`, [heads, n, dim], and `lse`, [heads, n], to the attention to its window alone."""
    views = buffers.of(tile.window(len(q)))
    q, k, v = (t[:, at].to(out.dtype) for t, at in ((q, tile.queries), (k, tile.keys), (v, tile.keys)))
    scores = views.scores(q, k, k_steps, scaling)
    weights = scores.softmax(-1)
    # a weight is exp(score - log-sum-exp), the largest one of the largest score; torch.logsumexp takes four times as long
    lse[:, tile.queries] = scores.amax(-1) - weights.amax(-1).log()
    out[:, tile.queries] = views.summed(weights, v, v_steps)


def _near_backward(tile, buffers, q, k, v, g, own, share, k_steps, v_steps, d_k_steps, d_v_steps, scaling, dq, dk, dv):
    """Add to the gradients what comes from the pairs of a tile, which have a share of the weights, [heads, n, 1]."""
    views = buffers.of(tile.window(len(q)))
    q, g, own, share = (t[:, tile.queries].to(dq.dtype) for t in (q, g, own, share))
    k, v = (t[:, tile.keys].to(dq.dtype) for t in (k, v))
    weights = views.scores(q, k, k_steps, scaling).softmax(-1).mul_(share)
    found = views.gradients(q, k, v, g, own, weights, k_steps, v_steps, d_k_steps, d_v_steps, scaling)
    for total, at, blocks in zip((dv, dk, dq), (tile.keys, tile.keys, tile.queries), found):
        total[:, at] += blocks


def _far(part, q, k, v, scaling, out, lse, shift, value_step) -> None:
    """Take the attention of a part into `out`, [heads, n, dim], and `lse`, [heads, n], so far.

    Args:
        shift: [heads, n], what the step of the keys adds to all scores of a query.
        value_step: [heads or 1, 1, dim], the step of the values.
    """
    part_out, part_lse = _FLASH(part.queries.of(q), part.keys.of(k), part.keys.of(v), 0.0, scale=scaling)
    if shift is not None:
        part_lse += part.queries.of(shift)
    part_out = part_out.to(out.dtype)
    if value_step is not None:
        part_out += value_step[:, None]
    out, lse = part.queries.of(out), part.queries.of(lse)
    out.lerp_(part_out, torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _far_backward(part, g, q, k, v, out, lse, scaling, dq, dk, dv) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the gradients what comes from a part; return that of its keys and values, [heads, groups, tokens, dim]. With
    the output and the log-sum-exps of the whole, the kernel's weights are those of the whole."""
    queries, keys = part.queries.of, part.keys.of
    found = _FLASH_BACKWARD(
        queries(g), queries(q), keys(k), keys(v), queries(out), queries(lse), 0.0, is_causal=False, scale=scaling
    )
    for total, piece in zip((queries(dq), keys(dk), keys(dv)), found):
        total.add_(piece)
    return found[1:]


def _sum_to(tables: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[heads, rows, dim] summed to [tables, 1, dim]."""
    return states.reshape(len(tables), -1, states.shape[-1]).sum(1, keepdim=True, dtype=tables.dtype)


__all__ = ["near_far_attention"]
