"""`python -m support.show` on files that a run has written: what it prints, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import Rollout
from support.data import Problem, Prompt
from support.report import rollout_rows

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = {g: Prompt(Problem(f"set:{g}", f"problem {g}", str(g)), [1]) for g in (7, 8)}
GROUP = [
    Rollout(7, 0, [0] * 9, finish="stop", verdict="right", answer="7", score=0.9, posterior=0.8, survival=0.3),
    Rollout(7, 1, [0] * 4, finish="pruned", score=math.nan, posterior=math.nan, survival=1.0, tail="cut"),
    Rollout(7, 2, [0] * 2, finish="stop", verdict="no answer", tail="two\u2028lines\n\x1b[2Jend"),
    Rollout(7, 3, [0] * 6, finish="length", verdict="wrong", answer="8", score=0.25, posterior=0.4, survival=0.5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two steps, of two groups each; the last line was cut off by a crash."""
    rows = rollout_rows(1, PROMPTS, GROUP) + rollout_rows(2, PROMPTS, [*GROUP[:2], Rollout(8, 0, [0], finish="stop")])
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rollouts.jsonl").write_text(text + '{"step": 3, "gro', "utf-8")
    return tmp_path


def show(*arguments: object, columns: int = 100) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": str(columns)}
    command = [sys.executable, "-m", "support.show", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def lines(*arguments: object, columns: int = 100) -> list[str]:
    done = show(*arguments, columns=columns)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_a_group_as_a_table(folder: Path) -> None:
    """A line for each rollout, whatever its text: no line end or escape of it reaches the terminal."""
    head, gold, empty, heading, dashes, *table = lines(folder, "--step", 1)
    assert head.endswith("step 1, group 7: 4 of 4 rollouts") and gold == "gold 7, problem set:7" and empty == ""
    assert set(dashes.strip()) == {"-"} and heading.split() == [
        "#",
        "score",
        "q",
        "p",
        "kept",
        "verdict",
        "answer",
        "tokens",
        "tail",
    ]
    assert [row.split() for row in table] == [
        ["0", "0.90", "0.80", "0.30", "yes", "right", "7", "9"],
        ["1", "-", "-", "1.00", "no", "-", "-", "4", "cut"],
        ["2", "-", "-", "-", "yes", "no", "answer", "-", "2", "two", "lines", "[2Jend"],
        ["3", "0.25", "0.40", "0.50", "yes", "wrong", "8", "6"],
    ]
    assert {row[: heading.index("tail") - 2].rstrip().rfind(" ") for row in table} == {heading.index("tail") - 4}


@pytest.mark.parametrize(
    ("flags", "samples"),
    [("--wrong", "23"), ("--pruned", "1"), ("--wrong --pruned", "123"), ("--group 7", "0123")],
)
def test_some_of_a_group(folder: Path, flags: str, samples: str) -> None:
    """No answer is a wrong one, as its reward says."""
    table = lines(folder, "--step", 1, *flags.split())
    assert f"{len(samples)} of 4 rollouts" in table[0] and "".join(row.split()[0] for row in table[5:]) == samples


def test_the_newest_step_and_another_group(folder: Path) -> None:
    assert "step 2, group 7: 2 of 2" in lines(folder)[0] and "step 2, group 8: 1 of 1" in lines(folder, "--group", 8)[0]


def test_two_runs_side_by_side(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    rows = rollout_rows(1, PROMPTS, [Rollout(8, 5, [0] * 3, finish="stop", verdict="right", tail="x" * 200)])
    (other / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = lines(folder, other, "--step", 1, columns=203)
    assert all(row[100:103] == " | " and len(row) <= 203 for row in table if len(row) > 103) and len(table) == 9
    assert table[5][:100].split()[0] == "0" and table[5][103:].split()[0] == "5" and table[5].endswith("xxx")
    assert [row.split()[0] for row in table[5:]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "{folder}/none",
            "none/rollouts.jsonl: no rollout is there; name the folder of a run, and not one of --log-rollouts none",
        ),
        ("{folder} --step 9", "--step 9: {folder}/rollouts.jsonl has the steps 1 to 2"),
        ("{folder} --group 9", "--group 9: step 2 of {folder}/rollouts.jsonl has the groups 7, 8"),
        ("{folder}/empty", "empty/rollouts.jsonl: no rollout is there"),
        (
            "{folder}/broken",
            "broken/rollouts.jsonl: it cannot be read, or not all of its lines are rollouts of arrol.py",
        ),
        ("{folder} {folder} {folder}", "two runs fit side by side"),
    ],
)
def test_errors_are_one_sentence(folder: Path, flags: str, words: str) -> None:
    for name, text in {"empty": "", "broken": '{"step": 1, "group": 1}\n[]\n'}.items():
        (folder / name).mkdir()
        (folder / name / "rollouts.jsonl").write_text(text)
    done = show(*flags.format(folder=folder).split())
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert words.format(folder=folder) in done.stderr
