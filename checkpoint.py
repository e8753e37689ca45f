"""Checkpoints: written beside the old ones and renamed when complete, so that the newest one on disk is always whole.

checkpoint-40/model/                      the policy in transformers format, with tokenizer
              quality_head.safetensors    the quality head
              learner/                    float32 weights, optimizer, schedule (torch.distributed.checkpoint)
              state.pt                    everything else of the run; written last, so that it marks a complete checkpoint
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "checkpoint-"


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first, by step number."""
    found = [
        path
        for path in run.glob(PREFIX + "*")
        if path.name.removeprefix(PREFIX).isdigit() and (path / "state.pt").is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def save(
    run: Path,
    step: int,
    *,
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    head: dict[str, Tensor] | None,
    learner: dcp.stateful.Stateful,
    state: dict,
    keep: int,
) -> Path:
    """Write `checkpoint-<step>` into `run`, then delete all but the newest `keep`. Returns its folder.

    weights: the full policy by parameter name, in the type to save. head: the quality head's tensors. state: tensors and
    primitives only. An older checkpoint is deleted only after this one is in place.
    """
    final, temporary = run / f"{PREFIX}{step}", run / f".writing-{PREFIX}{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary / "model", state_dict=weights)
    tokenizer.save_pretrained(temporary / "model")
    if head is not None:
        save_file({name: tensor.contiguous() for name, tensor in head.items()}, temporary / "quality_head.safetensors")
    dcp.save({"learner": learner}, checkpoint_id=temporary / "learner")
    torch.save(state, temporary / "state.pt")
    for path in temporary.rglob("*"):
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)  # only a folder without state.pt, or the same step again
    temporary.rename(final)
    _flush(run)
    for old in complete(run)[:-keep]:
        shutil.rmtree(old)
    return final


def load(checkpoint: Path, learner: dcp.stateful.Stateful) -> dict:
    """Restore `learner` in place; returns the `state` that was saved. Raises if a part is missing or damaged."""
    dcp.load({"learner": learner}, checkpoint_id=checkpoint / "learner")
    return torch.load(checkpoint / "state.pt", weights_only=True)


def _flush(path: Path) -> None:
    """Force a file or folder to the disk: a rename that survives a power cut before the data would fake completeness."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
