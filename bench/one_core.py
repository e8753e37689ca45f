"""Runs a program on one core, which tells seconds of that core in place of wall-clock time.

    python bench/one_core.py 1 arrol.py --steps 2

What others do on the machine then costs it next to nothing, and each core can have a run of its own.
Grading has processes of its own, which are not counted; they take a hundredth of a step.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    _, core, program, *flags = sys.argv
    # Before torch is imported, which then has one thread.
    os.sched_setaffinity(0, {int(core)})
    time.perf_counter = time.process_time
    sys.argv, sys.path[0] = [program, *flags], str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
