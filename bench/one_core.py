"""Runs a program on one core, which tells seconds of that core in place of wall-clock time.

    python bench/one_core.py 1 arrol.py --steps 2

What others do on the machine then costs it little, and each core can have a run of its own.
Grading has processes of its own, which are not counted; they take a hundredth of a step.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def count_cpu_time(core: int) -> None:
    """Bind this process to `core` and let `time.perf_counter` tell its CPU time.

    Before torch is imported, which then has one thread.
    """
    os.sched_setaffinity(0, {core})
    time.perf_counter = time.process_time


if __name__ == "__main__":
    _, number, program, *flags = sys.argv
    count_cpu_time(int(number))
    sys.argv, sys.path[0] = [program, *flags], str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
