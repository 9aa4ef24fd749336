# Two commands do everything on a machine with python3, make and git:
#   make demo    install into .venv, then train, certify, attack, audit and export a small network
#   make test    install into .venv with the development tools, then lint, check types, test
# and for those who want to know what it costs, with the paper's library beside it (hours, or minutes):
#   make bench   measure everything on this machine and write docs/benchmarks.md; DATA=folder of CIFAR-10
#   make bench-quick
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
BENCHMARKS := kernels overhead scaling orthogonalizers forecast
# These read images: of CIFAR-10 if DATA is its folder, else the digits of the package.
TRAINED := methods recipe
# Examples in docstrings and documents build on each other, so they run one after another.
EXAMPLES = $(BIN)/python -m pytest --cov --cov-append --cov-report=term:skip-covered src docs README.md

.NOTPARALLEL:
.PHONY: demo test test-all lint types bench bench-quick clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

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

# What is measured has a stamp until all is, so that an interrupted run goes on where it was.
bench: $(addprefix $(VENV)/.measured-,$(BENCHMARKS) $(TRAINED))
	$(BIN)/python -m benchmarks page
	rm $^

$(VENV)/.measured-%: | $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks $* $(if $(filter $*,$(TRAINED)),$(if $(DATA),--data $(DATA)))
	touch $@

bench-quick: $(VENV)/.installed-bench
	set -e; for command in $(BENCHMARKS) $(TRAINED); do $(BIN)/python -m benchmarks $$command --quick; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[plot,train]'
	touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache
