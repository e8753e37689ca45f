"""The worked examples run, and say what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.args import TINY
from support.checkpoint import load_head
from support.metrics import auc

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "copying.md").read_text()
USES = re.findall(r"^## (\w+)\.py\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(program: str, *arguments: object) -> str:
    """Run a program as a reader would, as the only rank; returns what it printed."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_tour_takes_a_group_from_prompt_to_gradient(tmp_path: Path) -> None:
    printed = run("examples/tour.py", "--output", tmp_path / "tour.png")
    rows = [line.split() for line in printed.splitlines() if re.match(r" *\d+ +\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(range(16))
    pruned = [row for row in rows if row[-1] == "pruned"]
    judged = [row for row in rows if "right" in row or "wrong" in row]
    assert 0 < len(pruned) < 16 and all(row[1] == "10" for row in pruned)
    # Advantages of a group sum to 0; those of the right ones are positive.
    assert abs(sum(float(row[-1]) for row in judged)) < 0.1
    assert all((float(row[-1]) > 0) == ("right" in row) for row in judged)
    gap = float(re.search(r"up to (\S+) nats", printed)[1])
    assert gap < 1e-3 and float(re.search(r"gradient (\S+)", printed)[1]) > 0
    assert (tmp_path / "tour.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_without_a_trainer(tmp_path: Path) -> None:
    """Of samples that think alike at token 6 one goes on, and the others keep their 6 tokens."""
    printed = run("examples/engine_only.py", "--token", 6, "--samples", 8, "--limit", 0.9)
    rows = [line.split("\t") for line in printed.splitlines() if line.count("\t") == 5]
    assert [(row[0], row[1]) for row in rows] == [(str(g), str(s)) for g in range(2) for s in range(8)]
    assert {row[2] for row in rows} >= {"stop", "pruned"}
    for _, _, finish, tokens, alike, text in rows:
        assert (int(tokens) > 6) == (alike != "None" and finish != "pruned") and len(text) > 2
        if finish == "pruned":
            assert int(tokens) == 6 and float(alike) >= 0.9
        elif int(tokens) > 6:
            assert float(alike) <= 0.9
    # The first of a prompt that reaches the token has no sibling to be like.
    assert [next(row[4] for row in rows if row[0] == group and row[4] != "None") for group in "01"] == ["0.0"] * 2


def test_a_head_for_a_model_that_was_trained_elsewhere(tmp_path: Path) -> None:
    """It tells right from wrong within problems that it has not seen, and tts.py votes with it."""
    printed = run("examples/train_head.py", "--n", 8, "--output", tmp_path / "head")
    for field in ("detect_state", "last_state"):
        assert float(re.search(rf"within problems (\S+) by {field}", printed)[1]) > 0.6, printed
    head, flags = tmp_path / "head" / "quality_head.safetensors", ["--data", "sums:2-3:9", "--n", 2, "--early-stop"]
    _, *tables, detect_length = load_head(head)
    assert detect_length == 10
    for table in tables:
        assert table.shape == (32,) and table.max() - table.min() > 0.3
    run("tts.py", "--head", head, *flags, "--output", tmp_path / "votes")
    scores = json.loads((tmp_path / "votes" / "scores.json").read_text())
    lines = (tmp_path / "votes" / "candidates.jsonl").read_text("utf-8").split("\n")
    rows = [row for row in map(json.loads, filter(None, lines)) if row["answer"] is not None]
    logits = torch.tensor([row["signals"]["head"] for row in rows])
    right = torch.tensor([row["verdict"] == "right" for row in rows])
    assert auc(logits, right) > 0.6 and scores["early_stop"]["tokens saved"] > 0


# --- docs/copying.md: each of the five alone -------------------------------------------------------------------------


def test_all_five_are_on_the_page() -> None:
    assert [name for name, _ in USES] == ["quality_head", "calibration", "engine", "grpo", "tts"]


@pytest.mark.parametrize(("name", "use"), USES, ids=[name for name, _ in USES])
def test_what_the_page_says_works_in_an_empty_folder(name: str, use: str, tmp_path: Path) -> None:
    """Nothing else of this repository is to be had there. `engine` and `grpo` take ten seconds."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    check = "import importlib.util\nassert importlib.util.find_spec('support') is None\n"
    (tmp_path / "use.py").write_text(check + use.replace("Qwen/Qwen3-0.6B-Base", str(TINY)))
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    command = [sys.executable, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
