"""Plumbing of arrol.py and tts.py. Imported before torch, whose libraries read these variables."""

import os

# Threads that spin while they wait make a step 20 times slower beside one other busy process, and
# only a quarter faster on an idle machine (2 cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps a compiled kernel for each shape it has met, 1,024 by default, and batches differ in
# size from step to step: 80 MB more after 200 steps of the embedded model. 64 are as fast.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Warnings of its C++ part, on devices that are not there.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
