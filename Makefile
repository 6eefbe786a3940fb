# make demo   set up, train a small English-German model on the bundled corpus, score it, reload it, translate
# make test   set up, run the whole test suite
# make conformance   Transformers' own tests on every configuration, with their figures, and on Marian beside them
# make lint   ruff, format and lint
# make bench  time attention, training and decoding against their peers; tables in benchmarks/results
PYTHON ?= python3
BIN := .venv/bin
# pip compiles nothing ahead; Python keeps the bytecode of what it imports, or every process would compile that again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test conformance library-suite lint bench setup setup-dev clean

demo: setup
	$(BIN)/relpos train quickstart --output_dir out/quickstart --overwrite
	$(BIN)/relpos evaluate out/quickstart --beams 1,4
	$(BIN)/python -m relpos.training.show_translations out/quickstart

test: setup-dev library-suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -rs

conformance: setup-dev library-suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "conformance or not conformance" tests/conformance

# Transformers' own tests, downloaded; without them the suite runs all the same, and says so.
library-suite: setup-dev
	-$(BIN)/python tests/conformance/library_suite.py

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

bench: setup
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/attention.py --causal
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/training.py --size demo
	$(BIN)/python benchmarks/decoding.py

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info
