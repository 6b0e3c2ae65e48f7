# Two commands do everything on a machine with python3, make, git and gcc: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint licences

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train every method on handwritten digits and compare them in a table and a picture
	@echo "==> Comparing all methods on handwritten digits (a few minutes; if interrupted, run make demo again to continue)"
	@$(BIN)/intbmoe compare digits --methods all
	@echo "==> Open runs/digits/compare/all/report.html"

# Two processes; all tests of a file run in the same one. The last -n counts, so ARGS="-n 0" runs in one process.
# Only these two pytest plugins of other packages are needed here; loading all of them takes each process seconds.
# Every process has one thread, and those that a test asks for sleep while they wait: two processes need both cores.
test: $(READY) ## run the tests; ARGS are passed to pytest, such as ARGS="-m slow" or ARGS="-n 0 tests/test_cli.py"
	@echo "==> Running the tests"
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(BIN)/python -m pytest -p xdist -p _hypothesis_pytestplugin -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

gpu-test: $(READY) ## run the tests that need a CUDA device, in several processes that share it
	@echo "==> Running the tests on the GPU"
	@$(BIN)/python -m pytest -m gpu -n auto --dist worksteal $(ARGS)

lint: $(READY) ## check style and formatting with ruff, and the layers with import-linter
	@echo "==> Checking style, formatting and layers"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

licences: $(READY) ## list the installed packages with version and licence; ARGS=--json for other programs
	@$(BIN)/python .ci/licences.py $(ARGS)

# Touched last, so that an interrupted installation starts again. Only the slow steps of pip's output are shown.
$(READY): pyproject.toml constraints.txt setup.py .ci/install $(wildcard locks/*.txt) $(wildcard src/intbmoe/ops/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "intbmoe needs Python 3.11 or later; try make PYTHON=python3.12")'
	@echo "==> Installing intbmoe and its tools into .venv (a minute or more; longer if torch is large)"
	@$(PYTHON) -m venv .venv
	@.ci/install \
		| awk '/Downloading .*\.(whl|tar)[^.]/ || /^Installing/ {sub(/^ */, "    "); sub(/: .*/, " …"); print; fflush()}'
	@touch $@
