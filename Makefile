# The only list of verbs. Needs Python 3.11 or newer with pip; everything else is put into .venv.

PYTHON ?= python3
N ?= 20000
TIMES ?= 10
VENV := .venv
BIN := $(VENV)/bin
# The interpreter's own pip fills the environment, so a Python without ensurepip will do.
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet --quiet
CASES ?= ../shared/cases
# The plugin, or the program of its own that came before it.
COMPOSE = $(if $(shell docker compose version 2>/dev/null),docker compose,docker-compose) --project-name dask-taskdb
FOLDER ?= build/compose

# Without compiled bytecode every process of a cluster spends its first seconds compiling Dask.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

.PHONY: help demo demo-crash test test-slow releases check proto reference docs bench wheels up down compose-test cases cases-crash clean

help:
	@echo "make demo [N=20000]           run an array of N chunks on a small cluster, with a live view"
	@echo "make demo-crash [N=20000]     the same, with the scheduler and the daemon killed with -9 on the way"
	@echo "make test [ARGS='-k name']    run the tests"
	@echo "make test-slow                those that take long"
	@echo "make releases                 some tests with the oldest and the newest supported Dask, each in a fresh environment"
	@echo "make check                    ruff and mypy"
	@echo "make proto                    generate taskdb/wire from proto/"
	@echo "make docs                     the pages of docs/, as a site in build/site"
	@echo "make reference                write what the pages repeat of the code anew"
	@echo "make bench [ARGS=--help]      measure against the stock scheduler"
	@echo "make up | down                a cluster in containers"
	@echo "make wheels                   the project and all it needs, in build/wheels, for an image without a package registry"
	@echo "make compose-test [FOLDER=build/compose]   run that cluster on an engine of its own, and kill its parts (root, minutes)"
	@echo "make cases [WINDOW=n] [ARGS=names]   run the cases of CASES=$(CASES) on a small cluster"
	@echo "make cases-crash [WINDOW=n] [TIMES=10] [STOCK_WORKERS=1]   publish and reattach, with the scheduler killed in between"
	@echo "make clean                    remove what these verbs made"

demo: $(VENV)/core
	@$(BIN)/python -m demo --chunks $(N) $(ARGS)

demo-crash: $(VENV)/core
	@$(BIN)/python -m demo --crash --chunks $(N) $(ARGS)

test: $(VENV)/dev
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow" $(ARGS)

test-slow: $(VENV)/dev
	@$(BIN)/python -m pytest -q -m slow $(ARGS)

releases: $(VENV)/core
	@$(BIN)/python -m tests.releases $(ARGS)

check: $(VENV)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# The mapped path gives the generated modules their package name.
proto: $(VENV)/dev
	@$(BIN)/python -m grpc_tools.protoc -Itaskdb/wire=proto --python_out=. --pyi_out=. --grpc_python_out=. taskdb/wire/taskdb.proto

reference: $(VENV)/dev
	@$(BIN)/python -m tests.docs.reference

docs: $(VENV)/docs
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: $(VENV)/dev
	@$(BIN)/python -m bench $(or $(ARGS),compare --workload basic-sum)

wheels:
	@echo "making build/wheels"
	@rm -rf build/lib build/bdist.* build/wheels/dask_taskdb-*
	@$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --quiet --wheel-dir build/wheels . bokeh

up:
	@$(COMPOSE) up --build --detach

down:
	@$(COMPOSE) down

compose-test: $(VENV)/dev
	@$(BIN)/python -m tests.compose.run --folder $(FOLDER) $(ARGS)

cases: $(VENV)/dev
	@test -d $(CASES) || { echo "no cases at $(CASES): say CASES=folder" >&2; exit 2; }
	@$(BIN)/python -m demo.cluster --nanny $(if $(WINDOW),--window $(WINDOW)) -- $(BIN)/python $(CASES)/run_cases.py {address} $(ARGS)

cases-crash: $(VENV)/dev
	@test -d $(CASES) || { echo "no cases at $(CASES): say CASES=folder" >&2; exit 2; }
	@$(BIN)/python -m demo.cluster --hook --times $(TIMES) $(if $(STOCK_WORKERS),,--survive) $(if $(WINDOW),--window $(WINDOW)) \
		-- $(BIN)/python $(CASES)/run_cases.py {address} publish_and_reattach

clean:
	@rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)

# Stamps: done again only when the dependencies may have changed. pip compiles what it installs; an editable project is left to us.
$(VENV)/core: pyproject.toml | $(BIN)/python
	@echo "installing dask-taskdb"
	@$(PIP) --editable .
	@$(BIN)/python -m compileall -q taskdb scheduler_adapter demo
	@touch $@

$(VENV)/dev: $(VENV)/core
	@echo "installing what tests and checks need"
	@$(PIP) --editable '.[test,lint]'
	@touch $@

$(VENV)/docs: $(VENV)/core
	@echo "installing what the site is built with"
	@$(PIP) --editable '.[docs]'
	@touch $@
