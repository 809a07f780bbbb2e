# make demo   fine-tune the built-in model and show what it learnt (about two minutes after installation)
# make test   everything that is checked before a change lands; WORKERS=1 runs one test at a time
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# More than there are cores at the least: many tests wait for processes.
WORKERS ?= 3
STAMP := $(VENV)/.installed

.PHONY: demo test check test-long format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "unisono needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/demo.py

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

test: $(STAMP) check
	$(PY) -m pytest -m "not long and not gpu" -n $(WORKERS) --durations=15

test-long: $(STAMP)
	$(PY) -m pytest -m long

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
