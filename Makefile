# demo: the main job on the shipped calibration.  test: the tests.  check: everything a change must pass.
# test-triton: the kernels under the interpreter.  test-record: recording from mlx-lm, which test leaves out.
PYTHON ?= python3
# Any release from 2.9 on will do; one is named so that the interpreter tests are repeatable.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test check test-triton test-record docs clean

demo: .venv/core
	$(BIN)/moeplan demo -o reports/demo

test: .venv/dev
	$(BIN)/python -m pytest tests --ignore=tests/triton

test-triton: .venv/triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/triton

test-record: .venv/mlx-lm
	$(BIN)/python -m pytest tests/test_record.py

check: .venv/dev
	$(BIN)/ruff format --check moeplan tests benchmarks
	$(BIN)/ruff check moeplan tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests --ignore=tests/triton

docs: .venv/dev
	$(BIN)/python -m pytest tests/examples

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "moeplan needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python pyproject.toml
	$(BIN)/pip install -q -e .
	@touch $@

.venv/dev: .venv/core
	$(BIN)/pip install -q -e '.[dev,mlx]'
	@touch $@

.venv/triton: .venv/dev
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[dev,mlx,triton]'
	@touch $@

.venv/mlx-lm: .venv/dev
	$(BIN)/pip install -q -e '.[dev,mlx-lm]'
	@touch $@

clean:
	rm -rf .venv build dist
