# The Python that .venv is made with, 3.11 or newer: make PYTHON=python3.12 demo
PYTHON ?= python3
# Foreign packages must not shadow those in .venv.
unexport PYTHONPATH PYTHONHOME

.PHONY: demo test install clean

demo: install
	.venv/bin/python arrol.py

test: install
	.venv/bin/python -m pytest tests

install:
	@$(PYTHON) install.py

clean:
	rm -rf .venv .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
