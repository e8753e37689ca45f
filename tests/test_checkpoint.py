"""What fails while a checkpoint is written costs the checkpoint and not the run, on all ranks alike."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from calibration import Calibrator
from grpo import Learner, LossConfig, Policy, shard
from quality_head import QualityHead
from support import checkpoint
from support.args import TINY
from support.checkpoint import SaveError, complete


def parts(model: Path = TINY, make: Callable[[Policy], Policy] = lambda policy: policy) -> dict:
    """What `checkpoint.save` is given by a run."""
    policy = make(Policy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 1.0))
    weights = {name: tensor.detach() for name, tensor in policy.model.named_parameters()}
    full = {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in weights.items()}
    learner = Learner(
        policy,
        LossConfig(),
        lr=1e-3,
        warmup_steps=1,
        weight_decay=0.1,
        grad_clip=1.0,
        token_budget=256,
        minibatches=1,
    )
    return dict(
        model=policy.model,
        weights=full,
        tokenizer=AutoTokenizer.from_pretrained(model),
        head=(QualityHead(8, 4), Calibrator(bins=4), Calibrator(bins=4), 10),
        learner=learner,
        state={"step": 0},
        keep=2,
    )


def save(run: Path, step: int, **given: object) -> Path:
    return checkpoint.save(run, step, **given | {"weights": given["weights"].items()})


def names(run: Path) -> list[str]:
    """Everything in the run's folder."""
    return sorted(path.name for path in run.iterdir())


@pytest.fixture(scope="module")
def given() -> dict:
    return parts()


def model_with(folder: Path, **generation: object) -> Path:
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "head"))
    defaults = json.loads((TINY / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(defaults | generation))
    return folder


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": False, "top_k": 20, "eos_token_id": [1, 5]},
        {"early_stopping": True, "num_beams": 1},
    ],
)
def test_sampling_defaults_that_cannot_be_saved_are_dropped(generation: dict, tmp_path: Path) -> None:
    """transformers#29665: loaded, and refused at the first checkpoint. Ids that end a response stay."""
    model = model_with(tmp_path / "model", **generation)
    before = GenerationConfig.from_pretrained(model)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        before.save_pretrained(tmp_path)
    saved = save(tmp_path, 1, **parts(model))
    after = GenerationConfig.from_pretrained(saved / "model")
    assert (after.eos_token_id, after.pad_token_id) == (before.eos_token_id, before.pad_token_id)
    assert not set(generation) - {"eos_token_id"} & set(after.to_diff_dict())
    assert len(AutoModelForCausalLM.from_pretrained(saved / "model").state_dict()) > 0


def test_valid_sampling_defaults_are_kept(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, **parts(model_with(tmp_path / "model", do_sample=True, temperature=0.6)))
    assert GenerationConfig.from_pretrained(saved / "model").temperature == 0.6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_never_written(given: dict, value: float, tmp_path: Path) -> None:
    save(tmp_path, 1, **given)
    name = "model.norm.weight"
    weights = given["weights"] | {name: given["weights"][name].clone()}
    weights[name][3] = value
    with pytest.raises(SaveError, match=f"checkpoint-2 could not be written: ValueError: {name} is not finite"):
        save(tmp_path, 2, **given | {"weights": weights})
    assert names(tmp_path) == ["checkpoint-1"]


def fail(error: Exception) -> Callable[..., None]:
    def work(*_: object, **__: object) -> None:
        raise error

    return work


