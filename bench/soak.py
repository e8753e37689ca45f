"""A long run of the embedded model on several ranks: memory, open files and processes must not grow.

    python bench/soak.py --prompts 4 --group-size 8 --cold-start 5       200 steps on 2 ranks, 4 minutes on 2 CPU cores

Reads the memory (`memory_gb` of metrics.jsonl, of the rank that takes most), the open files of every rank and the number of processes,
at step 20 and at the end. Exits with status 1 if memory grew by more than 5%, if there are more open files, or if a process outlives the
run. Flags of arrol.py go too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def family(pid: int) -> list[int]:
    """A process and all that descend from it, whichever thread started them."""
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(member for child in children for member in family(int(child)))]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def reading(launcher: int) -> dict[str, list[float]]:
    """Open files of each rank, but for the two pipes to each of its grading workers, which start when they are first
    needed; and the number of processes in all."""
    members = family(launcher)
    ranks = [pid for pid in members if "arrol.py" in command(pid) and pid != launcher]
    workers = [sum("--grade-worker" in command(child) for child in family(pid)) for pid in ranks]
    return {
        "files": [len(list(Path(f"/proc/{pid}/fd").iterdir())) - 2 * n for pid, n in zip(ranks, workers, strict=True)],
        "processes": [len(members)],
    }


def newest(run: Path) -> dict[str, float]:
    """The last whole line of metrics.jsonl; {"step": -1} if there is none."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1]) if lines else {"step": -1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=20, help="step of the reading that the last one is compared with")
    parser.add_argument("--ranks", type=int, default=2)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary, "run")
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={own.ranks}"]
            + [str(ROOT / "arrol.py"), "--steps", str(own.steps), "--baseline-steps", "0", "--output", str(run)]
            # By the first reading a checkpoint has been written, and all of a small KV cache used: its pages then stay resident.
            + ["--eval-problems", "50", "--checkpoint-every", "10", "--kv-cache-gb", "0.1", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        readings: dict[int, dict[str, list[float]]] = {}
        seen: set[int] = set()
        while launcher.poll() is None:
            time.sleep(0.2)
            metrics = newest(run)
            step = metrics["step"]
            try:
                if step > 0 and step not in readings and (step % 20 == 0 or step == own.steps - 1) and step < own.steps:
                    readings[step] = reading(launcher.pid) | {"MB": [1000 * metrics["memory_gb"]]}
                    seen.update(family(launcher.pid))
                    print(f"step {step:4d}: {readings[step]}", flush=True)
            except (FileNotFoundError, ProcessLookupError):  # a process that ended meanwhile
                continue
        if launcher.returncode:
            sys.exit(f"the run failed:\n{launcher.stderr.read().decode()[-2000:]}")
    time.sleep(2)
    left = [pid for pid in seen if Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/cmdline").read_text()]
    first, last = readings[own.first], readings[max(readings)]
    growth = max(b / a for a, b in zip(first["MB"], last["MB"], strict=True)) - 1
    files = max(b - a for a, b in zip(first["files"], last["files"], strict=True))
    print(
        f"step {own.first} to {max(readings)}: memory {growth:+.1%}, open files {files:+.0f}, left behind: {left or 'no process'}"
    )
    sys.exit(growth > 0.05 or files > 0 or bool(left))


if __name__ == "__main__":
    main()
