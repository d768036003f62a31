PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export DS_BUILD_OPS = 0
export DS_ACCELERATOR ?= cpu

.PHONY: environment quickstart test lint types unit format

# Torch goes first, by the exact version that pyproject.toml pins: left to the
# resolver, a machine without a GPU may receive a CUDA build of several gigabytes.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)

quickstart: environment
	$(BIN)/dspark run configs/quickstart.yaml

test: environment lint types unit

environment: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types:
	$(BIN)/mypy

# Two at a time, a file in one process: much of the time goes by waiting for processes to start and to end.
unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=2 --dist=loadfile

include tests/engines/engines.mk

include tests/pipelines/kill_sweep.mk

include tests/dspark/evidence.mk

include tests/pipelines/training/training_kill_sweep.mk

include benchmarks/codecs.mk

include tests/storage/cache_evidence.mk
