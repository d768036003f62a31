PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export DS_BUILD_OPS = 0
export DS_ACCELERATOR ?= cpu

.PHONY: environment quickstart test lint types imports unit coverage fuzz format docs lock wheel-test

# Torch goes first and by exact version: left to the resolver, a machine without a GPU may receive a CUDA build of
# several gigabytes.
TORCH := $(shell grep '^torch==' requirements.lock)

quickstart: environment
	$(BIN)/dspark run configs/quickstart.yaml

test: environment lint types imports unit

environment: $(VENV)/installed

$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	$(BIN)/pip check --quiet
	touch $@

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types:
	$(BIN)/mypy

# Floors and rings, and that what is imported is asked for.
imports:
	$(BIN)/lint-imports
	$(BIN)/deptry .

# Two at a time, a file in one process: much of the time goes by waiting for processes to start and to end.
unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=2 --dist=loadfile $(PYTEST_OPTIONS)

# The lines that the tests reach (of this process and of those that it forks, not of Ray's workers).
coverage:
	$(MAKE) unit PYTEST_OPTIONS="--cov --cov-report=term:skip-covered"

# Any content of the files that the product reads; `make test` tries a hundred of each.
fuzz: environment
	$(BIN)/python benchmarks/evidence/fuzz.py --examples 5000 --output docs/evidence/fuzz.json

# Pages that are made from the code.
docs: environment
	$(BIN)/python -m pipelines.settings.reference > docs/settings.md

# A wheel in an environment of its own, in an empty folder: `dspark doctor` and the tiny run. Minutes.
wheel-test: environment
	$(BIN)/python benchmarks/evidence/wheel.py

# New versions within the ranges of pyproject.toml.
lock:
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet $(TORCH)
	.lock-venv/bin/pip install --quiet --editable '.[dev]'
	{ head -1 requirements.lock; .lock-venv/bin/pip freeze --exclude-editable | sed "s/+cpu$$//"; } > requirements.new
	mv requirements.new requirements.lock && rm -rf .lock-venv

include benchmarks/evidence/evidence.mk
