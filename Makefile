# One way in: `make demo` on a fresh machine. Everything is installed into .venv from pyproject + constraints.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
DOCS_TESTS := tests/test_pages.py tests/test_site.py tests/test_notebooks.py tests/test_tutorials.py
DIST_TESTS := tests/packaging

.PHONY: setup demo test test-all lint types site docs test-docs packages dist test-dist bench claims mutants clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt benchmarks/rivals.txt
	$(PYTHON) -c 'import sys; sys.exit("normscope needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hf,dev,docs]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/rivals.txt
	touch $(STAMP)

demo: setup
	$(BIN)/normscope demo --output out/demo.html
	$(BIN)/normscope check normscope.demo.examples:post_ln --optimizer adam --lr 1e-3 --fail-on never --format html --output out/post_ln.html
	$(BIN)/normscope check hf:gpt2 --fail-on never --format html --output out/gpt2.html

# Bytecode is kept even where the shell forbids it: else each worker compiles all tests, each process all of src.
# What the documentation shows and what a release holds is tested by `make docs` and `make dist`.
test: setup
	$(PYTEST) $(addprefix --ignore=,$(DOCS_TESTS) $(DIST_TESTS))

# One run of everything, as each run imports all tests again; it needs the packages.
test-all: setup
	NORMSCOPE_DIST=dist $(PYTEST) --durations=30 --durations-min=5

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The site: every warning is an error, every link is checked. The variable silences an advertisement.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-docs: setup
	$(PYTEST) $(DOCS_TESTS)

docs: site
	$(MAKE) test-docs

packages: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

test-dist: setup
	NORMSCOPE_DIST=dist $(PYTEST) $(DIST_TESTS)

dist: packages
	$(MAKE) test-dist

bench: setup
	$(BIN)/normscope bench

claims: setup
	$(BIN)/python docs/redraw_claims.py

mutants: setup
	$(BIN)/python tests/mutants/run.py --jobs 2

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
