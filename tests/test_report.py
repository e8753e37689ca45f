"""What is reported about pruned rollouts, by hand; and files that survive a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine import Rollout
from support.report import RunLog, load_metrics, plot_reward, rollout_metrics, summary


def rollout(group: int, length: int, finish: str = "stop", survival: float | None = None) -> Rollout:
    return Rollout(group, token_ids=[0] * length, finish=finish, survival=survival)


def test_rollout_metrics_by_hand() -> None:
    """Two groups, L_detect 4. Group 1: a short wrong one, kept right (p = 1/4) and wrong (p = 1/2), one pruned.
    Group 2: one survivor, right, p = 1/2, two pruned."""
    rollouts = [
        rollout(1, 3),
        rollout(1, 8, survival=0.25),
        rollout(1, 6, survival=0.5),
        rollout(1, 4, "pruned"),
        rollout(2, 10, "length", survival=0.5),
        rollout(2, 4, "pruned"),
        rollout(2, 4, "pruned"),
    ]
    m = rollout_metrics(rollouts, [0.0, 1.0, 0.0, None, 1.0, None, None], detect_length=4)
    assert (m["rollouts"], m["scored"], m["pruned"], m["keep_ratio"]) == (7, 6, 3, 0.5)
    assert m["positive_scored"] == pytest.approx((4 + 2) / (4 + 2 + 2)) and m["positive_kept"] == pytest.approx(2 / 3)
    assert m["reward"] == pytest.approx(6 * 0.75 / 7)  # the short one is wrong
    assert m["rho_mean"] == pytest.approx((1 / 3 + 1) / 2) and m["rho_variance"] == pytest.approx((2 / 9 + 0) / 2)
    assert m["zero_variance_after"] == 0.5 and m["zero_variance_before"] == pytest.approx(
        0.5 / 2
    )  # group 2: (1 + 1) / (1 + 2 + 1)
    assert m["tokens_generated"] == 39 and m["tokens_kept"] == 27
    assert m["tokens_saved"] == pytest.approx(3 * (4 * 4 + 2 * 2 + 2 * 6) / 8)
    assert m["truncated"] == 0.25


def test_rollout_metrics_of_nothing_are_nan_and_not_an_error() -> None:
    m = rollout_metrics([rollout(1, 4, "pruned")], [None], detect_length=4)
    assert m["keep_ratio"] == 0 and math.isnan(m["reward"]) and m["zero_variance_after"] == 1
    assert math.isnan(rollout_metrics([], [], detect_length=4)["keep_ratio"])


def test_run_log_drops_what_the_interrupted_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(4):
        log.metrics({"step": step, "loss": math.nan if step == 1 else 0.5})
        log.rollouts([{"step": step, "tail": "two\u2028lines"}])
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut off by a crash
    RunLog(tmp_path, resumed_step=2).close()
    assert load_metrics(tmp_path) == [{"step": 0, "loss": 0.5}, {"step": 1}, {"step": 2, "loss": 0.5}]
    assert [json.loads(line)["step"] for line in (tmp_path / "rollouts.jsonl").read_text().split("\n") if line] == [
        0,
        1,
        2,
    ]


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
