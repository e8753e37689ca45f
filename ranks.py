"""Several processes that train one model: who this one is, and what they tell each other.

torchrun starts them, one for each GPU. Every rank takes the same steps: all of them call what is here together, in the same order. A
process that torchrun did not start is the only rank, and nothing is sent.

When a rank fails alone, the others wait for it in vain. torchrun ends them as soon as it sees that; under another launcher, `TIMEOUT` does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import islice
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist

T, K, V = TypeVar("T"), TypeVar("K"), TypeVar("V")

TIMEOUT = timedelta(
    minutes=30
)  # no rank waits longer for another: sampling may take one that much longer, or writing a checkpoint


def start_process_group() -> torch.device:
    """Join the ranks that torchrun started, or be the only one; returns this rank's device.

    Raises RuntimeError where there are more ranks than GPUs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone = dict(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1])
        )
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise RuntimeError(
            f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, and a rank needs its own"
        )
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    return torch.device("cuda", local)


def rank() -> int:
    """This process's number among `world_size()`; 0 writes the files and speaks. Known before the group is, and after."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def say(text: str, file: TextIO | None = None) -> None:
    """Print, on rank 0 alone."""
    if rank() == 0:
        print(text, file=file)


def share(items: Mapping[K, V]) -> dict[K, V]:
    """This rank's part of `items`: every `world_size()`-th of them. There may be none."""
    return dict(islice(items.items(), rank(), None, world_size()))


def gather(mine: T) -> list[T]:
    """What all ranks passed, in their order, on every rank. It travels pickled, but for the case of one rank."""
    if world_size() == 1:
        return [mine]
    everyone: list[T] = [mine] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def of_first(mine: T) -> T:
    """What rank 0 passed, on every rank."""
    values = [mine]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def node_by_node() -> Iterator[None]:
    """Run the block on the first rank of each machine, then on its others, which find there what the first has downloaded."""
    first = os.environ["LOCAL_RANK"] == "0"
    if not first:
        barrier()
    yield
    if first:
        barrier()
