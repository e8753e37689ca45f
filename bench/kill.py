"""kill -9 at random moments of a training run, then --resume: does each end with the weights of the undisturbed run?

    python bench/kill.py                    20 kills of a 12-step run of the embedded model, about 20 minutes on 2 CPU cores
    python bench/kill.py --kills 5 --ranks 2

A checkpoint is written after every step, so that kills fall into the writing too. Every run has its own folder; one that was killed
before its first checkpoint starts anew, in another. Exits with status 1 if any weight, or any number in metrics.jsonl that is not a time,
differs. Flags of arrol.py go too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from support.checkpoint import complete

RUN = (
    "--steps 12 --prompts 4 --group-size 8 --cold-start 2 --baseline-steps 0 --eval-problems 0 --checkpoint-every 1 "
    "--keep-checkpoints 2 --max-num-seqs 64 --log-rollouts all"
).split()
TIMES = ("time_", "wall_clock", "memory_")


def start(flags: list[str], ranks: int) -> subprocess.Popen[bytes]:
    """Training in a process group of its own, so that all ranks and workers can be killed at once."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "arrol.py"), *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def first_step(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait until the first training step is done."""
    while process.poll() is None and not any('"step": 1,' in line for line in open_lines(run / "metrics.jsonl")):
        time.sleep(0.1)


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def finish(process: subprocess.Popen[bytes], what: str) -> None:
    errors = process.communicate()[1]
    if process.returncode:
        sys.exit(f"{what} failed with status {process.returncode}:\n{errors.decode()[-2000:]}")


def kill_after(process: subprocess.Popen[bytes], seconds: float) -> None:
    time.sleep(seconds)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it had ended
        pass
    process.communicate()


def differences(expected: Path, found: Path) -> list[str]:
    """What differs between two finished runs: weights bit for bit, and the lines of metrics.jsonl but for times."""
    first, second = (complete(run)[-1] for run in (expected, found))
    problems = [] if first.name == second.name else [f"newest checkpoint {second.name}, not {first.name}"]
    for name in ("model/model.safetensors", "quality_head.safetensors"):
        one, other = load_file(first / name), load_file(second / name)
        problems += [f"{name}: {key}" for key in one if one[key].tobytes() != other[key].tobytes()]
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if not key.startswith(TIMES)}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (expected, found)
    ]
    if lines[0] != lines[1]:
        problems.append("metrics.jsonl")
    if (expected / "rollouts.jsonl").read_text() != (found / "rollouts.jsonl").read_text():
        problems.append("rollouts.jsonl")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    own, flags = parser.parse_known_args()
    moments, bad = random.Random(own.seed), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, begun = Path(temporary), time.monotonic()
        process = start([*RUN, *flags, "--output", str(folder / "undisturbed")], own.ranks)
        first_step(process, folder / "undisturbed")
        early = time.monotonic() - begun
        finish(process, "the undisturbed run")
        duration = time.monotonic() - begun
        print(f"undisturbed: the first step after {early:.0f} s, the end after {duration:.0f} s", flush=True)
        for kill in range(own.kills):
            run, after = folder / f"killed-{kill}", moments.uniform(early, duration)
            kill_after(start([*RUN, *flags, "--output", str(run)], own.ranks), after)
            kept, half = complete(run), [path.name for path in run.glob(".writing-*")]
            again = ["--resume", str(run)] if kept else [*RUN, *flags, "--output", str(run) + "-anew"]
            finish(start(again, own.ranks), f"the run after kill {kill + 1}")
            problems = differences(folder / "undisturbed", run if kept else Path(str(run) + "-anew"))
            bad += bool(problems)
            print(
                f"kill {kill + 1}/{own.kills} after {after:5.1f} s: {kept[-1].name if kept else 'no checkpoint yet':20s} "
                + (f"{half[0]} was half-written; " if half else "")
                + ("same weights" if not problems else f"DIFFERENT: {', '.join(problems[:4])}"),
                flush=True,
            )
    print(f"{own.kills - bad} of {own.kills} runs ended with the weights of the undisturbed one")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
