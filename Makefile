# make demo   fine-tune the built-in model and show the results before and after (about 70 s after installation)
# make demo-dpo   train the built-in model on preferences (DPO), likewise (under a minute)
# make demo-grpo  let the built-in model learn from a reward (GRPO), likewise
# make demo-vision  let it learn what drawn pictures show, with a new vision tower, likewise
# make test   all checks that a change must pass; WORKERS=1 runs one test at a time
# make system installs, as root, the programs that some tests need (apt-get: iptables, iproute2, openssh-server, Slurm …; npm: llama.cpp); without them these are skipped
# make test-fast  the tests that start no process, in two to three minutes
# make test-board  the tests of `unisono board` in Chromium
# make test-long   tests that take minutes or hours; LONG_WORKERS=1 runs one at a time
# make test-gpu   tests on one NVIDIA GPU, in an environment whose torch has CUDA: make test-gpu VENV=PATH
# make wheel   build the wheel, install it into a fresh environment and train with it
# make docs   build the documentation site in both languages into site/; a broken link, an unknown command or key fails. site/index.html opens without a server
# make docs-serve  the same, then serve it at http://127.0.0.1:8000
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# More than there are cores at the least: many tests wait for processes. With three, two cores were busy for 88 % of the time, with four for 97 %.
WORKERS ?= 4
# Tests of this kind start up to eight processes each, and strike at moments that they wait for.
LONG_WORKERS ?= 2
# Of pytest, for `make test`.
TEST_OPTIONS ?=
# Many threads of many small processes would only wait for each other; and each of them would compile the package anew where no bytecode is kept.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
STAMP := $(VENV)/.installed

.PHONY: demo demo-dpo demo-grpo demo-vision demo-images system test check lint types tests test-fast test-board test-long test-gpu format wheel docs docs-serve clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "unisono needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

system:
	scripts/install_system.sh

demo: $(STAMP)
	$(PY) examples/demo.py

demo-dpo: $(STAMP)
	$(PY) examples/demo.py dpo

demo-grpo: $(STAMP)
	$(PY) examples/demo.py grpo

demo-vision: $(STAMP)
	$(PY) examples/demo.py vision

demo-images: $(STAMP)
	$(PY) examples/images/make_shapes.py demo-images
	$(VENV)/bin/unisono generate demo-images/model "green cross" --out demo-images/before --number 8 --steps 20 --guidance 1
	$(VENV)/bin/unisono train examples/images/shapes.yaml --resume
	$(VENV)/bin/unisono generate runs/demo-images "green cross" --out demo-images/after --number 8 --steps 20 --guidance 1
	$(PY) examples/images/make_shapes.py classify demo-images/before
	$(PY) examples/images/make_shapes.py classify demo-images/after

check: lint types

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

types: $(STAMP)
	$(VENV)/bin/mypy

tests: $(STAMP)
	$(PYTEST) -m "not long and not gpu" -n $(WORKERS) --durations=15 $(TEST_OPTIONS)

test-fast: $(STAMP)
	$(PYTEST) -m "not processes" -n 2 -q $(TEST_OPTIONS)

test-board: $(STAMP)
	$(PYTEST) tests/front/board tests/guard/supervise/test_timeline.py -n 2 -q $(TEST_OPTIONS)

# mypy takes one core for a minute: beside the first tests.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types tests

test-long: $(STAMP)
	$(PYTEST) -m "long and not gpu" -n $(LONG_WORKERS) --durations=30
	$(PYTEST) -m "not slow and not ranks and not long and not gpu" -n $(LONG_WORKERS) --hypothesis-profile=drawn

# In an environment with a torch for CUDA: make test-gpu VENV=PATH. Not in CI, whose machines have no GPU; a CUDA library may warn of what does no harm.
test-gpu:
	$(VENV)/bin/python -m pytest -m gpu -W default -ra tests/gpu tests/trainer/ranks/test_group.py tests/trainer/ranks/test_drift.py

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

wheel: $(STAMP)
	rm -rf dist
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .
	PYTHON=$(PY) scripts/try_wheel.sh dist/unisono-*.whl

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --config-file mkdocs.yml
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --config-file mkdocs.zh.yml

docs-serve: docs
	$(PY) -m http.server --bind 127.0.0.1 --directory site 8000

clean:
	rm -rf .venv build site dist .pytest_cache .mypy_cache .ruff_cache
