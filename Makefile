# Each command sets up what it needs: a virtual environment of its own for each Python, and the package in it.
PYTHON ?= python3
FLAVOUR := $(filter-out python3 python,$(notdir $(PYTHON)))
ENV := .venv$(if $(FLAVOUR),-$(FLAVOUR))
RUN := $(ENV)/bin/python
WORKERS ?= 2

.PHONY: train test lint format clean

train: $(ENV)/.package
	$(RUN) -m t5x_pjit_recipes.train --gin_file=gin/runs/pretrain_pydoc.gin --cpu_devices=8 $(ARGS)

test: $(ENV)/.test
	$(RUN) -m pytest -n $(WORKERS) $(ARGS)

lint: $(ENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(ENV)/.test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

$(ENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=, as in: make PYTHON=python3.13 train")'
	$(PYTHON) -m venv $(ENV)

$(ENV)/.package: setup.py | $(ENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(ENV)/.test: setup.py | $(ENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $(ENV)/.package $@
