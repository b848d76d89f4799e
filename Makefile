# Meterhouse. `make serve` and `make test` are all a newcomer needs; each installs what it lacks and is quick again.
PYTHON ?= python3
BIN    := .venv/bin
ARGS   ?=
# TORCH=torch==2.13.0 chooses another build of PyTorch than deploy/install.py would.

.DEFAULT_GOAL := help
.PHONY: help serve demo test check format bench chaos clean

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

serve: ## install, fetch the default model, serve on 127.0.0.1:8000 with two demo tenants (ARGS="--port 8001")
	@$(PYTHON) deploy/install.py serve
	@exec $(BIN)/meterhouse serve --demo $(ARGS)

demo: ## a short story: three tenants, streams, a cut connection, an invoice and its export
	@$(PYTHON) deploy/install.py dev
	@$(BIN)/python examples/demo.py $(ARGS)

test: ## install what the tests need and run everything (ARGS="-k spool")
	@$(PYTHON) deploy/install.py test
	@$(BIN)/python -m pytest $(ARGS)

check: ## ruff, strict types, and who may import whom
	@$(PYTHON) deploy/install.py dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	 $(BIN)/mypy deploy/install.py examples/demo.py examples/adapters/train.py benchmarks/*.py && $(BIN)/python -m pytest -q tests/unit/test_imports.py

format: ## let ruff lay out the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: ## output tokens/s beside transformers' generate
	@$(PYTHON) deploy/install.py dev
	@$(BIN)/python benchmarks/generate.py $(ARGS)

chaos: ## kill gateway, engine and ClickHouse 210 times under load and count (ARGS="--kills 500 --seed 7")
	@$(PYTHON) deploy/install.py test
	@$(BIN)/python -m tests.chaos $(ARGS)

clean: ## remove the environment and caches of this checkout (never data)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache *.egg-info
