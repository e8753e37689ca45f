"""bench/gpu.py on a CPU: all that a GPU will run is run here once, with a small model, and what is
wrong there will have a name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import gpu
from support.distributed import start_process_group
from support.memory import first_misfit

ROOT = Path(__file__).resolve().parent.parent
# Written to a module of its own, which starts faster than this one.
ROW = """
import json, os, signal, time

def measure(suite, row, lab, file):
    with open(file, "a") as out:
        broken = ["gap max is above 5"] if row == "broken" else []
        out.write(json.dumps({"name": "first of two", "broken": broken}) + "\\n")
    if row == "hangs":
        time.sleep(100)
    if row == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def check(results: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run it as on a GPU; returns the process and the lines of gpu.jsonl."""
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--results", str(results), *arguments]
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in ranks}
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=500)
    lines = (results / "gpu.jsonl").read_text("utf-8").splitlines() if (results / "gpu.jsonl").is_file() else []
    return done, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gpu.Lab]:
    start_process_group()
    yield gpu.Lab(device=torch.device("cpu"), scratch=tmp_path_factory.mktemp("scratch"), **gpu.SMALL)
    dist.destroy_process_group()


@pytest.mark.parametrize("row", gpu.ROWS["trainer"])
def test_rows_of_the_trainer(row: str, lab: gpu.Lab) -> None:
    """Where both sides compute in float32, they agree."""
    measures = gpu.ROWS["trainer"][row][1](lab)
    assert measures and all(math.isfinite(value) for value in measures.values())
    exact = {"gap max": 0.0, "cosine of the steps": 1.0, "score off by": 0.0, "tensors not restored": 0}
    for name in exact.keys() & measures.keys():
        assert measures[name] == pytest.approx(exact[name], abs=1e-3)
    assert measures.get("update tokens/s", 1.0) > 0


def test_the_model_is_as_large_as_qwen3_and_fits() -> None:
    """Sizes of a GPU, on the meta device: as many parameters as are published, and nothing that is refused."""
    lab = gpu.Lab(device=torch.device("meta"), **gpu.QWEN)
    counted = gpu.Shape(gpu.make_model(lab).config)
    assert counted.parameters == 1_720_574_976
    trainer = gpu.Args(token_budget=lab.budget, max_length=lab.longest)
    engine = gpu.Args(token_budget=lab.budget, max_length=64 + lab.response, gpu_memory_utilization=0.45)
    for args in (trainer, engine):
        assert first_misfit(counted, args, 1, int(79.2 * 2**30)) is None


def test_a_difference_shows(lab: gpu.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are off, a checkpoint that restores nothing, another head: each breaks its bound."""
    make_policy = gpu.shard

    def off(policy: gpu.Policy, *arguments: object) -> gpu.Policy:
        with torch.no_grad():
            policy.model.model.norm.weight.mul_(1.5)
        return make_policy(policy, *arguments)

    monkeypatch.setattr(gpu, "shard", off)
    assert gpu.bfloat16(lab)["gap max"] > 0.01
    assert gpu.float32(lab)["cosine of the steps"] < gpu.AT_LEAST["cosine of the steps"]
    monkeypatch.setattr(gpu.checkpoint, "load", lambda folder, learner: {})
    assert gpu.resume(lab)["tensors not restored"] > 10
    monkeypatch.setattr(gpu, "token_confidence", lambda logits: logits.float().logsumexp(-1))
    assert gpu.head(lab)["confidence off by"] > gpu.AT_MOST["confidence off by"]


def test_the_trainer_needs_torch_and_transformers_alone(tmp_path: Path) -> None:
    """On a bare machine vLLM, datasets and math-verify are not there; the engine's rows say so."""
    absent = ["vllm", "datasets", "math_verify", "pandas", "pyarrow", "matplotlib", "hypothesis", "pytest"]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    done, lines = check(tmp_path, "--only", "resume", "--only", "engine", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "engine, default: vLLM is not installed" in done.stdout
    assert [(line["row"], line["broken"]) for line in lines] == [("resume", [])]


def test_rows_of_an_engine(tmp_path: Path) -> None:
    done, lines = check(tmp_path, "--only", "default")
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["name"]: line["measures"] for line in lines}
    steps = ["step, cold", "step, κ = 1", "step, κ = 0.5", "step, κ = 0.25"]
    assert list(found) == ["sampling", "sleep", *steps, "gap"]
    kept = [found[step]["keep_ratio"] for step in steps]
    assert kept[:2] == [1.0, 1.0] and 1 > kept[2] > kept[3] > 0
    assert all(found[step]["time_update"] > 0 and found[step]["time_generate"] > 0 for step in steps)
    assert 0 < found["gap"]["gap mean"] <= found["gap"]["gap 99.9%"] <= found["gap"]["gap max"] < 1e-3
    # Nothing of a GPU is made up.
    assert found["sleep"]["GB taken in night 1"] == 0


def test_what_is_out_of_bounds_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is out of every bound."""
    measures = {"gap mean": 0.2, "gap max": math.nan, "update MFU": 0.1, "log-probs MFU": 0.5, "wake s": 1e9}
    monkeypatch.setitem(gpu.ROWS, "engine", {"fake": (1, lambda lab: iter([("first", measures), ("second", {})]))})
    monkeypatch.setattr(gpu.os, "_exit", lambda status: None)
    lab = gpu.Lab(device=torch.device("cpu"))
    gpu.measure("engine", "fake", lab, tmp_path / "gpu.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text("utf-8").splitlines()]
    assert [(line["name"], line["broken"]) for line in lines] == [
        ("first", ["update MFU is below 0.25", "gap mean is above 0.1", "gap max is above 5"]),
        ("second", []),
    ]
    assert "torch" in lines[0]["machine"]["versions"]


def test_a_row_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is ended when its time is up; what it had measured stays."""
    (tmp_path / "fake_row.py").write_text(ROW)
    monkeypatch.syspath_prepend(tmp_path)
    import fake_row

    file = tmp_path / "gpu.jsonl"
    file.touch()
    rows = {row: (6 if row == "hangs" else 60, None) for row in ("fine", "broken", "hangs", "crashes")}
    monkeypatch.setattr(gpu, "measure", fake_row.measure)
    monkeypatch.setitem(gpu.ROWS, "trainer", rows)
    assert {row: gpu.supervise("trainer", row, None, file) for row in rows} == {
        "fine": [],
        "broken": ["trainer, first of two: gap max is above 5"],
        "hangs": ["trainer, hangs: not done after 6 s"],
        "crashes": ["trainer, crashes: ended with status -11"],
    }
    assert len(file.read_text().splitlines()) == 4


def test_a_fault_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows, where none is named."""
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--results", str(tmp_path)])
    for faults, status in ({}, None), ({"head": ["head: not done after 15 s"]}, "head: not done after 15 s"):
        asked = []
        monkeypatch.setattr(gpu, "supervise", lambda _, row, *rest, f=faults, a=asked: a.append(row) or f.get(row, []))
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == status
        assert asked == [*gpu.ROWS["trainer"], *gpu.ROWS["engine"]]
