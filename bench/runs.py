"""The training runs that the tables share: trained once, kept in bench/runs, and read by every table that needs them.

    plan, _ = read_flags(command(__doc__))
    runs = train(plan, ["GRPO", "GRPO + ARRoL"])        name of the method -> one run for each seed
    python bench/runs.py                                all of them, seed by seed, so that those of a seed are neighbours in time

A run is a method, a seed and a size. All share code, data, evaluation and seeds; a method is a few flags of arrol.py. Seeds come in the
outer loop, so that a machine that gets slower does so for all methods. A run that ended is never trained again, nor is one that crashed:
tables show it as crashed until its folder is removed. One that was interrupted goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tqdm import tqdm

from bench.tables import machine
from support.args import TINY, Args, fail, parse
from support.report import Metrics, load_metrics

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "GRPO": "--algo grpo --prune none",
    "GRPO + ARRoL": "--algo grpo --prune arrol",
    "DAPO": "--algo dapo --prune none",
    "DAPO + ARRoL": "--algo dapo --prune arrol",
    "GRPO + random": "--algo grpo --prune random",
    "GRPO, scored": "--algo grpo --prune arrol --keep-ratio 1 --eval-every 0",  # to replay decisions on
    "GRPO + ARRoL, κ = 0.25": "--algo grpo --prune arrol --keep-ratio 0.25",
    "GRPO + ARRoL, κ = 0.75": "--algo grpo --prune arrol --keep-ratio 0.75",
}
# Twice as many rollouts as slots, as arrol.py has with a real model: pruned ones make room for others. With all of them in flight at once a step
# of vLLM on a CPU takes as long with half of them. On 2 idle cores 24 runs of 2 to 4 minutes, with four evaluations each; in all 69.
EMBEDDED = "--steps 15 --prompts 32 --minibatches 4 --cold-start 3 --eval-problems 100 --eval-every 5 --max-num-seqs 256"
EVALUATION = "--baseline-steps 0 --eval-n 16"
RECORD = "run.json"


@dataclass(frozen=True)
class Plan:
    """What a command was asked for: seeds, flags of arrol.py that all methods get, and where runs and results are."""

    seeds: list[int]
    flags: list[str]
    runs: Path
    results: Path

    @property
    def embedded(self) -> bool:
        """Whether the embedded model is trained."""
        return parse(self.flags).model == str(TINY)

    def run_flags(self, method: str, seed: int) -> list[str]:
        return [*self.flags, *METHODS[method].split(), "--log-rollouts", "all", "--seed", str(seed)]

    def folder(self, method: str, seed: int) -> tuple[Path, Args]:
        """Where a run lives, and its flags parsed. The name holds a digest of all flags: other flags, another folder."""
        args = parse(self.run_flags(method, seed))
        kept = dataclasses.asdict(args) | {"output": ""} | ({"model": "tiny"} if args.model == str(TINY) else {})
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-")
        return self.runs / f"{name}-seed{seed}-{digest}", args


@dataclass(frozen=True)
class Run:
    """A run that ended, well or not: the lines of its metrics.jsonl (one per step, and step 0), its args.json, its record."""

    method: str
    seed: int
    folder: Path
    args: dict
    lines: list[Metrics]
    record: dict

    @property
    def crashed(self) -> bool:
        return self.record["crash"] is not None

    @property
    def seconds(self) -> float:
        """Wall-clock time of training, without evaluation and checkpoints."""
        return self.lines[-1]["wall_clock"]

    @property
    def steps(self) -> list[Metrics]:
        """The lines of all training steps."""
        return [line for line in self.lines if line["step"] > 0]

    @property
    def after_cold_start(self) -> list[Metrics]:
        """The steps in which a method that prunes does: of the others too, so that they compare."""
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
    """Of an evaluation: "avg", "pass@16" and "greedy", each a mean over the sets that have it. Nothing if the line has none."""
    found: dict[str, list[float]] = {}
    for key, value in line.items():
        if key.startswith("eval/"):
            kind = key.rsplit("/", 1)[1]
            found.setdefault("avg" if kind.startswith("avg@") else kind, []).append(value)
    return {kind: sum(values) / len(values) for kind, values in found.items()}


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at`, on the straight line between the points before and after. Raises ValueError outside of them.

    >>> interpolate([(0.0, 0.5), (100.0, 0.7)], 25.0)
    0.55
    """
    times = [when for when, _ in points]
    if not times or not times[0] <= at <= times[-1]:
        raise ValueError(f"{at} s is not within the evaluations, which are at {times} s")
    right = bisect_left(times, at)
    if times[right] == at:
        return points[right][1]
    (t0, v0), (t1, v1) = points[right - 1], points[right]
    return v0 + (v1 - v0) * (at - t0) / (t1 - t0)


# ------------------------------------------------------------------ training


def command(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that all commands have."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags go to arrol.py and hold for every method: --model for a real one (then arrol.py's own sizes), --steps …",
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "bench" / "runs", help="folder of the training runs")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the tables")
    return parser


