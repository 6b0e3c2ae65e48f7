# Two commands do everything on a machine with python3, make, git and gcc: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint licences

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train every method on handwritten digits, and compare them in a table and a picture
	@echo "==> Comparing all methods on handwritten digits (a few minutes; make demo again goes on where it was stopped)"
	@$(BIN)/intbmoe compare digits --methods all
	@echo "==> Open runs/digits/compare/all/report.html"

# Two processes, a file of tests whole in one of them. pytest's last -n counts: ARGS="-n 0" is one process.
# Of other packages' plugins for pytest only these two are of use here; all of them take each process seconds to load.
test: $(READY) ## run the tests; ARGS="-m slow", ARGS="-n 0 tests/test_cli.py" and the like go to pytest
	@echo "==> Running the tests"
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -p xdist -p _hypothesis_pytestplugin -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

gpu-test: $(READY) ## run the tests that need a CUDA device, several processes on the one device
	@echo "==> Running the tests on the GPU"
	@$(BIN)/python -m pytest -m gpu -n auto --dist worksteal $(ARGS)

lint: $(READY) ## check style and formatting with ruff, and the layers with import-linter
	@echo "==> Checking style, formatting and layers"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

licences: $(READY) ## list the packages that are installed, with version and licence; ARGS=--json for other programs
	@$(BIN)/python .ci/licences.py $(ARGS)

# Touched last, so that an interrupted installation starts again. pip's output is thinned to what takes its time.
$(READY): pyproject.toml constraints.txt setup.py .ci/install $(wildcard locks/*.txt) $(wildcard src/intbmoe/ops/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "intbmoe needs Python 3.11 or later; try make PYTHON=python3.12")'
	@echo "==> Installing intbmoe and its tools into .venv (a minute or more; longer where torch is large)"
	@$(PYTHON) -m venv .venv
	@.ci/install \
		| awk '/Downloading .*\.(whl|tar)[^.]/ || /^Installing/ {sub(/^ */, "    "); sub(/: .*/, " …"); print; fflush()}'
	@touch $@
