"""Attention by rows on a GPU against the fused attention without positions: milliseconds and ratio.

python benchmarks/gpu.py
"""

import statistics

import torch
from measure import machine, write

from relpos.attention_relpos import attention_by_rows, relative_rows

HEADS, DIM, K = 8, 64, 16
SIZES = [(64, 32), (64, 128), (16, 512), (4, 2048)]


def milliseconds(run, repeats: int = 20) -> float:
    """Median time of a run, by the GPU's clock."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def compare(batch: int, n: int, dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds of ours and of the fused attention without positions, forward and backward."""
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
    states, tables = [make(batch, HEADS, n, DIM) for _ in range(3)], [make(2 * K + 1, DIM) for _ in range(2)]
    positions = torch.arange(n, device="cuda")
    rows = relative_rows(positions, positions, K)
    options = {"scaling": DIM**-0.5, "rows": rows, "key_table": tables[0], "value_table": tables[1]}
    return (
        milliseconds(lambda: attention_by_rows(*states, **options)[0].sum().backward()),
        milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(*states).sum().backward()),
    )


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU that PyTorch can use here.")
    facts = {**machine(), "gpu": torch.cuda.get_device_name()}
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch, n in SIZES:
            ours, plain = compare(batch, n, dtype)
            rows.append([str(dtype), batch, n, f"{ours:.2f}", f"{plain:.2f}", f"{ours / plain:.2f}"])
    note = f"{HEADS} heads of {DIM}, k = {K}, forward and backward; sdpa has no positions."
    write(
        "gpu", "Attention by rows on a GPU", ["dtype", "batch", "n", "ours, ms", "sdpa, ms", "ratio"], rows, facts, note
    )


if __name__ == "__main__":
    main()
