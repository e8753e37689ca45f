"""What a training run survives. Exits with status 1 where it does not; flags of arrol.py go too.

    python -m tests.stress kill
        kill -9 at 20 random moments of a 12-step run, then --resume: does each end with the
        weights, metrics and rollouts of the undisturbed run? 20 minutes on 2 CPU cores
    python -m tests.stress soak --prompts 4 --group-size 8 --cold-start 5
        200 steps on 2 ranks: does memory grow by more than 5% after step 20, are there more open
        files, does a process outlive the run? 4 minutes

A killed run writes a checkpoint after every step, so that kills fall into the writing too. One that
was killed before its first checkpoint starts anew, in another folder.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

from bench.runs import ROOT
from support.checkpoint import complete
from support.show import load_metrics

KILLED = (
    "--steps 12 --prompts 4 --group-size 8 --cold-start 2 --baseline-steps 0 --eval-problems 0 --checkpoint-every 1 "
    "--keep-checkpoints 2 --max-num-seqs 64 --log-rollouts all"
)
# By the first reading a checkpoint has been written, and all pages of a small KV cache used.
SOAKED = "--steps 200 --baseline-steps 0 --eval-problems 50 --checkpoint-every 10 --kv-cache-gb 0.1"
TIMES = ("time_", "wall_clock", "memory_")


def start(flags: list[str], ranks: int) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "arrol.py"), *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    errors = process.communicate()[1]
    if process.returncode:
        sys.exit(f"{' '.join(process.args)} failed with status {process.returncode}:\n{errors.decode()[-2000:]}")


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first, whichever thread started them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(member for child in children for member in family(int(child)))]


# ------------------------------------------------------------------ kill


def differences(expected: Path, found: Path) -> list[str]:
    """Which files of two finished runs differ; of metrics.jsonl, times and memory do not count."""
    newest, runs = [complete(run)[-1] for run in (expected, found)], (expected, found)
    same = {"checkpoint": newest[0].name == newest[1].name}
    for name in ("model/model.safetensors", "quality_head.safetensors"):
        # Tensors bit for bit: safetensors writes metadata in any order.
        bits = [{key: values.tobytes() for key, values in load_file(path / name).items()} for path in newest]
        same[name] = bits[0] == bits[1]
    same["rollouts.jsonl"] = filecmp.cmp(*(run / "rollouts.jsonl" for run in runs), shallow=False)
    lines = [
        [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in load_metrics(run)]
        for run in runs
    ]
    same["metrics.jsonl"] = lines[0] == lines[1]
    return [name for name, alike in same.items() if not alike]


def kill(flags: list[str], ranks: int, folder: Path, kills: int) -> bool:
    """Whether all killed and resumed runs end as the undisturbed one."""
    undisturbed, moments, bad = folder / "undisturbed", random.Random(0), 0
    begun, process = time.monotonic(), start([*flags, "--output", str(undisturbed)], ranks)
    while process.poll() is None and not load_metrics(undisturbed):
        time.sleep(0.1)
    early = time.monotonic() - begun
    finish(process)
    duration = time.monotonic() - begun
    print(f"undisturbed: the first step after {early:.0f} s, the end after {duration:.0f} s", flush=True)
    for number in range(1, kills + 1):
        run, after = folder / f"killed-{number}", moments.uniform(early, duration)
        process = start([*flags, "--output", str(run)], ranks)
        time.sleep(after)
        for pid in family(process.pid) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        kept, half = complete(run), [path.name for path in run.glob(".writing-*")]
        end = run if kept else folder / f"{run.name}-anew"
        finish(start(["--resume", str(run)] if kept else [*flags, "--output", str(end)], ranks))
        problems = differences(undisturbed, end)
        bad += bool(problems)
        print(
            f"kill {number}/{kills} after {after:5.1f} s: {kept[-1].name if kept else 'no checkpoint yet':20s} "
            + (f"{half[0]} was half-written; " if half else "")
            + (f"DIFFERENT: {', '.join(problems)}" if problems else "same"),
            flush=True,
        )
    return not bad


# ------------------------------------------------------------------ soak


def reading(launcher: int) -> dict[str, float]:
    """Processes; open files of all ranks, but for two pipes to each grading worker."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in family(launcher)}
    ranks = [pid for pid, words in commands.items() if "arrol.py" in words and pid != launcher]
    workers = sum("--grade-worker" in words for words in commands.values())
    files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ranks)
    return {"files": files - 2 * workers, "processes": len(commands)}


def soak(flags: list[str], ranks: int, folder: Path) -> bool:
    """Whether nothing grows after 20 steps, and nothing outlives the run."""
    launcher = start([*flags, "--output", str(folder)], ranks)
    readings: dict[int, dict[str, float]] = {}
    seen: set[int] = set()
    while launcher.poll() is None:
        time.sleep(0.2)
        line = (load_metrics(folder) or [{"step": 0}])[-1]
        # Twenty steps to a block, which ends a step early: after the last step, processes end.
        block = int(line["step"] + 1) // 20
        if block and block not in readings:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found = reading(launcher.pid) | {"memory_gb": line["memory_gb"]}
                seen.update(family(launcher.pid))
                readings[block] = found
                print(f"step {line['step']:4.0f}: {found}", flush=True)
    finish(launcher)
    time.sleep(2)
    left = [pid for pid in seen if (path := Path(f"/proc/{pid}/cmdline")).exists() and path.read_text()]
    first, last = readings[1], readings[max(readings)]
    growth, files = last["memory_gb"] / first["memory_gb"] - 1, last["files"] - first["files"]
    print(f"from first to last: memory {growth:+.1%}, open files {files:+.0f}, left: {left or 'no process'}")
    return growth <= 0.05 and files <= 0 and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "soak"])
    parser.add_argument("--ranks", type=int, help="default: 1 for kill, 2 for soak")
    parser.add_argument("--kills", type=int, default=20)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        if own.what == "kill":
            good = kill([*KILLED.split(), *flags], own.ranks or 1, Path(temporary), own.kills)
        else:
            good = soak([*SOAKED.split(), *flags], own.ranks or 2, Path(temporary, "run"))
    sys.exit(not good)


if __name__ == "__main__":
    main()
