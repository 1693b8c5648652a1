# Everything a newcomer needs: `make demo` runs the main job, `make test` the tests, `make check` adds ruff and mypy.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= decoder,dev
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

.PHONY: help setup demo test check lint docs clean

help:
	@echo "make demo    set everything up, then profile, trace, tune and decode live with every policy"
	@echo "make test    set everything up, then run the tests"
	@echo "make check   ruff, mypy and the tests"
	@echo "make docs    write docs/cli.md and docs/structure.md anew from the code"
	@echo "make clean   remove the virtual environment"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	# The drafter's parity test compares with the authors' package, whose own pins are not needed for its network.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt dflash
	touch $(READY)

setup: $(READY)

demo: setup
	$(BIN)/decoder pull smollm2-135m
	$(BIN)/python -m decoder.demo

test: setup
	$(BIN)/decoder pull smollm2-135m
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

docs: setup
	$(BIN)/python tools/cli_reference.py docs/cli.md
	$(BIN)/python tools/structure_page.py docs/structure.md

clean:
	rm -rf $(VENV)
