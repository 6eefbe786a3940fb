"""Attention with relative position representations, as functions on tensors (Shaw et al. 2018, equations 3 to 5).

One convention everywhere: query position i, key position j, offset r = j - i, which is negative looking back. The table
row of r is clip(r, -k, k) + k: row 0 is "k or more back", row k the token itself, row 2k "k or more ahead".

The position terms never build a [queries, keys, dim] tensor. With R rows in a table, all queries meet all rows in one
product [queries, R], whose entries are then placed at their (query, key); on the value side the weights are summed per
row into [queries, R] before they meet the table. The functions know nothing of offsets: any labelling of the edges with
rows will do (section 3.1 of the paper).

That is `attention_by_rows`, which also returns the weights. Where rows are clipped offsets, the same is computed faster:
of a sequence that attends to itself, where no weights are asked for, by `attention_of_tokens`, which skews where it is
short and goes near and far where it is long; of its last token, which is decoding, by `attention_of_last_token`.
"""

from typing import NamedTuple

import torch
from torch import nn

from .near_far_relpos import near_far_attention
from .skewed_relpos import skewed_attention, without_autocast

# Tokens from which on near and far is faster than skewing; in an encoder, the rows of the tables come on top, since with
# more of them windows are wider. Measured with 8 heads of 64 on two threads, forward and forward and backward, as parts of
# skewing's time. In an encoder with k = 16: 1.08 and 1.17 at 640 tokens, 0.92 and 1.04 at 896, 0.81 and 0.99 at 1024; with
# k = 64: 0.96 and 1.13 at 896, 0.89 and 0.94 at 1024. In a decoder, where skewing computes what it hides: 0.99 and 1.07 at
# 320 tokens, 0.92 and 0.98 at 384, and there with k = 64 0.94 and 1.00.
NEAR_FAR_FROM = 896
NEAR_FAR_FROM_CAUSAL = 384

# Numbers in cached keys up to which it is fastest to add a_ij to them before a single query meets them. On two threads, a
# step of 16 sentences takes so, or by `attention_of_last_token`, as parts of the step of a Marian model: with 4 heads of
# 32, 1.03 or 1.16 at 10 tokens, 1.08 or 1.12 at 100, 1.11 or 1.08 at 200; with 8 heads of 64, 1.05 or 1.10 at 10, 1.06 or
# 1.08 at 25, 1.06 or 1.05 at 50.
FEW_CACHED = 2**18


class Padding(NamedTuple):
    """Where the real tokens of a batch are.

    Attributes:
        real: [batch, n] booleans.
        spans: The first real token of each sequence and the one after its last; None where any sequence has padding in
            its midst.
    """

    real: torch.Tensor
    spans: list[tuple[int, int]] | None

    @classmethod
    def of(cls, attention_mask: torch.Tensor | None) -> "Padding | None":
        """Read a padding mask, [batch, n], zero at padding; None where it hides nothing."""
        if attention_mask is None:
            return None
        real = attention_mask != 0
        counts = real.sum(-1)
        n = real.shape[1]
        if bool((counts == n).all()):
            return None
        first = real.int().argmax(-1)  # 0 where there is none
        last = n - real.flip(-1).int().argmax(-1)
        last = torch.where(counts > 0, last, first)
        whole = bool((last - first == counts).all())
        return cls(real, list(zip(first.tolist(), last.tolist())) if whole else None)


def relative_rows(
    query_positions: torch.Tensor, key_positions: torch.Tensor, max_relative_position: int
) -> torch.Tensor:
    """Table row of every query and key (equation 5 of the paper, shifted to start at zero).

    Args:
        query_positions: [queries] positions i.
        key_positions: [keys] positions j.
        max_relative_position: The clipping distance k; with 0 there is one row for all pairs.

    Returns:
        [queries, keys] of int64: clip(j - i, -k, k) + k.
    """
    k = max_relative_position
    return (key_positions - query_positions[:, None]).clamp_(-k, k).add_(k)


