"""What is reported about pruned rollouts, by hand; and files that survive a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Rollout
from support.args import parse
from support.data import Problem, Prompt
from support.metrics import rollout_metrics
from support.report import RunLog, find_fault, plot_reward, plot_rollouts, rollout_rows, summary
from support.show import load_metrics


def rollout(
    group: int,
    length: int,
    finish: str = "stop",
    survival: float | None = None,
    reward: float | None = None,
) -> Rollout:
    return Rollout(group, token_ids=[0] * length, finish=finish, survival=survival, reward=reward)


def test_rollout_metrics_by_hand() -> None:
    """Two groups, L_detect 4. Group 1: a short wrong one, kept right (p = 1/4) and wrong (p = 1/2), one pruned.
    Group 2: one survivor, right, p = 1/2, two pruned."""
    rollouts = [
        rollout(1, 3, reward=0.0),
        rollout(1, 8, survival=0.25, reward=1.0),
        rollout(1, 6, survival=0.5, reward=0.0),
        rollout(1, 4, "pruned"),
        rollout(2, 10, "length", survival=0.5, reward=1.0),
        rollout(2, 4, "pruned"),
        rollout(2, 4, "pruned"),
    ]
    m = rollout_metrics(rollouts, detect_length=4)
    assert (m["rollouts"], m["scored"], m["pruned"], m["keep_ratio"]) == (7, 6, 3, 0.5)
    assert m["positive_scored"] == pytest.approx((4 + 2) / (4 + 2 + 2)) and m["positive_kept"] == pytest.approx(2 / 3)
    assert m["reward"] == pytest.approx(6 * 0.75 / 7)  # the short one is wrong
    assert m["rho_mean"] == pytest.approx((1 / 3 + 1) / 2) and m["rho_variance"] == pytest.approx((2 / 9 + 0) / 2)
    assert m["zero_variance_after"] == 0.5
    assert m["tokens_generated"] == 39 and m["tokens_kept"] == 27
    assert m["tokens_saved"] == pytest.approx(3 * (4 * 4 + 2 * 2 + 2 * 6) / 8)
    assert m["truncated"] == 0.25


def test_rollout_metrics_of_nothing_are_nan_and_not_an_error() -> None:
    m = rollout_metrics([rollout(1, 4, "pruned")], detect_length=4)
    assert m["keep_ratio"] == 0 and math.isnan(m["reward"]) and m["zero_variance_after"] == 1
    assert math.isnan(rollout_metrics([], detect_length=4)["keep_ratio"])


PROMPTS = {1: Prompt(Problem("sum:1", "1+1=?", "2"), [1, 2])}
METRICS = {"tokens_generated": 10, "time_generate": 1.0, "reward": 0.5, "keep_ratio": 1.0}


def test_run_log_drops_what_the_interrupted_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    args = parse(["--output", str(tmp_path), "--steps", "9"])
    with RunLog(args, "run") as log:
        for step in range(4):
            rollouts = [Rollout(1, token_ids=[0], finish="stop", tail="two\u2028lines", verdict="right", reward=1.0)]
            loss = math.nan if step == 1 else 0.5
            log.step(METRICS | {"step": step, "loss": loss}, PROMPTS, rollouts)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        # Cut off by a crash.
        file.write('{"step": 4, "lo')
    with RunLog(args, "run", resumed_step=2):
        pass
    lines = load_metrics(tmp_path)
    assert [(line["step"], line.get("loss")) for line in lines] == [(0, 0.5), (1, None), (2, 0.5)]
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().split("\n") if line]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[0]["tail"] == "two\u2028lines"
    assert (tmp_path / "rollouts.png").read_bytes().startswith(b"\x89PNG")


def from_tensorboard(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}


def from_wandb(folder: Path) -> dict[tuple[str, int], float]:
    """Of an offline run. Its file: 7 bytes, then records of checksum (4), size (2), type (1), data."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    # Its process may still be writing when a run has finished.
    wandb.teardown()
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, start, found = path.read_bytes(), 7, {}
    # Records go across the ends of blocks of 32 KiB; this log is one block.
    assert len(data) < 2**15
    while start < len(data):
        end = start + 7 + int.from_bytes(data[start + 4 : start + 6], "little")
        history = Record.FromString(data[start + 7 : end]).history
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
        found |= {(name, history.step.num): value for name, value in values.items() if not name.startswith("_")}
        start = end
    return found


