# make serve | make test | make build | make lint | make bench: each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.h csrc/*/*.inc)
NATIVE := CMakeLists.txt $(SOURCES) $(wildcard csrc/*.cmake)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --require-virtualenv
MODEL ?= smollm2-135m
PORT ?= 8000

.PHONY: build serve test lint format bench clean

build: $(VENV)/built.stamp

$(VENV)/pip.stamp:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("headrace needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'  # dependency groups
	@touch $@

# Editable: Python sources are used where they lie; a change of the core or of the dependencies builds again.
$(VENV)/built.stamp: $(VENV)/pip.stamp pyproject.toml $(NATIVE)
	$(PIP) install --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/built.stamp pyproject.toml
	$(PIP) install --group dev
	@touch $@

serve: build
	$(BIN)/headrace serve --model $(MODEL) --port $(PORT)

# First, 3 seconds: the scheduler's written cases take every branch of it, whatever the random ones happen to find.
test: lint
	$(BIN)/python -m pytest tests/sched --ignore=tests/sched/test_properties.py \
	  --cov=src/headrace/sched --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered
	$(BIN)/python -m pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

bench: build
	$(BIN)/headrace bench offline --model $(MODEL) --batch 1 4 16

clean:
	rm -rf $(VENV) build
