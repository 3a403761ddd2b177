# Everything a developer runs. The first target that needs it makes .venv and installs the pinned versions there.
#   make demo       optimise SqueezeNet on this machine (about four minutes); results in out/demo
#   make test       the quick tests          make test-all   these and the slow ones
#   make gpu-test   what a GPU adds to the tests, in under five minutes (needs jax[cuda12])
#   make lint       ruff and pyright         make format     let ruff rewrite the files
#   make clean      remove what runs leave behind (not .venv)
# Variables: PYTHON (3.11 or newer, to make .venv), JOBS (test processes), ARGS (further arguments to pytest or the demo).

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
GPU_COMPILER := .venv/.gpu_compiler
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
SOURCES := xrl_jax experiments tests

.PHONY: demo test test-all gpu-test lint format clean

demo: $(READY)
	$(BIN)/python -m experiments.optimize --model=squeezenet --search=taso --budget_seconds=240 --out=out/demo $(ARGS)

test: $(READY) $(GPU_COMPILER)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY) $(GPU_COMPILER)
	$(PYTEST) $(ARGS)

gpu-test: $(READY)
	$(BIN)/python -m pytest -q -rs tests/gpu $(ARGS)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf out build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing .venv is kept. The stamp makes setup run again only when the requirements change.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,onednn,onnx]"
	@touch $@

# XLA's compiler for NVIDIA GPUs, which some tests use; no GPU is needed.
$(GPU_COMPILER): $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m xrl_jax.measure.gpu.install
	@touch $@

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "'$(PYTHON)' is not here: xrl_jax needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " + sys.version.split()[0] \
	    + ", but xrl_jax needs 3.11 or newer: name one with make PYTHON=/path/to/python3")'
	"$(PYTHON)" -m venv .venv
