# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up its own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-the-demo

.PHONY: help demo test lint types unit setup fuzz kill bench large clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## create .venv and install acemerge with what the tests need

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(DEMO_STAMP)

# The demo needs a part of that, which installs in a minute.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[bench]'
	@touch $@

demo: $(DEMO_STAMP)  ## train experts of a real text model, merge them, compare, ask the merged model
	$(BIN)/acemerge demo

test: setup lint types unit  ## everything CI checks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2 --dist worksteal

FUZZ_EXAMPLES ?= 10000
PROPERTY_EXAMPLES ?= 1000
fuzz: setup  ## every parser against FUZZ_EXAMPLES damaged inputs each (10000); every other property with PROPERTY_EXAMPLES (1000)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/pytest tests/test_fuzz.py --hypothesis-show-statistics
	FUZZ_EXAMPLES=$(PROPERTY_EXAMPLES) $(BIN)/pytest -m hypothesis --ignore tests/test_fuzz.py

kill: setup  ## kill a merge at every one of its file-system operations
	for flags in "" "--overwrite" "--overwrite --no-exchange"; do \
	  folder=$$(mktemp -d) && PYTHONPATH=tests/support $(BIN)/python tests/support/kill_harness.py $$folder/scene --every $$flags; \
	  code=$$?; rm -rf "$$folder"; [ $$code = 0 ] || exit $$code; \
	done

BENCHMARKS = ace_speed methods_speed sweep bandwidth growth end_to_end
bench: setup  ## every quick benchmark in turn; MERGEKIT=ENV/bin/mergekit-yaml to compare with it too
	for name in $(BENCHMARKS); do echo "## $$name" && $(BIN)/python benchmarks/$$name.py || exit 1; done

LARGE_FOLDER ?= /tmp
large: setup  ## ACE on 38 GB of models, more than most machines' memory: 43 GB of disk in LARGE_FOLDER (/tmp)
	$(BIN)/python benchmarks/large.py --folder $(LARGE_FOLDER)

clean:  ## remove what make created
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
