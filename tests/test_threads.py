"""How OpenMP's threads wait: chosen when `support` is imported, by whether others use the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPIN = """
import os, subprocess, sys, time
spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
time.sleep(0.5)
try:
    import support
    print(os.environ["OMP_WAIT_POLICY"])
finally:
    spinner.kill()
"""


def chosen(**variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | variables
    done = subprocess.run([sys.executable, "-c", SPIN], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_threads_sleep_beside_another_process() -> None:
    """Spinning, they would wait for the CPU that they keep busy. Who sets the variable is obeyed."""
    assert chosen() == "PASSIVE" and chosen(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"
