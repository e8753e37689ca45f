"""What several test files share: the process group, and a real engine on the embedded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as arrol.py on a busy machine: before torch is imported

import pytest
import torch
import torch.distributed as dist

from engine import Engine
from support.args import TINY
from support.distributed import start_process_group

DETECT = 12


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines on a CPU and takes them down, then the process group."""
    made: list[Engine] = []

    def make(model: Path = TINY, **options: object) -> Engine:
        for engine in made:
            engine.close()
        made.clear()
        if not dist.is_initialized():
            start_process_group()
        made.append(
            Engine(
                str(model),
                **{
                    "detect_length": DETECT,
                    "max_model_len": 128,
                    "max_num_seqs": 64,
                    "dtype": torch.float32,
                    "kv_cache_gb": 0.25,
                }
                | options,
            )
        )
        return made[0]

    yield make
    for engine in made:
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
