# Every target makes .venv if it is missing; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test test-lowest lint bench mutants docs dist clean

# torch comes first and alone, so that pip takes its CPU build where there is one; the rest is pinned and
# installed without dependency resolution, because laplace-torch and BackPACK declare torchvision, which
# they do not import here and which does not load beside a CPU build of torch.
$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	$(PY) -W ignore -m examples.demo

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal --cov --cov-report=term

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m mypy

bench: $(READY)
	$(PY) -W ignore -m examples.benchmarks.predictive
	$(PY) -W ignore -m examples.benchmarks.kfac
	$(PY) -W ignore -m examples.benchmarks.fit
	$(PY) -W ignore -m examples.benchmarks.scaling
	$(PY) -W ignore -m examples.benchmarks.lora
	$(PY) -W ignore -m examples.benchmarks.quadratics

# which lines of kfac/, debias/ and predictive/ of the last commit no test guards: a seeded sample of cosmic-ray's
# mutants, in a clone under build/; goes on where it stopped
.venv-mutants/.ready:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0 parso==0.8.7 SQLAlchemy==2.1.8
	touch $@

mutants: $(READY) .venv-mutants/.ready
	nice -n 15 $(PY) -W ignore -m examples.benchmarks.mutants --n 300 --seed 0

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "build/site/index.html"

# The lowest versions that pyproject.toml declares, in a virtual environment of their own.
test-lowest:
	python3.10 -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -r tests/lowest.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/lowest-no-deps.txt
	OMP_NUM_THREADS=1 PYTHONPATH=. .venv-lowest/bin/python -m pytest -q -o addopts="" \
		tests/kfac tests/debias/test_two_batch.py tests/posterior/test_kron.py tests/predictive tests/evaluation/test_sweep.py

dist:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/twine check --strict dist/*

clean:
	rm -rf $(VENV) .venv-lowest .venv-dist .venv-mutants build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .coverage
