# The two commands are `make lab` and `make test`; each sets up everything it needs first.
#
#   make lab ARGS=--no-browser      options passed on to JupyterLab
#   make lab PHASE=2                opens at another phase
#   make test PYTHON=python3.12     the interpreter to build .venv from
#   make test VENV=none             no set-up: use the environment that is active (conda, a GPU machine)

PYTHON ?=
VENV   ?= .venv
PHASE  ?= 0
ARGS   ?=
export PYTHON VENV

RUN   := @sh tools/bootstrap.sh
TEST  := $(RUN) tools/run_tests.py
PARTS := static lint sync unit starters notebooks lectures solutions
LECTURE = $(or $(wildcard notebooks/0$(PHASE)_*.ipynb notebooks/$(PHASE)_*.ipynb),\
	$(error there is no phase $(PHASE): choose PHASE from those of notebooks/))

.DEFAULT_GOAL := help
.PHONY: help lab lab-browser-check site site-check site-links setup test test-quick test-long format build bench doctor clean clean-venv $(addprefix test-,$(PARTS))

help: ## this list
	@echo "FlashAttention, wall by wall"
	@echo
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile
	@echo
	@sed -n '3,6s/^# */  /p' Makefile

lab: ## set up, then open JupyterLab at phase 0 (or PHASE=...)
	$(RUN) -m jupyterlab --allow-root --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.app_settings_dir="$(CURDIR)/tools/jupyterlab" \
		--LabApp.default_url="/lab/tree/$(LECTURE)" $(ARGS)

test: ## set up, then prove that all of it works: every part below
	$(TEST) $(ARGS)

test-quick: ## ... the unit tests that are not slow: the inner loop
	$(TEST) quick
test-long: ## ... the unit tests that others nearly stand for: after a change of a check or a kernel
	$(TEST) long
test-static: ## ... test-lint and test-sync, side by side
	$(TEST) static
test-lint: ## ... ruff and mypy
	$(TEST) lint
test-sync: ## ... the notebooks are what src/lessons builds
	$(TEST) sync
test-unit: ## ... unit and property tests
	$(TEST) unit
test-starters: ## ... every unsolved exercise fails its check, and nothing else
	$(TEST) starters
test-notebooks: ## ... test-lectures and test-solutions
	$(TEST) notebooks
test-lectures: ## ... every lecture runs and gives the outputs it shows
	$(TEST) lectures
test-solutions: ## ... every solution runs and gives the outputs it shows
	$(TEST) solutions

lab-browser-check: ## a learner's first minutes in a real browser (needs playwright and chromium)
	$(RUN) tests/lab/browser_check.py $(ARGS)

build: ## rebuild the notebooks from src/lessons (ARGS="--only 02")
	$(RUN) src/lessons/build.py $(ARGS)

format: ## lay the Python code out as `make test-lint` wants it
	$(RUN) -m ruff format .

bench: ## a little of every measurement that this machine can make
	$(RUN) -m flashlab.cli bench all --quick $(ARGS)

doctor: ## what this machine has, and which phase runs how on it
	$(RUN) src/flashlab/doctor.py $(ARGS)

SITE := build/site-venv/bin/python
build/site-venv/ready: pyproject.toml
	@$(or $(PYTHON),python3) -m venv --clear build/site-venv
	@$(SITE) -m pip install --quiet --upgrade 'pip>=25.1'
	@$(SITE) -m pip install --quiet --group site
	@touch $@
build/site-npm: site/package.json
	@mkdir -p $@ build/site-static/mathjax/output/chtml/fonts
	@cp $< $@ && npm install --prefix $@ --silent --no-package-lock --no-audit --no-fund
	@cp $@/node_modules/mathjax/es5/tex-chtml.js build/site-static/mathjax
	@cp -r $@/node_modules/mathjax/es5/output/chtml/fonts/woff-v2 build/site-static/mathjax/output/chtml/fonts
	@cp docs/tiles.png build/site-static
	@touch $@

site: build/site-venv/ready build/site-npm ## the course as a website, in build/site (its first set-up needs npm and Python 3.11)
	@rm -rf build/site && $(SITE) site/stage.py
	@$(SITE) -m sphinx -W --keep-going --quiet --jobs auto --fresh-env -c site build/site-source build/site
site-check: site ## the website in a real browser (needs a chromium)
	@$(SITE) site/check.py $(ARGS)
site-links: site ## whether the website's links to other places lead somewhere: a report
	@$(SITE) -m sphinx --quiet --builder linkcheck -c site build/site-source build/site-links

setup: ## only the set-up: .venv with the package and its pins
	$(RUN) setup

clean: ## delete caches (never .venv, your answers or your progress)
	@rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find src tests tools docs -name __pycache__ -type d -prune -exec rm -rf {} +
	@find . -path './.venv*' -prune -o -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +

clean-venv: ## delete .venv, so that the next set-up starts afresh
	@rm -rf .venv
