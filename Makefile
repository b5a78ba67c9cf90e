# The README's two commands are `make demo` and `make test`. Each creates .venv when it is missing,
# installs what it needs and can be run again at any time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two test processes fit two cores; torch must then not spread each of them over both.
TEST_PROCESSES ?= 2

.PHONY: demo test bench lint format clean

demo: $(VENV)/.installed-all
	$(BIN)/llorch demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n $(TEST_PROCESSES) --dist loadfile

# Saves the run into .benchmarks; `pytest-benchmark compare` sets two of them side by side.
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

# A stamp for each set of extras: a venv that pyproject.toml has outgrown is brought up to date.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "installing llorch-worker[$*] into $(VENV): torch is large, this takes minutes"
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
