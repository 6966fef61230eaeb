# make serve | make test | make build | make lint | make bench: each sets up what it needs, once.
# make test-native | test-sanitized | test-neon replay the conformance vectors; make vectors writes them anew.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.inc)
NATIVE := CMakeLists.txt $(filter-out csrc/conformance%,$(SOURCES)) $(wildcard csrc/*.cmake)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --require-virtualenv
MAKEFLAGS += --no-print-directory
MODEL ?= smollm2-135m
PORT ?= 8000
VECTORS := tests/golden/conformance.txt
SANITIZE := -O1 -g -fno-sanitize-recover=all -Wno-maybe-uninitialized  # g++ 12 warns wrongly beside sanitizers
CROSS := aarch64-linux-gnu-g++
EMULATOR := qemu-aarch64-static

.PHONY: build serve test test-native test-sanitized test-neon vectors lint format bench clean

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
test: lint test-native
	$(BIN)/python -m pytest tests/sched --ignore=tests/sched/test_properties.py \
	  --cov=src/headrace/sched --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered
	$(BIN)/python -m pytest

comma := ,
# The conformance program, built in build/$(1) with the arguments $(2): csrc without Python.
build_conformance = $(BIN)/cmake -S . -B build/$(1) -DHEADRACE_EXTENSION=OFF $(2) >/dev/null && \
  $(BIN)/cmake --build build/$(1) --target conformance --parallel $$(nproc)

test-native: $(VENV)/dev.stamp
	$(call build_conformance,native)
	build/native/conformance $(VECTORS)

test-sanitized: $(VENV)/dev.stamp
	$(call build_conformance,sanitized,-DCMAKE_BUILD_TYPE=Sanitized \
	  -DCMAKE_CXX_FLAGS="$(SANITIZE) -fsanitize=address$(comma)undefined")
	build/sanitized/conformance $(VECTORS)
	$(call build_conformance,threads,-DCMAKE_BUILD_TYPE=Sanitized -DCMAKE_CXX_FLAGS="$(SANITIZE) -fsanitize=thread")
	build/threads/conformance $(VECTORS)

test-neon: $(VENV)/dev.stamp
	@command -v $(CROSS) $(EMULATOR) >/dev/null || { \
	  echo 'test-neon needs $(CROSS) and $(EMULATOR): apt-get install g++-aarch64-linux-gnu qemu-user-static'; exit 1; }
	$(call build_conformance,neon,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(CROSS) -DCMAKE_EXE_LINKER_FLAGS=-static)
	$(EMULATOR) -cpu max build/neon/conformance $(VECTORS)

# After a change of what the scalar kernels give, meant as such: the difference belongs into the commit.
vectors: $(VENV)/dev.stamp
	$(call build_conformance,native)
	build/native/conformance --write $(VECTORS)

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
	$(BIN)/python -m bench --model $(MODEL) $(if $(PEERS),--peers $(PEERS)) $(BENCH)
	$(if $(BENCH),,$(BIN)/python -m bench.growth --model $(MODEL) $(if $(PEERS),--peers $(PEERS)))

clean:
	rm -rf $(VENV) build
