PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export DS_BUILD_OPS = 0
export DS_ACCELERATOR ?= cpu

.PHONY: environment quickstart test lint types unit

# Torch goes first, by the exact version that pyproject.toml pins: left to the
# resolver, a machine without a GPU may receive a CUDA build of several gigabytes.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)

environment: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