BROKEN = [
    ("tokenizer.save_pretrained", TypeError("Object of type AddedToken is not JSON serializable")),
    ("model.save_pretrained", AttributeError("no attribute 'dtype'")),
    ("learner.state_dict", KeyError("exp_avg")),
    ("learner.state_dict", MemoryError()),
    ("weights.items", torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")),
]


@pytest.mark.parametrize(("where", "error"), BROKEN, ids=lambda value: getattr(type(value), "__name__", ""))
def test_whatever_fails_costs_the_checkpoint_alone(
    given: dict, where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, **given)
    name, method = where.split(".")
    with monkeypatch.context() as patch:
        if name == "weights":
            changed = given | {"weights": type("Weights", (dict,), {"items": lambda self: map(fail(error), [1])})()}
        else:
            changed = given
            patch.setattr(given[name], method, fail(error))
        with pytest.raises(SaveError, match=f"checkpoint-2 could not be written: {type(error).__name__}") as caught:
            save(tmp_path, 2, **changed)
    assert "\n" not in str(caught.value) and names(tmp_path) == ["checkpoint-1"]
    save(tmp_path, 2, **given)
    assert [path.name for path in complete(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


def test_a_state_that_cannot_be_pickled(given: dict, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="checkpoint-1 could not be written"):
        save(tmp_path, 1, **given | {"state": {"step": lambda: 1}})
    assert names(tmp_path) == []


def test_ctrl_c_while_shards_are_written_ends_the_run(
    given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed.checkpoint wraps it like any failure."""
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, **given)
    assert complete(tmp_path) == []


@pytest.mark.parametrize("extras", [0, 2])
def test_a_head_is_loaded_as_it_was_saved(extras: int, tmp_path: Path) -> None:
    """With or without log-probs: the file's shapes say which."""
    head, states = QualityHead(8, 4, seed=3, extras=extras), torch.randn(5, 8 + extras)
    checkpoint.save_head(tmp_path / "head.safetensors", head, Calibrator(bins=4), Calibrator(bins=4), 10)
    loaded, *_ = checkpoint.load_head(tmp_path / "head.safetensors")
    assert loaded.extras == extras and loaded(states).equal(head(states))


def test_finished_answers_have_posteriors_once_both_labels_are_counted(tmp_path: Path) -> None:
    """Of one label alone every posterior is 0 or 1; an older file, as the embedded model's, has no counts."""
    window, path = Calibrator(bins=4), tmp_path / "head.safetensors"
    for label in (1.0, 0.0):
        window.label(torch.tensor([0.9]), torch.tensor([label]))
        checkpoint.save_head(path, QualityHead(8, 4), Calibrator(bins=4), window, 10)
        _, _, finished, _ = checkpoint.load_head(path)
        assert (finished is None) == (label == 1.0)
    assert finished.equal(window.posterior(torch.tensor([0.1, 0.3, 0.6, 0.9])))
    _, table, finished, _ = checkpoint.load_head(TINY / "head" / "quality_head.safetensors")
    assert finished is None and len(table) > 1


# ------------------------------------------------------------------ two ranks


def on_rank(rank: int, folder: str) -> None:
    """One of two ranks: what fails on either, in turn; each leaves the reasons that it was given."""
    os.environ["RANK"] = str(rank)
    limit = timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    given = parts(make=functools.partial(shard, device=torch.device("cpu")))
    run, reasons = Path(folder, "run"), []
    save(run, 1, **given)
    write = dcp.FileSystemWriter.write_data
    cases = [
        (1, given["learner"], "state_dict", fail(KeyError("on rank 1"))),
        (1, dcp.FileSystemWriter, "write_data", fail(OSError("disk of rank 1"))),
        (0, dcp.FileSystemWriter, "write_data", fail(OSError("disk of rank 0"))),
        (0, given["tokenizer"], "save_pretrained", fail(TypeError("on rank 0"))),
    ]
    for failing, thing, method, work in cases:
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(thing, method, work)
            with pytest.raises(SaveError) as caught:
                save(run, 2, **given)
        reasons.append(str(caught.value))
        dist.barrier()
        reasons.append(names(run))
        dist.barrier()
    name = "model.norm.weight"
    with pytest.raises(SaveError) as caught:
        save(run, 2, **given | {"weights": given["weights"] | {name: given["weights"][name] * float("nan")}})
    reasons.append(str(caught.value))
    assert dcp.FileSystemWriter.write_data is write
    save(run, 2, **given)
    Path(folder, f"{rank}.json").write_text(json.dumps(reasons))
    dist.destroy_process_group()


def test_what_fails_on_one_rank_is_an_error_on_both(tmp_path: Path) -> None:
    """The other would wait for half an hour."""
    torch.multiprocessing.spawn(on_rank, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first[1:-1:2] == [["checkpoint-1"]] * 4
    words = ["on rank 1", "disk of rank 1", "disk of rank 0", "on rank 0", "model.norm.weight is not finite"]
    assert all(word in reason for word, reason in zip(words, first[::2], strict=True))
    assert [path.name for path in complete(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
