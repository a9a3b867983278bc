# make train    makes .venv if it is missing, then trains the quickstart's agent
# make test     the same for the tests
# make lint     style, types and layers
#
# ARGS is handed on:      make train ARGS='--name longer --set rl.num_steps=200'
# Another Python:         make test PYTHON=python3.12
# One test at a time:     make test TEST_WORKERS=0 (else one for each core, four at most)
# Another PyTorch build:  make train TORCH_INDEX=URL (its index of wheels, such as the CPU build's)

PYTHON ?= python3
CONFIG ?= configs/quickstart.toml
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
TEST_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))')
# The files of the tests that run alone: no other is imported for them.
ALONE := $(shell grep -rl --include="test_*.py" "mark.alone" tests)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Images of machines often set it; then each process compiles all of etude again, which takes as long as the rest of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test lint

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

train: $(VENV)/.installed-train
	$(BIN)/etude train --config $(CONFIG) $(ARGS)

test: $(VENV)/.installed-test
	@# The second part runs whatever the first one found. 5: ARGS names no such test.
	@status=0; \
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile -m 'not slow and not alone' $(ARGS) || \
	  { status=$$?; test -z "$(ARGS)" || test $$status -ne 5 || status=0; }; \
	$(BIN)/pytest -m 'alone and not slow' $(or $(ARGS),$(ALONE)) || { test $$? -eq 5 || status=1; }; \
	exit $$status

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

# PyTorch first and on its own: its build (CPU, CUDA) is the user's choice, the rest follows it.
$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed; $(PYTHON) is" \
	    "$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing)." \
	    "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.installed-train: $(VENV)/.installed-torch pyproject.toml constraints.txt
	@echo "installing etude into $(VENV)"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-torch pyproject.toml constraints.txt
	@echo "installing etude and what its tests need into $(VENV)"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
