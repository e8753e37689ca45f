# The Python that .venv is made with, 3.11 or newer: make PYTHON=python3.12 demo
PYTHON ?= python3
# Foreign packages must not shadow those in .venv.
unexport PYTHONPATH PYTHONHOME

.PHONY: demo test lint bench gpu-check peers example-trl install clean

demo: install
	.venv/bin/python arrol.py

lint: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

test: .venv-trl/stamp
	.venv/bin/python -m pytest tests

# Two hours on 2 idle cores by the sum of its runs, most of it training; runs are kept in bench/runs and not repeated. A table that fails does not stop the others.
BENCHES = theory speed cost accuracy dapo pruning keep_ratio convergence head voting early_stop

bench: install
	@failed=; for name in $(BENCHES); do \
		echo "== bench.$$name"; .venv/bin/python -m bench.$$name || failed="$$failed $$name"; \
	done; .venv/bin/python -m bench.report; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# Ten minutes on one GPU of 80 GB; needs no network and no install: without vLLM, the trainer alone is checked.
gpu-check:
	@$(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON)) -m bench.gpu

# Beside TRL's GRPOTrainer: 8 minutes on 2 idle cores.
peers: .venv-trl/stamp
	.venv/bin/python -m bench.peers

example-trl: .venv-trl/stamp
	.venv-trl/bin/python examples/trl_arrol.py

# TRL and what it lacks, on top of the packages of .venv: sampler and trainer need one torch.
SITE = import sysconfig; print(sysconfig.get_path("purelib"))

.venv-trl/stamp: examples/requirements-trl.txt .venv/stamp
	.venv/bin/python -m venv --clear --without-pip .venv-trl
	.venv/bin/python -c '$(SITE)' > "$$(.venv-trl/bin/python -c '$(SITE)')/venv.pth"
	.venv/bin/python -m pip --python .venv-trl/bin/python install --quiet --no-warn-conflicts -r $<
	touch $@

install:
	@$(PYTHON) support/install.py

.venv/stamp: install ;

clean:
	rm -rf .venv .venv-trl .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
