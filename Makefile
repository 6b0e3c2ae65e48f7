# Two commands do everything on a machine with python3, make, git and gcc: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train every method on handwritten digits, and compare them in a table and a picture
	@echo "==> Comparing all methods on handwritten digits (a few minutes; make demo again goes on where it was stopped)"
	@$(BIN)/intbmoe compare digits --methods all

test: $(READY) ## run the tests; ARGS="-m slow" and the like go to pytest
	@echo "==> Running the tests"
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## check style and formatting with ruff
	@echo "==> Checking style and formatting"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# Touched last, so that an interrupted installation starts again. pip's output is thinned to what takes its time.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/intbmoe/ops/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "intbmoe needs Python 3.11 or later; try make PYTHON=python3.12")'
	@echo "==> Installing intbmoe and its tools into .venv (about a minute; longer where torch is large)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt -e '.[dev]' \
		| awk '/Downloading .*\.(whl|tar)[^.]/ || /^Installing/ {sub(/^ */, "    "); sub(/: .*/, " …"); print; fflush()}'
	@touch $@
