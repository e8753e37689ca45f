"""Plumbing of arrol.py and tts.py. Imported before torch, whose libraries read these variables."""

import os
import time
from pathlib import Path

# Threads that spin while they wait make a step 20 times slower beside one other busy process; where they do
# not, it is a quarter slower on an idle machine: one where in a tenth of a second others use half a CPU at most.
if "OMP_WAIT_POLICY" not in os.environ:
    before = int(Path("/proc/stat").read_text().split()[4])
    time.sleep(0.1)
    idle = int(Path("/proc/stat").read_text().split()[4]) - before
    if idle < 0.1 * (os.cpu_count() - 0.5) * os.sysconf("SC_CLK_TCK"):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# oneDNN keeps a compiled kernel for each shape it has met, 1,024 by default, and batches differ in
# size from step to step: 80 MB more after 200 steps of the embedded model. 64 are as fast.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its C++ part warns of devices that are not there
