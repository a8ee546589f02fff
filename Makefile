# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
PIP_QUIET := --quiet --disable-pip-version-check
LOCKED := -r requirements.txt -r requirements-network.txt -r requirements-dicom.txt -r requirements-onnx.txt -r requirements-dev.txt

.PHONY: help venv demo quick test lint docs docs-version wheel sbom clean

help:
	@echo "make demo   train a phantom federation, compare, and write a report (minutes on two cores)"
	@echo "make quick  run the unit tests of the rooms that do not train (under a minute on two cores)"
	@echo "make test   run all tests"
	@echo "make lint   ruff, mypy and the import contract"
	@echo "make docs   write build/site: the documentation as pages, all links checked"
	@echo "make wheel  write build/dist: wheel and sdist, tried in an environment of their own"
	@echo "make sbom   write build/sbom.cdx.json: what panorgan is made of, for the hospital's IT"
	@echo "make venv   only create .venv"

venv: $(READY)

$(READY): requirements.txt requirements-torch.txt requirements-network.txt requirements-dicom.txt requirements-onnx.txt \
		requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("panorgan needs Python 3.11 or newer; set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
# The files name every package with its hashes: these very files, or none. PyTorch's build depends on the machine, so pip
# chooses it and its file is checked afterwards (a wheel runs nothing when it is installed).
	$(BIN)/pip install $(PIP_QUIET) --no-deps --require-hashes $(LOCKED)
	$(BIN)/pip install $(PIP_QUIET) --report $(VENV)/torch.json "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements-torch.txt)"
	$(BIN)/python scripts/check_hashes.py $(VENV)/torch.json requirements-torch.txt || ($(BIN)/pip uninstall -q -y torch; false)
	$(BIN)/pip install $(PIP_QUIET) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)
	$(BIN)/panorgan demo --resume

# One thread per process: two test processes share two cores. The end-to-end tests come apart: each file there starts real
# servers and sites, which its tests share. Python keeps its bytecode, whatever the environment says: tests start it often.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=
UNITS := $(addprefix tests/,anatomy data data_doctor phantom preparation losses networks evaluation deployment \
	test_config.py test_checksums.py test_errors.py)
quick: $(READY)
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(UNITS)

test: $(READY)
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/e2e
	$(QUIET) $(BIN)/python -m pytest -n 2 --dist loadfile tests/e2e

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Into the same environment: no package of theirs is in another file (a test sees to it), so none is replaced.
$(DOCS_READY): requirements-docs.txt $(READY)
	$(BIN)/pip install $(PIP_QUIET) --no-deps --require-hashes -r requirements-docs.txt
	@touch $@

# Not --quiet: mkdocs would not count the warnings that --strict makes errors. Its theme's advice to move on is known.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/check_site.py build/site

# The documentation of this version beside those of others, in a folder that a web server serves: SITE=folder.
docs-version: docs
	$(BIN)/python scripts/keep_docs.py build/site $(or $(SITE),build/versions)

# hatchling is installed here already: nothing is downloaded. A wheel must not depend on when it was built.
wheel: $(READY)
	rm -rf build/dist
	SOURCE_DATE_EPOCH=1700000000 $(BIN)/hatchling build -d build/dist
	$(BIN)/python scripts/try_wheel.py build/dist

sbom: $(READY)
	$(BIN)/python scripts/sbom.py build/sbom.cdx.json

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
