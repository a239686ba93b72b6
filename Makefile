# Each target makes the virtual environment first where it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LEDGER ?= reports/ledger/local.jsonl
WORKERS ?= 2

.PHONY: help report test lint clean

help:
	@echo "make report   put the reference under test (quick tier, on CPU) and print the coverage table"
	@echo "make test     run every test: all cells, and the self-tests of each room"
	@echo "make lint     ruff, mypy, import contracts"
	@echo "make clean    remove the virtual environment, caches and the local ledger"

$(VENV)/.installed: pyproject.toml
	@echo "== making $(VENV) and installing what pyproject.toml names (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

report: $(VENV)/.installed
	@echo "== running the smoke tier on CPU: real daemons, engines and checkpoints; results go to $(LEDGER)"
	@$(BIN)/python -m pytest conformance/test_cells.py -n $(WORKERS) --tier smoke --ledger $(LEDGER) -q; status=$$?; \
	echo "== coverage, from $(LEDGER)"; $(BIN)/matrix report --tier smoke --ledger $(LEDGER) && exit $$status

test: $(VENV)/.installed
	@echo "== running every cell and the self-tests; results go to $(LEDGER)"
	@$(BIN)/python -m pytest conformance -n $(WORKERS) --tier full --ledger $(LEDGER) -q

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache $(LEDGER)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
