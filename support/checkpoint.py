"""Checkpoints, written beside the old ones and renamed when complete: the newest on disk is always whole.

checkpoint-40/model/                      the policy in transformers format, with tokenizer
              quality_head.safetensors    the quality head and its calibration, for other programs
              learner/                    float32 weights, optimizer, schedule (torch.distributed.checkpoint)
              state.pt                    the rest of the run; written last: it marks a complete checkpoint
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
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from calibration import Calibrator, posterior_table
from quality_head import QualityHead
from support.distributed import gather, rank

PREFIX = "checkpoint-"


class SaveError(RuntimeError):
    """A checkpoint was not written; the older ones are as they were."""


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first, by step number."""
    found = {path.parent.name.removeprefix(PREFIX): path.parent for path in run.glob(f"{PREFIX}*/state.pt")}
    return [found[step] for step in sorted(filter(str.isdigit, found), key=int)]


def save(
    run: Path,
    step: int,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    head: tuple[QualityHead, Calibrator, Calibrator, int] | None,
    learner: dcp.stateful.Stateful,
    state: dict,
    keep: int,
) -> Path:
    """Write `checkpoint-<step>` into `run`, then delete all but the newest `keep`. Returns its folder.

    All ranks call it, with one folder for all: each writes its shards of `learner`, rank 0 the rest.
    weights: in the dtype to save. head: see `save_head`. state: tensors and primitives.
    Raises SaveError, on all ranks, if anything fails on one, or a weight is not finite.
    """
    final, temporary = run / f"{PREFIX}{step}", run / f".writing-{PREFIX}{step}"
    full, shards = {}, {}

    def collect() -> None:
        for name, tensor in weights:
            if not tensor.isfinite().all():
                raise ValueError(f"{name} is not finite")
            full.update({name: tensor} if rank() == 0 else {})
        shards.update(learner.state_dict())

    def write() -> None:
        dcp.save({"learner": shards}, checkpoint_id=temporary / "learner")
        if rank() > 0:
            return
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # sampling defaults that transformers loads, and refuses to save (transformers#29665)
            ids = {name: value for name, value in vars(model.generation_config).items() if name.endswith("token_id")}
            model.generation_config = GenerationConfig(**ids)
        model.save_pretrained(temporary / "model", state_dict=full)
        tokenizer.save_pretrained(temporary / "model")
        if head is not None:
            save_head(temporary / "quality_head.safetensors", *head)
        torch.save(state, temporary / "state.pt")
        os.sync()  # or a power cut could leave a renamed folder with files that are not whole
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in complete(run)[:-keep]:
            shutil.rmtree(old)

    for work in (collect, write):
        if reason := _failure(work):
            shutil.rmtree(temporary, ignore_errors=True)
            raise SaveError(f"{final.name} could not be written: {reason}")
    return final


def _failure(work: Callable[[], None]) -> str | None:
    """Do `work`; returns what failed on any rank, to all of them, or they would wait for it in vain."""
    error: BaseException | None = None
    try:
        work()
    except (Exception, CheckpointException) as raised:
        error = next(iter(raised.failures.values()))[0] if isinstance(raised, CheckpointException) else raised
        if isinstance(error, KeyboardInterrupt):
            raise error from raised
    return next(filter(None, gather(error and f"{type(error).__name__}: {error}".splitlines()[0])), None)


def load(checkpoint: Path, learner: dcp.stateful.Stateful) -> dict:
    """Restore `learner` in place, on any number of ranks, and return what was saved as `state`."""
    dcp.load({"learner": learner}, checkpoint_id=checkpoint / "learner")
    return torch.load(checkpoint / "state.pt", weights_only=True)


def save_head(path: Path, head: QualityHead, calibrator: Calibrator, finished: Calibrator, detect_length: int) -> None:
    """The head's weights, counts c+ and c- of each bin, at L_detect and of finished answers, and what made them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    for name, window in (("calibration", calibrator), ("finished", finished)):
        tensors[f"{name}.positives"], tensors[f"{name}.negatives"] = window.counts()
    save_file(tensors, path, {"detect_length": str(detect_length), "alpha": str(calibrator.alpha)})


def load_head(path: Path) -> tuple[QualityHead, Tensor, Tensor | None, int]:
    """The head, posteriors of each bin of its score (B,) fp64, at L_detect and of finished answers, and L_detect.

    The second are None without counts of both labels: older files have none. Raises ValueError, a sentence.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        counts = [tensors.pop(f"calibration.{kind}") for kind in ("positives", "negatives")]
        ended = [tensors.pop(f"finished.{kind}", torch.zeros(1)) for kind in ("positives", "negatives")]
        (width, seen), size = tensors["hidden.weight"].shape, len(tensors["norm.weight"])
        head = QualityHead(size, width, extras=seen - size)
        head.load_state_dict(tensors)
        alpha = float(notes["alpha"])
        finished = posterior_table(*ended, alpha) if all(count.any() for count in ended) else None
        return head, posterior_table(*counts, alpha), finished, int(notes["detect_length"])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"--head {path}: it holds no quality head ({str(error).splitlines()[0]})") from error
