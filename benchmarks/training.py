"""A whole training step (forward, backward, Adam): RelPos against itself without positions, Marian, T5 and OpenNMT-py.

    python benchmarks/training.py [--size base] [--batch 32] [--length 32] [--seconds 60] [--opennmt-py PYTHON]

OpenNMT-py 3.5.1 has needs of its own: PYTHON is the interpreter of an environment that has it.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from measure import in_turn, machine, ratio, write
from models import SIZES, build

KINDS = ["relpos", "relpos, no positions", "marian", "t5"]


def step(kind: str, size: str, batch: int, length: int):
    """One update of a new model, on the same random sentences for all; a quarter of them is shorter by half."""
    model = build(kind, size).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(2, SIZES[size]["vocabulary"], (batch, length), generator=generator) for _ in range(2)
    )
    mask = torch.ones_like(source)
    mask[: batch // 4, length // 2 :] = 0
    labels = target.masked_fill(mask == 0, -100)

    def run():
        model(input_ids=source, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def opennmt_py_step(python: str, size: str, batch: int, length: int) -> Callable[[], None]:
    """The same of OpenNMT-py with relative positions, in a process of its own that waits for its turn."""
    script = Path(__file__).with_name("opennmt_py_step.py")
    command = [python, "-W", "ignore", str(script), json.dumps(SIZES[size]), str(batch), str(length)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if not peer.stdout.readline():
        raise SystemExit(f"OpenNMT-py did not start: {python} -m pip install OpenNMT-py==3.5.1 is what it needs.")

    def run():
        peer.stdin.write("\n")
        peer.stdin.flush()
        if not peer.stdout.readline():
            raise SystemExit("OpenNMT-py stopped; its message is above.")

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per sentence, on each side")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--opennmt-py", metavar="PYTHON", help="an interpreter that has OpenNMT-py 3.5.1")
    options = parser.parse_args()
    facts, sizes = machine(), (options.size, options.batch, options.length)
    runs = {kind: step(kind, *sizes) for kind in KINDS}
    if options.opennmt_py:
        runs["opennmt-py 3.5.1, relative"] = opennmt_py_step(options.opennmt_py, *sizes)
    times = in_turn(runs, seconds=options.seconds)
    tokens = options.batch * options.length
    rows = [
        [kind, f"{tokens / statistics.median(times[kind]):.0f}", ratio(times["relpos"], times[kind])] for kind in runs
    ]
    note = (
        f"Size {options.size}: {SIZES[options.size]}; {options.batch} sentences of {options.length} tokens on each side, "
        "a quarter of them padded to half, dropout 0.1, float32, Adam (fused, but for OpenNMT-py, which has none on CPU). Ratios of step times within a round: median "
        "(95 % interval)."
    )
    columns = ["model", "target tokens per second", "time of relpos / time of this"]
    write(f"training_{options.size}_{options.length}", "Training step", columns, rows, facts, note)


if __name__ == "__main__":
    main()
