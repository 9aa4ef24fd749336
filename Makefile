# Two commands do everything on a machine with python3, make and git:
#   make demo    install into .venv, then train a small network and show that its layers are orthogonal
#   make test    install into .venv with the development tools, then lint, check types, test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
# Examples in docstrings and documents build on each other, so they run one after another.
EXAMPLES = $(BIN)/python -m pytest --cov --cov-append --cov-report=term:skip-covered src docs README.md

.PHONY: demo test test-all lint types bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/first_network.py

test: lint types
	$(BIN)/python -m pytest -n 2 -m "not slow" --cov --cov-report= tests
	$(EXAMPLES) --cov-fail-under=95

test-all: lint types
	$(BIN)/python -m pytest -n 2 --cov --cov-report= tests
	$(EXAMPLES)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/spectrum.py
	$(BIN)/python benchmarks/methods.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache
