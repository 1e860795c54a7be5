# Every target makes .venv if it is missing; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test lint bench mutants clean

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
	$(PY) -W ignore -m examples.calibration

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
	$(PY) -W ignore -m examples.benchmarks.quadratics

# which lines of kfac/, debias/ and predictive/ no test guards: a seeded sample, goes on where it stopped
mutants: $(READY)
	nice -n 15 $(PY) -W ignore -m examples.benchmarks.mutants --n 300 --results mutants.jsonl

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .coverage
