# make probe       set up, then the main job on the embedded encoder and images
# make test        set up, then the default suite (minutes)
# make test-slow   set up, then the slow suite
# make check       lint and types
#
# Everything goes into the active virtual or conda environment, or into .venv if none is active.
# PYTHON=python3.12 chooses the interpreter of a new .venv.

PYTHON ?= python3
ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),$(CURDIR)/.venv)
PY := $(ENV)/bin/python
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile
DONE := $(ENV)/.vision-probing-$(shell cksum < pyproject.toml | cut -d' ' -f1)

.PHONY: probe test test-slow check speed

probe: $(DONE)-demo
	$(PY) probe.py

test: $(DONE)-dev
	$(PY) -m pytest $(SPREAD) -m "not slow"

test-slow: $(DONE)-dev
	$(PY) -m pytest $(SPREAD) -m slow

check: $(DONE)-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

speed: $(DONE)-dev
	$(PY) tests/speed/extraction.py
	$(PY) tests/speed/storage.py
	$(PY) tests/speed/input.py
	$(PY) tests/speed/volume.py
	$(PY) tests/speed/index.py
	$(PY) tests/speed/startup.py

$(ENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: type make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(ENV)

# The mark names the content of pyproject.toml: an unchanged project is installed once.
$(DONE)-%: | $(ENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@
