"""Flags: bad ones end the program at once with one sentence that names the flag and the remedy."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import args
from support.args import EMBEDDED, FROM_RUN, TINY, Args, TtsArgs, parse, parse_tts

ROOT = Path(args.__file__).parent.parent
PROGRAMS = ((Args, parse), (TtsArgs, parse_tts))
NUMBERS = [
    (parser, spec)
    for settings, parser in PROGRAMS
    for spec in dataclasses.fields(settings)
    if spec.type in ("int", "float", "float | None")
]


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def refused(parser: Callable[[list[str]], object], flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that these flags end in."""
    with pytest.raises(SystemExit) as stop:
        parser(flags)
    message = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(message) == 1, message
    return message[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--keep-ratio 0", "--keep-ratio 0.0: must be in (0, 1]"),
        ("--keep-ratio 1.5", "--keep-ratio 1.5"),
        ("--keep-ratio 0.99", "--p-max 0.95"),
        ("--p-min 0.6 --p-max 0.5", "--p-min 0.6: must be in (0, p_max]"),
        ("--detect-length 256", "--detect-length 256: must be below --max-length 256"),
        ("--temperature 0", "--temperature 0.0: must be in (0, 2]"),
        ("--group-size 1", "--group-size 1: must be in [2, inf)"),
        ("--min-survivors 17", "--min-survivors 17: must be in [0, group_size]"),
        ("--minibatches 0", "--minibatches 0: must be in [1, inf)"),
        ("--max-prompt 256", "--max-prompt 256: must be in [1, max_length)"),
        ("--prune some", "--prune some: must be in ('arrol', 'random', 'none')"),
        ("--algo dapo --beta 0.1", "--beta 0.1: DAPO has no KL term"),
        ("--model ./none", "--model ./none: there is no such folder"),
        ("--resume none", "none/args.json: no flags of a run can be read from it"),
        ("--keep-ratoi 0.5", "unrecognized arguments: --keep-ratoi"),
        ("--keep 0.5", "unrecognized arguments: --keep"),  # no abbreviations: a new flag would change what they mean
        ("--algo dapo --overlong-cache 300", "--overlong-cache 300: must not exceed --max-length"),
        ("--max-gap 0", "--max-gap 0.0: must be in (0, inf)"),
        ("--prompts x", "argument --prompts: invalid int value: 'x'"),
    ],
)
def test_bad_flags(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(parse, flags.split(), capsys)


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(args.importlib.util, "find_spec", lambda name: None)
    assert "--tracker wandb: pip install wandb first" in refused(parse, ["--tracker", "wandb"], capsys)


@pytest.mark.parametrize("parser", [parse, parse_tts])
def test_a_model_without_a_tokenizer(
    parser: Callable[[list[str]], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes one of a single token then, in silence."""
    (tmp_path / "config.json").write_text("{}")
    assert "lacks config.json or a tokenizer; save both there" in refused(parser, ["--model", str(tmp_path)], capsys)


@pytest.mark.parametrize(("parser", "spec"), NUMBERS, ids=lambda value: getattr(value, "name", ""))
def test_no_number_is_infinite_or_none(
    parser: Callable[[list[str]], object], spec: dataclasses.Field, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--lr inf` trained for a step."""
    for value in ("nan", "inf", "-inf", "1e999"):
        assert option(spec.name) in refused(parser, [f"{option(spec.name)}={value}"], capsys)


@pytest.mark.parametrize(
    ("interval", "inside", "beyond"),
    [
        ("(0, 1]", [math.ulp(0), 0.5, 1], [0, -0.5, 1.5, math.inf, math.nan]),
        ("[0, 1)", [0, 0.5], [-0.5, 1, math.nan]),
        ("[1, inf)", [1, 10**400, 1e308], [0, math.inf, math.nan]),
        ("[1, inf]", [1, math.inf], [-math.inf, math.nan]),
        ("(-inf, 0)", [-1e308], [-math.inf, 0]),
        ("[0, group_size]", [0, 16], [17]),
        ("[1, group_size)", [15], [0, 16]),
    ],
)
def test_intervals(interval: str, inside: list[float], beyond: list[float]) -> None:
    """A round bracket excludes its end, a square one includes it; an end may be another flag."""
    [spec] = [spec for spec in dataclasses.fields(Args) if spec.name == "min_survivors"]
    bounded = dataclasses.field(metadata=dict(spec.metadata) | {"allowed": interval})
    bounded.name = spec.name
    for value in [*inside, *beyond]:
        assert args.outside(Args(min_survivors=value), bounded) == (value in beyond or value != value), value


def test_defaults_are_within_their_own_bounds() -> None:
    for settings, _ in PROGRAMS:
        found = settings()
        assert not [spec.name for spec in dataclasses.fields(settings) if args.outside(found, spec)]
    assert len(dataclasses.fields(Args)) <= 65 and len(dataclasses.fields(TtsArgs)) <= 20


@pytest.mark.parametrize(("settings", "parser"), PROGRAMS)
def test_help_tells_defaults_and_bounds(
    settings: type, parser: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parser(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "in (0, 1]; default 0.5" in text
    assert all(f" {option(spec.name)}" in text for spec in dataclasses.fields(settings))


def test_bad_flags_fail_before_anything_heavy_is_imported() -> None:
    code = "import sys; from support import args\ntry: args.parse(['--group-size', '1'])\nexcept SystemExit: "
    code += "assert not {'torch', 'vllm', 'datasets', 'transformers'} & set(sys.modules); print('light')"
    light = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert light.stdout == "light\n"
    run = subprocess.run([sys.executable, "arrol.py", "--group-size", "1"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("arrol.py: error: --group-size 1") and not run.stdout


def test_defaults_are_the_papers_and_the_embedded_models() -> None:
    paper = parse(["--model", "Qwen/Qwen3-1.7B-Base", "--tilt", "printed"])
    assert (paper.keep_ratio, paper.positive_target, paper.balance, paper.bins) == (0.5, 0.5, 0.5, 128)
    assert (paper.detect_length, paper.group_size, paper.lr, paper.max_length) == (512, 16, 1e-6, 8192)
    assert (paper.cold_start, paper.clip_low) == (20, 0.2)
    assert parse([]).balance == 2.0 and parse(["--tilt", "printed", "--balance", "1"]).balance == 1.0
    embedded = parse([])
    assert embedded.model == str(TINY) and all(getattr(embedded, name) == value for name, value in EMBEDDED.items())
    assert (embedded.instruction, embedded.weight_decay, embedded.steps) == ("", 0.0, 24)
    assert parse(["--steps", "3"]).steps == 3 and parse(["--steps=3", "--no-thinking"]).steps == 3


def test_every_flag_reaches_its_field() -> None:
    """verl#4957: a flag that exists and is not passed on."""
    for spec in dataclasses.fields(Args):
        if spec.name in ("resume", "model", "tracker") or spec.type == "bool":
            continue
        allowed = spec.metadata["allowed"]
        if isinstance(allowed, tuple):
            value: object = allowed[-1] if spec.name != "algo" else "grpo"
        else:
            whole = EMBEDDED.get(spec.name, spec.default)
            value = whole + 1 if spec.type == "int" else {"str": "x", "tuple[str, ...]": ["x", "y"]}.get(spec.type, 0.5)
        words = value if isinstance(value, list) else [str(value)]
        assert getattr(parse([option(spec.name), *words]), spec.name) == value, spec.name


# ------------------------------------------------------------------ the flags of a run that is gone on with


def run_folder(folder: Path, *flags: str, **changes: object) -> Path:
    """A run's folder, with changes to its args.json."""
    flags = dataclasses.asdict(parse([*flags, "--output", str(folder)]))
    (folder / "args.json").write_text(json.dumps(flags | changes))
    return folder


def test_resume_takes_the_runs_own_flags_and_those_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, "--steps", "3", "--lr", "0.5", "--eval-data", "sums")
    again = parse(["--resume", str(tmp_path), "--steps", "6"])
    assert (again.steps, again.lr, again.output, again.model) == (6, 0.5, str(tmp_path), str(TINY))
    assert again.eval_data == ["sums"]
    # a run is never overwritten, nor gone on with as another one
    assert "run" in refused(parse, ["--output", str(tmp_path)], capsys)
    for flags in ("--prune none", "--head-width 8", "--head-inputs state+logprob"):
        assert "begin another" in refused(parse, ["--resume", str(tmp_path), *flags.split()], capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0.1}, "--learning-rate: no such flag, or one that is gone; delete it there"),
        ({"beta1": 0.9, "head_passes": 8}, "--beta1, --head-passes: no such flag, or one that is gone"),
        ({"lr": "0.1"}, "--lr 0.1: it is of the wrong type"),
        ({"lr": None}, "--lr None: it is of the wrong type"),
        ({"steps": 2.5}, "--steps 2.5: it is of the wrong type"),
        ({"steps": True}, "--steps True: it is of the wrong type"),
        ({"max_length": "long"}, "--max-length long: it is of the wrong type"),
        ({"model": 5}, "--model 5: it is of the wrong type"),
        ({"thinking": "yes"}, "--thinking yes: it is of the wrong type"),
        ({"eval_data": "sums"}, "--eval-data sums: it is of the wrong type"),
        ({"tis_cap": "off"}, "--tis-cap off: it is of the wrong type"),
    ],
)
def test_a_flag_that_a_run_cannot_have(
    changes: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, of both programs, that names the file and the flag."""
    run_folder(tmp_path, **changes)
    for parser, flags in ((parse, ["--resume", str(tmp_path)]), (parse_tts, ["--model", checkpoint(tmp_path)])):
        message = refused(parser, flags, capsys)
        assert f"{tmp_path / 'args.json'}: {words}" in message


@pytest.mark.parametrize(("name", "value"), [("max_length", math.inf), ("temperature", math.nan), ("max_num_seqs", 0)])
def test_a_runs_flags_are_held_to_their_bounds(
    name: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, **{name: value})
    for parser, flags in ((parse, ["--resume", str(tmp_path)]), (parse_tts, ["--model", checkpoint(tmp_path)])):
        assert option(name) in refused(parser, flags, capsys)


@pytest.mark.parametrize("text", ["", '{"steps": 4', "[]", "[1, 2]", "null", "3", '"steps"', "\udcff"])
def test_a_file_that_holds_no_flags(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off by a full disk, or another program's."""
    (tmp_path / "args.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for parser, flags in ((parse, ["--resume", str(tmp_path)]), (parse_tts, ["--model", checkpoint(tmp_path)])):
        assert f"{tmp_path / 'args.json'}: no flags of a run" in refused(parser, flags, capsys)


def checkpoint(run: Path) -> str:
    """A checkpoint's folder, as far as flags go."""
    model = run / "checkpoint-2" / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    return str(model.parent)


def test_a_checkpoint_is_scored_with_the_settings_of_its_run(tmp_path: Path) -> None:
    run_folder(tmp_path, "--max-length", "300", "--detect-length", "7", "--seed", "5", "--temperature", "0.5")
    folder = checkpoint(tmp_path)
    found, run = parse_tts(["--model", folder, "--n", "8"]), parse(["--resume", str(tmp_path)])
    assert found.model == f"{folder}/model" and found.head == "" and (found.n, found.seed) == (8, 0)
    assert all(getattr(found, name) == getattr(run, name) for name in FROM_RUN) and found.detect_length == 7
    (Path(folder) / "quality_head.safetensors").write_bytes(b"")
    assert parse_tts(["--model", folder]).head == f"{folder}/quality_head.safetensors"
    assert parse_tts(["--model", folder, "--head", "", "--max-length", "64", "--max-prompt", "9"]).head == ""
    saved = json.loads((tmp_path / "args.json").read_text())
    (tmp_path / "args.json").write_text(json.dumps(saved | {"model": "./elsewhere"}))
    assert parse_tts(["--model", folder]).max_length == 300
    (tmp_path / "args.json").unlink()
    assert parse_tts(["--model", folder]).max_length == 8192
