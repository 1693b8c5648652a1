# Everything a newcomer needs: `make demo` runs the main job, `make test` the tests, `make check` adds ruff and mypy.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= decoder,dev
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

.PHONY: help setup demo test check lint docs gpu clean

help:
	@echo "make demo    set everything up, then profile, trace, tune and decode live with every policy"
	@echo "make test    set everything up, then run the tests"
	@echo "make check   ruff, mypy and the tests"
	@echo "make gpu     where there is a GPU: the tests that need one, and records of selection and forwards in gpu/"
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

# Needs a GPU. GPU_TARGETS are profiled with random weights: known models need no download.
GPU         ?= gpu
GPU_TARGETS ?= Qwen/Qwen3-4B Qwen/Qwen3-8B
gpu: setup
	mkdir -p $(GPU)
	$(BIN)/python -m pytest tests/decoder/device tests/decoder/test_graphs.py tests/selector/test_scorer.py
	$(BIN)/python benchmarks/device_selection.py --device cuda --json > $(GPU)/selection.json
	$(BIN)/python benchmarks/device_selection.py --device cuda --vocab 151936 --depth 15 --json > $(GPU)/selection-qwen3.json
	for target in $(GPU_TARGETS); do for mode in eager captured; do \
	  $(BIN)/costmodel profile --target $$target --random-weights --dtype bfloat16 --device cuda --mode $$mode \
	    --batch 1,4,16 --out $(GPU)/$$(basename $$target)-$$mode.json || exit 1; \
	done; done

clean:
	rm -rf $(VENV)
