# Two commands do everything: `make train` and `make test`. The first one also makes the virtual environment.
# `make quick` is for after every change: all that needs no process of its own, in under a minute.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes now and then: so one more at a time than there are cores, up to 4.
AT_ONCE = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')

.PHONY: train test quick check browser bench clean test-engines test-extras

train: $(VENV)/ready
	$(BIN)/python examples/emoji.py

test: check browser
	$(BIN)/python -m pytest -n $(AT_ONCE)

# The dashboard is tested in a real Chromium: Debian's, if there is none and we may install it. Where there is none, those
# tests are skipped, and say so.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } \
		|| echo "no chromium here, and it cannot be installed: the dashboard's browser tests are skipped"

quick: check
	$(BIN)/python -m pytest -n $(AT_ONCE) -m "not processes"

# What needs an engine that places nodes: `make test` skips these where the engine is not there. Ray and dask are installed
# in an environment of their own, Slurm is fetched.
test-engines: .engines/ready .engines/kubernetes/ready slurm-packages
	.engines/bin/python -m pytest -rs tests/engines

.engines/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .engines
	.engines/bin/pip install --quiet --constraint constraints.txt --editable '.[examples,dashboard,ray,dask]' pytest
	touch $@

# What takes programs from other frameworks, tried with the frameworks themselves, each in an environment of its own:
# `make test` skips these tests.
test-extras: .extras/hf/ready .extras/lightning/ready
	.extras/hf/bin/python -m pytest -rs tests/extras/test_hf.py
	.extras/lightning/bin/python -m pytest -rs tests/extras/test_lightning.py

.extras/hf/ready: FRAMEWORKS := datasets peft trl
.extras/%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt --editable '.[$*,dashboard]' $(FRAMEWORKS) pytest
	touch $@

# All benchmarks, for hours; writes docs/benchmarks.md. Single ones: .venv/bin/python -m benchmarks NAME
bench: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[plots]'
	$(BIN)/python -m benchmarks everything

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[examples,dashboard,dev]'
	touch $@

clean:
	rm -rf $(VENV) .engines .extras .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Frameworks to compare with, each in an environment of its own, since they do not agree on their dependencies. One that
# cannot be installed is left out, and the benchmark says so.
PEERS := torchft ray flower hivemind
.peers/torchft/ready: PACKAGE := torchft-nightly
.peers/ray/ready: PACKAGE := ray
.peers/flower/ready: PACKAGE := flwr
.peers/hivemind/ready: PACKAGE := hivemind

.PHONY: peers
peers: $(VENV)/ready
	-$(MAKE) --keep-going $(PEERS:%=.peers/%/ready)
	$(BIN)/python -m benchmarks peers

.peers/%/ready: benchmarks/peers.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint benchmarks/peers.txt torch numpy $(PACKAGE) || { rm -rf $(@D); exit 1; }
	touch $@

# What the tests of Slurm and Kubernetes use. Debian's packages of Slurm are unpacked, not installed: no daemon is started
# and nothing outside .engines changes. Where that cannot be, those tests are skipped, and say so.
.PHONY: slurm-packages
slurm-packages:
	@command -v slurmctld >/dev/null || [ -d .engines/slurm/root ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& mkdir -p .engines/slurm/debs/partial && apt-get update -qq >/dev/null \
		&& apt-get install -y -qq --no-install-recommends --download-only -o Dir::Cache::archives="$$PWD/.engines/slurm/debs" \
			slurmctld slurmd slurm-client munge >/dev/null 2>&1 \
		&& mkdir .engines/slurm/new && for deb in .engines/slurm/debs/*.deb; do dpkg -x "$$deb" .engines/slurm/new || exit 1; done \
		&& mv .engines/slurm/new .engines/slurm/root; } \
		|| echo "no Slurm here, and it cannot be fetched: its tests are skipped"

.engines/kubernetes/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet kubernetes-validate
	touch $@
