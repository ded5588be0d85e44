# Each command sets up what it needs in virtual environments of its own, one set for each Python. The tests have another
# than training: they install libtpu, to describe TPUs, and JAX looks for a TPU wherever that is installed.
PYTHON ?= python3
FLAVOUR := $(filter-out python3 python,$(notdir $(PYTHON)))
ENV := .venv$(if $(FLAVOUR),-$(FLAVOUR))
TEST_ENV := $(ENV)-test
ORACLE_ENV := .venv-oracle
WORKERS ?= 2

.PHONY: train test test-extras lint format clean

train: $(ENV)/.installed
	$(ENV)/bin/python -m t5x_pjit_recipes.train --gin_file=gin/runs/pretrain_pydoc.gin --cpu_devices=8 $(ARGS)

test: $(TEST_ENV)/.installed
	$(TEST_ENV)/bin/python -m pytest -n $(WORKERS) --ignore=tests/extras $(ARGS)

# What is compared with Hugging Face's own models: PyTorch runs in a process of its own, in an environment that all Pythons share.
test-extras: $(TEST_ENV)/.installed-extras $(ORACLE_ENV)/.installed
	ORACLE_PYTHON=$(CURDIR)/$(ORACLE_ENV)/bin/python $(TEST_ENV)/bin/python -m pytest -n $(WORKERS) tests/extras $(ARGS)

lint: $(TEST_ENV)/.installed
	$(TEST_ENV)/bin/python -m ruff check .
	$(TEST_ENV)/bin/python -m ruff format --check .

format: $(TEST_ENV)/.installed
	$(TEST_ENV)/bin/python -m ruff check --fix .
	$(TEST_ENV)/bin/python -m ruff format .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON, as in: make train PYTHON=python3.13")'
	$(PYTHON) -m venv $*

$(ENV)/.installed: setup.py | $(ENV)/bin/python
	$(ENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(TEST_ENV)/.installed: setup.py | $(TEST_ENV)/bin/python
	$(TEST_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

$(TEST_ENV)/.installed-extras: $(TEST_ENV)/.installed
	$(TEST_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[hf]'
	touch $@

$(ORACLE_ENV)/.installed: | $(ORACLE_ENV)/bin/python
	$(ORACLE_ENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'transformers>=5,<6' safetensors
	touch $@
