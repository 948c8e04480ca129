# Two commands matter: `make demo` and `make test`. Each builds .venv if it must, and starts at once if not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED_FROM := pyproject.toml constraints.txt $(shell find native -name "*.cpp" -o -name "*.h" -o -name "CMakeLists.txt")

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contracts unit bench demo-model clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/.installed ## install, and stream a story from the bundled model
	@printf 'Once upon a time'
	@$(BIN)/onward generate "Once upon a time" --max-new-tokens 400 --temperature 0.5 --seed 10
	@echo

test: lint types contracts unit ## everything that must pass: lint, types, import contracts, tests

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	@$(BIN)/lint-imports

unit: $(VENV)/.installed-dev
	@$(BIN)/pytest

bench: $(VENV)/.installed-dev ## decode and prefill beside transformers, and the machine's limit
	@$(BIN)/python -m benchmarks.decode

demo-model: $(VENV)/.installed-dev ## rebuild corpus, tokenizer and both bundled models (about an hour)
	@$(BIN)/python -m training

clean: ## remove what the targets above made
	rm -rf $(VENV) build .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INSTALLED_FROM) | $(VENV)/bin/python
	@echo "installing Onward into $(VENV) …"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools …"
	@$(PIP) --editable '.[dev]'
	@touch $@
