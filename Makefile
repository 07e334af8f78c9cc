# Two commands: `make plan` (plan the example) and `make test` (linters, types, tests).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: plan picture test lint types unit constants bench test-launchers test-engines test-netns test-ray clean help

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(RUN_STAMP)

plan: $(RUN_STAMP)  ## plan the example: print the plan, write its launcher files under ./plans/
	$(BIN)/meshplan catalog upgrade >/dev/null
	$(BIN)/meshplan plan example.yaml --out plans --force

picture: $(RUN_STAMP)  ## draw cli/plan.svg again, the whole report that README shows
	COLUMNS=80 $(BIN)/meshplan plan example.yaml --full --no-store | $(BIN)/python -c "import io, sys; \
	from rich.console import Console; screen = Console(record=True, width=80, file=io.StringIO()); \
	screen.print(sys.stdin.read(), markup=False, highlight=False); \
	screen.save_svg('cli/plan.svg', title='meshplan plan example.yaml --full')"

test: lint types unit  ## linters, types, tests

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# mypy cannot follow an editable install of a mapped package, so it is shown the tree under its installed name.
types: $(DEV_STAMP)
	@mkdir -p build/types/meshplan && for folder in planner profiler catalogs cli; do \
	  ln -sfn ../../../$$folder build/types/meshplan/$$folder; done
	MYPYPATH=build/types $(BIN)/mypy -p meshplan

unit: $(DEV_STAMP)
	$(BIN)/pytest -n auto --dist loadgroup

# A second environment: torch wants its CPU build, Megatron-LM ignores its Python bound; --no-deps keeps CUDA out.
LAUNCHERS_VENV ?= .venv-launchers
LAUNCHERS_PYTHON ?= python3.11
LAUNCHERS_STAMP := $(LAUNCHERS_VENV)/.installed
CONFORMANCE := tests/conformance
MEGATRON := $(CONFORMANCE)/megatron

$(LAUNCHERS_STAMP): $(MEGATRON)/requirements.txt $(MEGATRON)/framework.txt $(CONFORMANCE)/parsers.txt \
  $(CONFORMANCE)/frameworks.txt pyproject.toml
	$(LAUNCHERS_PYTHON) -m venv $(LAUNCHERS_VENV)
	$(LAUNCHERS_VENV)/bin/pip install --quiet --no-deps --requirement $(MEGATRON)/requirements.txt
	$(LAUNCHERS_VENV)/bin/pip install --quiet --no-deps --ignore-requires-python --requirement $(MEGATRON)/framework.txt
	$(LAUNCHERS_VENV)/bin/pip install --quiet --requirement $(CONFORMANCE)/parsers.txt
	DS_BUILD_OPS=0 $(LAUNCHERS_VENV)/bin/pip install --quiet --no-deps --no-build-isolation \
	  --requirement $(CONFORMANCE)/frameworks.txt
	$(LAUNCHERS_VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

# The serving engines want another transformers: an environment of their own, without CUDA (336 MB are vLLM's wheel).
ENGINES_VENV ?= .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed
ENGINES := $(CONFORMANCE)/engines

$(ENGINES_STAMP): $(ENGINES)/requirements.txt $(ENGINES)/engines.txt pyproject.toml
	$(LAUNCHERS_PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/pip install --quiet --requirement $(ENGINES)/requirements.txt
	$(ENGINES_VENV)/bin/pip install --quiet --no-deps --requirement $(ENGINES)/engines.txt
	$(ENGINES_VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-launchers: $(LAUNCHERS_STAMP) test-engines  ## target frameworks' own parsers over the emitted files
	$(LAUNCHERS_VENV)/bin/pytest -m launchers -n 2 --dist loadfile --ignore $(ENGINES) $(CONFORMANCE)

test-engines: $(ENGINES_STAMP)  ## parsers of the serving engines and their routers alone
	$(ENGINES_VENV)/bin/pytest -m launchers -n 2 --dist loadfile $(ENGINES)

# Torch is not needed to develop, so it has an environment of its own; 2.13.0 is the version that CI has.
TORCH_VENV ?= .venv-torch
TORCH_STAMP := $(TORCH_VENV)/.installed

$(TORCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --quiet torch==2.13.0 --editable '.[dev]'
	touch $@

test-netns: $(TORCH_STAMP)  ## profiler and a training run over network namespaces, device profiler on torch (root, ip, tc)
	$(TORCH_VENV)/bin/pytest -m 'netns or torch'

# Ray is not needed to develop either, and brings its own versions of what it needs.
RAY_VENV ?= .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed

$(RAY_STAMP): pyproject.toml
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/pip install --quiet --editable '.[dev,ray]'
	touch $@

test-ray: $(RAY_STAMP)  ## sweeps on a Ray cluster of this machine
	$(RAY_VENV)/bin/pytest -m ray tests/planner/sweep

# Which published runs the shipped constants are fitted to: files of the folder OBSERVATIONS, by kind and source. Fits of
# training take 8 CPU-minutes, those of serving 10. Traces of serving runs lie in TRACES.
OBSERVATIONS ?= observations
TRACES ?= $(OBSERVATIONS)/../traces
FITTED_TRAINING := internevo korthikanti mlperf maxtext-tpu mpt megatron-bridge sc21 oneflow zero-bubble sailor \
  megatron-core-moe torchtitan dgxc nemo nemo-automodel alpa qwen-finetune torchtune megatron-moe-modelzoo ms-swift litgpt
FITTED_SERVING := argonne splitwise trtllm-v0.14 trtllm-v0.5 silicon-aggregated dstack-static blis llmservingsim

constants: $(RUN_STAMP)  ## fit the shipped constants of training and serving anew, from a folder: OBSERVATIONS=…
	mkdir -p build && rm -f build/constants.sqlite
	MESHPLAN_DB=build/constants.sqlite $(BIN)/meshplan calibrate --from-scratch --dry-run --traces $(TRACES) \
	  $(FITTED_TRAINING:%=$(OBSERVATIONS)/training-%.jsonl) $(FITTED_SERVING:%=$(OBSERVATIONS)/serving-%.jsonl) \
	  --export catalogs/seed/calibrations.yaml

clean:  ## remove what the other commands made
	rm -rf $(VENV) $(LAUNCHERS_VENV) $(ENGINES_VENV) $(TORCH_VENV) $(RAY_VENV) build plans
