"""Several processes that train one model, one for each GPU, as torchrun starts them.

All ranks call what is here together, in the same order. With `--tp N`, N successive ranks share an
engine: they sample and grade the same rollouts, and each trains on its share of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine import Decision, PruneHook, Rollout
from support.args import fail

T, K, V = TypeVar("T"), TypeVar("K"), TypeVar("V")
# Ranks that share one engine, and the group of this rank's.
_tp = 1
_engine_group: dist.ProcessGroup | None = None


def start_process_group(tensor_parallel: int = 1) -> torch.device:
    """Join the ranks that torchrun started, or be the only one; returns this rank's device.

    Ends the program where there are more ranks than GPUs, or no whole number of engines.
    """
    global _tp, _engine_group
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(alone | os.environ)
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if ranks % tensor_parallel:
        fail(f"--tp {tensor_parallel}: {ranks} ranks are no multiple of it; start a multiple by torchrun")
    if on_gpu := torch.cuda.is_available():
        # By the number of ranks: all know it, and the first one says it.
        if max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > (gpus := torch.cuda.device_count()):
            fail(f"--nproc-per-node: this machine has {gpus} GPUs, and a rank needs its own")
        torch.cuda.set_device(local)
    # No rank waits longer for another, which may have failed: torchrun sees that sooner, others do not.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30))
    _tp = tensor_parallel
    _engine_group = dist.new_subgroups(_tp, backend="gloo")[0] if _tp > 1 else None
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def rank() -> int:
    """This process's number; 0 writes the files and prints. Known before the group is, and after."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def engine_number() -> int:
    """Which engine this rank drives, alone or with others."""
    return rank() // _tp


def print0(text: str, file: TextIO | None = None) -> None:
    """Print, on rank 0 alone."""
    if rank() == 0:
        print(text, file=file)


def shard(prompts: Mapping[K, V]) -> dict[K, V]:
    """The prompts that this rank's engine samples: every so many-th of them. There may be none."""
    return dict(itertools.islice(prompts.items(), engine_number(), None, world_size() // _tp))


def gather(value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank; pickled on the way."""
    values: list[T] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def gather_rollouts(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of all ranks, on every rank, in the order that one rank would have them.

    Of those that other engines sampled, token ids become a range of the same length, and log-probs
    are empty. Ranks that share an engine keep the token ids of their share of the survivors.
    """
    if world_size() == 1:
        return rollouts
    own = {(r.group, r.sample): r for r in rollouts}
    stubs = []
    for r in rollouts if rank() % _tp == 0 else []:
        # States are copied: a view would be sent with all of its tensor.
        detect, last = (None if state is None else state.clone() for state in (r.detect_state, r.last_state))
        tokens = range(len(r.token_ids))
        stubs.append(dataclasses.replace(r, token_ids=tokens, logprobs=[], detect_state=detect, last_state=last))
    for number, r in enumerate(r for r in rollouts if r.reward is not None):
        if number % _tp != rank() % _tp:
            r.token_ids, r.logprobs = range(len(r.token_ids)), []
    merged = sorted(itertools.chain.from_iterable(gather(stubs)), key=lambda r: (r.group, r.sample))
    return [own.get((r.group, r.sample), r) for r in merged]


class SharedDecisions:
    """A pruner whose decisions are those of the first rank of an engine, for all that share it.

    Two decisions that differ by a rounding would drive the ranks of one engine apart.
    """

    def __init__(self, pruner: PruneHook) -> None:
        self.pruner = pruner

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        decisions = [self.pruner.decide(states, groups, samples)]
        dist.broadcast_object_list(decisions, src=rank() - rank() % _tp, group=_engine_group)
        return decisions[0]

    def __getattr__(self, name: str) -> object:
        return getattr(self.pruner, name)
