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
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .skewed_relpos import (
    Buffers,
    TableGradients,
    Tables,
    Views,
    Window,
    empty_like_projections,
    even_share,
    of_heads,
    sum_to,
    with_gradients_of,
    without_autocast,
)

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries of a tile, which meet as many keys and 2k - 2 more.
TILE = 128
# Bytes of the buffers that the tiles of some heads pass through.
BUFFER_BYTES = 2**23
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
        return with_gradients_of(query, key, value, key_table, value_table)
    reach = min(max_relative_position, query.shape[2] - 1)
    if reach == 0:  # one row for all pairs
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scaling)
        if value_table is not None:
            middle = value_table.shape[-2] // 2
            output = (output + value_table[..., middle : middle + 1, :]).to(query.dtype)
        return with_gradients_of(output, key_table)
    states = (_for_kernel(tensor) for tensor in (query, key, value))
    return _NearFarAttention.apply(*states, key_table, value_table, scaling, reach, is_causal)


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
        if self.count == 1:
            return states[:, self.start : self.start + self.size][:, None]
        return states[:, self.start :].unfold(1, self.size, self.step)[:, : self.count].movedim(-1, 2)


class Part(NamedTuple):
    """Groups of queries, each with its group of keys, that go through the kernel together."""

    queries: Groups
    keys: Groups
    ahead: bool


@lru_cache
def far_parts(n: int, tile: int, reach: int, is_causal: bool) -> list[Part]:
    """All pairs of n tokens that are in no tile's window, each in one part."""
    around, size, parts = reach - 1, tile, []
    while size < n:
        middles = range(size, n, 2 * size)
        behind = [((m, min(m + size, n)), (max(0, m - size - around), m - around)) for m in middles]
        ahead = [((m - size, m), (m + around, min(m + around + size, n))) for m in middles if m + around < n]
        parts += _grouped(behind, step=2 * size, ahead=False)
        if not is_causal:
            parts += _grouped(ahead, step=2 * size, ahead=True)
        size *= 2
    return parts


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


@lru_cache
def tiles(n: int, size: int, reach: int, is_causal: bool) -> list[Tile]:
    """All queries of a sequence."""
    found = []
    for start in range(0, n, size):
        stop = min(start + size, n)
        last = stop if is_causal else min(stop + reach - 1, n)
        found.append(Tile(slice(start, stop), slice(max(0, start - reach + 1), last)))
    return found


def _some_heads(heads: int, most: int) -> Iterator[slice]:
    """All heads, so many at a time, or one."""
    together = even_share(heads, max(1, most))
    for head in range(0, heads, together):
        yield slice(head, min(head + together, heads))


def _buffers(query: torch.Tensor, reach: int, is_causal: bool) -> Buffers:
    """For the tiles of some heads of [batch, heads, n, dim]."""
    _, heads, n, dim = query.shape
    tile, around = _tile_size(n, reach), reach - 1
    like = query.new_empty(0, dim, dtype=torch.promote_types(query.dtype, torch.float32))
    window = Window(1, tile, tile + around * (1 if is_causal else 2), around)
    most = BUFFER_BYTES // (window.numbers(dim) * like.element_size())
    return Buffers.kept(like, window._replace(blocks=even_share(heads, max(1, most))), reach, is_causal)


def _step_ahead(steps: torch.Tensor | None, heads: slice, is_causal: bool) -> torch.Tensor | None:
    """The step to the farthest offset ahead, [heads or 1, 1, dim]; None where there is nothing ahead, or no table."""
    return None if steps is None or is_causal else of_heads(steps, heads)[:, -1:]


