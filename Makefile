# make demo    generates code with the pair that ships
# make test    runs the tests, in two processes (on the CPU; `.venv/bin/pytest -m gpu` runs those that need a GPU)
# make test-all  the same with every case: `few` marks the tests of which `make test` runs some cases
# make fuzz    opens 2,000 seeded mutations of a model folder, in two processes: a few minutes
# make test-jax  lowers every op and the decode loop with the newest JAX that pyproject.toml names, in an environment of its own
# make notebooks  runs the notebooks on the CPU and keeps their outputs in them
# make lint    ruff check, ruff format --check, pyright
#
# Each sets up .venv on first use and installs again when pyproject.toml changes. PYTHON=... names the interpreter to use.

VENV := .venv
BIN := $(VENV)/bin
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many interpreters: a second less for each that finds the sources compiled.
unexport PYTHONDONTWRITEBYTECODE

# On a machine with an NVIDIA driver the demo wants the GPU; the tests run on the CPU either way.
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda13)

# Tests and figures are of this version of JAX; `make test-jax` takes the newest one.
JAX := 0.11.2
NEWEST := .venv-jax

# Continuous integration also runs the kernels written in Triton, interpreted.
COMMA := ,
EXTRAS := test$(if $(CI),$(COMMA)test-triton)

.PHONY: demo test test-all test-jax fuzz notebooks lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo
	$(BIN)/dflash-jax demo

test: $(VENV)/installed-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/installed-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --all-cases

test-jax: $(NEWEST)/installed
	$(NEWEST)/bin/pytest -n 2 tests/kernels/test_cross_lowering.py tests/decoding/test_loop_lowers.py tests/decoding/test_cycle.py

fuzz: $(VENV)/installed-test
	$(BIN)/pytest -n 2 -m fuzz tests/fuzz

notebooks: $(VENV)/installed-test
	$(BIN)/python notebooks/make_outputs.py

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	@python=$$(.ci/find-python) && echo "$(VENV): $$python" && "$$python" -m venv $(VENV)

$(VENV)/installed-demo: pyproject.toml | $(BIN)/python
	@echo "installing dflash-jax into $(VENV) (a minute or two on first use)"
	@$(BIN)/python -m pip install --quiet --editable '.$(CUDA:%=[%])'
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(BIN)/python
	@echo "installing dflash-jax and its test tools into $(VENV) (a few minutes on first use)"
	@$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' 'jax==$(JAX)' 'jaxlib==$(JAX)'
	@touch $@

$(NEWEST)/installed: pyproject.toml
	@python=$$(.ci/find-python) && "$$python" -m venv $(NEWEST)
	@echo "installing dflash-jax with the newest JAX into $(NEWEST) (a few minutes on first use)"
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache
