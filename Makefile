# Development build of the kernels, beside the sources.
PYTHON ?= .venv/bin/python
.PHONY: native
native:
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(PYTHON)) > build/cmake.log 2>&1 || { cat build/cmake.log; exit 1; }
	cmake --build build/dev
	cp build/dev/_native*.so src/octavo/kernels/
