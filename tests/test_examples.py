"""The worked examples run, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(program: str, *arguments: object) -> str:
    """Run a program as a reader would, as the only rank; returns what it printed."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_tour_takes_a_group_from_prompt_to_gradient(tmp_path: Path) -> None:
    printed = run("examples/tour.py", "--output", tmp_path / "tour.png")
    rows = [line.split() for line in printed.splitlines() if re.match(r" *\d+ +\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(range(16))
    pruned = [row for row in rows if row[-1] == "pruned"]
    judged = [row for row in rows if "right" in row or "wrong" in row]
    assert 0 < len(pruned) < 16 and all(row[1] == "10" for row in pruned)
    # Advantages of a group sum to 0; those of the right ones are positive.
    assert abs(sum(float(row[-1]) for row in judged)) < 0.1
    assert all((float(row[-1]) > 0) == ("right" in row) for row in judged)
    gap = float(re.search(r"up to (\S+) nats", printed)[1])
    assert gap < 1e-3 and float(re.search(r"gradient (\S+)", printed)[1]) > 0
    assert (tmp_path / "tour.png").read_bytes().startswith(b"\x89PNG")
