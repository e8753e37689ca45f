"""Plumbing of arrol.py and tts.py. Imported before torch, whose libraries read these variables."""

import os
import time
from pathlib import Path

# Threads that sleep at once when they wait make an update a fifth slower on an idle machine, and those that
# spin make a step 10 times slower beside one other busy process. So they sleep where in a tenth of a second
# others use more than half a CPU; else they spin for a moment: half the speed of sleep if one comes later.
if "OMP_WAIT_POLICY" not in os.environ:
    before = int(Path("/proc/stat").read_text().split()[4])
    time.sleep(0.1)
    idle = int(Path("/proc/stat").read_text().split()[4]) - before
    if idle < 0.1 * (os.cpu_count() - 0.5) * os.sysconf("SC_CLK_TCK"):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# oneDNN keeps a compiled kernel for each shape it has met, 1,024 by default, and batches differ in
# size from step to step: 80 MB more after 200 steps of the embedded model. 64 are as fast.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its C++ part warns of devices that are not there
