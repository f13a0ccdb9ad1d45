# demo and test each work alone on a fresh machine: they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch where nothing else is wanted; TORCH="torch==2.9.*", say, takes another.
TORCH ?= torch==2.13.0
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp tests/native/*.h tests/native/*.cpp tests/stub_cuda/*.cpp)

.PHONY: demo test soak check format lint types sanitize bench clean

demo: $(VENV)/.installed
	$(BIN)/python -m demo.run

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

# An hour of random requests with everything that can go wrong, by default; MINUTES=5 SEED=7 for less, and for another.
MINUTES ?= 60
SEED ?= 1
soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.soak --minutes $(MINUTES) --seed $(SEED)

check: format lint types test

format: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint: $(VENV)/.installed
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The mechanism's own tests, plain and under the sanitizers; needs a C++ compiler and CMake, no Python.
sanitize:
	for sanitizer in "" address,undefined thread; do \
	  build=build/native-$${sanitizer:-plain}; \
	  cmake -S . -B $$build -DCMAKE_BUILD_TYPE=RelWithDebInfo -DVATTN_TESTS=ON -DVATTN_WERROR=ON \
	    "-DVATTN_SANITIZE=$$sanitizer" && \
	  cmake --build $$build --parallel 2 && \
	  ctest --test-dir $$build --output-on-failure || exit 1; \
	done

bench: $(VENV)/.installed
	for name in step overlap fragmentation windows mla quantised decode batching memory blocks capacity backends block_size prefix cache speculate; do $(BIN)/python -m bench $$name || exit 1; done

# The stub of the native module lies beside the module; mypy looks for it in the source tree.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	VATTN_WERROR=ON $(BIN)/python -m pip install --quiet --editable ".[dev]"
	cp "$$($(BIN)/python -c 'import vattn._native as n; print(n.__file__.rpartition("/")[0])')/_native.pyi" vattn/
	touch $@

clean:
	rm -rf build $(VENV) vattn/_native.pyi
