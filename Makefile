# Every verb of the project; people and CI use the same ones. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help prerequisites setup build check test fault fuzz bench docs demo package clean

VENV := $(CURDIR)/.venv
PYTHON := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
EXTRAS := spark spark-connect delta iceberg postgres clickhouse redis mongodb elasticsearch kafka steps tier \
  zookeeper test check bench
RUST_SOURCES := $(shell find native -type f -not -name '*.md') Cargo.toml Cargo.lock
PYTEST := $(PYTHON) -m pytest
export VIRTUAL_ENV := $(VENV)
export PATH := $(VENV)/bin:$(HOME)/.cargo/bin:$(PATH)
export PYSPARK_PYTHON := $(PYTHON)
export PYSPARK_DRIVER_PYTHON := $(PYTHON)

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMPS)/extension ## make .venv with every dependency and the built extension
	@echo "ready: . .venv/bin/activate"

build: setup ## compile the kernel into .venv; nothing happens when nothing changed

check: setup ## formatting, lint and types of Python and Rust
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

test: setup ## every everyday test: Rust, tidy, unit, conformance, integration, short fault, fuzz and bench
	cargo test --package penstock-kernel --locked --quiet
	$(PYTHON) -m tools.servers install
	$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=15

fault: setup ## the long fault sweeps: every kill point, every cut
	PENSTOCK_LONG=1 $(PYTEST) tests/fault

fuzz: setup ## the long fuzzing of the kernel with mutated binlogs
	PENSTOCK_LONG=1 $(PYTEST) tests/fuzz

bench: setup ## measure against the peers on 1 GB files; the figures go to bench/results (SIZE=tiny: a rehearsal)
	$(PYTHON) -m bench --size $(or $(SIZE),1GB)

docs: setup ## write docs/reference again from the code
	$(PYTHON) -m tools.document

demo: setup ## a live server, a busy writer, Delta tables by Spark, and the proof that they are equal
	@$(PYTHON) -m tools.servers install host
	@$(PYTHON) -m demo

package: setup ## build a wheel into dist/ and prove it in a fresh environment without Rust
	$(PYTHON) -m tools.package

clean: ## remove what the other verbs made: builds, caches, .venv
	rm -rf .venv build dist target spark-warehouse metastore_db derby.log
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis src/penstock/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/environment:
	@tools/prerequisites.sh
	@"$$(tools/prerequisites.sh python)" -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/dependencies: pyproject.toml $(STAMPS)/environment
	@echo "installing the Python dependencies into .venv"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(PYTHON) tools/requirements.py $(EXTRAS) > $(STAMPS)/requirements.txt
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r $(STAMPS)/requirements.txt
	@touch $@

$(STAMPS)/extension: $(RUST_SOURCES) $(STAMPS)/dependencies
	@echo "compiling the kernel (about two minutes the first time)"
	@PIP_QUIET=1 maturin develop --release --locked --quiet
	@touch $@
