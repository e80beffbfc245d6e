# make demo: from a bare machine to a training over two ranks. make help: the other targets.
# make check, make test, make test-all: minutes, ten minutes, everything; each contains the one before.
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
BUILD_TOOLS := hvdtrain/commands/install_horovod/build-tools.txt
PINS := requirements.txt requirements-check.txt requirements-cuda.txt
INPUTS := setup.cfg pyproject.toml $(PINS) $(BUILD_TOOLS) \
    hvdtrain/commands/install_horovod/recipe.py
TORCH := torch==2.13.0 torchvision==0.28.0
FINGERPRINT := $(shell { $(PYTHON) -VV; echo $(TORCH); cat $(INPUTS); } 2>&1 | sha256sum | cut -c1-16)
STAMP := $(VENV)/.setup-$(FINGERPRINT)
# Where all is set up, `make check` takes that; else an environment without framework and Horovod.
CHECK := $(if $(wildcard $(STAMP)),$(VENV),.venv-check)
CHECK_STAMP := $(CHECK)/.setup-$(FINGERPRINT)
PATHS := $(PATH)
# Its argument is shown in a terminal, with the seconds, while pip is silent.
PIP = python -m hvdtrain.system.runtime.terminal $(1) \
    python -m pip install --quiet --disable-pip-version-check
PYTEST := python -m pytest
TWO_WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
WHEELS := --only-binary :all:

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# mpirun refuses root, which a container often is; and more ranks than cores, which a small machine
# has: in Open MPI 5 and 4 each by its own name.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1

.PHONY: help setup demo check test test-all extras peers soak docs dist format requirements clean
help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

setup: $(STAMP)  ## make .venv with everything in it, Horovod included

define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@[ "$$($(@D)/bin/python -VV 2>&1)" = "$$($(PYTHON) -VV 2>&1)" ] \
	    || $(PYTHON) -m hvdtrain.system.runtime.terminal "a new environment in $(@D)" \
	    $(PYTHON) -m venv --clear $(@D)
endef

$(STAMP):
	@echo "$(@D) is set up: TensorFlow, PyTorch, Open MPI and tools (3 GB, with CUDA" \
	    "more), then Horovod's build: some minutes"
	$(environment)
	@$(call PIP,"1 of 4: pip installs TensorFlow and Open MPI and tools") \
	    $(WHEELS) --require-hashes --requirement requirements.txt
	@# By version alone: a CPU build from another index is another file.
	@$(call PIP,"2 of 4: pip installs PyTorch") $(WHEELS) --no-deps $(TORCH)
	@if python -m pip show torch | grep '^Requires:.*cuda' >/dev/null; then \
	    $(call PIP,"2 of 4: pip installs CUDA for PyTorch") \
	    $(WHEELS) --require-hashes --requirement requirements-cuda.txt; fi
	@# Editable: what a developer changes is what the ranks run, with no second install.
	@$(call PIP,"3 of 4: pip installs hvdtrain") --no-deps --no-build-isolation --editable .
	@echo "4 of 4: Horovod is built, or taken from the cache of earlier builds"
	hvdtrain install-horovod
	@rm -f $(VENV)/.setup-* && touch $@

demo: setup  ## train on handwritten digits over two ranks
	mpirun -n 2 python -m hvdtrain.mnist $(DEMO_OPTIONS)

.venv-check/.setup-$(FINGERPRINT): export PATH := $(CURDIR)/.venv-check/bin:$(PATHS)
.venv-check/.setup-$(FINGERPRINT):
	$(environment)
	@$(call PIP,"1 of 2: pip installs what make check needs") \
	    $(WHEELS) --require-hashes --requirement requirements-check.txt
	@$(call PIP,"2 of 2: pip installs hvdtrain") --no-deps --no-build-isolation --editable .
	@rm -f $(@D)/.setup-* && touch $@

check: export PATH := $(CURDIR)/$(CHECK)/bin:$(PATHS)
check: $(CHECK_STAMP)  ## lint, imports, unit tests: no framework, no Horovod; minutes from a clone
	ruff check .
	ruff format --check .
	codespell
	lint-imports --no-logo --no-cache
	python .ci/house.py
	$(PYTEST) tests/unit --numprocesses 2

test: setup  ## check, types, each framework in one process, one run on real ranks per contract
	@$(MAKE) --no-print-directory check
	mypy & types=$$!; $(PYTEST) tests/framework $(TWO_WORKERS); wait $$types
	$(PYTEST) tests/parallel -m contract $(TWO_WORKERS) --durations=0 | tee .durations.txt

# What mostly waits, for processes and hosts and time, and what mostly computes; the first of them
# has all that may install packages of the system. New files are of the second.
WAITING := $(wildcard tests/cluster tests/faults tests/browser $(patsubst %,tests/parallel/test_%.py,\
    bad_input commands doctor elastic launch saves signs_of_life spawn terminal trainers unequal))
COMPUTING := $(wildcard tests/fuzz tests/parallel) $(addprefix --ignore=,$(WAITING))
REST := python -m pytest -m 'not contract and not timing' --durations=0

