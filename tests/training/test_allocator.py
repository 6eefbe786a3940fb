"""Freed memory is kept: in a process of its own, since it cannot be undone."""

import os
import platform
import subprocess
import sys

import pytest

from relpos.training.allocator import keep_freed_memory

FAULTS = """
import resource, torch
from relpos.training.allocator import keep_freed_memory
changed = keep_freed_memory()
for _ in range(5):  # until the heap has grown
    torch.ones(8_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(8_000_000)
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to set but in glibc")
def test_freed_memory_is_used_again():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run([sys.executable, "-c", FAULTS], env=clean, capture_output=True, text=True, check=True)
    changed, faults = run.stdout.split()
    assert changed == "True"
    assert int(faults) < 100, "20 blocks of 32 MB have 160,000 pages"


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_freed_memory()
