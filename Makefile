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
INPUTS := setup.cfg pyproject.toml constraints.txt \
    hvdtrain/environment/recipe.py hvdtrain/environment/wrapper.py
FINGERPRINT := $(shell { $(PYTHON) -VV; cat $(INPUTS); } 2>&1 | sha256sum | cut -c1-16)
STAMP := $(VENV)/.setup-$(FINGERPRINT)
TESTS := $(wildcard tests/unit tests/parallel tests/cluster tests/browser)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# mpirun refuses root, which a container often is; and more ranks than cores, which a small machine
# has: in Open MPI 5 and 4 each by its own name.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1

.PHONY: help setup demo test lint format clean
help:  ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP)  ## make .venv with everything in it, Horovod included

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@[ "$$($(VENV)/bin/python -VV 2>&1)" = "$$($(PYTHON) -VV 2>&1)" ] \
	    || $(PYTHON) -m venv --clear $(VENV)
	@# Editable: what a developer changes is what the ranks run, with no second install.
	python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[all,test]'
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

clean:  ## remove .venv and what tools left; the cache of built wheels stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