test-all: setup  ## all tests, as the continuous integration runs them
	coverage erase
	@$(MAKE) --no-print-directory test PYTEST='coverage run -m pytest'
	coverage combine --quiet
	coverage report
	@$(MAKE) --no-print-directory docs
	@# Side by side; what the first wrote is shown when both have ended.
	$(REST) $(WAITING) > .waiting.log 2>&1 & waiting=$$!; failed=0; \
	    $(REST) $(COMPUTING) | tee --append .durations.txt || failed=1; \
	    wait $$waiting || failed=1; tee --append .durations.txt < .waiting.log; exit $$failed
	python -m pytest tests/parallel -m timing --durations=0 | tee --append .durations.txt

extras: setup  ## the tests that need DALI, MLflow and wandb: 900 MB
	@$(call PIP,"pip installs DALI and the trackers") \
	    $(WHEELS) --require-hashes --requirement requirements-extras.txt
	HVDTRAIN_LONG=1 $(PYTEST) $(wildcard tests/*/test_dali.py tests/*/test_trackers.py) \
	    tests/unit/training/test_trackers.py

# On top of .venv, whose packages they use and do not change.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.setup-$(FINGERPRINT)
$(PEERS_STAMP) peers: export PATH := $(CURDIR)/$(PEERS)/bin:$(PATH)
$(PEERS_STAMP): requirements-peers.txt $(STAMP)
	$(environment)
	@$(VENV)/bin/python -c 'import sysconfig; \
	    print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@$(call PIP,"pip installs accelerate and Lightning and transformers") \
	    $(WHEELS) --no-deps --require-hashes --requirement requirements-peers.txt
	@rm -f $(PEERS)/.setup-* && touch $@

peers: $(PEERS_STAMP)  ## verify --script on scripts of accelerate, Lightning and transformers
	HVDTRAIN_LONG=1 python -m pytest tests/peers $(TWO_WORKERS)

soak: extras peers  ## what takes too long for test-all: faults again and again, all pairs, peak memory
	HVDTRAIN_LONG=1 $(PYTEST) -s tests/faults
	python -m tests.faults.soak --data ../shared/data/mnist
	python -m tests.faults.soak --data ../shared/data/mnist --framework tensorflow
	python -m tests.fuzz all --seconds 600
	HVDTRAIN_LONG=1 $(PYTEST) -s $(patsubst %,tests/parallel/test_%.py,pairs many_ranks elastic keras)
	python -m benchmarks.memory
	python -m benchmarks.many_ranks

docs: setup  ## make site/ of the pages and the API reference; a dead link or name fails
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "site/index.html is made; with search: python -m http.server --directory site"

# Tools that nothing else needs: in an environment of their own.
DIST_TOOLS := build==1.6.1 twine==7.0.0 setuptools
dist:  ## build sdist and wheel in dist/, check them, and use the wheel in a new environment
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt $(DIST_TOOLS)
	.venv-dist/bin/python -m build --no-isolation --outdir dist
	.venv-dist/bin/python -m twine check --strict dist/*
	! comm -23 <(git ls-files | sort) <(tar -tf dist/*.tar.gz | cut -d / -f 2- | sort) | grep .
	PYTHON=$(PYTHON) .ci/try-wheel dist/*.whl constraints.txt

format: setup  ## let ruff rewrite the code
	ruff check --fix .
	ruff format .

# Pins that stand in the files are kept: take out what shall move, or all of them.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --custom-compile-command 'make requirements'

requirements:  ## write the pins and their hashes anew, with uv (CONTRIBUTING.md)
	$(LOCK) --extra all --extra nvidia --extra docs --extra test --constraint requirements.txt \
	    --constraint requirements-cuda.txt --constraint <(printf '%s\n' $(TORCH)) setup.cfg \
	    | awk -v all=requirements.txt -v cuda=requirements-cuda.txt \
	        '/^#/ { print > all; print > cuda; next } /^[a-z]/ { out = all } \
	        /^(cuda|nvidia|triton)/ { out = cuda } /^torch(vision)?==/ { out = "/dev/null" } \
	        { print > out }'
	{ printf '%s\n' $(TORCH); sed -nE 's/^([a-z].*) \\$$/\1/p' requirements.txt; } \
	    > constraints.txt
	$(LOCK) --extra test --extra mpi --extra completion --constraint requirements.txt \
	    --output-file requirements-check.txt setup.cfg
	$(LOCK) --extra dali --extra mlflow --extra wandb --constraint requirements.txt \
	    --output-file requirements-extras.txt setup.cfg
	printf '%s\n' accelerate lightning transformers \
	    | $(LOCK) --constraint requirements.txt --constraint <(printf '%s\n' $(TORCH)) - \
	    | awk 'NR == FNR { known[$$1]; next } /^[a-z]/ { kept = !($$1 in known) && \
	        !/^(cuda|nvidia|triton|torch=)/ } /^#/ || kept' requirements.txt - > requirements-peers.txt
	printf '%s\n' cmake packaging setuptools wheel \
	    | $(LOCK) --constraint $(BUILD_TOOLS) --output-file $(BUILD_TOOLS) -

clean:  ## remove .venv and what tools left; the cache of built wheels stays
	rm -rf $(VENV) .venv-check .venv-dist $(PEERS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	    .hypothesis .durations.txt .waiting.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
