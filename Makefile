# Every verb of the project; people and CI use the same ones. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help prerequisites setup build check test test-all test-long test-stress miri mutants bench docs site demo package clean

VENV := $(CURDIR)/.venv
PYTHON := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
RUST_SOURCES := $(shell find native -type f -not -name '*.md') Cargo.toml Cargo.lock
export VIRTUAL_ENV := $(VENV)
export PATH := $(VENV)/bin:$(HOME)/.cargo/bin:$(PATH)
export PYSPARK_PYTHON := $(PYTHON)
export PYSPARK_DRIVER_PYTHON := $(PYTHON)

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMPS)/extension ## make .venv with every dependency and the built extension
	@echo "ready: . .venv/bin/activate"

build: setup ## compile the kernel into .venv; nothing happens when nothing changed

check: setup ## formatting, lint and types of Python and Rust
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

test: setup ## the everyday tests, which decide whether a change lands (AREA=canal: of one area)
	@$(PYTHON) -m tools.suite.run --tier everyday $(if $(AREA),--area $(AREA)) $(if $(WORKERS),--workers $(WORKERS))

test-all: setup ## the everyday and the deep tests (AREA=canal: of one area)
	@$(PYTHON) -m tools.suite.run --tier all $(if $(AREA),--area $(AREA)) $(if $(WORKERS),--workers $(WORKERS))

test-long: setup ## the long sweeps, resumed (SEEDS=1-5 MINUTES=60 ONLY=log FRESH=1); results in build/long.json
	@$(PYTHON) -m tools.suite.long $(if $(SEEDS),--seeds $(SEEDS)) $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(ONLY),--only '$(ONLY)') $(if $(FRESH),--fresh)

test-stress: setup ## repeat TESTS (default: those that depend on time) under load, resumed (TIMES=50 PARALLEL=4)
	@$(PYTHON) -m tools.suite.stress $(if $(TIMES),--times $(TIMES)) $(if $(PARALLEL),--parallel $(PARALLEL)) \
	  $(if $(FRESH),--fresh) $(TESTS)

miri: setup ## run miri, installed on first use, over the unit tests of the kernel's files with unsafe code
	@$(PYTHON) -m tools.miri

mutants: setup ## mutation testing, resumed (KERNEL=30 PYTHON_MUTANTS=30 SEED=1); survivors are listed
	@$(PYTHON) -m tools.mutants $(if $(KERNEL),--kernel $(KERNEL)) \
	  $(if $(PYTHON_MUTANTS),--python $(PYTHON_MUTANTS)) $(if $(SEED),--seed $(SEED))

bench: setup ## measure against the peers on 1 GB files; the figures go to bench/results (SIZE=tiny: a rehearsal)
	$(PYTHON) -m bench --size $(or $(SIZE),1GB)

docs: setup ## write docs/reference again from the code
	$(PYTHON) -m tools.document

site: setup ## build the documentation as a site into build/site/html; a link to nothing fails
	@$(PYTHON) tools/requirements.py docs | $(PYTHON) -m pip install --quiet -r /dev/stdin
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m tools.site

demo: setup ## a live server, a busy writer, Delta tables by Spark, and the proof that they are equal
	@$(PYTHON) -m tools.servers install host
	@$(PYTHON) -m demo

package: setup ## build the sdist and wheels into dist/; prove them without Rust, and under qemu
	@$(PYTHON) tools/requirements.py package | $(PYTHON) -m pip install --quiet -r /dev/stdin
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
	@$(PYTHON) tools/requirements.py --all-but package > $(STAMPS)/requirements.txt
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r $(STAMPS)/requirements.txt
	@touch $@

$(STAMPS)/extension: $(RUST_SOURCES) $(STAMPS)/dependencies
	@echo "compiling the kernel (about two minutes the first time)"
	@PIP_QUIET=1 maturin develop --release --locked --quiet
	@touch $@
