"""Whole training steps on the embedded model and a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import arrol
import checkpoint
import data
from args import TINY, parse
from arrol import Trainer
from engine import Engine, NothingScored
from grader import Grader, Verdict
from grpo import SamplerGapError

ROOT = Path(arrol.__file__).parent


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(max_model_len=256, max_num_seqs=128)


@pytest.fixture
def trainer(engine: Engine, tmp_path: Path) -> Callable[..., Trainer]:
    """Builds a trainer from flags; small steps unless they say otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with Grader() as grader:

        def make(**changes: object) -> Trainer:
            flags = {
                "steps": 6,
                "prompts": 6,
                "group_size": 8,
                "cold_start": 1,
                "eval_problems": 0,
                "output": tmp_path / str(time.monotonic_ns()),
                "token_budget": 4096,
                "warmup_steps": 2,
            } | changes
            args = parse([f"--{name.replace('_', '-')}={value}" for name, value in flags.items()])
            prompts, _ = data.tokenize(data.sums(200, 1), tokenizer, args.max_prompt, args.instruction)
            stops = data.stop_token_ids(
                tokenizer, AutoModelForCausalLM.from_pretrained(TINY).config, GenerationConfig.from_pretrained(TINY)
            )
            return Trainer(args, engine, tokenizer, prompts, [], stops, grader, torch.device("cpu"))

        yield make


def outcome(trainer: Trainer) -> list[list[dict]]:
    """Run to the end; every rollout of every step, as rollouts.jsonl has it."""
    trainer.run("test", checkpoints=False)
    lines = (Path(trainer.args.output) / "rollouts.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines if line]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_six_steps_straight_equal_three_and_three(trainer: Callable[..., Trainer]) -> None:
    """EasyR1#57: same prompts, same decisions, same weights, bit for bit; through files, at a mid-epoch data position."""
    straight = trainer(log_rollouts="all")
    expected = outcome(straight)
    assert any(row["pruned"] for row in expected)
    first = trainer(log_rollouts="all", steps=3)
    folder = Path(first.args.output)
    first.run("test")
    start = weights(first)
    second = trainer(log_rollouts="all", seed=0, output=folder / "elsewhere")
    second.args.output = str(folder)
    second.run("test", resume_from=checkpoint.complete(folder)[-1])
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().split("\n") if line]
    assert rows == expected
    assert same(weights(straight), weights(second)) and not same(start, weights(second))


def test_keep_ratio_1_is_no_pruning(trainer: Callable[..., Trainer]) -> None:
    plain, all_kept = (
        trainer(prune="none", steps=3, log_rollouts="all"),
        trainer(keep_ratio=1, steps=3, log_rollouts="all"),
    )
    own = {"score", "posterior", "survival"}
    assert [[(k, v) for k, v in row.items() if k not in own] for row in outcome(plain)] == [
        [(k, v) for k, v in row.items() if k not in own] for row in outcome(all_kept)
    ]
    assert same(weights(plain), weights(all_kept))


def test_a_run_keeps_its_ratio_and_its_sampler_in_step(trainer: Callable[..., Trainer]) -> None:
    """33 steps: keep rate within 3 points of kappa, and the gap between sampler and trainer below 1e-3 at every token."""
    lines = trainer(steps=33, cold_start=3).run("test", checkpoints=False)[1:]
    assert [line["pruning"] for line in lines] == [False] * 3 + [True] * 30
    rate = sum(line["scored"] * line["keep_ratio"] for line in lines[3:]) / sum(line["scored"] for line in lines[3:])
    assert abs(rate - 0.5) < 0.03
    assert max(line["gap_max"] for line in lines) < 1e-3
    # the sync had something to do after every step, but for those in which all groups were dead
    assert all(line["optimizer_steps"] > 0 or line["zero_variance_after"] == 1 for line in lines)
    assert lines[3]["tokens_trained"] < lines[3]["tokens_generated"]


