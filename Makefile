# make train   set everything up and run the nano experiment to its end
# make test    set everything up, then lint, type-check and test
# make setup   only set up: .venv, pinned packages, the sandbox
# make bench   measure what docs/performance.md says of a CPU
# make trl     measure the engine against TRL: make trl MODEL=a folder or GGUF file of SmolLM2-135M
# make gpu     check the engine on a CUDA GPU, and measure it there

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= configs/nano.toml

# Left out, TORCH is the CPU build. With a CUDA GPU: make train TORCH=torch==2.13.0
export TORCH
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: train test lint format setup browser sshd bench gpu clean

train: $(READY)
	$(BIN)/metatrainer train $(CONFIG)

test: lint browser sshd
	$(BIN)/pytest

# The tests of the page drive a real one.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || scripts/browser

# The tests of rented machines are given real ones.
sshd:
	@command -v sshd >/dev/null || scripts/sshd

bench: $(READY)
	$(BIN)/python benchmarks/nano_job.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/validate.py

# TRL is needed for nothing else. See benchmarks/against_trl.py for where the model is from.
trl: $(READY)
	$(BIN)/python -m pip install -q trl==1.16.0
	$(BIN)/python benchmarks/against_trl.py $(MODEL)

gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): scripts/setup requirements.lock pyproject.toml
	@scripts/setup $(VENV)
	@touch $@

# Runs are kept: they are results.
clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist
	find src tests -name __pycache__ -type d -exec rm -rf {} +
