# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up its own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-the-demo
# Exact versions of everything that is installed, pip and what builds the package included.
LOCK ?= requirements.lock
# The same with the hashes of all but torch; empty where a lock has none. `make setup HASHES=` for an index with builds of its own.
HASHES ?= $(wildcard $(LOCK:.lock=.hashes))

.PHONY: help demo test check core lint types unit setup lock test-latest test-oldest test-install fuzz kill ray-deaths bench large clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## create .venv and install acemerge with what the tests need

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c $(LOCK)
INSTALL = $(BIN)/python $(PIP_INSTALL) --build-constraint $(LOCK)

INSTALL_HASHED = $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --build-constraint $(LOCK) -r $(HASHES)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade pip

$(STAMP): pyproject.toml $(LOCK) | $(BIN)/python
	$(if $(HASHES),$(INSTALL_HASHED))
	$(INSTALL) -e '.[dev]'
	$(BIN)/python -m pip check
	@touch $@ $(DEMO_STAMP)

# The demo needs a part of that, which installs in a minute.
$(DEMO_STAMP): pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e '.[bench]'
	@touch $@

demo: $(DEMO_STAMP)  ## train experts of a real text model, merge them, compare, ask the merged model
	$(BIN)/acemerge demo

test: setup lint types unit  ## everything CI checks

check: setup  ## a developer's quick answer: lint, types, and the tests of the core, side by side
	$(MAKE) --no-print-directory -j 3 --output-sync=target lint types core

CORE = tests/numerics tests/methods/test_ace.py tests/planning tests/cli/test_cli.py
core: setup
	$(BIN)/pytest -n 2 --dist loadfile $(CORE)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/deptry src

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2 --dist loadfile

# uv only resolves: pip installs.
UV := .venvs/uv/bin/uv
$(UV):
	$(PYTHON) -m venv .venvs/uv
	.venvs/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8

RESOLVE = $(UV) pip compile pyproject.toml --extra dev --quiet --python-version 3.11
NEWEST = $(RESOLVE) --config-file lock.toml --universal --custom-compile-command 'make lock'

# The lock itself carries no hashes: pip would ask for one of every package, and a CPU build of torch has not the hash of the
# index's build. A second file has those of all others.
lock: $(UV)  ## bring requirements.lock up to date with pyproject.toml; UPGRADE=--upgrade for the newest versions of everything
	$(NEWEST) $(UPGRADE) -o requirements.lock
	$(NEWEST) -c requirements.lock --generate-hashes --no-emit-package torch --no-annotate -o requirements.hashes

# Newest but torch, which stays at the version that lock.toml names: newer ones may come with gigabytes of CUDA libraries only.
test-latest: $(UV)  ## `make test` with the newest releases of everything
	$(NEWEST) -o .venvs/latest.lock --upgrade
	$(MAKE) test VENV=.venvs/latest LOCK=.venvs/latest.lock

# On Linux this downloads 3 GB: of so old a torch the index has only the CUDA build, which runs without a GPU too.
test-oldest: $(UV)  ## the unit tests with the lowest versions that pyproject.toml declares (PYTHON=python3.11)
	$(RESOLVE) --no-config --resolution lowest-direct --upgrade -o .venvs/oldest.lock
	$(MAKE) unit VENV=.venvs/oldest LOCK=.venvs/oldest.lock

test-install: setup  ## build wheel and source archive; install each into an empty environment; plan, merge and verify with it
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist -d dist
	$(BIN)/python -m pip wheel --quiet --no-deps --build-constraint $(LOCK) -w dist .
	for package in dist/*; do sh tests/support/try_package.sh $$package $(LOCK) $(PYTHON) || exit 1; done

FUZZ_SECONDS ?= 1800
FUZZ_EXAMPLES ?= 1000
PROPERTY_EXAMPLES ?= 1000
fuzz: setup  ## every parser guided by coverage, for FUZZ_SECONDS together (1800); then by hypothesis, and every other property
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	PYTHONPATH=tests/support $(BIN)/python tests/support/fuzz.py --seconds $(FUZZ_SECONDS)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/pytest tests/test_fuzz.py --hypothesis-show-statistics
	FUZZ_EXAMPLES=$(PROPERTY_EXAMPLES) $(BIN)/pytest -m hypothesis --ignore tests/test_fuzz.py

kill: setup  ## disturb every verb: kill it at each operation on files, let each fail, fill its disk, close its output (KILL="--most 20")
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/kill_harness.py $(KILL)

RAY_RUNS ?= 50
ray-deaths: setup  ## kill worker, raylet, head and driver of a merge on a cluster, RAY_RUNS times (50) in all
	$(BIN)/python benchmarks/ray_deaths.py --runs $(RAY_RUNS)

BENCHMARKS = ace_speed methods_speed sweep bandwidth growth end_to_end
bench: setup  ## every quick benchmark in turn; MERGEKIT=ENV/bin/mergekit-yaml to compare with it too
	for name in $(BENCHMARKS); do echo "## $$name" && $(BIN)/python benchmarks/$$name.py || exit 1; done

LARGE_FOLDER ?= /tmp
large: setup  ## ACE on 38 GB of models, more than most machines' memory: 43 GB of disk in LARGE_FOLDER (/tmp)
	$(BIN)/python benchmarks/large.py --folder $(LARGE_FOLDER)

clean:  ## remove what make created
	rm -rf $(VENV) .venvs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
