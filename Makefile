# `make serve` and `make test` do everything on a machine with Python 3.11+, a C++ compiler and make.
PYTHON ?= .venv/bin/python
BASE_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.hpp')
MODEL ?= smollm2
HOST ?= 127.0.0.1
PORT ?= 8000
PYTEST := $(BIN)/python -m pytest

.PHONY: serve install test test-all validate lint types format native clean

serve: $(VENV)/.installed
	$(BIN)/octavo serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

install: $(VENV)/.installed

# The suite that every change must pass: lint and types are apart, so that a failing test is seen first.
test: $(VENV)/.installed-test
	$(PYTEST) -m "not large and not data" $(ARGS)

# The same with the large matrices.
test-all: $(VENV)/.installed-test
	$(PYTEST) -m "not data" $(ARGS)

# Checks against real data, which is not part of the project: make validate DATA=folder
validate: $(VENV)/.installed-test
	@test -n "$(DATA)" || { echo "make validate needs DATA=folder of the real data" >&2; exit 2; }
	@test -d "$(DATA)" || { echo "DATA=$(DATA) is not a folder" >&2; exit 2; }
	OCTAVO_DATA="$(abspath $(DATA))" $(PYTEST) -m data -s $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "octavo needs Python 3.11 or newer as $(BASE_PYTHON); set BASE_PYTHON=path" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "octavo compiles its kernels and needs a C++17 compiler: install g++ or clang, or set CXX" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(PIP) .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python $(SOURCES)
	$(PIP) '.[test,dev]'
	@touch $(VENV)/.installed $@

# Development build of the kernels, beside the sources (use with PYTHONPATH=src).
native:
	@mkdir -p build
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(PYTHON)) > build/cmake.log 2>&1 || { cat build/cmake.log; exit 1; }
	cmake --build build/dev
	@for built in build/dev/_native*.so; do \
	  cp "$$built" "src/octavo/kernels/.$$(basename $$built).new" && \
	  mv "src/octavo/kernels/.$$(basename $$built).new" "src/octavo/kernels/$$(basename $$built)"; done

clean:
	rm -rf build dist $(VENV)
