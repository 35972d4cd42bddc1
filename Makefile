# Everything installs with constraints.txt, into virtual environments beside this file.
PYTHON ?= python3
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two test processes with one thread each: small matrices gain more from that than from threads.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n 2 --dist worksteal
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test coverage test-browser lint hooks wheel test-tl3 bench figures figures-check gallery notebooks docs clean calibrate fuzz

demo: .venv/installed
	.venv/bin/tl-headmaps demo

# make test ARGS="-m 'not browser'" leaves the browser alone.
test: .venv/tested
	$(call PYTEST,.venv) $(ARGS)

# Tests with the lines they reach; fails below the share in pyproject.toml.
coverage: .venv/tested
	$(call PYTEST,.venv) -m 'not browser' --cov --cov-report=term $(ARGS)

# The figures in a real browser; a missing one is a failure here (apt-get install chromium).
test-browser: .venv/tested
	TL_HEADMAPS_BROWSER=required .venv/bin/python -m pytest $$(grep -l browser tests/test_*.py) -m browser

lint: .venv/linted
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The linters of `make lint`, at the same versions, before every commit.
hooks: .venv/linted
	.venv/bin/pre-commit install

# The wheel in an environment that holds nothing else: what a user of `pip install` gets.
wheel: .venv/tested
	rm -rf dist .venv-wheel
	.venv/bin/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP_INSTALL) torch
	.venv-wheel/bin/python $(PIP_INSTALL) "$$(ls dist/*.whl)[demo]"
	.venv-wheel/bin/tl-headmaps --version
	.venv-wheel/bin/tl-headmaps grid --head L23H4 --sources France,Egypt --targets Paris,Cairo \
		--out dist/grid.json --out dist/grid.html
	.venv-wheel/bin/tl-headmaps cite dist/grid.json

# Not run twice: what never meets TransformerLens, what it does not decide (checkpoints, run folders, the demo, statistics), examples of
# docstrings. A new file runs here until it is listed; single tests are marked `once`.
WITHOUT_HOST = analyses calibration checkpoint checkpoint_families citations cli_checkpoint cli_signatures component_spectra demo docs drawings \
	examples hub map_shape mapped naming options package prompts ranking relations renderers renderers_notebook reproduce results runs shapes statistics \
	tasks texts vocabulary

test-tl3: .venv-tl3/tested
	$(call PYTEST,.venv-tl3) tests -m 'not browser and not once' $(WITHOUT_HOST:%=--ignore=tests/test_%.py)

figures: .venv/tested
	.venv/bin/python tests/benchmarks/figures.py

figures-check: .venv/tested
	.venv/bin/python tests/benchmarks/figures.py --check

gallery: .venv/tested
	PYTHONPATH=tests .venv/bin/python tests/benchmarks/gallery.py

# Runs the notebooks and stores what they show; ARGS="03 05" for some of them.
notebooks: .venv/tested
	OMP_NUM_THREADS=1 .venv/bin/python tests/notebooks.py $(ARGS)

# The site, pages that open offline: build/site/index.html
docs: .venv/documented
	.venv/bin/python examples/site/website.py build/site

# Every p-value, interval and verdict on heads that know nothing (about 20 minutes): tests/calibration/table.md
calibrate: .venv/tested
	.venv/bin/python tests/calibration/run.py $(ARGS)

# Bad input, kills, full disks, threads (five minutes): make fuzz ARGS="--seconds 3600 --seed 1"
fuzz: .venv/tested
	.venv/bin/python tests/fuzz/run.py $(ARGS)

bench: .venv/tested
	.venv/bin/python tests/benchmarks/run.py --out tests/benchmarks/figures.json
	.venv/bin/python tests/benchmarks/figures.py --speed

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) torch
	.venv/bin/python $(PIP_INSTALL) -e '.[demo]'
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
	rm -rf .venv .venv-tl3 .venv-wheel build dist *.egg-info
