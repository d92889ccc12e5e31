# make train [ARGS="model=mlp data=fashion_mnist"]    set up .venv once, then train
# make test  [ARGS="tests/plan -k ragged"     ]    set up .venv with the test extras, then run the tests
# make test SLOW=1                                    the slow ones too, and more random examples: before a release
# make fuzz  SEEDS=300 [FIRST=1000]                    more random trainings beside a plain loop
# make test-cuda                                      tests on a simulated CUDA device (ALL=1: more of them)
# make test-oldest                                    tests with the oldest packages that pyproject.toml admits
# make lint                                           ruff and mypy
# make weight                                         statements of every room, and their shape
# make docs                                           the documentation, as site/index.html; make docs-serve shows it while it is written
# make clean                                          remove .venv

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(IS_SUPPORTED)' 2>/dev/null && echo $$p && break; done)

INSTALL = $(VENV)/bin/python -m pip install -q --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

# The model is named unless the arguments choose one.
MODEL := $(if $(filter model=% experiment=%,$(ARGS)),,model=resnet34d)

.DEFAULT_GOAL := help
.PHONY: help train test fuzz test-oldest test-cuda lint weight docs docs-serve clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: $(VENV)/.installed
	$(VENV)/bin/python -m lightning_ga.train $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(if $(SLOW),--hypothesis-profile thorough,-m 'not slow') $(ARGS)

fuzz: $(VENV)/.installed-dev
	FIRST=$(or $(FIRST),0) SEEDS=$(or $(SEEDS),300) $(VENV)/bin/python -m pytest -n 2 --dist worksteal \
		tests/integration/test_random_trainings.py $(ARGS)

# Tests that need nothing that only newer packages have.
ON_OLDEST := $(addprefix tests/,plan batch memory snapshot loading compat probe integration) \
	$(foreach name,optimizers sharded traceless,--ignore=tests/integration/test_$(name).py)

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt \
		ARGS="-W ignore::DeprecationWarning -W ignore::FutureWarning $(ON_OLDEST) $(ARGS)"

# What runs on a simulated CUDA device, if it can be built here.
ON_CUDA := exactness survive survive_update traceless resume random_trainings
MORE_ON_CUDA := features lbfgs probe recovery schedules sparse step_counts token_weights \
	true_programs whole

test-cuda: $(VENV)/.installed-dev
	@if built=$$($(VENV)/bin/python tests/simulated_cuda/build.py); then \
		SEEDS=$(or $(SEEDS),12) tests/simulated_cuda/run.sh $(VENV)/bin/python -m pytest -n 2 --dist worksteal -p on_simulated_cuda \
			tests/simulated_cuda tests/memory tests/batch/test_split.py \
			$(foreach name,$(ON_CUDA) $(if $(ALL),$(MORE_ON_CUDA)),tests/integration/test_$(name).py) \
			--deselect tests/integration/test_random_trainings.py::test_ranks_train_as_a_plain_loop $(ARGS); \
	fi

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

weight: $(VENV)/.installed-dev
	@$(VENV)/bin/python -m benchmarks.weight

docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-docs
	$(VENV)/bin/mkdocs build --quiet
	@! grep -rlE '<(script|link|img)[^>]+(src|href)="?(https?:)?//' site || { echo "Error: these pages fetch from elsewhere." >&2; exit 1; }

docs-serve: $(VENV)/.installed-docs
	$(VENV)/bin/mkdocs serve

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(IS_SUPPORTED)' || \
		{ echo "Error: Python 3.11, 3.12 or 3.13 is needed; install one, or name it: make PYTHON=/path/to/python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "Error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing into $(VENV): about 6 GB with PyTorch, once."
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing into $(VENV): about 6 GB with PyTorch, once."
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(INSTALL) -e '.[docs]'
	@touch $(VENV)/.installed $@
