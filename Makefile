# One command each: `make test` starts from nothing, also on a machine without venv or servers.
SHELL := /bin/bash
bin := .venv/bin
stamp := .venv/.installed
# Test processes at once: they wait more than they work, so on two cores eight are faster than two.
JOBS ?= 8
TESTS ?= tests
PYTEST := $(bin)/python -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS))

.PHONY: help venv servers check test faults worlds integrations soak mutants bench format clean

help: ## what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

venv: $(stamp) ## a virtual environment in .venv, as pinned in constraints.txt

$(stamp): pyproject.toml constraints.txt scripts/make-venv
	@scripts/make-venv
	@touch $@

servers: ## the servers that the tests start
	@scripts/install-servers

check: venv ## format, lint, types, shape
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/pyright
	@if [ -d tests/shape ]; then $(PYTEST) -q tests/shape; fi

test: venv servers ## every test but the shape (see check), the fault matrix, the worlds and the integrations
	$(PYTEST) -m "not faults and not worlds and not integrations" $(if $(filter tests,$(TESTS)),--ignore=tests/shape) \
		--durations=10 --durations-min=1 $(TESTS)

# pytest's exit code 5 is "no such test": a matrix without rows is not a failure.
faults: venv servers ## the slow fault matrix
	$(PYTEST) -m "faults and not worlds and not integrations" --durations=10 $(TESTS) || { code=$$?; [ $$code = 5 ] || exit $$code; }

worlds: venv servers ## other event loops, gevent, application servers, other Pythons
	@scripts/make-python-venvs
	$(PYTEST) -m "worlds and not faults" --durations=10 --durations-min=1 tests/worlds

integrations: venv servers ## the integrations with the frameworks' real servers and workers; the page
	@scripts/install-browser
	@scripts/install-prometheus
	$(PYTEST) -m "integrations and not faults" --durations=10 --durations-min=1 tests/integrations

# HOLDFAST_STORES=redis,etcd for these alone; HOLDFAST_SOAK=100 for so many sequences of requests each
soak: venv servers ## random requests to every store, compared with the rules of admission
	$(PYTEST) -m soak --durations=10 $(TESTS)

# MUTANTS="redlock renew" for those whose names have it; see tests/mutants/
mutants: venv servers ## takes one rule after the other out, and sees that its tests notice
	$(PYTEST) -q tests/testing/test_mutants.py tests/mutants
	$(bin)/python scripts/run-mutants $(MUTANTS)

# Peers live in an environment of their own: their dependencies are not ours.
.venv-bench/.installed: $(stamp) benchmarks/requirements.txt scripts/make-bench-venv
	@scripts/make-bench-venv
	@touch $@

# BENCH="--quick --only redis" and the like; see benchmarks/ and docs/benchmarks.md
bench: .venv-bench/.installed servers ## the benchmarks against every peer, with plots
	.venv-bench/bin/python -m benchmarks $(BENCH)

format: venv ## rewrite as the formatter wants it
	$(bin)/ruff check --fix-only --quiet .
	$(bin)/ruff format .

clean: ## remove what the commands above made
	rm -rf .venv .venv-bench .venv-3.* build dist htmlcov .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