def place_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What each query has for the row of each key: out[..., i, j] = logits[..., i, rows[i, j]].

    Args:
        logits: [batch, heads, queries, R].
        rows: [queries, keys], or [batch, queries, keys].

    Returns:
        [batch, heads, queries, keys].
    """
    return logits.gather(-1, _per_head(rows).expand(*logits.shape[:-1], -1))


def sum_rows(weights: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Weights summed per table row, the transpose of `place_rows`: out[..., i, r] = sum of weights[..., i, j] over the
    keys j with rows[i, j] = r.

    Args:
        weights: [batch, heads, queries, keys].
        rows: [queries, keys], or [batch, queries, keys].
        size: The number of rows R of the table.

    Returns:
        [batch, heads, queries, R].
    """
    total = weights.new_zeros(*weights.shape[:-1], size)
    return total.scatter_add(-1, _per_head(rows).expand_as(weights), weights)


def _per_head(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dim() == 2 else rows[:, None]  # [batch, 1, queries, keys]


def attention_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    rows: torch.Tensor | None = None,
    key_table: torch.Tensor | None = None,
    value_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention for any number of queries and keys, with its weights.

        e_ij = scaling * q_i . (k_j + a^K_rows[i,j])        o_i = sum_j softmax_j(e_ij) (v_j + a^V_rows[i,j])

    Costs O(queries * keys) and O(queries * R * dim), in time and memory. Without tables this is plain attention.

    Args:
        query: [batch, heads, queries, dim].
        key, value: [batch, heads, keys, dim].
        scaling: Factor of both terms of the score, usually dim^-0.5.
        rows: Row indices, [queries, keys] or [batch, queries, keys]; needed with a table.
        key_table, value_table: a^K and a^V, [R, dim] or [heads, R, dim]; None where the model has none.
        mask: Broadcastable to [batch, heads, queries, keys]: boolean, True where a query may look, or a float mask that
            is added to the scores (a value below half of the smallest float means "may not look").
        dropout: Probability with which a weight is dropped.

    Returns:
        The output, [batch, heads, queries, dim], and the weights, [batch, heads, queries, keys], in the query's dtype. A
        query that may look nowhere gets zeros.
    """
    query = query * scaling  # first, or half precision may overflow
    if rows is not None and rows.dim() == 2 and rows.shape[0] == 1:
        # a single query, which is decoding: its a_ij are a small table themselves, with a row per key
        key_table, value_table = (
            None if table is None else table.index_select(-2, rows[0]) for table in (key_table, value_table)
        )
        rows = None
    terms = None if key_table is None else _times_table(query, key_table)
    if terms is not None and rows is not None:
        terms = place_rows(terms, rows)
    scores = _add_product(terms, query, key.transpose(-1, -2))
    weights = masked_softmax(scores, mask)
    if dropout > 0:
        weights = nn.functional.dropout(weights, p=dropout)
    terms = None
    if value_table is not None:
        # summed before the cast: thousands of far weights share one row
        per_row = weights if rows is None else sum_rows(weights, rows, value_table.shape[-2])
        terms = _times_table(per_row.to(value.dtype), value_table.transpose(-1, -2))
    output = _add_product(terms, weights.to(value.dtype), value)
    return output, weights.to(query.dtype)


def add_rows(states: torch.Tensor, table: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """k_j + a^K_ij or v_j + a^V_ij for a single query i, as equations 3 and 4 have them.

    Args:
        states: Keys or values, [batch, heads, keys, dim].
        table: [R, dim] or [heads, R, dim]; None where the model has none.
        rows: [keys].

    Returns:
        [batch, heads, keys, dim].
    """
    return states if table is None else states + table.index_select(-2, rows)


@without_autocast
def attention_of_last_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    key_table: torch.Tensor | None = None,
    value_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of the last token of a sequence to all of it, equations 3 to 5 of the paper with clipped offsets.

    A constant may be added to all scores, and weights sum to one: relative to the row of the farthest keys, only the last
    k keys and values have a term, so that a step costs little more than attention without positions however long the
    cache is.

    Args:
        query: [batch, heads, 1, dim].
        key, value: [batch, heads, keys, dim], the last ones the query's own.
        scaling: Factor of both terms of the score, usually dim^-0.5.
        key_table, value_table: a^K and a^V, [2k + 1, dim]; one may be None. (There is no such form of tables per head.)
        mask, dropout: As in `attention_by_rows`.

    Returns:
        As from `attention_by_rows`.
    """
    batch, heads, keys, dim = key.shape
    near = min((key_table if key_table is not None else value_table).shape[0] // 2, keys)
    key_table, value_table = (None if table is None else table.to(query.dtype) for table in (key_table, value_table))
    # sentences and heads as one axis, and few operations: of a single query, each of them is felt
    query = query.reshape(-1, dim) * scaling  # first, or half precision may overflow
    scores = torch.bmm(query[:, None], key.flatten(0, 1).mT)[:, 0]
    if key_table is not None:
        scores[:, keys - near :].addmm_(query, _last_steps(key_table, near).t())
    weights = masked_softmax(scores.view(batch, heads, 1, keys), mask)
    if dropout > 0:
        weights = nn.functional.dropout(weights, p=dropout)
    flat, value = weights.to(value.dtype).view(-1, keys), value.flatten(0, 1)
    if value_table is None:
        output = torch.bmm(flat[:, None], value)
    else:
        farthest = value_table[value_table.shape[0] // 2 - near]
        if mask is not None or dropout > 0:  # weights may not sum to one
            farthest = farthest * flat.sum(-1, keepdim=True)
        terms = torch.addmm(farthest, flat[:, keys - near :], _last_steps(value_table, near))
        output = torch.baddbmm(terms[:, None], flat[:, None], value)
    return output.view(batch, heads, 1, dim), weights.to(query.dtype)


def _last_steps(table: torch.Tensor, near: int) -> torch.Tensor:
    """The rows of the offsets 1 - near to 0 less that of -near, [near, dim]."""
    same = table.shape[0] // 2
    return table[same - near + 1 : same + 1] - table[same - near]


def attention_of_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    key_table: torch.Tensor | None = None,
    value_table: torch.Tensor | None = None,
    padding: Padding | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Exact attention of sequences to themselves on CPU, equations 3 to 5 of the paper with clipped offsets, in the
    faster of two ways.

    Args:
        query, key, value: [batch, heads, n, dim], positions 0 to n - 1.
        scaling: Factor of both terms of the score, usually dim^-0.5.
        key_table, value_table: a^K and a^V, [2k + 1, dim] or [heads, 2k + 1, dim]; one may be None.
        padding: Where the real tokens are; None where all are real.
        is_causal: Queries do not look ahead.

    Returns:
        [batch, heads, n, dim]. A query that may look nowhere gets zeros.
    """
    rows = (key_table if key_table is not None else value_table).shape[-2]
    options = {
        "scaling": scaling,
        "max_relative_position": rows // 2,
        "key_table": key_table,
        "value_table": value_table,
        "is_causal": is_causal,
    }
    whole = padding is None or padding.spans is not None
    if whole and query.shape[2] >= (NEAR_FAR_FROM_CAUSAL if is_causal else NEAR_FAR_FROM + rows):
        return near_far_attention(query, key, value, spans=padding and padding.spans, **options)
    return skewed_attention(query, key, value, real=padding and padding.real, **options)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis in at least float32; a row that is masked throughout gives zeros.

    Args:
        scores: [batch, heads, queries, keys].
        mask: As in `attention_by_rows`.

    Returns:
        [batch, heads, queries, keys] of float32 or float64.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return scores.softmax(-1, dtype=dtype)
    if mask.dtype != torch.bool:
        scores = scores + mask
        mask = mask > torch.finfo(mask.dtype).min / 2
    weights = torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1, dtype=dtype)
    # exact zeros at masked keys already, except where a whole row is masked: its weights came out uniform
    return weights * mask.any(-1, keepdim=True)


def _add_product(terms: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """terms + left @ right, [batch, heads, ...] each, in one pass over the result."""
    if terms is None:
        return left @ right
    return torch.baddbmm(*(each.flatten(0, 1) for each in (terms, left, right))).unflatten(0, left.shape[:2])


def _times_table(rows_or_queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[batch, heads, queries, dim] by [R, dim] or [heads, R, dim] -> [batch, heads, queries, R]."""
    if table.dim() == 2:
        # one product of matrices: the states of heads are not contiguous, and matmul would copy the table for each of them
        products = rows_or_queries.reshape(-1, rows_or_queries.shape[-1]) @ table.t()
        return products.view(*rows_or_queries.shape[:-1], table.shape[0])
    return torch.einsum("bhnd,hrd->bhnr", rows_or_queries, table)


__all__ = [
    "FEW_CACHED",
    "Padding",
    "add_rows",
    "attention_by_rows",
    "attention_of_last_token",
    "attention_of_tokens",
    "masked_softmax",
    "place_rows",
    "relative_rows",
    "sum_rows",
]