def read_flags(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The plan, and the command's own flags."""
    own, rest = parser.parse_known_args(argv)
    given = {word.split("=")[0] for word in rest if word.startswith("--")}
    words = (EVALUATION + ("" if "--model" in given else f" {EMBEDDED}")).split()
    flags = [word for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in given for word in pair]
    plan = Plan(own.seeds, [*flags, *rest], own.runs, own.results)
    _, args = plan.folder("GRPO", own.seeds[0])
    if args.steps <= args.cold_start:
        fail(f"--steps {args.steps}: must exceed --cold-start {args.cold_start}, after which pruning begins")
    return plan, own


def train(plan: Plan, methods: Sequence[str]) -> dict[str, list[Run]]:
    """The runs of these methods, method by method; those that are missing are trained first, seed by seed."""
    todo = [
        (method, seed, *plan.folder(method, seed)) for seed in plan.seeds for method in methods
    ]  # a bad flag ends it here
    found: dict[str, list[Run]] = {method: [] for method in methods}
    for number, (method, seed, folder, args) in enumerate(todo, 1):
        title, done = f"{number}/{len(todo)} {method}, seed {seed}", (folder / RECORD).is_file()
        if not done:
            _train_one(folder, args.steps, plan.run_flags(method, seed), method, seed, title)
        run = load(folder)
        what = f"crashed, {run.record['crash']['error']}" if run.crashed else f"{run.seconds:.0f} s of training"
        print(f"{title}: {what}" + (f" (kept in {folder}; remove it to train again)" if done else ""), flush=True)
        found[method].append(run)
    return found


def load(folder: Path) -> Run:
    """A run that ended."""
    record = json.loads((folder / RECORD).read_text("utf-8"))
    saved = folder / "args.json"
    args = json.loads(saved.read_text("utf-8")) if saved.is_file() else {}  # it may have crashed before that
    return Run(record["method"], record["seed"], folder, args, load_metrics(folder), record)


def _train_one(folder: Path, steps: int, flags: list[str], method: str, seed: int, title: str) -> None:
    """Train, and leave a record of how it ended."""
    if any(folder.glob("checkpoint-*")):
        flags = ["--resume", str(folder)]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = [*flags, "--output", str(folder)]
    begun, code = time.monotonic(), code_version()
    status = run_program([str(ROOT / "arrol.py"), *flags], folder, title, steps)
    lines = load_metrics(folder)
    step = int(lines[-1]["step"]) if lines else 0
    crash = None
    if status or step < steps:
        crash = {"status": status, "step": step, "error": last_words(folder)}
    record = {
        "method": method,
        "seed": seed,
        "crash": crash,
        "seconds": time.monotonic() - begun,
        "machine": machine(),
        "code": code,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False), "utf-8")


def run_program(program: list[str], folder: Path, title: str, steps: int = 0) -> int:
    """Run a Python program, its output in output.log of `folder`, a bar over the steps of its metrics.jsonl; returns its status.

    Ends this program if that one was stopped by Ctrl-C or a notice, or refused a flag or a file: neither is a crash.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the program would outlive this one
    with (folder / "output.log").open("w") as output:
        process = subprocess.Popen([sys.executable, *program], stdout=output, stderr=subprocess.STDOUT)
        try:
            with tqdm(
                total=steps or None, desc=title, unit="step", dynamic_ncols=True, leave=False, disable=None
            ) as bar:
                while process.poll() is None:
                    try:
                        process.wait(timeout=1)
                    except subprocess.TimeoutExpired:
                        lines = load_metrics(folder) if steps else []
                        bar.update(int(lines[-1]["step"]) - bar.n if lines else 0)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            sys.exit(f"{title}: interrupted; the same command goes on")
    if process.returncode in (130, -signal.SIGINT, -signal.SIGTERM):
        sys.exit(f"{title}: interrupted; the same command goes on")
    if process.returncode == 2:
        sys.exit(f"{title}: {last_words(folder)}")
    return process.returncode


def last_words(folder: Path) -> str:
    """The last two lines of output.log, progress bars aside, without the paths of this machine."""
    text = (folder / "output.log").read_text("utf-8", "replace")
    lines = [line.rsplit("\r", 1)[-1].strip() for line in text.split("\n")]
    lines = [line for line in lines if line and "it/s]" not in line and "step/s" not in line]
    return " ".join(lines[-2:])[-1000:].replace(str(folder), folder.name).replace(f"{ROOT}/", "")


def code_version() -> str:
    """The commit of the program, with a + if files of it have changed since; "unknown" outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    if shutil.which("git") is None or not (commit := git("rev-parse", "--short", "HEAD")):
        return "unknown"
    return commit + ("+" if git("status", "--porcelain", "--", "*.py", "tiny", ":!bench", ":!tests") else "")


if __name__ == "__main__":
    train(read_flags(command(__doc__))[0], list(METHODS))
