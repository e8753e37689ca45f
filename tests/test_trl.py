"""TRL's trainer with our engine and pruner, in the environment that `make test` makes for it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="make .venv-trl/stamp adds TRL")
def test_trl_trains_without_and_with_pruning() -> None:
    """A weight sync that misses a tensor opens the gap; advantages of the wrong rows keep the reward down."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    command = [PYTHON, "examples/trl_arrol.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    number = r"([\d.e+-]+)"
    pattern = f"pruning (True|False): keep rate {number}, gap {number}, held-out reward {number} -> {number}"
    lines = {name: [*map(float, numbers)] for name, *numbers in re.findall(pattern, done.stdout)}
    assert list(lines) == ["False", "True"], done.stdout
    for _, gap, before, after in lines.values():
        assert 0 < gap < 1e-3 and after > before + 0.05
    assert lines["False"][0] == 1 and abs(lines["True"][0] - 0.5) < 0.05
