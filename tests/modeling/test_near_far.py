"""Attention of sequences to themselves, skewed and near-and-far, against the equations with every a_ij written out."""

import math
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from relpos import RelPosForConditionalGeneration, attention_relpos, near_far_relpos, skewed_relpos
from relpos.attention_relpos import Padding, attention_of_tokens
from relpos.configuration import preset
from relpos.near_far_relpos import far_parts, near_far_attention, tiles
from relpos.skewed_relpos import skewed_attention


def literal(query, key, value, key_table, value_table, k, real, is_causal):
    """Equations 3 to 5 with a_ij materialised, [heads, n, n, dim]. Shares nothing with the product."""
    heads, n, dim = query.shape[1:]
    offset = [[max(-k, min(k, j - i)) + k for j in range(n)] for i in range(n)]
    a = lambda table: table.expand(heads, *table.shape[-2:])[:, torch.tensor(offset, dtype=torch.long).view(n, n)]
    visible = (
        torch.ones(len(query), 1, n, n, dtype=torch.bool) if real is None else real[:, None, None].expand(-1, 1, n, n)
    )
    visible = visible.tril() if is_causal else visible
    scores = torch.einsum("bhid,bhjd->bhij", query, key)
    if key_table is not None:
        scores = scores + torch.einsum("bhid,hijd->bhij", query, a(key_table))
    powers = (scores / math.sqrt(dim)).exp() * visible
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300 if query.dtype == torch.float64 else 1e-30)
    output = torch.einsum("bhij,bhjd->bhid", weights, value)
    return output if value_table is None else output + torch.einsum("bhij,hijd->bhid", weights, a(value_table))


def make(n, k, *, kind="both", per_head=False, spans=None, dim=8, heads=2, dtype=torch.float64, seed=0):
    """States [2, heads, n, dim], laid out as projections leave them, the tables, and the spans as a padding mask."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    states = [rand(2, n, heads, dim).transpose(1, 2).requires_grad_() for _ in range(3)]
    shape = (heads, 2 * k + 1, dim) if per_head else (2 * k + 1, dim)
    key_table = rand(*shape).requires_grad_() if kind != "values" else None
    value_table = {"keys": None, "tied": key_table}.get(kind, rand(*shape).requires_grad_())
    real = None
    if spans is not None:
        real = torch.zeros(2, n, dtype=torch.bool)
        for sequence, (start, end) in zip(real, spans):
            sequence[start:end] = True
    return states, key_table, value_table, real


def both_ways(states, key_table, value_table, real, is_causal):
    """name -> output, of the two computations."""
    k = (key_table if key_table is not None else value_table).shape[-2] // 2
    options = {"scaling": states[0].shape[-1] ** -0.5, "max_relative_position": k, "is_causal": is_causal}
    options.update(key_table=key_table, value_table=value_table)
    padding = Padding.of(real)
    yield "skewed", skewed_attention(*states, real=real, **options)
    yield "near and far", near_far_attention(*states, spans=padding and padding.spans, **options)


def gradients(output, leaves):
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=g, dtype=torch.float64).to(output.dtype)
    return torch.autograd.grad(output, leaves, weight)


def check(problem, is_causal, *, tolerance=1e-10):
    states, key_table, value_table, real = problem
    k = (key_table if key_table is not None else value_table).shape[-2] // 2
    leaves = [*states, *{id(t): t for t in (key_table, value_table) if t is not None}.values()]
    seen = torch.ones(2, states[0].shape[2], dtype=torch.bool) if real is None else real
    at_tokens = seen[:, None, :, None].to(states[0].dtype)
    expected = literal(*states, key_table, value_table, k, real, is_causal) * at_tokens
    expected_gradients = gradients(expected, leaves)
    for name, output in both_ways(*problem, is_causal):
        assert output.dtype == states[0].dtype
        if name == "near and far":
            assert not (output * (1 - at_tokens)).any(), "something at padding"
        output = output * at_tokens
        torch.testing.assert_close(
            output, expected, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
        for found, wanted in zip(gradients(output, leaves), expected_gradients):
            limit = tolerance * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
            torch.testing.assert_close(
                found, wanted, atol=limit, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut everything so small that short sequences meet every kind of piece."""
    monkeypatch.setattr(near_far_relpos, "TILE", 4)
    monkeypatch.setattr(near_far_relpos, "BUFFER_BYTES", 1)
    monkeypatch.setattr(skewed_relpos, "BUFFER_BYTES", 10_000)  # one head of one sequence, or several


