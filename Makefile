# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up its own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint types unit setup clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## create .venv and install acemerge with what the demo and the tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## train experts of a real text model, merge them, compare, ask the merged model
	$(BIN)/acemerge demo

test: setup lint types unit  ## everything CI checks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest

clean:  ## remove what make created
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
