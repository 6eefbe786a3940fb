"""What the benchmarks share: contestants in turn, ratios of one round with their interval, tables that name the machine."""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


class Ratio(NamedTuple):
    """Median of the ratios of the rounds, with the interval that holds the true median with 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def in_turn(
    contestants: dict[str, Callable[[], Any]], *, seconds: float = 20.0, rounds: int = 7
) -> dict[str, list[float]]:
    """Run every contestant once per round, in a new order each time.

    Args:
        contestants: What to run, by name.
        seconds: When to stop, ...
        rounds: ... but not before so many rounds.

    Returns:
        Seconds of each round by name.
    """
    settle_allocator()
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names, start = list(contestants), time.perf_counter()
    while len(times[names[0]]) < rounds or time.perf_counter() - start < seconds:
        random.shuffle(names)
        for name in names:
            begin = time.perf_counter()
            contestants[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def settle_allocator() -> None:
    """Bring glibc to where it is in a process that has worked for a while.

    At first it asks the system for every tensor of more than 128 KiB, and returns it: each then costs a page fault per
    4 KiB, up to half of the time of small attention, or none, depending on what else was freed. Once a block of 32 MiB has
    been freed, smaller ones are its own to reuse.
    """
    torch.ones(2**25 - 2**12, dtype=torch.uint8)  # freed at once


def ratio(times: list[float], others: list[float]) -> Ratio:
    """How much longer `times` took than `others` in the same rounds."""
    ratios = sorted(a / b for a, b in zip(times, others))
    # order statistics around the median: a binomial count is within 0.98 sqrt(n) of n / 2 in 95 % of the cases
    half, spread = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
    low, high = max(0, round(half - spread)), min(len(ratios) - 1, round(half + spread))
    return Ratio(statistics.median(ratios), ratios[low], ratios[high])


def peak_memory(script: str, *arguments: str) -> int:
    """Bytes that a process of its own says its work took at most; see `report_peak_memory`."""
    command = [sys.executable, script, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report_peak_memory(run: Callable[[], Any]) -> None:
    """Print the bytes that a run adds to this process's memory at most (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = status("VmRSS")
    run()
    print(status("VmHWM") - before)


def status(field: str) -> int:
    """Bytes that the system says of this process under a name such as VmRSS (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def machine() -> dict[str, Any]:
    """The machine and the versions, and how busy it was."""
    import transformers

    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(name: str, title: str, columns: list[str], rows: list[list[Any]], facts: dict[str, Any], note: str) -> None:
    """Write results/NAME.md and results/NAME.json, and print the table.

    Args:
        columns, rows: The table.
        facts: What `machine` said before the first run.
        note: What the figures are.
    """
    facts = {**facts, "load_average_after": round(os.getloadavg()[0], 2)}
    line = lambda cells: "| " + " | ".join(str(cell) for cell in cells) + " |"
    table = "\n".join([line(columns), line("---" for _ in columns), *map(line, rows)])
    described = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    text = f"# {title}\n\n{note}\n\n{table}\n\nMeasured on: {described}.\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    named = [dict(zip(columns, (list(c) if isinstance(c, Ratio) else c for c in row))) for row in rows]
    for path, content in (
        (RESULTS / f"{name}.md", text),
        (RESULTS / f"{name}.json", json.dumps({"machine": facts, "rows": named}, indent=1) + "\n"),
    ):
        unfinished = path.with_suffix(path.suffix + ".tmp")
        unfinished.write_text(content)
        unfinished.replace(path)
