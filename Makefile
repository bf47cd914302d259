# Two commands: `make demo` and `make test`. Both set up .venv themselves and need only python3 >= 3.11
# (another interpreter: make PYTHON=python3.12 demo).
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= demo-out

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types install install-dev clean

help:
	@echo "make demo         set up $(VENV), draw a realistic window, plan it, verify the plan"
	@echo "make test         everything CI runs: ruff, mypy, pytest"
	@echo "make install      only the set-up of demo (no torch)"
	@echo "make install-dev  only the set-up of test"
	@echo "make clean        remove $(VENV) and $(DEMO_DIR)"

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# torch stays out here: planning needs none of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python >= 3.11 is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV)" >&2; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing the package" >&2
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e .
	@touch $@

# constraints.txt pins torch: resolved freely it may be a build of several gigabytes.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools and torch" >&2
	@$(PIP) --no-build-isolation -e ".[dev,torch,parquet,report,train,simulate,ray]"
	@touch $@

# The topology and the cap are those the preset is meant for (docs/synth.md).
demo: $(VENV)/.installed
	@mkdir -p $(DEMO_DIR)
	$(BIN)/routepack synth flash --seed 0 -o $(DEMO_DIR)/window.npz
	@echo
	$(BIN)/routepack plan $(DEMO_DIR)/window.npz --dp 16 --ep 8 --shards 2 --token-cap 8192 \
	  --cost $(DEMO_DIR)/window.cost.json --budget 1 -o $(DEMO_DIR)/plan.json
	@echo
	$(BIN)/routepack verify $(DEMO_DIR)/plan.json $(DEMO_DIR)/window.npz

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) $(DEMO_DIR)
