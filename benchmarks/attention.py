"""Attention alone: ours against PyTorch's fused attention and eager attention, both without positions, and against the
literal form that builds the [n, n, dim] tensors a^K_ij and a^V_ij.

    python benchmarks/attention.py [--seconds 20] [--longest 8192] [--causal]
"""

import argparse
import sys
from collections.abc import Callable

import torch
from measure import in_turn, machine, peak_memory, ratio, report_peak_memory, write

from relpos.attention_relpos import attention_of_tokens

HEADS, DIM, K = 8, 64, 16
# (batch, n): the sizes of training on sentences, then ever longer ones
SIZES = [(32, 32), (16, 128), (4, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192)]
# forms that store [n, n] numbers, or [n, n, dim], stop here
QUADRATIC_UP_TO = 2048


def eager(query, key, value, is_causal):
    scores = query @ key.transpose(-1, -2) * DIM**-0.5
    if is_causal:
        n = query.shape[2]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


def literal(query, key, value, is_causal, key_table, value_table):
    n = query.shape[2]
    rows = (torch.arange(n) - torch.arange(n)[:, None]).clamp(-K, K) + K
    a_key, a_value = key_table[rows], value_table[rows]  # [n, n, dim]
    by_query = lambda states: states.permute(2, 0, 1, 3).flatten(1, 2)  # [n, batch * heads, ...]
    positions = (by_query(query) @ a_key.transpose(1, 2)).unflatten(1, query.shape[:2]).permute(1, 2, 0, 3)
    scores = (query @ key.transpose(-1, -2) + positions) * DIM**-0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    moved = (by_query(weights) @ a_value).unflatten(1, query.shape[:2]).permute(1, 2, 0, 3)
    return weights @ value + moved


def contestants(batch: int, n: int, is_causal: bool, backward: bool) -> dict[str, Callable[[], None]]:
    """name -> a run, forward or forward and backward, on states as projections leave them."""
    leaves = [torch.randn(batch, n, HEADS * DIM, requires_grad=True) for _ in range(3)]
    tables = [torch.randn(2 * K + 1, DIM, requires_grad=True) for _ in range(2)]
    weight = torch.randn(batch, n, HEADS * DIM)
    options = {"scaling": DIM**-0.5, "is_causal": is_causal, "key_table": tables[0], "value_table": tables[1]}
    forms = {
        "sdpa": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        "eager": lambda q, k, v: eager(q, k, v, is_causal),
        "literal": lambda q, k, v: literal(q, k, v, is_causal, *tables),
        "ours": lambda q, k, v: attention_of_tokens(q, k, v, **options),
    }

    def runner(form):
        def run():
            with torch.set_grad_enabled(backward):
                output = form(*(leaf.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for leaf in leaves))
                output = output.transpose(1, 2).flatten(2)
            if backward:
                torch.autograd.grad(output, [*leaves, *tables], weight, allow_unused=True)

        return run

    return {name: runner(form) for name, form in forms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per size and direction")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--causal", action="store_true", help="the decoder's side")
    parser.add_argument("--memory", nargs=3, metavar=("FORM", "N", "BACKWARD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        form, n, backward = options.memory
        contestants(1, 1024, options.causal, backward == "True")[form]()  # what is loaded once
        report_peak_memory(contestants(1, int(n), options.causal, backward == "True")[form])
        return
    facts, rows = machine(), []
    flag = ["--causal"] * options.causal
    for batch, n in SIZES:
        for backward in (False, True):
            if n > options.longest:
                continue
            runs = contestants(batch, n, options.causal, backward)
            if n > QUADRATIC_UP_TO:
                del runs["literal"], runs["eager"]
            times = in_turn(runs, seconds=options.seconds)
            memory = {
                name: peak_memory(sys.argv[0], "--memory", name, str(n), str(backward), *flag)
                for name in ("sdpa", "ours")
                if n > 1024
            }
            against = [ratio(times["ours"], times[name]) if name in times else "-" for name in ("sdpa", "eager")]
            speedup = ratio(times["literal"], times["ours"]) if "literal" in times else "-"
            direction = "forward+backward" if backward else "forward"
            extra = f"{memory['ours'] / max(1, memory['sdpa']):.2f}" if memory else "-"
            rows.append(
                [
                    batch,
                    n,
                    direction,
                    f"{sorted(times['ours'])[len(times['ours']) // 2] * 1e3:.1f}",
                    *against,
                    speedup,
                    extra,
                ]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    columns = [
        "batch",
        "n",
        "direction",
        "ours, ms",
        "ours / sdpa",
        "ours / eager",
        "literal / ours",
        "peak memory, ours / sdpa",
    ]
    note = (
        f"{HEADS} heads of {DIM}, k = {K}, tables for keys and values shared by the heads, float32, "
        f"{'decoder (causal)' if options.causal else 'encoder'}. Ratios of times within a round: median (95 % interval). "
        "sdpa and eager have no positions; literal builds the [n, n, dim] tensors. Peak memory is what one sequence of "
        "length n adds to the process, beside inputs and parameters."
    )
    write("attention_causal" if options.causal else "attention", "Attention", columns, rows, facts, note)


if __name__ == "__main__":
    main()
