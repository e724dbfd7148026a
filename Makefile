# make demo   install, then let the small model of this package answer four questions
# make test   install, then every test that needs no GPU
# make check  install, then lint and all tests but the slow ones: the loop while editing
# make lint   ruff and pyright only
# make gpu    the tests that need one or more GPUs
# make sizes  lines per room against the aims in docs/style.md
# make clean  remove the environment and the caches
#
# PYTHON=python3.12       the interpreter that makes .venv (3.11 or newer)
# TORCH=2.11.0            this torch instead of the one in constraints-cpu.txt
# TORCH_INDEX=<address>   one more package index, such as PyTorch's CPU wheels
# PY=python3              use an interpreter that already has everything; installs nothing

PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
VENV := .venv

# The wanted torch is part of the name, so that asking for another one installs again.
STAMP := $(VENV)/.installed-torch-$(or $(TORCH),default)
RUN_STAMP := $(STAMP)-run

ifdef PY
INSTALLED :=
INSTALLED_RUN :=
SUZURI := $(PY) -c "import sys; from suzuri.cli import main; sys.exit(main())"
else
PY := $(VENV)/bin/python
INSTALLED := $(STAMP)
# To see the model answer, what tests and lint need is not waited for.
INSTALLED_RUN := $(if $(wildcard $(STAMP)),$(STAMP),$(RUN_STAMP))
SUZURI := $(VENV)/bin/suzuri
endif

PYTEST = $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo test check lint gpu sizes clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

# $(call install,.) without the tools of tests and lint, $(call install,.[dev]) with them.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Suzuri needs Python 3.11 or newer; '$(PYTHON)' says: $$($(PYTHON) --version 2>&1 | head -n 1)"; \
	  for name in python3.13 python3.12 python3.11; do \
	    if $$name -c '' 2>/dev/null; then echo "This machine has $$name: run  make PYTHON=$$name $(MAKECMDGOALS)"; exit 1; fi; \
	  done; \
	  echo "Install one, then run  make PYTHON=<its name> $(MAKECMDGOALS)"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@if [ -n "$(TORCH)" ]; then wanted="torch==$(TORCH)"; \
	elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then wanted=""; \
	else wanted="-c constraints-cpu.txt"; fi; \
	echo "Installing into $(VENV) $${wanted:+($$wanted)}; the first time downloads torch"; \
	$(VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
	  $$wanted -e '$(1)'
	@touch $@
endef

$(STAMP): pyproject.toml constraints-cpu.txt
	$(call install,.[dev])

$(RUN_STAMP): pyproject.toml constraints-cpu.txt
	$(call install,.)

demo: $(INSTALLED_RUN)
	$(SUZURI) demo
	@test ! -x $(VENV)/bin/suzuri || echo "suzuri is in $(VENV)/bin. For developing: make test, README.md."

test: $(INSTALLED)
	$(PYTEST) -q tests/architecture
	$(PYTEST) -n 2 --ignore tests/architecture

check: lint
	$(PYTEST) -q tests/architecture
	$(PYTEST) -n 2 --ignore tests/architecture -m "not gpu and not multi_gpu and not slow"

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

gpu: $(INSTALLED)
	$(PY) -m pytest -q -m "gpu or multi_gpu"

sizes: $(INSTALLED)
	@$(PY) scripts/room_sizes.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find suzuri tests scripts -name __pycache__ -prune -exec rm -rf {} +
