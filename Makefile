# Every target sets up .venv by itself when it is missing or older than the dependency lists.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

.PHONY: setup demo test test-all check docs bench soak gates clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rollstream needs Python 3.11 or newer; set PYTHON=/path/to/one")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-all: $(STAMP)
	$(PYTEST) --random-order

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs: $(STAMP)
	$(BIN)/python docs/make_algorithm_pages.py

bench: $(STAMP)
	$(BIN)/python bench/flow_overhead.py
	$(BIN)/python bench/call_latency.py
	$(BIN)/python bench/broadcast_gather.py --passes 3
	$(BIN)/python bench/worker_start.py
	$(BIN)/python bench/sampling.py
	$(BIN)/python bench/flow_vs_loop.py
	$(BIN)/python bench/lines_of_code.py

soak: $(STAMP)
	$(BIN)/python bench/soak.py

gates: $(STAMP)
	$(BIN)/python bench/gates.py --write docs/results.md
	$(BIN)/python docs/make_algorithm_pages.py

clean:
	rm -rf .venv