def test_a_sync_that_misses_lm_head_stops_the_run(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tied lm_head fault: found in the second step, before anything is learnt from the wrong samples."""
    monkeypatch.setattr(Engine, "_refresh_packed_head", lambda self: None)
    broken = trainer(lr=1e-3, warmup_steps=0)
    with pytest.raises(SamplerGapError, match="weight sync"):
        broken.run("test", checkpoints=False)
    assert broken.step_number <= 3
    monkeypatch.undo()
    broken.engine.sync(broken.weights())


def test_pruned_rollouts_reach_nothing_behind_the_engine(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    run = trainer(cold_start=0)
    run.step()
    grade, update = run.grader.grade, run.learner.update
    monkeypatch.setattr(run.grader, "grade", lambda texts, golds: seen.update(graded=len(texts)) or grade(texts, golds))
    monkeypatch.setattr(
        run.learner,
        "update",
        lambda sequences, *limits: seen.update(trained=len(sequences)) or update(sequences, *limits),
    )
    metrics, _ = run.step()
    assert metrics["pruned"] > 0
    assert seen == {
        "graded": metrics["rollouts"] - metrics["pruned"],
        "trained": metrics["rollouts"] - metrics["pruned"],
    }


def test_the_head_teaches_the_policy_nothing(trainer: Callable[..., Trainer]) -> None:
    """No gradient of the quality head reaches the policy, whose states it learns from."""
    run = trainer(cold_start=0, lr=0.0, head_lr=0.1)
    run.step()
    before, head = weights(run), [p.clone() for p in run.pruner.head.parameters()]
    run.step()
    assert same(before, weights(run)) and all(p.grad is None for p in run.policy.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(head, run.pruner.head.parameters()))


def test_a_run_in_which_nothing_reaches_l_detect_stops(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be plain GRPO under the name of ARRoL, without a word."""
    run = trainer(detect_length=200, cold_start=1)
    monkeypatch.setattr(run.engine, "detect_length", 200)
    with pytest.raises(NothingScored, match="lower --detect-length"):
        run.run("test", checkpoints=False)
    assert run.step_number == 2


def test_dapo_refills_groups_without_variance_and_gives_up(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl#953: refills are bounded, and rewards that are all 0 end the step without an update, not with an error."""
    run = trainer(algo="dapo", prompts=4, max_refills=2)
    metrics, _ = run.step()
    assert metrics["rollouts"] > 4 * 8 and 0 < metrics["usable_groups"] <= 12
    before = weights(run)
    wrong = Verdict("wrong", "1")
    monkeypatch.setattr(run.grader, "grade", lambda texts, golds: [wrong] * len(texts))
    metrics, _ = run.step()
    assert metrics["usable_groups"] == 0 and metrics["rollouts"] == 3 * 4 * 8 and metrics["optimizer_steps"] == 0
    assert same(before, weights(run))


def test_checkpoints_are_chosen_by_number_and_only_when_complete(tmp_path: Path) -> None:
    """speculators#739, dirty-trading-bot#15: 9 < 10, and 11 was cut off."""
    for number, whole in ((9, True), (10, True), (11, False)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{number}" / "state.pt").write_bytes(b"")
    (tmp_path / ".writing-checkpoint-12").mkdir()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_a_checkpoint_loads_in_transformers_with_its_head(trainer: Callable[..., Trainer]) -> None:
    run = trainer(steps=3, checkpoint_every=1, keep_checkpoints=2)
    run.run("test")
    folder = Path(run.args.output)
    assert [path.name for path in checkpoint.complete(folder)] == ["checkpoint-2", "checkpoint-3"]
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-3" / "model", dtype=torch.float32)
    assert same(dict(model.named_parameters()), weights(run))
    assert AutoTokenizer.from_pretrained(folder / "checkpoint-3" / "model").encode("1+2=?\n")
    head, table, detect_length = checkpoint.load_head(folder / "checkpoint-3" / "quality_head.safetensors")
    states = torch.randn(5, model.config.hidden_size)
    assert torch.equal(head(states), run.pruner.head(states)) and detect_length == run.args.detect_length
    centres = (torch.arange(len(table)) + 0.5) / len(table)
    assert len(table) == run.args.bins and torch.equal(table, run.pruner.calibrator.posterior(centres))
    with pytest.raises(ValueError, match="no quality head"):
        checkpoint.load_head(folder / "checkpoint-3" / "model" / "model.safetensors")


def test_a_failed_save_leaves_the_old_checkpoint(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk full: the half-written folder is never taken for a checkpoint."""
    run = trainer(steps=1)
    run.run("test")
    folder = Path(run.args.output)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    run.step()
    with pytest.raises(OSError, match="No space left"):
        run.save(folder)
    assert [path.name for path in checkpoint.complete(folder)] == ["checkpoint-1"]


def test_beta_adds_a_kl_to_the_start_model(trainer: Callable[..., Trainer]) -> None:
    run = trainer(steps=2, beta=0.1, prune="none", lr=1e-3, warmup_steps=0, minibatches=1)
    lines = run.run("test", checkpoints=False)[1:]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[1]["kl"] > 1e-5


def test_ctrl_c_says_where_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    """A real run in its own session: SIGINT to the whole group, as a terminal sends it; then the run is resumed."""
    command = [
        sys.executable,
        "arrol.py",
        "--prompts",
        "4",
        "--group-size",
        "8",
        "--eval-problems",
        "0",
        "--baseline-steps",
        "0",
    ]
    # this process is the only rank of a group of its own, and has said so in its environment
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    run = subprocess.Popen(
        [*command, "--steps", "500", "--checkpoint-every", "1", "--output", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not checkpoint.complete(tmp_path / "run") and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "The last checkpoint is" in errors and f"--resume {tmp_path / 'run'}" in errors and "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    done = int(checkpoint.complete(tmp_path / "run")[-1].name.removeprefix("checkpoint-"))
    again = subprocess.run(
        [sys.executable, "arrol.py", "--resume", str(tmp_path / "run"), "--steps", str(done + 1)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stderr
    assert "whole step, s" in again.stdout and (tmp_path / "run" / "reward.png").exists()
    steps = [line["step"] for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    assert steps == list(range(done + 2))