@pytest.mark.parametrize("read", [from_tensorboard, from_wandb])
def test_a_tracker_is_told_what_the_file_is(
    read: Callable[[Path], dict[tuple[str, int], float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups; in the folder of the run, which is not there yet (wandb would go elsewhere then)."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, tracker = tmp_path / "run" / "baseline", read.__name__.removeprefix("from_")
    with RunLog(parse(["--output", str(folder), "--tracker", tracker]), "run") as log:
        log.metrics({"step": 0, "eval/held-out/avg@4": 0.25, "time_eval": 3.5})
        for step in (1, 2):
            changes = {"step": step, "pruning": step == 2, "head_auc": math.nan if step == 1 else 0.75, "loss": -0.5}
            log.step(METRICS | changes, PROMPTS, [Rollout(1, token_ids=[0], finish="stop", verdict="right")])
    found = read(folder)
    assert all(found.pop(("time/memory_gb", step)) > 0 for step in (1, 2))
    every_step = {"rollout/tokens_generated": 10, "time/generate": 1, "rollout/reward": 0.5, "prune/keep_ratio": 1}
    expected = {(name, step): value for name, value in (every_step | {"loss/loss": -0.5}).items() for step in (1, 2)}
    expected |= {("eval/held-out/avg@4", 0): 0.25, ("time/eval", 0): 3.5, ("head/auc", 2): 0.75}
    assert found == expected | {("prune/pruning", 1): 0, ("prune/pruning", 2): 1}


def graded(verdict: str, finish: str = "stop", tail: str = "") -> Rollout:
    reward = {"right": 1.0, "wrong": 0.0, "no answer": 0.0}.get(verdict)
    return Rollout(1, token_ids=[0], finish=finish, verdict=verdict, reward=reward, tail=tail)


def test_a_step_that_has_nothing_to_learn_from_says_why() -> None:
    """Which of the three it is, how a rollout ends, and the flag that helps."""
    wrong, right = [graded("wrong", tail="so\n\\boxed{3}")] * 5, [graded("right")]
    dead = find_fault(wrong, 3)
    assert "5 of 5 survivors got no reward" in dead and "--dataset" in dead and "boxed{3}" in dead
    silent = find_fault([graded("no answer", tail="first\nthe answer is 7")] * 9 + right, 0)
    assert "9 of 10 survivors give no answer" in silent and "--instruction" in silent and "the answer is 7" in silent
    cut = find_fault([graded("no answer", "length", "and then")] * 9 + right, 0)
    assert "9 of 10 survivors were cut off" in cut and "--max-length" in cut and "and then" in cut


def test_a_step_that_can_be_learnt_from_is_left_alone() -> None:
    """Two dead steps in a row, a fifth of right ones, a grader's time-outs: none of it is a warning."""
    assert find_fault([graded("wrong")] * 4, 2) is None
    assert find_fault([graded("no answer")] * 8 + [graded("right")] * 2, 0) is None
    assert find_fault([Rollout(1, finish="pruned")], 3) is None


def test_a_run_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the third dead step in a row, which is the sixth here."""
    with RunLog(parse(["--output", str(tmp_path), "--steps", "7"]), "run") as log:
        for step, reward in enumerate((0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0), 1):
            assert "got no reward" not in capsys.readouterr().err
            log.step(METRICS | {"step": step, "reward": reward}, PROMPTS, [graded("wrong")])
            if step == 6:
                assert capsys.readouterr().err.count("1 of 1 survivors got no reward") == 1


def test_a_picture_of_every_kind_of_rollout(tmp_path: Path) -> None:
    rollouts = [
        Rollout(1, 0, token_ids=[0] * 9, finish="stop", verdict="right", score=0.9, posterior=0.8, survival=0.3),
        Rollout(1, 1, token_ids=[0] * 4, finish="pruned", score=math.nan, posterior=math.nan, survival=1.0),
        Rollout(1, 2, token_ids=[0] * 2, finish="stop", verdict="no answer"),
        Rollout(1, 3, token_ids=[0] * 6, finish="length", verdict="timeout"),
    ]
    rows = rollout_rows(1, PROMPTS, rollouts)
    assert rows[1]["score"] is None and rows[0]["gold"] == "2" and rows[1]["pruned"]
    plot_rollouts(rows, 4, tmp_path / "rollouts.png")
    assert (tmp_path / "rollouts.png").read_bytes().startswith(b"\x89PNG")


def test_summary_and_picture(tmp_path: Path) -> None:
    def step(number: int, seconds: float, pruning: bool) -> dict:
        return {
            "step": number,
            "time_step": seconds,
            "wall_clock": number * seconds,
            "reward": 0.5,
            "pruning": pruning,
            "tokens_generated": 100,
        }

    runs = {
        "GRPO": [
            {"step": 0, "eval/held-out/avg@4": 0.25},
            step(1, 4.0, False),
            step(2, 6.0, False) | {"eval/held-out/avg@4": 0.5},
        ],
        "ARRoL": [
            {"step": 0, "eval/held-out/avg@4": 0.25, "eval/amc23/pass@16": 0.5},
            step(1, 9.0, False),
            step(2, 2.0, True),
            step(3, 3.0, True) | {"eval/held-out/avg@4": 0.75},
        ],
    }
    lines = summary(runs).splitlines()
    assert next(line for line in lines if line.startswith("whole step")).split()[-3:] == ["5.000", "2.500", "2.00x"]
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[0] == ["evaluation", "step", "held-out", "avg@4", "amc23", "pass@16"]
    assert table[2:] == [
        ["GRPO", "0", "0.250", "-"],
        ["GRPO", "2", "0.500", "-"],
        ["ARRoL", "0", "0.250", "0.500"],
        ["ARRoL", "3", "0.750", "-"],
    ]
    plot_reward(runs, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
