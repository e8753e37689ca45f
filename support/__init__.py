"""Plumbing of arrol.py and tts.py. Imported before torch, whose libraries read these variables."""

import os
import time


def busy(seconds: float = 0.1) -> bool:
    """Whether others have used over a fifth of this process's CPUs, as it slept. False where Linux does not tell."""

    def idle(cpus: set[int]) -> int:
        with open("/proc/stat") as stat:
            rows = [line.split() for line in stat if line.startswith("cpu")][1:]
        return sum(int(row[4]) + int(row[5]) for row in rows if int(row[0][3:]) in cpus)

    try:
        before = idle(cpus := os.sched_getaffinity(0))
        time.sleep(seconds)
        return idle(cpus) - before < 0.8 * seconds * len(cpus) * os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False


# Threads that spin while they wait make a step 20 times slower beside one other busy process; asleep
# at once, they make it a quarter slower on an idle machine (2 cores). A variable that is set wins.
if "OMP_WAIT_POLICY" not in os.environ and busy():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# oneDNN keeps a compiled kernel for each shape it has met, 1,024 by default, and batches differ in
# size from step to step: 80 MB more after 200 steps of the embedded model. 64 are as fast.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Warnings of its C++ part, on devices that are not there.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
