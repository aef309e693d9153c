# Everything lands in .venv: `make demo` shows it work, `make test` tests it. PYTHON=... picks the interpreter.

PYTHON ?= python3
EXTRAS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml hermes_core/version.py $(PLUGINS:%=%/pyproject.toml)
# UV=uv installs in a tenth of the time; it reads none of pip's settings.
UV ?=
# $(call install,VENV): the command that installs into it.
install = $(if $(UV),"$(UV)" pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip --disable-pip-version-check install --quiet)
PIP := $(call install,$(VENV))
TORCH := requirements/torch.in
LOCKS := $(patsubst requirements/%.lock,%,$(wildcard requirements/*.lock))

# Many images set it. Then every program that a test starts would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all stress lint format docs bench lock release-check clean

help:
	@echo 'make setup      .venv with hermes-rl and every plugin, editable (EXTRAS="atropos torch trl" adds the heavy ones)'
	@echo 'make demo       the whole way once, on tasks that come with the SWE-smith plugin'
	@echo 'make test       every promise once, in minutes and without a server (ARGS="-k name" goes to pytest)'
	@echo 'make test-all   also on every backend, at other levels, with every extra that is here'
	@echo 'make stress     real tasks while drivers, channels and sandboxes die, and everything everywhere (long)'
	@echo 'make lint       ruff, formatting, mypy --strict, the layers of imports'
	@echo 'make format     let ruff format and fix what it can'
	@echo 'make docs       the documentation as a site in build/docs; broken links are errors'
	@echo 'make bench      the benchmarks, ours beside the reference'
	@echo 'make lock       the locks in requirements/ anew, with uv (NAMES="base trl"; ARGS=--upgrade takes newer versions)'
	@echo 'make release-check  build every sdist and wheel into dist/, and test these'
	@echo 'make clean      remove .venv'

setup: $(STAMP) $(patsubst %,$(VENV)/.extra-%,$(EXTRAS))

# pip takes hashes for all of its arguments or for none, and ours have no hashes: hence two calls. A lock is complete
# (--no-deps): older pips look for "name[extra]" beyond the lock, and fail when a newer version of it appears.
$(STAMP): requirements/base.lock $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'hermes-rl needs Python 3.11 or newer; "$(PYTHON)" is:' "$$($(PYTHON) --version 2>&1)"; \
	  echo 'name another one: make $(firstword $(MAKECMDGOALS) setup) PYTHON=python3.12'; exit 1; } >&2
	@begin=$$(date +%s); set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo 'making $(VENV) ...'; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo 'on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }; \
	fi; \
	echo 'installing what requirements/base.lock names ...'; \
	$(PIP) --no-deps --require-hashes -r requirements/base.lock; \
	echo 'installing hermes-rl and its plugins, editable ...'; \
	$(PIP) --no-deps --no-build-isolation -e . $(PLUGINS:%=-e ./%); \
	touch $@; \
	echo "set up in $$(( $$(date +%s) - begin )) s"

# They need other versions than the rest: each gets an environment of its own, .venv-NAME.
APART := $(patsubst %,$(VENV)/.extra-%,cloud hermes inspect openenv tinker verifiers vllm)
$(APART): $(VENV)/.extra-%: requirements/%.lock $(STAMP)
	@begin=$$(date +%s); set -e; \
	$(PYTHON) -m venv --clear $(VENV)-$*; \
	$(if $(filter tinker vllm,$*),$(call install,$(VENV)-$*) -r $(TORCH);) \
	$(call install,$(VENV)-$*) --no-deps --require-hashes -r requirements/$*.lock; \
	$(call install,$(VENV)-$*) --no-deps --no-build-isolation -e . $(PLUGINS:%=-e ./%); \
	touch $@; \
	echo "extra $* set up in $(VENV)-$* in $$(( $$(date +%s) - begin )) s"

$(VENV)/.extra-%: $(STAMP)
	@begin=$$(date +%s); set -e; \
	if [ -f requirements/$*.lock ]; then $(PIP) --no-deps --require-hashes -r requirements/$*.lock; \
	elif [ $* = torch ]; then $(PIP) -r $(TORCH); \
	else echo 'unknown extra "$*": there is no requirements/$*.lock' >&2; exit 1; fi; \
	touch $@; \
	echo "extra $* set up in $$(( $$(date +%s) - begin )) s"

# Its lock is without torch, which it needs.
$(VENV)/.extra-trl: $(VENV)/.extra-torch

demo: setup
	@$(BIN)/python -m hermes_swe_smith.demo $(ARGS)

# A test that hangs fails alone, with the stacks of its threads, and does not hold up the others.
LIMIT := --timeout 420

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(LIMIT) $(ARGS)

test-all: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(LIMIT) -m 'not stress' --hypothesis-profile thorough $(ARGS)

stress: setup
	$(BIN)/python -m pytest -m stress $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p hermes_core -p benchmarks $(PLUGINS:plugins/%=-p %)
	$(BIN)/mypy plugins/hermes_verifiers/hermes_rl.py examples/*.py
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not with --quiet: MkDocs counts no warnings then, and --strict finds none.
docs: setup $(VENV)/.extra-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

# The first two constrain others. A lock keeps the versions that it has, unless its .in or ARGS asks for others.
NAMES ?= base atropos $(filter-out base atropos,$(LOCKS))
lock:
	$(PYTHON) requirements/lock.py "$(or $(UV),uv)" $(NAMES) $(ARGS)

# Each wheel is built from its sdist. What is in dist/ afterwards is what RELEASING.md uploads.
release-check: setup
	rm -rf dist
	for project in . $(PLUGINS); do $(BIN)/python -m build --quiet --no-isolation --outdir dist "$$project" || exit; done
	HERMES_TEST_DIST=dist $(BIN)/python -m pytest -m 'full or not full' $(LIMIT) tests/test_wheels.py tests/test_project.py $(ARGS)

clean:
	rm -rf $(VENV)
