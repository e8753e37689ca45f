"""Flags: bad ones end the program at once with one sentence that names the flag and the remedy."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import args
from support.args import EMBEDDED, TINY, Args, parse

ROOT = Path(args.__file__).parent.parent


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--keep-ratio 0", "--keep-ratio 0.0: must lie in (0, 1]"),
        ("--keep-ratio 1.5", "--keep-ratio 1.5"),
        ("--keep-ratio 0.99", "--p-max 0.95"),
        ("--detect-length 256", "--detect-length 256: must be below --max-length 256"),
        ("--temperature 0", "--temperature 0.0: must be above 0"),
        ("--group-size 1", "--group-size 1: must be at least 2"),
        ("--max-prompt 256", "--max-prompt 256: must be below --max-length 256"),
        ("--prune some", "invalid choice: 'some'"),
        ("--algo dapo --beta 0.1", "--beta 0.1: DAPO has no KL term"),
        ("--dataset none.jsonl", "--dataset none.jsonl: there is no such file"),
        ("--model ./none", "--model ./none: there is no such folder"),
        ("--resume none", "--resume none: there is no args.json in it"),
        ("--keep-ratoi 0.5", "unrecognized arguments: --keep-ratoi"),
        ("--keep 0.5", "unrecognized arguments: --keep"),  # no abbreviations: a new flag would change what they mean
        ("--algo dapo --overlong-cache 300", "--overlong-cache 300: must not exceed --max-length 256"),
        ("--tracker wandb", "--tracker wandb: it is not installed; pip install wandb"),
        ("--max-gap 0", "--max-gap 0.0: must be above 0"),
        ("--prompts x", "argument --prompts: invalid int value: 'x'"),
    ],
)
def test_bad_flags(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(flags.split())
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and words in message


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path)])
    assert "no tokenizer; save one there" in capsys.readouterr().err


def test_bad_flags_fail_before_anything_heavy_is_imported() -> None:
    code = "import sys; from support import args\ntry: args.parse(['--group-size', '1'])\nexcept SystemExit: assert not {'torch', 'vllm'} & set(sys.modules); print('light')"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "light\n"
    )
    run = subprocess.run([sys.executable, "arrol.py", "--group-size", "1"], cwd=ROOT, capture_output=True, text=True)
    assert (
        run.returncode == 2
        and run.stderr.splitlines()[-1].startswith("arrol.py: error: --group-size 1")
        and not run.stdout
    )


def test_defaults_are_the_papers_and_the_embedded_models() -> None:
    paper = parse(["--model", "Qwen/Qwen3-1.7B-Base", "--tilt", "printed"])
    assert (paper.keep_ratio, paper.positive_target, paper.balance, paper.bins, paper.detect_length) == (
        0.5,
        0.5,
        0.5,
        128,
        512,
    )
    assert (paper.group_size, paper.lr, paper.max_length, paper.cold_start, paper.clip_low) == (16, 1e-6, 8192, 20, 0.2)
    assert parse([]).balance == 2.0 and parse(["--tilt", "printed", "--balance", "1"]).balance == 1.0
    embedded = parse([])
    assert embedded.model == str(TINY) and all(getattr(embedded, name) == value for name, value in EMBEDDED.items())
    assert parse(["--steps", "3"]).steps == 3 and parse(["--steps=3", "--no-thinking"]).steps == 3


def test_every_flag_reaches_its_field() -> None:
    """verl#4957: a flag that exists and is not passed on."""
    for spec in dataclasses.fields(Args):
        if spec.name in ("resume", "model", "dataset", "tracker") or spec.type == "bool":
            continue
        choices = spec.metadata["choices"]
        value = (
            choices[-1]
            if choices
            else {"str": "x", "int": str(EMBEDDED.get(spec.name, spec.default) + 1) if spec.type == "int" else ""}.get(
                spec.type, "0.5"
            )
        )
        flags = (
            [f"--{spec.name.replace('_', '-')}", value, "--algo", "grpo"] if spec.name != "algo" else ["--algo", value]
        )
        expected = [value] if spec.type == "list[str]" else value
        assert (
            getattr(parse(flags), spec.name) if spec.type == "list[str]" else str(getattr(parse(flags), spec.name))
        ) == expected, spec.name


def test_resume_takes_the_runs_own_flags_and_those_that_are_given(tmp_path: Path) -> None:
    first = parse(["--steps", "3", "--lr", "0.5", "--output", str(tmp_path)])
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(first)))
    again = parse(["--resume", str(tmp_path), "--steps", "6"])
    assert (again.steps, again.lr, again.output, again.model) == (6, 0.5, str(tmp_path), str(TINY))
    for flags in (
        ["--output", str(tmp_path)],
        ["--resume", str(tmp_path), "--prune", "none"],
        ["--resume", str(tmp_path), "--head-width", "8"],
    ):
        with pytest.raises(SystemExit):
            parse(flags)  # a run is never overwritten, nor gone on with as another one
