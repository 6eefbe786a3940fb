"""Attention with relative position representations, as functions on tensors (Shaw et al. 2018, equations 3 to 5).

One convention everywhere: query position i, key position j, offset r = j - i, which is negative looking back. The table
row of r is clip(r, -k, k) + k: row 0 is "k or more back", row k the token itself, row 2k "k or more ahead".

The position terms never build a [queries, keys, dim] tensor. With R rows in a table, all queries meet all rows in one
product [queries, R], whose entries are then placed at their (query, key); on the value side the weights are summed per
row into [queries, R] before they meet the table. The functions know nothing of offsets: any labelling of the edges with
rows will do (section 3.1 of the paper).
"""

import torch
from torch import nn


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
    return (key_positions[None, :] - query_positions[:, None]).clamp(-k, k) + k


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
    query = query * scaling
    scores = query @ key.transpose(-1, -2)
    if key_table is not None:
        scores = scores + place_rows(_times_table(query, key_table), rows)
    weights = masked_softmax(scores, mask)
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    output = weights.to(value.dtype) @ value
    if value_table is not None:
        # summed before the cast: thousands of far weights share one row
        per_row = sum_rows(weights, rows, value_table.shape[-2]).to(value.dtype)
        output = output + _times_table(per_row, value_table.transpose(-1, -2))
    return output, weights.to(query.dtype)


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
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1, dtype=dtype)
    # exact zeros at masked keys already, except where a whole row is masked: its weights came out uniform
    return weights * mask.any(-1, keepdim=True)


def _times_table(rows_or_queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[batch, heads, queries, dim] by [R, dim] or [heads, R, dim] -> [batch, heads, queries, R]."""
    if table.dim() == 2:
        return rows_or_queries @ table.t()
    return torch.einsum("bhnd,hrd->bhnr", rows_or_queries, table)


__all__ = ["attention_by_rows", "masked_softmax", "place_rows", "relative_rows", "sum_rows"]
