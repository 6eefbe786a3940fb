"""Self-attention with relative positions for long sequences on CPU, at the price of PyTorch's fused attention.

Clipping makes most pairs ordinary: with k the clipping distance, keys up to i - k all have row 0 of the tables for a query
at i, and keys from i + k on all have row 2k. So the pairs fall into three:

- the *band* of the 2k - 1 offsets in between, which is computed in small blocks of queries;
- those *behind* it, a triangle of all pairs with j <= i - k, and those *ahead* of it, another one: attention as the fused
  kernel does it. A constant may be added to all scores of a query, and weights sum to one. With row 0 as the reference its
  terms vanish, so that the kernel gets keys and values as they are behind, and moved by the step from row 0 to row 2k ahead.

A triangle of n tokens is two triangles of n / 2 and a square, which the kernel computes without waste; small triangles end
this, where it computes squares and hides half of them.

Every part gives an output and its log-sum-exp, and these are merged as the shards of ring attention are. Backward, each
part gets the merged output and log-sum-exp, which makes its gradients those of the whole softmax, and the band is computed
again. Nothing of size n x n is stored.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .skewed_relpos import NEVER, by_table, empty_like_projections, of_heads, split_table

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Tokens of the smallest triangles.
TRIANGLE = 256
# Queries of a block of the band, which meet as many keys and 2k - 2 more.
BLOCK = 64
# Numbers of [heads, n, dim] in work at a time, and of these in the band: beside inputs and outputs, these are what memory
# goes into.
CHUNK = 2**20
BAND_CHUNK = 2**18


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
        return torch.zeros_like(query)
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
    count: int = 1

    def moved(self, by: int) -> "Groups":
        return self._replace(start=self.start + by)

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """A view of [heads, n, ...] as [heads, groups, tokens, ...]."""
        return states[:, self.start :].unfold(1, self.size, self.step)[:, : self.count].movedim(-1, 2)


def split_triangle(n: int) -> Iterator[tuple[Groups, Groups]]:
    """All pairs of n tokens in which one is later than the other, or the same, as groups: each group of the earlier with
    the group of the later at its place. Where the two are the same, half of the pairs of a group are meant."""
    whole, rest = divmod(n, TRIANGLE)
    if whole:
        yield (Groups(0, TRIANGLE, TRIANGLE, whole),) * 2
    if rest:
        yield (Groups(n - rest, rest, rest),) * 2
    size = TRIANGLE
    while size < n:
        count = n // (2 * size)
        if count:
            yield Groups(0, size, 2 * size, count), Groups(size, size, 2 * size, count)
        start = 2 * size * count
        rest = n - start - size
        if rest > 0:
            yield Groups(start, size, size), Groups(start + size, rest, rest)
        size *= 2


class Part(NamedTuple):
    """Groups of queries, each with its group of keys, that go through the kernel together.

    Attributes:
        ahead: The keys are ahead of the queries.
        half: Of queries and keys, as many of both, only pairs that lie as far apart or farther are meant.
    """

    queries: Groups
    keys: Groups
    ahead: bool
    half: bool

    def options(self, like: torch.Tensor) -> dict:
        """The kernel's. It knows the half behind, and takes the one ahead as a mask."""
        if not self.half or not self.ahead:
            return {"is_causal": self.half}
        return {"attn_mask": like.new_full((self.queries.size, self.keys.size), -torch.inf).tril(-1)[None, None]}


def far_parts(n: int, reach: int, is_causal: bool) -> Iterator[Part]:
    """All pairs of n tokens that lie `reach` or more apart, each in one part."""
    for earlier, later in split_triangle(n - reach):
        half = earlier == later
        yield Part(later.moved(reach), earlier, ahead=False, half=half)
        if not is_causal:
            yield Part(earlier, later.moved(reach), ahead=True, half=half)


