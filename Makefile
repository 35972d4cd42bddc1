# Everything installs with constraints.txt, into virtual environments beside this file.
PYTHON ?= python3
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-browser lint test-tl3 bench figures figures-check gallery docs clean

demo: .venv/installed
	.venv/bin/tl-headmaps demo

# make test ARGS="-m 'not browser'" leaves the browser alone.
test: .venv/tested
	.venv/bin/python -m pytest $(ARGS)

# The figures in a real browser; a missing one is a failure here (apt-get install chromium).
test-browser: .venv/tested
	TL_HEADMAPS_BROWSER=required .venv/bin/python -m pytest tests -m browser

lint: .venv/linted
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test-tl3: .venv-tl3/tested
	.venv-tl3/bin/python -m pytest -m 'not browser'

figures: .venv/tested
	.venv/bin/python tests/benchmarks/figures.py

figures-check: .venv/tested
	.venv/bin/python tests/benchmarks/figures.py --check

gallery: .venv/tested
	PYTHONPATH=tests .venv/bin/python tests/benchmarks/gallery.py

# The API reference, pages that open offline: build/reference/index.html
docs: .venv/documented
	.venv/bin/python tests/reference.py build/reference

bench: .venv/tested
	.venv/bin/python tests/benchmarks/run.py --out tests/benchmarks/figures.json

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) torch
	.venv/bin/python $(PIP_INSTALL) -e .
	touch $@

.venv/tested: .venv/installed
	.venv/bin/python $(PIP_INSTALL) -e '.[test]'
	touch $@

.venv/linted: .venv/installed
	.venv/bin/python $(PIP_INSTALL) -e '.[lint,test]'
	touch $@

.venv/documented: .venv/installed
	.venv/bin/python $(PIP_INSTALL) -e '.[docs]'
	touch $@

# The same constraints but for the host itself: the newest TransformerLens 3.
.venv-tl3/tested: pyproject.toml constraints.txt
	test -x .venv-tl3/bin/python || $(PYTHON) -m venv .venv-tl3
	grep -v '^transformer-lens==' constraints.txt > .venv-tl3/constraints.txt
	.venv-tl3/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-tl3/constraints.txt torch
	.venv-tl3/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-tl3/constraints.txt \
		-e '.[test]' 'transformer-lens<4'
	touch $@

clean:
	rm -rf .venv .venv-tl3 build dist *.egg-info
