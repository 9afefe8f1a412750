# Every target does the set-up it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
ARGS ?=

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test check lint types cover model sim recovery protos bench bench-policies interop clean fuzz chaos races

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(SETUP): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("radixpool needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup: $(SETUP)  ## make .venv with the locked versions

run: $(SETUP)  ## the demo: manager, pool holder and two workers on a real model (ARGS="--help" for options)
	$(BIN)/radixpool demo $(ARGS)

test: $(SETUP)  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: $(SETUP) lint types  ## lint, types, import rules, generated code
	$(BIN)/lint-imports
	$(BIN)/python scripts/protos.py --check
	$(BIN)/python scripts/buf.py

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(SETUP)
	$(BIN)/mypy

cover: $(SETUP)  ## branch coverage of radix/
	$(BIN)/python -m coverage run --branch --source=radix,src/radixpool/radix -m pytest -q tests/radix tests/model
	$(BIN)/python -m coverage report --skip-covered --show-missing

model: $(SETUP)  ## the cache against an independent oracle, step by step (STEPS=1000000)
	STEPS=$(or $(STEPS),100000) $(BIN)/python -m pytest tests/model -q -p no:cacheprovider --timeout=0

sim: $(SETUP)  ## seeded simulation of clients, workers and failures (SEEDS=10000)
	SEEDS=$(or $(SEEDS),10000) $(BIN)/python -m pytest tests/radix/test_simulator.py -q --timeout=0

fuzz: $(SETUP)  ## random messages against a live manager (EXAMPLES=100000)
	RADIXPOOL_FUZZ_EXAMPLES=$(or $(EXAMPLES),20000) $(BIN)/python -m pytest tests/rpc/test_fuzz.py -q --timeout=0

chaos: $(SETUP)  ## kill and freeze every process at every named step under load (ROUNDS=100 SEED=1 FIRST=1)
	RADIXPOOL_CHAOS_ROUNDS=$(or $(ROUNDS),100) RADIXPOOL_CHAOS_SEED=$(or $(SEED),1) \
	  RADIXPOOL_CHAOS_FIRST=$(or $(FIRST),1) RADIXPOOL_CHAOS_SUMMARY=out/chaos.json \
	  $(BIN)/python -m pytest tests/chaos -q -s --timeout=0

races: $(SETUP)  ## two managers at once for one socket, port and directory (TRIES=100)
	RADIXPOOL_RACES=$(or $(TRIES),100) $(BIN)/python -m pytest tests/rpc/test_two_managers.py -q --timeout=0

recovery: $(SETUP)  ## managers killed at any store of the directory, many times (STEPS=200000 ROUNDS=20)
	RADIXPOOL_DIRECTORY_STEPS=$(or $(STEPS),200000) RADIXPOOL_KILL_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest tests/directory -q --timeout=0

protos: $(SETUP)  ## regenerate src/radixpool/v1 from protos/
	$(BIN)/python scripts/protos.py

bench: $(SETUP)  ## speed of the tree on this machine (ARGS="--help" for options)
	$(BIN)/python bench/tree.py $(ARGS)

bench-policies: $(SETUP)  ## every eviction policy on the real traces, with plots
	$(BIN)/python bench/policies.py $(ARGS)

interop: $(SETUP)  ## let NVIDIA Dynamo's router follow our KV events (installs 230 MB into .interop)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .interop ai-dynamo-runtime==1.6.1
	DYN_LOG=error PYTHONPATH=.interop $(BIN)/python -m pytest tests/ops/test_kv_dynamo.py $(ARGS)

clean:  ## remove everything that make made
	rm -rf .venv .interop .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist out src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
