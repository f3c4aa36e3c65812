# Needs make and Python 3.11 or newer; everything else goes into .venv.
# `make test` is what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 5000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test long check sim clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

venv: $(STAMP)  ## create .venv with the pinned dependencies

$(STAMP): pyproject.toml requirements.lock
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); Tiercel needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV); the first time takes a few minutes: Spark is large."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## the demonstration
	@$(BIN)/tiercel demo

# Three processes on two cores: tests on Spark, the chaos run above all, often wait. Each has a session.
test: check  ## check, then all tests
	$(BIN)/pytest -n 3 --dist worksteal

long: $(STAMP)  ## tests that differ little from others and take long
	$(BIN)/pytest -m long -n 2 --dist worksteal

check: $(STAMP)  ## lint, format, types, architecture
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src
	$(BIN)/lint-imports --no-logo

sim: $(STAMP)  ## simulate SEEDS seeds (5000)
	$(BIN)/tiercel sim --seeds $(SEEDS)

clean:  ## remove everything that was generated, .venv too
	rm -rf $(VENV) build dist out src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
	  .import_linter_cache spark-warehouse metastore_db derby.log
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
