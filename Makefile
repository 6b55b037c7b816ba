# `test`, `train` and the like do all of their own set-up, the first time and whenever it changed: .ci/setup.
# PYTHON=... names the Python to build on, TORCH=torch==2.12.1 another torch.

# Tools are run as modules: where torch is shared with an outer Python, they may be too, and then have no
# script in .venv/bin.
RUN := .venv/bin/python -P -m

.NOTPARALLEL:
.PHONY: help train bench check test test-newest test-fast test-all test-versions fuzz kills lint format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

train: ## train a small GPT, sharded (ARGS="--steps 200 --nproc 2")
	@sh .ci/setup train
	@.venv/bin/fsdp-compiled train $(ARGS)

bench: ## this package and its rivals, side by side (ARGS="--preset large")
	@sh .ci/setup bench
	@.venv/bin/fsdp-compiled bench $(ARGS)

check: ## try this machine: kernels, lowerings, graphs, collectives, a step against FSDP2 (ARGS="--out report")
	@sh .ci/setup train
	@.venv/bin/fsdp-compiled check $(ARGS)

# Three at a time, a file each, in the order of tests/conftest.py: on two cores, since ranks that wait for each other, for
# a process to start or for silence leave two processes a quarter of them. A thread for each, or they and the ranks that
# they start contend for the cores.
# Bytecode is written: what one process has compiled, the next ones find.
PARALLEL := pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=10
ENVIRONMENT := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1
PYTEST := $(ENVIRONMENT) $(RUN) $(PARALLEL)

# What PYTEST_ARGS asks for runs on the default torch alone.
# The newest torch is fetched while lint computes.
test: ## lint, the tests, and a part of them on the newest torch (PYTEST_ARGS="-k plan -x": those alone)
	@sh .ci/setup test
	@$(if $(PYTEST_ARGS),,$(SETUP_NEWEST) & )$(MAKE) --no-print-directory lint; failed=$$?; wait; exit $$failed
	$(PYTEST) $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,@$(MAKE) --no-print-directory test-newest)

# The newest patch of each release that the package is for: pyproject.toml has the range.
VERSIONS := 2.11.0 2.12.1 2.13.0 2.14.1
NEWEST := $(lastword $(VERSIONS))
SETUP_NEWEST = TORCH=torch==$(NEWEST) sh .ci/setup test .venv-$(basename $(NEWEST))
# What of the tests shows most of what another torch may change.
PART := $(foreach name, parity fully_shard fully_shard_results guards repeated_calls families \
	unknown_reads unseen_inputs inherited_names closed_layouts tensor_parallel tensor_parallel_loop checkpoints \
	checkpoint_ranks fuzz examples readme cli_train kernels_compiled,$(wildcard tests/*/test_$(name).py))
test-newest: ## that part, on the newest torch, in an environment of its own
	@$(SETUP_NEWEST)
	$(ENVIRONMENT) .venv-$(basename $(NEWEST))/bin/python -P -m $(PARALLEL) $(PART) $(PYTEST_ARGS)

test-versions: ## the tests on all releases of torch, and docs/versions.md, a quarter of an hour each
	@sh .ci/setup test
	PYTEST_ARGS='$(PYTEST_ARGS)' $(ENVIRONMENT) .venv/bin/python -m tests.versions $(VERSIONS) -- $(PARALLEL) $(PYTEST_ARGS)

# Plan, programs, passes, the face on one process, and training beside FSDP2 and DDP under each placement; what would
# begin after the two minutes is skipped, whatever these files have grown to.
FAST := $(foreach name, imports buckets shape check clip accumulate api,$(wildcard tests/*/test_$(name).py))
test-fast: ## the tests for between two edits, two minutes; make test comes before a commit
	@sh .ci/setup test
	$(PYTEST) --no-test-after 110 $(FAST) "tests/api/test_parity.py::test_two_ranks_are_bitwise_fsdp2[adamw zero3]" \
		"tests/api/test_parity.py::test_two_ranks_are_bitwise_fsdp2[sgd zero2 seeds]" \
		"tests/api/test_parity.py::test_two_ranks_are_bitwise_ddp[adamw zero1]" \
		"tests/api/test_parity.py::test_two_ranks_are_bitwise_ddp[sgd ddp]" $(PYTEST_ARGS)

test-all: lint ## as make test, with what only repeats it in more combinations and on more models
	ALL_TESTS=1 $(PYTEST) -m "" $(PYTEST_ARGS)

fuzz: ## thousands of generated programs against plain PyTorch (ARGS="--start 5000 --count 100", "--seed 17")
	@sh .ci/setup test
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) tests.fuzz $(or $(ARGS),--count 2000)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) tests.fuzz --stacks $(or $(ARGS),--count 1000)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) tests.fuzz --loops $(or $(ARGS),--count 300)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) tests.fuzz --classes $(or $(ARGS),--count 300)

kills: ## train, killed at thirty random moments, ends as if it had not been (ARGS="--seed 7 --count 100")
	@sh .ci/setup test
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) tests.kills $(or $(ARGS),--count 30)

lint: ## check style and types
	@sh .ci/setup test
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: ## put the code into the common format
	@sh .ci/setup test
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## remove the environment, caches and build products; runs/ stays
	rm -rf .venv .venv-* build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