class Band:
    """Blocks of queries, each with the keys nearer than `reach`: those of the block, and of the tokens around it.

    Below, [blocks, block, ...] are numbers of queries of all heads and [blocks, width, ...] those of keys.
    """

    def __init__(self, heads: int, n: int, queries: slice, block: int, reach: int, is_causal: bool):
        """The band of some of n queries, as many as whole blocks hold, or all that are left."""
        self.heads, self.n, self.queries, self.block = heads, n, queries, block
        self.before = reach - 1
        self.width = self.before + block + (0 if is_causal else self.before)
        self.offsets = self.width - block + 1
        self.blocks = -(-(queries.stop - queries.start) // block)  # of each head
        self.first_key = queries.start - self.before
        self.reached = (self.blocks - 1) * block + self.width
        self.keys = slice(max(self.first_key, 0), min(self.first_key + self.reached, n))

    def of_queries(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[heads, n, dim] -> [blocks, block, dim], zeros where the last block has no more queries."""
        missing = self.blocks * self.block - (self.queries.stop - self.queries.start)
        states = nn.functional.pad(states[:, self.queries].to(dtype), (0, 0, 0, missing))
        return states.reshape(self.heads * self.blocks, self.block, -1)

    def of_keys(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[heads, n, dim] -> [blocks, width, dim], zeros where there are no keys. Not to be written to."""
        before = self.keys.start - self.first_key
        after = self.reached - before - (self.keys.stop - self.keys.start)
        keys = nn.functional.pad(states[:, self.keys].to(dtype), (0, 0, before, after)).contiguous()
        head, row, _ = keys.stride()
        shape = (self.heads, self.blocks, self.width, keys.shape[2])
        return keys.as_strided(shape, (head, self.block * row, row, 1)).flatten(0, 1)

    def set_queries(self, total: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write [blocks, block, ...] to where `of_queries` takes them from, in [heads, n, ...]."""
        rows = blocks.view(self.heads, -1, *total.shape[2:])
        total[:, self.queries] = rows[:, : self.queries.stop - self.queries.start]

    def add_keys(self, total: torch.Tensor, blocks: torch.Tensor) -> None:
        """Add [blocks, width, dim] to where `of_keys` takes them from, in [heads, n, dim]."""
        blocks = blocks.unflatten(0, (self.heads, self.blocks))
        summed = total.new_zeros(self.heads, self.reached, total.shape[2])
        for start in range(0, self.width, self.block):  # pieces that do not overlap
            piece = blocks[:, :, start : start + self.block]
            summed[:, start:].unfold(1, piece.shape[2], self.block)[:, : self.blocks].transpose(2, 3).add_(piece)
        total[:, self.keys] += summed[:, self.keys.start - self.first_key :][:, : self.keys.stop - self.keys.start]

    def scored(self, queries: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Products of queries with the keys of their block, each with its step added, [blocks, block, width]; `NEVER`
        outside of the band."""
        count = len(queries)
        # rows that are one longer show keys at the same offset below one another
        memory = queries.new_full((count * self.block * (self.width + 1),), NEVER)
        band = memory.as_strided((count * self.block, self.offsets), (self.width + 1, 1))
        placed = memory.as_strided((count, self.block, self.width), (self.block * (self.width + 1), self.width, 1))
        if steps is None:
            band.zero_()
        else:
            for table, rows, states in by_table(steps, band, queries.flatten(0, 1)):
                torch.mm(states, table[: self.offsets].t(), out=rows)
        self._hide_what_is_not_there(placed.unflatten(0, (self.heads, self.blocks)))
        return torch.baddbmm(placed, queries, keys.transpose(1, 2))

    def by_offset(self, pairs: torch.Tensor) -> torch.Tensor:
        """[blocks, block, width] numbers of pairs -> [queries, offsets], those of the band."""
        strides = (self.block * self.width, self.width + 1, 1)
        return pairs.as_strided((len(pairs), self.block, self.offsets), strides).flatten(0, 1)

    def _hide_what_is_not_there(self, scores: torch.Tensor) -> None:
        if self.first_key < 0:
            scores[:, 0, :, : -self.first_key] = NEVER
        for number in range(self.blocks - 1, -1, -1):
            missing = self.first_key + number * self.block + self.width - self.n
            if missing <= 0:
                break
            scores[:, number, :, -missing:] = NEVER

    def summed(self, weights: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """Sums of values by [blocks, block, width] weights, each with its step added: [blocks, block, dim]."""
        total = torch.bmm(weights, keys)
        if steps is not None:
            band = self.by_offset(weights)
            for table, out, rows in by_table(steps, total.flatten(0, 1), band):
                out.addmm_(rows, table[: self.offsets])
        return total

    def add_steps(self, total: torch.Tensor | None, pairs: torch.Tensor, states: torch.Tensor) -> None:
        """Add to [tables, offsets, dim] the gradient of steps, from that of the pairs and what the steps are multiplied
        with, [blocks, block, dim]."""
        if total is not None:
            band = self.by_offset(pairs)
            for out, rows, queries in by_table(total, band, states.flatten(0, 1)):
                out[: self.offsets].addmm_(rows.t(), queries)


def _bands(heads: int, n: int, dim: int, reach: int, is_causal: bool) -> Iterator[Band]:
    """All queries of a sequence, some at a time."""
    block = min(n, max(BLOCK, reach))  # wider where most keys would be of the tokens around
    size = max(1, BAND_CHUNK // (heads * dim * block)) * block
    for start in range(0, n, size):
        yield Band(heads, n, slice(start, min(start + size, n)), block, reach, is_causal)


def _pieces(query: torch.Tensor, numbers: int) -> Iterator[tuple[int, slice]]:
    """Where [batch, heads, n, dim] is cut, so that a piece has no more numbers or one head: (sequence, heads)."""
    batch, heads, n, dim = query.shape
    size = max(1, numbers // (n * dim))
    for sequence in range(batch):
        for head in range(0, heads, size):
            yield sequence, slice(head, min(head + size, heads))


def _step_ahead(states: torch.Tensor, steps: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """[heads, n, dim] keys or values as queries far behind them see them."""
    return states if steps is None or is_causal else (states + steps[:, -1:]).to(states.dtype)


class _NearFarAttention(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, query, key, value, key_steps, farthest, value_steps, scaling, reach, is_causal):
        n = query.shape[2]
        like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
        output = empty_like_projections(query)
        logsumexps = like.new_empty(query.shape[:3])
        for sequence, heads in _pieces(query, CHUNK):
            q, k, v = query[sequence, heads], key[sequence, heads], value[sequence, heads]
            k_steps, v_steps, first = (of_heads(tables, heads) for tables in (key_steps, value_steps, farthest))
            out, lse = output[sequence, heads].to(like.dtype), logsumexps[sequence, heads]
            for band in _bands(*q.shape, reach, is_causal):
                _near(band, q, k, v, k_steps, v_steps, scaling, out, lse)
            key_ahead, value_ahead = (None if t is None else t[:, -1:] for t in (k_steps, v_steps))
            shift = 0.0 if key_ahead is None or is_causal else (q * key_ahead).sum(-1, dtype=like.dtype) * scaling
            for part in far_parts(n, reach, is_causal):
                _far(part, q, k, v, scaling, out, lse, *((shift, value_ahead) if part.ahead else (0.0, None)))
            if first is not None:
                out += first
            if query.dtype != like.dtype:  # else `out` is a view, and it is there already
                output[sequence, heads] = out
        ctx.save_for_backward(query, key, value, key_steps, farthest, value_steps, output, logsumexps)
        ctx.constants = scaling, reach, is_causal
        return output

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad):
        query, key, value, key_steps, farthest, value_steps, output, logsumexps = ctx.saved_tensors
        scaling, reach, is_causal = ctx.constants
        n = query.shape[2]
        grad = _for_kernel(grad)
        like = logsumexps.new_empty(0)
        d_states = [empty_like_projections(query).zero_() for _ in range(3)]
        d_tables = [None if t is None else torch.zeros_like(t) for t in (key_steps, farthest, value_steps)]
        for sequence, heads in _pieces(query, CHUNK // 2):
            q, k, v, g, out, lse = (t[sequence, heads] for t in (query, key, value, grad, output, logsumexps))
            k_steps, first, v_steps = (of_heads(tables, heads) for tables in (key_steps, farthest, value_steps))
            d_k_steps, d_first, d_v_steps = (of_heads(tables, heads) for tables in d_tables)
            if first is not None:
                out = (out - first).to(q.dtype)
                d_first += _sum_to(d_first, g)
            own = (out * g).sum(-1, keepdim=True, dtype=like.dtype)
            dq, dk, dv = (total[sequence, heads].to(like.dtype) for total in d_states)
            steps = k_steps, v_steps, d_k_steps, d_v_steps
            for band in _bands(*q.shape, reach, is_causal):
                _near_backward(band, q, k, v, g, own, lse[..., None], *steps, scaling, dq, dk, dv)
            k_ahead, v_ahead = _step_ahead(k, k_steps, is_causal), _step_ahead(v, v_steps, is_causal)
            for part in far_parts(n, reach, is_causal):
                keys, values = (k_ahead, v_ahead) if part.ahead else (k, v)
                part_dk, part_dv = _far_backward(part, g, q, keys, values, out, lse, scaling, dq, dk, dv)
                if part.ahead:
                    for d_steps, d_keys in ((d_k_steps, part_dk), (d_v_steps, part_dv)):
                        if d_steps is not None:
                            d_steps[:, -1:] += _sum_to(d_steps, d_keys.flatten(1, 2))
            if query.dtype != like.dtype:  # else they are views, and it is there already
                for total, piece in zip(d_states, (dq, dk, dv)):
                    total[sequence, heads] = piece
        return *d_states, *d_tables, *(None,) * 3


def _near(band, q, k, v, k_steps, v_steps, scaling, out, lse) -> None:
    """Set some queries of `out`, [heads, n, dim], and `lse`, [heads, n], to the attention to the band alone."""
    q, k, v = band.of_queries(q, out.dtype) * scaling, band.of_keys(k, out.dtype), band.of_keys(v, out.dtype)
    weights, own_lse = _softmax(band.scored(q, k, k_steps))
    band.set_queries(lse, own_lse)
    band.set_queries(out, band.summed(weights, v, v_steps))


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., keys] -> weights and log-sum-exps, [..., 1]."""
    weights = scores.softmax(-1)  # many times as fast as exp where most of what it gives is zero
    # a weight is exp(score - log-sum-exp), the largest one of the largest score
    return weights, scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()


def _near_backward(band, q, k, v, g, own, lse, k_steps, v_steps, d_k_steps, d_v_steps, scaling, dq, dk, dv) -> None:
    """Set some queries of dq, and add to the other gradients, what comes from the band."""
    q, g, own, lse = (band.of_queries(states, dq.dtype) for states in (q, g, own, lse))
    k, v = (band.of_keys(states, dq.dtype) for states in (k, v))
    q = q * scaling
    weights, own_lse = _softmax(band.scored(q, k, k_steps))
    weights.mul_((own_lse - lse).exp_())  # the band's share of the whole
    band.add_keys(dv, torch.bmm(weights.transpose(1, 2), g))
    band.add_steps(d_v_steps, weights, g)
    # outside of the band, a score is the large negative number once more, and its weight is zero
    d_scores = band.scored(g, v, v_steps).sub_(own).mul_(weights)
    band.set_queries(dq, band.summed(d_scores, k, k_steps).mul_(scaling))
    band.add_keys(dk, torch.bmm(d_scores.transpose(1, 2), q))
    band.add_steps(d_k_steps, d_scores, q)


def _far(part, q, k, v, scaling, out, lse, shift, value_step) -> None:
    """Take the attention of a part into `out`, [heads, n, dim], and `lse`, [heads, n], so far.

    Args:
        shift: [heads, n], what the step of the keys adds to all scores of a query.
        value_step: [heads or 1, 1, dim], the step of the values.
    """
    states = part.queries.of(q), part.keys.of(k), part.keys.of(v)
    part_out, part_lse = _FLASH(*states, 0.0, scale=scaling, **part.options(q))
    if isinstance(shift, torch.Tensor):
        part_lse = part_lse + part.queries.of(shift)
    if value_step is not None:
        part_out = part_out + value_step[:, None]
    out, lse = part.queries.of(out), part.queries.of(lse)
    out.lerp_(part_out.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _far_backward(part, g, q, k, v, out, lse, scaling, dq, dk, dv) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the gradients what comes from a part; return that of its keys and values, [heads, groups, tokens, dim]. With
    the output and the log-sum-exps of the whole, the kernel's weights are those of the whole."""
    queries, keys = part.queries.of, part.keys.of
    options = {"is_causal": False, **part.options(q)}
    found = _FLASH_BACKWARD(
        queries(g), queries(q), keys(k), keys(v), queries(out), queries(lse), 0.0, scale=scaling, **options
    )
    for total, piece in zip((queries(dq), keys(dk), keys(dv)), found):
        total.add_(piece)
    return found[1:]


def _sum_to(tables: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[heads, rows, dim] summed to [tables, 1, dim]."""
    return states.reshape(len(tables), -1, states.shape[-1]).sum(1, keepdim=True, dtype=tables.dtype)


__all__ = ["near_far_attention"]
