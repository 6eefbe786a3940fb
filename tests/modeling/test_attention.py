"""Attention against the literal equations 3 to 5 of Shaw et al. 2018, with every a_ij written out, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos.attention_relpos import (
    attention_by_rows,
    attention_of_last_token,
    masked_softmax,
    place_rows,
    relative_rows,
    sum_rows,
)


def literal_attention(query, key, value, key_table, value_table, max_relative_position, first_query, mask):
    """The equations in loops over batch, heads and queries. Shares nothing with the product: own clipping, own softmax.

    query [batch, heads, queries, dim], keys and values [batch, heads, keys, dim], tables [2k + 1, dim] per head as a
    list, mask [batch, queries, keys] of booleans. Query i stands at position first_query + i, key j at j.
    """
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    output = torch.zeros(batch, heads, queries, dim, dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                visible = [j for j in range(keys) if mask[b, i, j]]
                if not visible:
                    continue
                clipped = [
                    max(-max_relative_position, min(max_relative_position, j - first_query - i)) for j in visible
                ]
                rows = [c + max_relative_position for c in clipped]
                position_keys = key_table[h][rows] if key_table else torch.zeros(len(rows), dim, dtype=query.dtype)
                position_values = (
                    value_table[h][rows] if value_table else torch.zeros(len(rows), dim, dtype=query.dtype)
                )
                scores = (query[b, h, i] * (key[b, h, visible] + position_keys)).sum(-1) / math.sqrt(dim)
                weights = (scores - scores.max()).exp()
                weights = weights / weights.sum()
                output[b, h, i] = (weights[:, None] * (value[b, h, visible] + position_values)).sum(0)
    return output


@st.composite
def problems(draw):
    """Any size, table and padding that a model can meet."""
    batch, heads, dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 6]))
    keys, k = draw(st.integers(0, 40)), draw(st.integers(0, 50))
    queries = draw(st.integers(0, keys))
    kind = draw(st.sampled_from(["keys", "values", "both", "tied"]))
    per_head, causal = draw(st.booleans()), draw(st.booleans())
    side = draw(st.sampled_from(["none", "left", "right"]))
    seed = draw(st.integers(0, 2**16))
    return batch, heads, dim, queries, keys, k, kind, per_head, causal, side, seed


def make(problem):
    batch, heads, dim, queries, keys, k, kind, per_head, causal, side, seed = problem
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    query, key, value = rand(batch, heads, queries, dim), rand(batch, heads, keys, dim), rand(batch, heads, keys, dim)
    shape = (heads, 2 * k + 1, dim) if per_head else (2 * k + 1, dim)
    key_table = rand(*shape) if kind != "values" else None
    value_table = {"keys": None, "tied": key_table}.get(kind, rand(*shape))
    first = keys - queries
    mask = torch.ones(batch, queries, keys, dtype=torch.bool)
    if causal:
        mask &= torch.arange(keys)[None] <= torch.arange(first, keys)[:, None]
    if side != "none":
        padding = torch.randint(0, keys + 1, (batch,), generator=g).tolist()
        for b, n in enumerate(padding):
            mask[b, :, slice(0, n) if side == "left" else slice(keys - n, keys)] = False
    return query, key, value, key_table, value_table, k, first, mask


def tables_by_head(table, heads):
    return None if table is None else [table[h] if table.dim() == 3 else table for h in range(heads)]


def product(query, key, value, key_table, value_table, k, first, mask):
    queries, keys = query.shape[2], key.shape[2]
    rows = relative_rows(torch.arange(first, first + queries), torch.arange(keys), k)
    return attention_by_rows(
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5,
        rows=rows,
        key_table=key_table,
        value_table=value_table,
        mask=mask[:, None],
    )


@settings(max_examples=150)
@given(problems())
def test_equals_the_literal_equations(problem):
    query, key, value, key_table, value_table, k, first, mask = make(problem)
    heads = query.shape[1]
    expected = literal_attention(
        query, key, value, tables_by_head(key_table, heads), tables_by_head(value_table, heads), k, first, mask
    )
    output, weights = product(query, key, value, key_table, value_table, k, first, mask)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, mask.any(-1)[:, None].expand_as(sums).to(sums.dtype), atol=1e-12, rtol=0)
    assert not weights.masked_select(~mask[:, None].expand_as(weights)).any()


def last_token(query, key, value, key_table, value_table, mask, **options):
    options = {"scaling": query.shape[-1] ** -0.5, "key_table": key_table, "value_table": value_table, **options}
    return attention_of_last_token(query, key, value, mask=None if mask is None else mask[:, None], **options)


@settings(max_examples=150)
@given(problems(), st.integers(1, 40), st.booleans())
def test_the_last_token_equals_the_literal_equations(problem, keys, masked):
    batch, heads, dim, _, _, k, kind, _, _, side, seed = problem
    side = side if masked else "none"
    query, key, value, *tables, k, first, mask = make((batch, heads, dim, 1, keys, k, kind, False, True, side, seed))
    expected = literal_attention(query, key, value, *(tables_by_head(t, heads) for t in tables), k, first, mask)
    output, weights = last_token(query, key, value, *tables, mask if masked else None)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    _, wanted = product(query, key, value, *tables, k, first, mask)
    torch.testing.assert_close(weights, wanted, atol=1e-12, rtol=1e-12)
    # the same weights are dropped from the same seed, and the sum of the others is not one
    torch.manual_seed(seed)
    output, _ = last_token(query, key, value, *tables, mask, dropout=0.5)
    torch.manual_seed(seed)
    rows = relative_rows(torch.tensor([first]), torch.arange(keys), k)
    options = {"scaling": dim**-0.5, "rows": rows, "mask": mask[:, None], "dropout": 0.5}
    wanted, _ = attention_by_rows(query, key, value, key_table=tables[0], value_table=tables[1], **options)
    torch.testing.assert_close(output, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["keys", "values", "both", "tied"])
def test_gradients_of_the_last_token(kind):
    query, key, value, *tables, _, _, mask = make((2, 2, 4, 1, 7, 2, kind, False, True, "left", 3))
    leaves = [query, key, value, *{id(t): t for t in tables if t is not None}.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    for seen in (None, mask):
        assert torch.autograd.gradcheck(lambda *_, seen=seen: last_token(query, key, value, *tables, seen), leaves)


@settings(max_examples=25)
@given(problems())
def test_a_float_mask_means_what_the_boolean_one_means(problem):
    query, key, value, key_table, value_table, k, first, mask = make(problem)
    for never in (-math.inf, torch.finfo(torch.float64).min):
        additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, never)
        boolean = product(query, key, value, key_table, value_table, k, first, mask)
        added = product(query, key, value, key_table, value_table, k, first, additive)
        torch.testing.assert_close(added, boolean, atol=1e-13, rtol=0)


def test_a_float_mask_adds_to_the_scores():
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(3, 3, dtype=torch.float64)
    output, _ = attention_by_rows(query, key, value, scaling=0.5, mask=bias)
    expected = (query @ key.transpose(-1, -2) * 0.5 + bias).softmax(-1) @ value
    torch.testing.assert_close(output, expected)


def test_row_of_an_offset():
    rows = relative_rows(torch.tensor([10]), torch.arange(20), 4)[0]
    offset = lambda r: rows[10 + r].item()
    assert offset(-9) == offset(-4) == 0, "offsets at or beyond the clipping distance share a row"
    assert offset(0) == 4, "the token itself has row k"
    assert offset(-1) == 3, "looking back is negative"
    assert offset(1) == 5, "looking ahead is positive"
    assert offset(4) == offset(9) == 8
    assert relative_rows(torch.arange(5), torch.arange(7), 0).unique().tolist() == [0]


def test_identical_keys_get_scores_by_their_distance():
    query = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    key = torch.randn(1, 1, 1, 4, dtype=torch.float64).expand(1, 1, 3, 4)
    table = torch.randn(9, 4, dtype=torch.float64)
    rows = relative_rows(torch.tensor([2]), torch.arange(3), 4)
    _, weights = attention_by_rows(query, key, key, scaling=1.0, rows=rows, key_table=table)
    assert len(weights.flatten().unique()) == 3
    expected = (query.flatten() * (key[0, 0] + table[[2, 3, 4]])).sum(-1).softmax(-1)
    torch.testing.assert_close(weights.flatten(), expected)


def test_only_the_offset_counts():
    shifted = relative_rows(torch.arange(7) + 1000, torch.arange(9) + 1000, 3)
    assert torch.equal(shifted, relative_rows(torch.arange(7), torch.arange(9), 3))


def test_the_scale_multiplies_both_terms_of_the_score():
    query, key = torch.ones(1, 1, 1, 4, dtype=torch.float64), torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    table = torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4], dtype=torch.float64)  # only "one back" scores: 4 * scaling
    rows = relative_rows(torch.tensor([1]), torch.arange(2), 1)
    _, weights = attention_by_rows(query, key, key, scaling=0.25, rows=rows, key_table=table)
    torch.testing.assert_close(weights.flatten(), torch.tensor([1.0, 0.0], dtype=torch.float64).softmax(-1))


def test_rows_may_differ_by_sentence_and_mean_anything():
    """Section 3.1: any labelling of the edges, here random labels of a table with 6 rows."""
    batch, heads, n, m, dim = 2, 3, 4, 5, 4
    query = torch.randn(batch, heads, n, dim, dtype=torch.float64)
    key, value = (torch.randn(batch, heads, m, dim, dtype=torch.float64) for _ in range(2))
    key_table, value_table = (torch.randn(6, dim, dtype=torch.float64) for _ in range(2))
    rows = torch.randint(0, 6, (batch, n, m))
    output, _ = attention_by_rows(
        query, key, value, scaling=0.5, rows=rows, key_table=key_table, value_table=value_table
    )
    scores = torch.einsum("bhid,bhijd->bhij", query, key[:, :, None] + key_table[rows][:, None]) * 0.5
    expected = torch.einsum("bhij,bhijd->bhid", scores.softmax(-1), value[:, :, None] + value_table[rows][:, None])
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["keys", "values", "both", "tied"])
def test_gradients(kind, per_head):
    query, key, value, key_table, value_table, k, first, mask = make(
        (2, 2, 4, 5, 7, 2, kind, per_head, True, "left", 3)
    )
    tensors = {"query": query, "key": key, "value": value, "key_table": key_table}
    if kind != "tied":
        tensors["value_table"] = value_table
    tensors = {name: t.requires_grad_() for name, t in tensors.items() if t is not None}

    def function(*given_tensors):
        named = dict(zip(tensors, given_tensors))
        value_side = named.get("key_table") if kind == "tied" else named.get("value_table")
        return product(named["query"], named["key"], named["value"], named.get("key_table"), value_side, k, first, mask)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_float64(dtype):
    problem = (2, 2, 16, 40, 40, 8, "both", False, True, "right", 5)
    expected, _ = product(*make(problem))
    query, key, value, key_table, value_table, k, first, mask = make(problem)
    output, weights = product(*(t.to(dtype) for t in (query, key, value, key_table, value_table)), k, first, mask)
    assert output.dtype == weights.dtype == dtype
    assert output.isfinite().all()
    eps = torch.finfo(dtype).eps
    assert (output.double() - expected).abs().max() < 8 * eps * expected.abs().max()


@pytest.mark.parametrize("with_keys", [True, False])
def test_half_precision_holds_scores_that_are_too_large_before_they_are_scaled(with_keys):
    dim, k = 64, 2
    query = torch.full((1, 1, 3, dim), 40.0, dtype=torch.float16)
    key = 40 * torch.tensor([1.0, 0.5, 1.0], dtype=torch.float16)[:, None].expand(
        1, 1, 3, dim
    )  # 64 * 40 * 40 = 102,400
    value, table = torch.randn(1, 1, 3, dim).half(), torch.full((2 * k + 1, dim), 40.0, dtype=torch.float16)
    rows = relative_rows(torch.arange(3), torch.arange(3), k)
    tables = {"key_table": table if with_keys else None, "value_table": table}
    output, weights = attention_by_rows(query, key, value, scaling=dim**-0.5, rows=rows, **tables)
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.5, 0.0, 0.5]).half().expand(3, 3))
    assert output.isfinite().all()


def test_a_query_that_may_look_nowhere_gets_zeros_and_no_nan_gradient():
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    output, _ = attention_by_rows(query, key, value, scaling=0.5, mask=mask)
    assert not output[:, :, 1].any()
    output.sum().backward()
    assert query.grad.isfinite().all()
    assert not query.grad[:, :, 1].any()
    assert not masked_softmax(torch.full((1, 1, 1, 3), 1e30), torch.zeros(3, dtype=torch.bool)).any()


def test_dropout_drops_weights_of_both_terms():
    query, key = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 64, 4)
    value, table = torch.ones(1, 1, 64, 4), torch.ones(129, 4)
    rows = relative_rows(torch.tensor([0]), torch.arange(64), 64)
    run = lambda p: attention_by_rows(query, key, value, scaling=1.0, rows=rows, value_table=table, dropout=p)
    kept, weights = run(0.5)
    dropped = (weights == 0).float().mean().item()
    assert 0.2 < dropped < 0.8
    torch.testing.assert_close(weights.unique(), torch.tensor([0.0, 2 / 64]))
    torch.testing.assert_close(kept, torch.full((1, 1, 1, 4), 2 * weights.sum().item()))


def test_placing_and_summing_are_transposes():
    rows = torch.randint(0, 5, (6, 7))
    logits, weights = torch.randn(2, 3, 6, 5, dtype=torch.float64), torch.randn(2, 3, 6, 7, dtype=torch.float64)
    torch.testing.assert_close((place_rows(logits, rows) * weights).sum(), (logits * sum_rows(weights, rows, 5)).sum())


def test_no_tensor_of_queries_keys_and_dim_is_made(watch):
    """At n = 300, dim = 64 an [n, n, dim] tensor would hold 5.8 million numbers; nothing may come near it."""
    n, dim, k = 300, 64, 16
    query, key, value = (torch.randn(1, 1, n, dim, requires_grad=True) for _ in range(3))
    tables = [torch.randn(2 * k + 1, dim, requires_grad=True) for _ in range(2)]
    rows = relative_rows(torch.arange(n), torch.arange(n), k)
    with watch:
        output, _ = attention_by_rows(
            query, key, value, scaling=0.125, rows=rows, key_table=tables[0], value_table=tables[1]
        )
        output.sum().backward()
    assert n * n <= watch.largest < 2 * n * n
