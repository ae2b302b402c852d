# Start with `make demo` and `make test`. Every target first runs scripts/setup.py, which fills .venv (.venv-0.29 for
# VLLM=0.29) from constraints/ and does nothing if nothing changed. Without a network name an interpreter that has the
# stack: `make test PYTHON=/path/to/python`.

PRECISION ?= jet_fp8_exact
PYTHON3   ?= python3
STACK     ?= auto
VLLM      ?=
PYTHON    ?=
ARGS      ?=

# upgrade-check compares with VLLM and runs in the default environment.
LANE := $(or $(if $(filter upgrade-check,$(MAKECMDGOALS)),,$(VLLM)),0.24)
VENV := .venv$(if $(filter-out 0.24,$(LANE)),-$(LANE))
# Interpreter of all targets. Its bin/ comes first on the PATH, so that torch and vLLM find programs such as ninja
# without an activated environment. Set-up must not run with it: it may replace .venv.
PY  := $(or $(PYTHON),$(CURDIR)/$(VENV)/bin/python)
RUN := $(if $(findstring /,$(PY)),PATH="$(abspath $(dir $(PY))):$$PATH" )$(PY)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-e2e test-vllm test-all test-gpu wheel upgrade-check lint format lock clean distclean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo
	@echo 'PRECISION=$(PRECISION)    a row of the table in docs/options.md, for make demo'
	@echo 'ARGS=...             arguments for the demo or for pytest: make test ARGS="-k contract"'
	@echo 'PYTHON=/path/python  use this interpreter and install only the plugin (no network needed)'
	@echo 'PYTHON3=python3.12   Python 3.11 or 3.12 to make .venv with'
	@echo 'STACK=cpu|gpu        install this stack without looking for a GPU'
	@echo 'VLLM=0.24|0.29       version of vLLM and what goes with it (0.24); 0.29 gets .venv-0.29'

setup:  ## make .venv with the CPU or the GPU stack (the other targets do it)
	@$(PYTHON3) scripts/setup.py --stack "$(STACK)" --vllm "$(LANE)" --python "$(PYTHON)"

demo: setup  ## train a small policy on addition with verl and vLLM under PRECISION; writes a report
	@$(RUN) -m jetrl_verl.cli demo --precision $(PRECISION) $(ARGS)

test: setup  ## every quick test that needs no GPU
	@$(RUN) scripts/run_tests.py $(ARGS)

test-e2e: setup  ## whole jobs of verl and vLLM on the CPU
	@$(RUN) scripts/run_tests.py --e2e $(ARGS)

test-vllm: setup  ## test-e2e, and the tests of rollout, weight sync and patches: what another vLLM can break
	@$(RUN) scripts/run_tests.py --vllm $(ARGS)

test-all: setup  ## test, test-e2e, whole sweeps, every recipe and option, and a second instruction set
	@$(RUN) scripts/run_tests.py --all $(ARGS)

upgrade-check: setup  ## compare verl VERL= and vLLM VLLM= (default: newest) with what we patch and override
	@$(RUN) scripts/upgrade_check.py --pip "$$(command -v $(PYTHON3))" --verl "$(VERL)" --vllm "$(VLLM)"

test-gpu: setup  ## the tests named *_on_gpu.py, JOBS processes on one GPU; fails where there is none
	@$(RUN) scripts/run_tests.py --gpu $(ARGS)

wheel: setup  ## dist/*.whl with the Hopper kernels, for machines without nvcc (needs nvcc, no GPU)
	@$(RUN) scripts/build_wheel.py $(ARGS)

lint: setup  ## ruff check and ruff format --check
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

format: setup  ## let ruff fix and format the tree
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

lock: setup  ## resolve constraints/*.in again into constraints/*.txt (needs a network)
	@bash scripts/lock.sh "$(VENV)/bin/uv"

clean:  ## remove caches, build products and the demo's outputs; .venv stays
	@rm -rf build dist outputs .pytest_cache .ruff_cache *.egg-info packaging/*/build packaging/*/*.egg-info
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean  ## clean, and remove .venv and .venv-0.29 too
	@rm -rf .venv .venv-*