@st.composite
def problems(draw):
    n, k = draw(st.integers(1, 40)), draw(st.integers(0, 50))
    kind = draw(st.sampled_from(["keys", "values", "both", "tied"]))
    spans = None
    if draw(st.booleans()):
        spans = [tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for _ in range(2)]
    sizes = {"heads": draw(st.integers(1, 5)), "dim": draw(st.sampled_from([1, 4]))}
    return make(n, k, kind=kind, per_head=draw(st.booleans()), spans=spans, **sizes)


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_equations_with_gradients(small_pieces, is_causal):
    # buffers for one head of one sequence at a time, for some, and for all
    @settings(max_examples=60)
    @given(problems(), st.sampled_from([1, 3_000, 10_000, 2**22]))
    def run(problem, size):
        with (
            mock.patch.object(near_far_relpos, "BUFFER_BYTES", size),
            mock.patch.object(skewed_relpos, "BUFFER_BYTES", size),
        ):
            check(problem, is_causal)
            check(problem, is_causal)  # in buffers that the first time has left as it left them

    run()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 200])
def test_what_one_call_leaves_in_the_buffers_is_not_in_the_next(is_causal, k):
    """Tiles as they are, of which the last one has fewer queries than the others."""
    for _ in range(2):
        check(make(151, k), is_causal)
        check(make(301, k), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 9])
def test_nothing_but_padding_still_has_a_gradient(n, is_causal):
    check(make(n, 2, spans=[(0, 0), (n, n)]), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("spans", [None, [(0, 600), (250, 600)], [(0, 600), (0, 350)]], ids=["full", "left", "right"])
def test_long_sequences_as_they_are_cut_in_earnest(is_causal, per_head, spans):
    problem = make(600, 16, per_head=per_head, spans=spans)
    check(problem, is_causal, tolerance=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_where_scores_are_large(dtype):
    """Keys far ahead have a step added: rounded to half precision, they would have other weights than in the output."""
    (query, key, value), *tables, _ = make(300, 2, dim=64, dtype=dtype)
    leaves = [t.detach() for t in (query * 8, key * 8, value, *tables)]
    found, wanted = (
        gradients(list(both_ways(copies[:3], *copies[3:], None, False))[1][1], copies)
        for copies in ([t.to(kind).requires_grad_() for t in leaves] for kind in (dtype, torch.float32))
    )
    for name, half, single in zip(("query", "key", "value"), found, wanted):
        assert (half - single).norm() < 0.04 * single.norm(), name
    assert (found[2] - wanted[2]).norm() < 0.005 * wanted[2].norm(), "weights are not those of the output"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_precisions_are_close_to_float64(dtype, is_causal):
    spans = [(0, 300), (100, 300)]
    exact, coarse = make(300, 8, spans=spans), make(300, 8, spans=spans, dtype=dtype)
    at_tokens = exact[3][:, None, :, None].double()
    expected = literal(*exact[0], *exact[1:3], 8, exact[3], is_causal) * at_tokens
    limit = 16 * torch.finfo(dtype).eps
    wanted = gradients(expected, [*exact[0], *exact[1:3]])
    for name, output in both_ways(*coarse, is_causal):
        output = output * at_tokens.to(dtype)
        assert (output.double() - expected).abs().max() < limit * expected.abs().max(), name
        for found, want in zip(gradients(output, [*coarse[0], *coarse[1:3]]), wanted):
            assert (found.double() - want).abs().max() < limit * want.abs().max(), name


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(small_pieces, is_causal):
    (query, key, value), key_table, value_table, real = make(11, 2, spans=[(0, 11), (3, 9)], dim=3)
    for position in (0, 1):

        def run(*leaves, position=position):
            return list(both_ways(leaves[:3], *leaves[3:], real, is_causal))[position][1]

        assert torch.autograd.gradcheck(run, (query, key, value, key_table, value_table), fast_mode=True)


@pytest.mark.parametrize("n", range(2, 45))
@pytest.mark.parametrize("reach", [1, 6])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tile", [2, 6, 7])
def test_every_pair_is_near_or_in_exactly_one_far_part(n, reach, tile, is_causal):
    reach, tile = min(reach, n - 1), max(tile, reach)
    count = torch.zeros(n, n, dtype=torch.long)
    for near in tiles(n, tile, reach, is_causal):
        count[near.queries, near.keys] += 1
    for part in far_parts(n, tile, reach, is_causal):
        queries, keys = (groups.of(torch.arange(n)[None])[0] for groups in (part.queries, part.keys))
        for ours, theirs in zip(queries, keys, strict=True):
            count[ours[0] : ours[-1] + 1, theirs[0] : theirs[-1] + 1] += 1
            offsets = theirs - ours[:, None]
            assert (offsets >= reach if part.ahead else offsets <= -reach).all()
    if is_causal:  # within its window, skewing hides the keys ahead
        count = count.tril()
    assert torch.equal(count, torch.ones_like(count).tril() if is_causal else torch.ones_like(count))


def test_nothing_of_size_n_by_n_is_made(watch):
    n = 4000
    problem = make(n, 4, dim=4, heads=1, dtype=torch.float32)
    with watch:
        output = near_far_attention(
            *problem[0], scaling=0.5, max_relative_position=4, key_table=problem[1], value_table=problem[2]
        )
        output.sum().backward()
    assert 2 * n * 4 <= watch.largest < n * n / 12


def test_states_and_gradients_laid_out_otherwise():
    """The kernel does not look at the stride between the numbers of a vector, and a sum's gradient has none."""
    states, key_table, value_table, _ = make(20, 2)
    across = [state.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for state in states]
    expected = literal(*states, key_table, value_table, 2, None, False)
    wanted = torch.autograd.grad(expected.sum(), states)
    for name, output in both_ways(across, key_table, value_table, None, False):
        torch.testing.assert_close(output, expected, msg=lambda m, name=name: f"{name}: {m}")
        for found, want in zip(torch.autograd.grad(output.sum(), across), wanted):
            torch.testing.assert_close(found, want, msg=lambda m, name=name: f"{name}: {m}")


def test_buffers_made_in_inference_mode_serve_training():
    skewed_relpos._kept.__dict__.clear()
    for problem in (make(20, 2), make(20, 2, spans=[(0, 20), (4, 20)])):
        with torch.inference_mode():
            expected = [output.clone() for _, output in both_ways(*problem, True)]
        for output, want in zip(both_ways(*problem, True), expected):
            torch.testing.assert_close(output[1], want, msg=output[0])
        check(problem, True)


def test_buffers_are_kept_for_the_next_call_but_not_many():
    skewed_relpos._kept.__dict__.clear()
    for n in (12, 13, 14, 15):
        check(make(n, 2), False)
    kept = skewed_relpos._kept.buffers
    assert len(kept) == skewed_relpos.KEPT
    before = {id(buffers) for buffers in kept.values()}
    list(both_ways(*make(15, 2, seed=1), False))
    assert {id(buffers) for buffers in skewed_relpos._kept.buffers.values()} == before


def test_large_buffers_are_not_kept(monkeypatch):
    """Skewing takes sequences of any length where padding is in their midst: what that needs is given back."""
    skewed_relpos._kept.__dict__.clear()
    monkeypatch.setattr(skewed_relpos, "KEPT_BYTES", 2**16)
    check(make(60, 2), False)
    assert not skewed_relpos._kept.__dict__.get("buffers")
    check(make(6, 2), False)
    assert skewed_relpos._kept.buffers


def test_threads_do_not_share_buffers():
    problems = [make(60, 3, seed=seed, dtype=torch.float32) for seed in range(4)]
    expected = [[output.detach().clone() for _, output in both_ways(*problem, True)] for problem in problems]

    def run(problem):
        return [[output.detach() for _, output in both_ways(*problem, True)] for _ in range(30)]

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(run, problems), expected):
            for outputs in found:
                for output, want in zip(outputs, wanted):
                    torch.testing.assert_close(output, want)


def test_threads_do_not_share_autocast():
    """Half of them are under autocast: none of them may leave it on, or off, for the others."""
    problems = [make(6, 2, dtype=torch.float32) for _ in range(4)]

    def run(numbered):
        number, problem = numbered
        wanted, found = bool(number % 2), set()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=wanted):
            for _ in range(300):
                for _, output in both_ways(*problem, True):
                    found.add(torch.is_autocast_enabled("cpu") == wanted)
                    output.sum().backward()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(run, enumerate(problems))) == {True}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_while_pieces_are_made_leaves_no_part_of_them(small_pieces, monkeypatch, at):
    skewed_relpos._kept.__dict__.clear()
    problem, made, new = make(20, 2), [], skewed_relpos._Piece.__init__

    def interrupted(self, *arguments):
        if len(made) == at:
            raise KeyboardInterrupt
        made.append(self)
        new(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(skewed_relpos._Piece, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(both_ways(*problem, False))
    check(problem, False)


def test_nothing_is_left_of_tensors_without_numbers():
    """Flop counters and exporters run a model on fake tensors: their buffers are not kept."""
    skewed_relpos._kept.__dict__.clear()
    problem = make(15, 2)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(t) for t in (*problem[0], *problem[1:3])]
        shapes = [output.shape for _, output in both_ways(fake[:3], *fake[3:], None, False)]
    assert shapes == [(2, 2, 15, 8)] * 2
    assert not skewed_relpos._kept.__dict__.get("buffers")
    check(problem, False)


def test_gradients_of_gradients_are_refused():
    states, key_table, value_table, _ = make(6, 2)
    for _, output in both_ways(states, key_table, value_table, None, False):
        (gradient,) = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_no_tokens():
    states, key_table, value_table, _ = make(1, 2)
    states = [state[:, :, :0] for state in states]
    for _, output in both_ways(states, key_table, value_table, None, False):
        assert output.shape == (2, 2, 0, 8)


def test_reading_padding():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    padding = Padding.of(mask)
    assert torch.equal(padding.real, mask.bool())
    assert [end - start for start, end in padding.spans] == [2, 4, 0]
    assert padding.spans[0] == (1, 3)
    assert Padding.of(torch.tensor([[1, 0, 1], [1, 1, 1]])).spans is None, "padding in the midst"
    assert Padding.of(torch.ones(2, 3)) is None
    assert Padding.of(None) is None


@pytest.mark.parametrize(
    ("n", "spans", "expected"),
    [(40, None, "skewed"), (1000, None, "near and far"), (1000, "whole", "near and far"), (1000, "broken", "skewed")],
)
def test_which_computation_runs(monkeypatch, n, spans, expected):
    called = []
    for module, name, label in (
        ("skewed_attention", skewed_attention, "skewed"),
        ("near_far_attention", near_far_attention, "near and far"),
    ):
        monkeypatch.setattr(
            attention_relpos, module, lambda *a, f=name, label=label, **k: called.append(label) or f(*a, **k)
        )
    states, key_table, value_table, _ = make(n, 4)
    mask = torch.ones(2, n)
    if spans == "whole":
        mask[1, :50] = 0
    if spans == "broken":
        mask[1, 50] = 0
    attention_of_tokens(*states, scaling=0.3, key_table=key_table, value_table=value_table, padding=Padding.of(mask))
    assert called == [expected]


@pytest.mark.parametrize("n", [12, 920])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_model_gives_the_same_by_rows(n, per_head):
    """Outputs and gradients of every parameter under "sdpa" and under "eager", with padding on either side."""
    torch.manual_seed(0)
    model = RelPosForConditionalGeneration(preset("tiny", dropout=0.0, relative_position_per_head=per_head)).train()
    source, target = torch.randint(2, 200, (3, n)), torch.randint(2, 200, (3, n))
    source_mask, target_mask = torch.ones(3, n), torch.ones(3, n)
    source_mask[0, : n // 2], source_mask[1, n // 2 :] = 0, 0
    target_mask[0, n // 3 :], target_mask[1, : n // 3] = 0, 0
    found = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(source, source_mask, target, target_mask).logits[target_mask.bool()]
        logits.logsumexp(-1).sum().backward()
        found[implementation] = logits, {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found["sdpa"][0], found["eager"][0], atol=2e-5, rtol=1e-5)
    for name, gradient in found["eager"][1].items():
        limit = 1e-4 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(
            found["sdpa"][1][name], gradient, atol=limit, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_autocast():
    torch.manual_seed(0)
    model = RelPosForConditionalGeneration(preset("tiny", dropout=0.0)).train()
    source = torch.randint(2, 200, (2, 20))
    plain = model(source, labels=source).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(source, labels=source).loss
        loss.backward()
    torch.testing.assert_close(loss.float(), plain, atol=0.05, rtol=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
