# Everything sets itself up: the first call makes .venv and installs into it, later calls are quick.
#
#   PYTHON=python3.12            the interpreter to build .venv from (3.11 or newer)
#   TORCH_INDEX=URL              another pip index for torch, such as a CPU build's
#   ARGS="parallel.tp=2 ..."     passed on to `mfun train` or to pytest
#   WORKERS=4                    test processes

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: help train test test-full proofs check format build wheel-test clean

help:
	@echo "make train        train the default model on 4 local ranks (ARGS=... to change it)"
	@echo "make test         the tests"
	@echo "make test-full    the tests with the long grids"
	@echo "make proofs       install Rocq if it is missing (Debian), check the theorems and the code"
	@echo "make check        lint, format and types"
	@echo "make format       put the format right"
	@echo "make build        wheel and sdist in dist/"
	@echo "make wheel-test   install the wheel elsewhere and use it"
	@echo "make clean        remove .venv and what was built"

train: .venv/.run
	$(BIN)/mfun train $(ARGS)

test: .venv/.dev
	$(PYTEST) $(ARGS)

test-full: .venv/.dev
	$(PYTEST) -m "" $(ARGS)

proofs: .venv/.dev
	@packages=$$($(BIN)/python -m proofs.rocq) || { $(SUDO) apt-get update -q && \
	  $(SUDO) apt-get install -q -y --no-install-recommends $$packages; } || true
	$(BIN)/python -m proofs $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build

wheel-test: build
	bash .ci/wheel-test

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mfun needs Python 3.11 or newer, and $(PYTHON) is older or missing: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.run: pyproject.toml .venv/.made
	$(PIP) -e '.[plot]'
	touch $@

.venv/.dev: pyproject.toml .venv/.made
	$(PIP) -e '.[dev]'
	touch $@ .venv/.run
