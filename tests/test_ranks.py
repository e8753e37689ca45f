"""Two ranks against one: the same rollouts, decisions, metrics and weights from the same flags; no
rank left waiting.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks_worker import FLAGS
from safetensors.torch import load_file
from transformers import AutoTokenizer

from arrol import Trainer
from support.args import TINY, parse
from support.grader import Verdict
from support.metrics import head_metrics
from support.report import Clock

ROOT = Path(__file__).resolve().parent.parent
RUNS = ("grpo", "dapo", "one prompt")
OF_A_PROCESS = ("time_", "wall_clock", "memory_")
BY_ORDER = ("auc", "auc_within")  # two samples of one text tie, or differ in the last digit


def start(ranks: int, *command: object) -> str:
    """Run a program on so many ranks; returns what it printed. A rank that waits for ever, or is left behind, fails."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    process = subprocess.Popen(
        [sys.executable, *launcher, *map(str, command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=300)
    finally:
        process.terminate()  # torchrun then ends its ranks
        process.wait(60)
    assert process.returncode == 0, errors[-4000:]
    return printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`two` and `one` hold the runs on so many ranks; in `resumed` one rank went on where two were
    after two of four steps.
    """
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("one", "two"):
        (folder / name).mkdir()
    (folder / "two" / "printed").write_text(start(2, "tests/ranks_worker.py", folder / "two"))
    shutil.copytree(folder / "two" / "grpo", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoint-4")
    start(1, "tests/ranks_worker.py", folder / "one", folder / "resumed" / "checkpoint-2")
    start(2, "arrol.py", *FLAGS, "--tp", 2, "--output", folder / "tensor parallel")
    return folder


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().split("\n") if line]


def same_rollouts(left: Path, right: Path) -> None:
    """Every rollout's text, length and fate exactly, its score and survival probability up to rounding.

    Rounding depends on how many rows are multiplied together. It could turn a draw, of a token or a
    survivor, whose two sides are within 1e-6 of each other: among the 6,000 tokens here, once in
    about a hundred machines.
    """
    inexact = ("score", "posterior", "survival")
    ours, theirs = lines(left, "rollouts"), lines(right, "rollouts")
    assert [{k: v for k, v in row.items() if k not in inexact} for row in ours] == [
        {k: v for k, v in row.items() if k not in inexact} for row in theirs
    ]
    for name in inexact:
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], abs=1e-5)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoint-4" / "model" / "model.safetensors")


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left.keys() | right.keys())


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_sample_and_prune_what_one_does(runs: Path, name: str) -> None:
    rows = lines(runs / "two" / name, "rollouts")
    assert any(row["pruned"] for row in rows) and any(row["finish"] == "stop" for row in rows)
    same_rollouts(runs / "two" / name, runs / "one" / name)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_report_what_one_does(runs: Path, name: str) -> None:
    """All metrics but times and memory, evaluations among them: they are of all ranks.

    Those that depend on the order of scores are what all of a run's own rollouts make of them.
    """
    for run in (runs / "two" / name, runs / "one" / name):
        for line in lines(run, "metrics")[1:]:
            rows = [row for row in lines(run, "rollouts") if row["step"] == line["step"] and row["score"] is not None]
            judged = [(row, Verdict(row["verdict"], None).reward) for row in rows if row["verdict"]]
            known = [(row["score"], reward, row["group"]) for row, reward in judged if reward is not None]
            expected = head_metrics(*map(torch.tensor, zip(*known, strict=True))) if known else {}
            for key in BY_ORDER:
                assert line.get(f"head_{key}", math.nan) == pytest.approx(expected.get(key, math.nan), nan_ok=True), key
    ours, theirs = lines(runs / "two" / name, "metrics"), lines(runs / "one" / name, "metrics")
    assert len(ours) == len(theirs) and any("eval/held-out/greedy" in line for line in ours)
    for left, right in zip(ours, theirs, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            if not key.startswith(OF_A_PROCESS) and key not in [f"head_{one}" for one in BY_ORDER]:
                bound = 1e-4 if key == "gap_max" else 1e-6
                assert left[key] == pytest.approx(right[key], rel=1e-5, abs=bound), key


def test_two_ranks_end_with_the_weights_of_one(runs: Path) -> None:
    """To 2e-6, where they moved by up to 8e-4: Adam turns the rounding of a gradient near 0 into a part of its step."""
    two, one, start = (
        weights(runs / "two" / "grpo"),
        weights(runs / "one" / "grpo"),
        load_file(TINY / "model.safetensors"),
    )
    assert distance(one, start) > 5e-4
    assert distance(two, one) < 2e-6


@pytest.mark.parametrize("name", RUNS)
def test_head_and_calibration_are_the_same_on_both_ranks_bit_for_bit(runs: Path, name: str) -> None:
    first, second = (json.loads((runs / "two" / f"rank-{rank}.json").read_text())[name] for rank in (0, 1))
    assert first == second and first.keys() == {"policy", "trainer", "calibrator", "finished"}


def test_ranks_had_different_numbers_of_prompts_and_survivors(runs: Path) -> None:
    """verl#6176, EasyR1#44: else the tests above would show less than they say."""
    rows = lines(runs / "two" / "grpo", "rollouts")
    kept = Counter((row["step"], row["group"] % 5 % 2) for row in rows if not row["pruned"])
    assert all(kept[step, 0] != kept[step, 1] > 0 for step in range(1, 5))


def test_one_rank_goes_on_where_two_were(runs: Path) -> None:
    """Shards of two ranks are read by one, with the data position, the head and its windows."""
    same_rollouts(runs / "resumed", runs / "one" / "grpo")
    assert distance(weights(runs / "resumed"), weights(runs / "one" / "grpo")) < 2e-6


def test_two_ranks_with_one_engine_sample_and_learn_what_one_does(runs: Path) -> None:
    """Tensor parallel: each has a part of every layer, the sums are rounded otherwise; the
    survivors are shared out for the update.
    """
    same_rollouts(runs / "tensor parallel", runs / "one" / "grpo")
    assert distance(weights(runs / "tensor parallel"), weights(runs / "one" / "grpo")) < 2e-6
    assert max(line.get("gap_max", 0.0) for line in lines(runs / "tensor parallel", "metrics")) < 1e-3


def test_a_rank_without_prompts_takes_part(runs: Path) -> None:
    """Pruning is due from the first step: nothing of its own is ever scored, and that is no reason to stop."""
    rows = lines(runs / "two" / "one prompt", "rollouts")
    assert {row["group"] for row in rows} == {0, 1} and any(row["score"] is not None for row in rows)


def test_several_ranks_speak_and_write_as_one(runs: Path) -> None:
    printed = (runs / "two" / "printed").read_text()
    assert printed.count("whole step, s") == printed.count("run folder:") == printed.count("evaluation: ") == 1
    assert [line["step"] for line in lines(runs / "two" / "grpo", "metrics")] == list(range(5))
    assert sorted(path.name for path in (runs / "two" / "grpo").iterdir()) == [
        "args.json",
        "checkpoint-2",
        "checkpoint-4",
        "metrics.jsonl",
        "reward.png",
        "rollouts.jsonl",
        "rollouts.png",
    ]


@pytest.mark.parametrize("own", [False, True])
def test_ranks_draw_different_numbers_unless_each_rollout_has_its_own(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of several ranks would all sample the same, were it not for their number in the seed."""
    trainer, seeds = object.__new__(Trainer), []
    trainer.args = parse(["--rollout-seeds" if own else "--no-rollout-seeds"])
    trainer.pruner = trainer.sampling = None
    grader = SimpleNamespace(grade=lambda texts, golds: [])
    trainer.parts = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(TINY), grader=grader)
    trainer.clock = Clock()
    trainer.engine = SimpleNamespace(generate=lambda *_, seed, **__: seeds.append(seed) or [])
    for number in range(4):
        monkeypatch.setenv("RANK", str(number))
        trainer.generate({}, step=3, attempt=0)
    assert len(set(seeds)) == (1 if own else 4)
