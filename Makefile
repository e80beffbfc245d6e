# make demo: from a bare machine to a training over two ranks. make help: the other targets.
# Needs Python >= 3.11 with venv and headers, make and g++ (Debian: python3-venv python3-dev make
# g++). MPI, CMake and the frameworks come from the package index into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
DEMO_OPTIONS ?=

# The name of the stamp is a fingerprint of what the set-up depends on, so that a change of any of
# it sets up again and a fresh checkout, which changes only dates, does not.
BUILD_TOOLS := hvdtrain/environment/build-tools.txt
INPUTS := setup.cfg pyproject.toml requirements.txt requirements-cuda.txt $(BUILD_TOOLS) \
    hvdtrain/environment/recipe.py hvdtrain/environment/wrapper.py
FINGERPRINT := $(shell { $(PYTHON) -VV; cat $(INPUTS); } 2>&1 | sha256sum | cut -c1-16)
STAMP := $(VENV)/.setup-$(FINGERPRINT)
TORCH := $(shell grep -oE 'torch(vision)?==.*' setup.cfg)
PIP := python -m pip install --quiet --disable-pip-version-check
WHEELS := --only-binary :all:
TESTS := $(wildcard tests/unit tests/parallel tests/cluster tests/browser)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# mpirun refuses root, which a container often is; and more ranks than cores, which a small machine
# has: in Open MPI 5 and 4 each by its own name.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1

.PHONY: help setup demo test lint format requirements clean
help:  ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP)  ## make .venv with everything in it, Horovod included

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@[ "$$($(VENV)/bin/python -VV 2>&1)" = "$$($(PYTHON) -VV 2>&1)" ] \
	    || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) $(WHEELS) --require-hashes --requirement requirements.txt
	@# By version alone: a CPU build from another index is another file.
	$(PIP) $(WHEELS) --no-deps $(TORCH)
	@if python -m pip show torch | grep '^Requires:.*cuda' >/dev/null; then \
	    $(PIP) $(WHEELS) --require-hashes --requirement requirements-cuda.txt; fi
	@# Editable: what a developer changes is what the ranks run, with no second install.
	$(PIP) --no-deps --no-build-isolation --editable .
	hvdtrain install-horovod
	@rm -f $(VENV)/.setup-* && touch $@

demo: setup  ## train on handwritten digits over two ranks
	mpirun -n 2 python -m hvdtrain.mnist $(DEMO_OPTIONS)

test: setup lint  ## lint, then all tests
	python -m pytest $(TESTS)

lint: setup  ## ruff and mypy
	ruff check .
	ruff format --check .
	mypy

format: setup  ## let ruff rewrite the code
	ruff check --fix .
	ruff format .

# Pins that stand in the files are kept: take out what shall move, or all of them.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --custom-compile-command 'make requirements'

requirements:  ## write the pins and their hashes anew, with uv (docs/developing.md)
	$(LOCK) --all-extras --constraint requirements.txt --constraint requirements-cuda.txt setup.cfg \
	    | awk -v all=requirements.txt -v cuda=requirements-cuda.txt \
	        '/^#/ { print > all; print > cuda; next } /^[a-z]/ { out = all } \
	        /^(cuda|nvidia|triton)/ { out = cuda } /^torch(vision)?==/ { out = "/dev/null" } \
	        { print > out }'
	printf '%s\n' cmake packaging setuptools wheel \
	    | $(LOCK) --constraint $(BUILD_TOOLS) --output-file $(BUILD_TOOLS) -

clean:  ## remove .venv and what tools left; the cache of built wheels stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
