#!/usr/bin/env bash
# On a machine with a GPU, in a few minutes and without downloads: is the model right there, and what does it cost?
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m pytest -q tests/modeling/test_cuda.py
"$python" benchmarks/gpu.py
