"""Checkpoints: written beside the old ones and renamed when complete, so that the newest one on disk is always whole.

checkpoint-40/model/                      the policy in transformers format, with tokenizer
              quality_head.safetensors    the quality head and its calibration, for `tts.py` and other programs
              learner/                    float32 weights, optimizer, schedule (torch.distributed.checkpoint)
              state.pt                    everything else of the run; written last, so that it marks a complete checkpoint
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calibration import Calibrator, posterior_table
from quality_head import QualityHead
from support.distributed import broadcast, rank

PREFIX = "checkpoint-"


class SaveError(RuntimeError):
    """A checkpoint could not be written; the older ones are as they were."""


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
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    head: tuple[QualityHead, Calibrator, int] | None,
    learner: dcp.stateful.Stateful,
    state: dict,
    keep: int,
) -> Path:
    """Write `checkpoint-<step>` into `run`, then delete all but the newest `keep`. Returns its folder.

    All ranks call it, and `run` is one folder for all: each writes its shards of `learner`, rank 0 the rest.
    weights: the full policy by parameter name, in the type to save; rank 0's count. head: see `save_head`. state: tensors and
    primitives only. An older checkpoint is deleted only after this one is in place. Raises SaveError, on all ranks, where the disk is
    full or fails.
    """
    final, temporary = run / f"{PREFIX}{step}", run / f".writing-{PREFIX}{step}"

    # Gathered by all ranks, kept by one.
    kept = {name: tensor for name, tensor in weights if rank() == 0}

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary / "model", state_dict=kept)
        tokenizer.save_pretrained(temporary / "model")
        if head is not None:
            save_head(temporary / "quality_head.safetensors", *head)

    def finish() -> None:
        torch.save(state, temporary / "state.pt")
        for path in temporary.rglob("*"):
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)  # only a folder without state.pt, or the same step again
        temporary.rename(final)
        _flush(run)
        for old in complete(run)[:-keep]:
            shutil.rmtree(old)

    try:
        _on_first_rank(begin)
        dcp.save({"learner": learner}, checkpoint_id=temporary / "learner")  # returns when all have written
        _on_first_rank(finish)
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # room for what comes
        reason = str(error).strip().splitlines()[-1]
        raise SaveError(f"{final.name} could not be written: {reason}") from error
    return final


def _on_first_rank(work: Callable[[], None]) -> None:
    """Do `work` on rank 0; what it raises is raised on all ranks, or the others would go on and wait for it in vain."""
    error = None
    if rank() == 0:
        try:
            work()
        except (OSError, SafetensorError, RuntimeError) as raised:
            error = raised
    if message := broadcast(None if error is None else f"{type(error).__name__}: {error}"):
        raise OSError(message) from error


def load(checkpoint: Path, learner: dcp.stateful.Stateful) -> dict:
    """Restore `learner` in place, on all ranks, however many wrote it; returns the `state` that was saved.

    Raises if a part is missing or damaged."""
    dcp.load({"learner": learner}, checkpoint_id=checkpoint / "learner")
    return torch.load(checkpoint / "state.pt", weights_only=True)


def save_head(path: Path, head: QualityHead, calibrator: Calibrator, detect_length: int) -> None:
    """The head's weights, the calibration's counts c+ and c- of each bin, and what they were made with, in one file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    tensors["calibration.positives"], tensors["calibration.negatives"] = calibrator.counts()
    save_file(tensors, path, {"detect_length": str(detect_length), "alpha": str(calibrator.alpha)})


def load_head(path: Path) -> tuple[QualityHead, Tensor | None, int | None]:
    """The head, the posterior of each bin of its score (B,) fp64, and L_detect; None for what the file does not hold.

    Raises ValueError, one sentence that names the file, if it holds no quality head.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
        counts = [tensors.pop(f"calibration.{kind}", None) for kind in ("positives", "negatives")]
        width, hidden_size = tensors["hidden.weight"].shape
        head = QualityHead(hidden_size, width)
        head.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"--head {path}: it holds no quality head ({str(error).splitlines()[0]})") from error
    table = None if counts[0] is None else posterior_table(*counts, float(notes["alpha"]))
    return head, table, int(notes["detect_length"]) if "detect_length" in notes else None


def _flush(path: Path) -> None:
    """Force a file or folder to the disk: a rename that survives a power cut before the data would fake completeness."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
