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


def keep_async_scheduling(patch: pytest.MonkeyPatch) -> None:
    """vLLM turns asynchronous scheduling off on a CPU, although it works there; leave it on."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check(cls: type, config: object) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check))


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines on a CPU and takes them down, then the process group."""
    made: list[Engine] = []
    small = dict(detect_length=DETECT, max_model_len=128, max_num_seqs=64, dtype=torch.float32, kv_cache_gb=0.25)

    def make(model: Path = TINY, asynchronous: bool = False, **options: object) -> Engine:
        for engine in made:
            engine.close()
        made.clear()
        if not dist.is_initialized():
            start_process_group()
        with pytest.MonkeyPatch.context() as patch:
            if asynchronous:
                keep_async_scheduling(patch)
            made.append(Engine(str(model), **(small | options)))
        assert (made[0].core.batch_queue is not None) == asynchronous
        return made[0]

    yield make
    for engine in made:
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
