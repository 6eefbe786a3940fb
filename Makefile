# make demo   set up, train a small English-German model on the bundled corpus, score it, reload it, translate
# make test   set up, run the whole test suite
# make lint   ruff, format and lint
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint setup setup-dev clean

demo: setup
	$(BIN)/relpos train quickstart --output_dir out/quickstart --overwrite
	$(BIN)/relpos evaluate out/quickstart --beams 1,4
	$(BIN)/python -m relpos.training.show_translations out/quickstart

test: setup-dev
	$(BIN)/python -m pytest -n 2 -q

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info
