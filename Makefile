# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help venv demo test lint clean

help:
	@echo "make demo   train a phantom federation, compare, and write a report (minutes on two cores)"
	@echo "make test   run all tests"
	@echo "make lint   ruff, mypy and the import contract"
	@echo "make venv   only create .venv"

venv: $(READY)

$(READY): requirements.txt requirements-network.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("panorgan needs Python 3.11 or newer; set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-network.txt -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)
	$(BIN)/panorgan demo --resume

# One thread per process: two test processes share two cores. The network tests come apart: each file there starts real
# servers and sites, which its tests share.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
test: $(READY)
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/network
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist loadfile tests/network

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