def _moved(states: torch.Tensor, step: torch.Tensor | None, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """[heads, n, dim] keys or values as queries far behind them see them."""
    return states.to(dtype) if step is None else torch.add(states, step, alpha=factor).to(dtype)


class _NearFarAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, query, key, value, key_table, value_table, scaling, reach, is_causal):
        batch, heads, n, dim = query.shape
        buffers = _buffers(query, reach, is_causal)
        tables = Tables.of(key_table, value_table, reach, is_causal, scaling, buffers.dtype)
        output = empty_like_projections(query)
        logsumexps, near_logsumexps = (query.new_empty(batch, heads, n, dtype=buffers.dtype) for _ in range(2))
        shift = None if key_table is None or is_causal else torch.empty_like(logsumexps[0])
        for sequence in range(batch):
            q, k, v, lse = query[sequence], key[sequence], value[sequence], logsumexps[sequence]
            out = output[sequence].to(lse.dtype)  # a view where it is the same
            _near(buffers, q, k, v, tables.steps(), scaling, out, near_logsumexps[sequence], shift)
            lse.copy_(near_logsumexps[sequence])
            for some in _some_heads(heads, CHUNK // (n * dim)):
                v_ahead = _step_ahead(tables.value_steps, some, is_causal)
                for part in far_parts(n, buffers.largest.queries, reach, is_causal):
                    moved = (None if shift is None else shift[some], v_ahead) if part.ahead else (None, None)
                    _far(part, q[some], k[some], v[some], scaling, out[some], lse[some], *moved)
            if value_table is not None:
                out += tables.farthest
            if out.dtype != output.dtype:
                output[sequence] = out
        ctx.save_for_backward(query, key, value, key_table, value_table, output, logsumexps, near_logsumexps)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad):
        query, key, value, key_table, value_table, output, logsumexps, near_logsumexps = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        batch, heads, n, dim = query.shape
        buffers = _buffers(query, reach, is_causal)
        tables = Tables.of(key_table, value_table, reach, is_causal, scaling, buffers.dtype)
        d_tables = TableGradients(key_table, value_table, reach, is_causal, scaling, buffers.dtype)
        grad = _for_kernel(grad)
        d_states = [empty_like_projections(query).zero_() for _ in range(3)]
        own = torch.empty_like(logsumexps[0])[..., None]
        for sequence in range(batch):
            states = [t[sequence] for t in (query, key, value, grad)]
            totals = [total[sequence].to(own.dtype) for total in d_states]  # views where they are the same
            lse = logsumexps[sequence]
            for some in _some_heads(heads, CHUNK // 2 // (n * dim)):
                q, k, v, g = (t[some] for t in states)
                out = output[sequence, some]
                if value_table is not None:
                    out = (out - of_heads(tables.farthest, some)).to(q.dtype)
                own[some] = (out * g).sum(-1, keepdim=True, dtype=own.dtype)
                k_ahead, v_ahead, d_k_ahead, d_v_ahead = (
                    _step_ahead(steps, some, is_causal) for steps in (*tables[1:], *d_tables.parts[1:])
                )
                # not in half precision: the log-sum-exp has the exact step, and weights of rounded keys might exceed 1
                states_ahead = _moved(k, k_ahead, own.dtype, 1 / scaling), _moved(v, v_ahead, own.dtype)
                for part in far_parts(n, buffers.largest.queries, reach, is_causal):
                    keys, values = states_ahead if part.ahead else (k, v)
                    some_totals = (total[some] for total in totals)
                    part_dk, part_dv = _far_backward(part, g, q, keys, values, out, lse[some], scaling, *some_totals)
                    if part.ahead:
                        _add_sum(part_dk, d_k_ahead, 1 / scaling)
                        _add_sum(part_dv, d_v_ahead)
            share = (near_logsumexps[sequence] - lse).exp()[..., None]
            _near_backward(buffers, *states, own, share, tables.steps(), d_tables.parts.steps(), scaling, *totals)
            for total, all_totals in zip(totals, d_states):
                if total.dtype != all_totals.dtype:
                    all_totals[sequence] = total
        if value_table is not None:
            d_tables.parts.farthest.add_(sum_to(tables.farthest, grad.transpose(0, 1).sum(2, dtype=own.dtype)))
        return *d_states, *d_tables.finish(), *(None,) * 3


def _near(buffers, q, k, v, steps, scaling, out, lse, shift) -> None:
    """Attention of all queries to the windows of their tiles alone.

    Args:
        out, lse: Set to output and log-sum-exp, [heads, n, dim] and [heads, n].
        shift: [heads, n], set to what the last step of the keys adds to all scores of a query; None where not wanted.
    """
    largest = torch.empty_like(lse)
    for some, tile, views in _tiles_of_heads(buffers, *lse.shape):
        at, of_some = (some, tile.queries), steps.of_heads(some)
        views.q.copy_(q[at])
        scores = views.scores(k[some, tile.keys].to(out.dtype), of_some.keys, scaling)
        if shift is not None:
            shift[at] = views.placing.last.view(shift[at].shape)
        lse[at] = scores.amax(-1)
        weights = torch.softmax(scores, -1, out=views.weights)
        largest[at] = weights.amax(-1)
        out[at] = views.summed(weights, v[some, tile.keys].to(out.dtype), of_some.values)
    # a weight is exp(score - log-sum-exp), the largest one of the largest score; torch.logsumexp takes four times as long
    lse -= largest.log_()


def _near_backward(buffers, q, k, v, g, own, share, steps, d_steps, scaling, dq, dk, dv) -> None:
    """Add to the gradients what comes from the pairs of the tiles, which have a share of the weights, [heads, n, 1]."""
    for some, tile, views in _tiles_of_heads(buffers, *q.shape[:2]):
        at, in_keys, of_some = (some, tile.queries), (some, tile.keys), steps.of_heads(some)
        views.q.copy_(q[at])
        views.g.copy_(g[at])
        keys, values = (states[in_keys].to(dq.dtype) for states in (k, v))
        weights = torch.softmax(views.scores(keys, of_some.keys, scaling), -1, out=views.weights).mul_(share[at])
        found = views.gradients(keys, values, weights, of_some, d_steps.of_heads(some), scaling, own[at])
        for total, place, blocks in zip((dv, dk, dq), (in_keys, in_keys, at), found):
            total[place] += blocks


def _tiles_of_heads(buffers: Buffers, heads: int, n: int) -> Iterator[tuple[slice, Tile, Views]]:
    """All queries: some heads, a tile, and what they use of the buffers."""
    largest = buffers.largest
    for some in _some_heads(heads, largest.blocks):
        for tile in tiles(n, largest.queries, largest.before + 1, is_causal=not buffers.looks_ahead):
            yield some, tile, buffers.of(tile.window(some.stop - some.start))


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
    ahead = part_lse - lse
    out.lerp_(part_out, torch.sigmoid(ahead)[..., None])
    # log(exp(a) + exp(b)) = a + log(1 + exp(b - a)); torch.logaddexp is not vectorised
    lse += nn.functional.softplus(ahead, threshold=50)


def _far_backward(part, g, q, k, v, out, lse, scaling, dq, dk, dv) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the gradients what comes from a part; return that of its keys and values, [heads, groups, tokens, dim]. With
    the output and the log-sum-exps of the whole, the kernel's weights are those of the whole."""
    queries, keys = part.queries.of, part.keys.of
    g, q, out = (queries(states).to(k.dtype) for states in (g, q, out))
    found = _FLASH_BACKWARD(g, q, keys(k), keys(v), out, queries(lse), 0.0, is_causal=False, scale=scaling)
    for total, piece in zip((queries(dq), keys(dk), keys(dv)), found):
        total.add_(piece)
    return found[1:]


def _add_sum(states: torch.Tensor, total: torch.Tensor | None, factor: float = 1.0) -> None:
    """Add the sum of [heads, groups, tokens, dim] to [tables, 1, dim]."""
    if total is not None:
        total.add_(sum_to(total, states.flatten(1, 2)), alpha=factor)


__all__ = ["near_far_attention"]
