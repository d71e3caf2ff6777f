# Every target sets up what it needs; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The rows of the architecture up to the reducer.
comma := ,
space := $(subst ,, )
CORE_ROOMS := types errors config metrics schedule reducer checkpoint
CORE := $(subst $(space),$(comma),$(CORE_ROOMS:%=src/oktopk/%.py) $(patsubst %,src/oktopk/%/*,algorithms primitives reduction wire transport) src/oktopk/kernels/reference.py)
# Three workers on two cores: many tests wait.
PARALLEL = $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder
# Compiling all that is installed to bytecode takes longer than installing it; most of it is never imported.
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
EXTRAS := trainer,speech,bert,integrations,gpu,docs,dev
# Where a machine forbids it, each of the processes that tests start would compile all of torch that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-fast test-slow mutants coverage check bench docs results gpu-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable ".[$(EXTRAS)]"
	$(BIN)/python -m oktopk.training.self_test  # and keeps the compiled loops
	touch $(STAMP)

demo: setup
	$(BIN)/oktopk train --config configs/synth_small.toml
	$(BIN)/oktopk report --latest

test: setup
	.ci/timed 300 tests $(PARALLEL)

# No processes: thread worlds and units, for the inner loop.
test-fast: setup
	.ci/timed 90 "fast tests" $(PARALLEL) -m 'not slow and not processes'

test-slow: setup
	.ci/timed 5400 "slow tests" $(BIN)/python -m pytest -n 2 --dist loadscope -m slow --timeout 3600

# Faults on purpose, each of which the tests of `make test` must notice. A part of test-slow.
mutants: setup
	$(BIN)/python tests/mutants.py

coverage: setup
	$(PARALLEL) --cov --cov-report=term
	$(BIN)/python -m coverage report --include='$(CORE)' --fail-under=95

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_public_api.py

bench: setup
	$(BIN)/oktopk bench all

# All that needs a GPU, in one file to send in.
gpu-check: setup
	.ci/gpu-check gpu-check.md

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

results: setup
	$(BIN)/oktopk results

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
