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
from typing import TYPE_CHECKING, TextIO, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from engine import Decision, PruneHook

T, K, V = TypeVar("T"), TypeVar("K"), TypeVar("V")

TIMEOUT = timedelta(
    minutes=30
)  # no rank waits longer for another: sampling may take one that much longer, or writing a checkpoint


_tp = 1  # ranks that share one engine
_peers: dist.ProcessGroup | None = None  # those of this rank, itself among them


def start_process_group(tensor_parallel: int = 1) -> torch.device:
    """Join the ranks that torchrun started, or be the only one; returns this rank's device.

    tensor_parallel: so many successive ranks share one engine, of which each holds a part of every layer; they sample the same prompts.
    Raises RuntimeError where there are more ranks than GPUs, or where they cannot be divided so.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone = dict(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1])
        )
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if ranks % tensor_parallel:
        raise RuntimeError(
            f"--tp {tensor_parallel}: {ranks} ranks cannot be divided into engines of so many; start a multiple by torchrun"
        )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise RuntimeError(
                f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, and a rank needs its own"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    global _tp, _peers
    _tp, _peers = tensor_parallel, None
    if tensor_parallel > 1:
        _peers, _ = dist.new_subgroups(tensor_parallel, backend="gloo")
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def engines() -> int:
    """How many engines the ranks drive."""
    return world_size() // _tp


def engine_number() -> int:
    """Which of the `engines()` this rank drives, alone or with its peers."""
    return rank() // _tp


def leads() -> bool:
    """Whether this rank speaks for its engine: the first of its peers."""
    return rank() % _tp == 0


def part(items: list[T]) -> list[T]:
    """Of what all peers of an engine have, this rank's part."""
    return items[rank() % _tp :: _tp]


def of_leader(mine: T) -> T:
    """What the leader of this rank's engine passed, on all its peers."""
    values = [mine]
    if _peers is not None:
        dist.broadcast_object_list(values, src=rank() - rank() % _tp, group=_peers)
    return values[0]


class SharedDecisions:
    """A pruner for ranks that share one engine: all of them go by the decisions of their leader.

    Two decisions that differ by a rounding would drive these ranks apart.
    """

    def __init__(self, pruner: PruneHook) -> None:
        self.pruner = pruner

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        return of_leader(self.pruner.decide(states, groups, samples))


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
    """The part of `items` that this rank's engine samples: every `engines()`-th of them. There may be none."""
    return dict(islice(items.items(), engine_number(), None, engines()))


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
