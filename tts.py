"""Test-time scaling: sample n answers to each problem, judge them, and let them vote (Sec. 4.4, Table 3, App. A.2).

    python tts.py --model runs/NAME/checkpoint-200 --data aime24 --n 32
    python tts.py --model Qwen/Qwen3-1.7B-Base --head quality_head.safetensors --data math500 --early-stop

Prints avg@n, pass@k, maj@n and a row for each voting rule of `voting.py`, with 95% intervals over problems; leaves the same as
`scores.json`, every candidate in `candidates.jsonl`, and a picture of accuracy against the number of candidates. With
`--early-stop`, what it costs and saves to stop candidates while they are sampled: by the quality head at L_detect, and by confidence
as DeepConf does online. Every candidate has a seed of its own, so that all plans are about the same candidates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.args import EMBEDDED, TINY, add_flags, fail, flag
from support.data import INSTRUCTION


@dataclass
class TtsArgs:
    """Everything that the scores depend on; saved with them."""

    model: str = flag("", "hub id, folder of a model, or a training run's checkpoint-N; none: the embedded model")
    head: str = flag("", "quality_head.safetensors (default: the one in the checkpoint, if there is one)")
    data: str = flag(
        "sums",
        "math500, minerva, olympiadbench, amc23, aime24, aime25 (from the hub), NAME=FILE for a local copy of one, a .jsonl, "
        ".json or .parquet file, or sums",
    )
    n: int = flag(32, "candidates per problem")
    temperature: float = flag(1.0, "sampling temperature")
    top_p: float = flag(1.0, "sampling nucleus")
    max_prompt: int = flag(1024, "longer prompts are not sampled and count as wrong, in tokens")
    max_length: int = flag(8192, "prompt and response together, in tokens")
    instruction: str = flag(INSTRUCTION, "appended to every problem; '' for none")
    thinking: bool = flag(False, "turn on the thinking mode of chat templates that have one")
    seed: int = flag(0, "fixes samples, intervals and subsets")
    window: int = flag(
        0, "tokens of DeepConf's sliding window; default: 2048, or a 32nd of --max-length if that is below 8192"
    )
    share: float = flag(0.1, "share of the candidates that DeepConf's filter keeps (its η)")
    early_stop: bool = flag(False, "sample again with candidates that are stopped early, by the head and by confidence")
    detect_length: int = flag(512, "early stop: response tokens at which the head scores a candidate (L_detect)")
    keep_ratio: float = flag(0.5, "early stop: share of a problem's scored candidates that go on (κ)")
    warmup: int = flag(16, "early stop: complete traces of a problem that set DeepConf's floor")
    trained_on: str = flag("", "training set (as --dataset of arrol.py): count the problems that are in it")
    output: str = flag("", "folder for the results (default: runs/ and the time)")
    max_num_seqs: int = flag(512, "candidates that vLLM decodes at once")
    gpu_memory_utilization: float = flag(0.9, "share of the GPU that vLLM may use")
    kv_cache_gb: float = flag(4.0, "vLLM's KV cache on a CPU, in GiB")
    grader_workers: int = flag(2, "processes that run math-verify")
    verbose: bool = flag(False, "show vLLM's own log lines")


FROM_RUN = (
    *("max_prompt", "max_length", "instruction", "thinking", "temperature", "detect_length"),
    *("max_num_seqs", "kv_cache_gb"),
)


def parse(argv: list[str]) -> TtsArgs:
    """`TtsArgs` from a command line; on bad input prints one sentence and exits with status 2. Creates nothing.

    Of a checkpoint of `arrol.py`, the settings of its run are the defaults.
    """
    parser = argparse.ArgumentParser(
        prog="tts.py", description="Test-time scaling: sample, judge, vote.", allow_abbrev=False
    )
    add_flags(parser, TtsArgs)
    given = vars(parser.parse_args(argv))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fail("it knows one process only; start it without torchrun")
    model = Path(given.get("model") or TINY)
    run = {}
    if (model / "model" / "config.json").is_file():  # a checkpoint of arrol.py
        settings = model.parent / "args.json"
        run = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
        head = model / "quality_head.safetensors"
        given.setdefault("head", str(head) if head.is_file() else "")
        model = model / "model"
    elif model == TINY:
        run = EMBEDDED | {"thinking": False, "temperature": 1.0}
    defaults = {name: run[name] for name in FROM_RUN if name in run}
    args = TtsArgs(**defaults | given | {"model": str(model) if model.exists() else given["model"]})
    args.window = args.window or (2048 if args.max_length >= 8192 else max(1, args.max_length // 32))
    args.output = args.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-tts"
    if problem := first_problem(args):
        fail(problem)
    return args


def first_problem(args: TtsArgs) -> str | None:
    """What is wrong with these flags, in one sentence that names the flag and the remedy; None if nothing is."""
    rules = [
        ("n", args.n >= 1, "must be at least 1"),
        ("seed", 0 <= args.seed < 2**32, "must lie in 0..4294967295"),
        ("temperature", 0 <= args.temperature <= 2, "must lie in [0, 2], as vLLM has it"),
        (
            "temperature",
            args.temperature > 0 or args.n == 1,
            "greedy samples are all alike: use --n 1, or a temperature",
        ),
        ("top_p", 0 < args.top_p <= 1, "must lie in (0, 1]"),
        ("window", args.window >= 1, "must be at least 1"),
        ("share", 0 < args.share <= 1, "must lie in (0, 1]"),
        ("keep_ratio", 0 < args.keep_ratio <= 1, "must lie in (0, 1]"),
        ("detect_length", 1 <= args.detect_length, "must be at least 1"),
        ("n", not args.early_stop or args.n > 1, "--early-stop needs several candidates"),
        (
            "warmup",
            not args.early_stop or 1 <= args.warmup < args.n,
            f"must lie in 1..{args.n - 1}, below --n {args.n}",
        ),
        (
            "detect_length",
            not args.early_stop or args.detect_length < args.max_length,
            f"must be below --max-length {args.max_length}, or nothing is ever stopped there",
        ),
        ("max_length", args.max_prompt < args.max_length, f"must exceed --max-prompt {args.max_prompt}"),
        ("gpu_memory_utilization", 0 < args.gpu_memory_utilization < 1, "must lie in (0, 1)"),
        ("kv_cache_gb", args.kv_cache_gb > 0, "must be above 0"),
        ("max_num_seqs", args.max_num_seqs >= 1, "must be at least 1"),
        ("grader_workers", args.grader_workers >= 1, "must be at least 1"),
        ("head", not args.head or Path(args.head).is_file(), "there is no such file"),
        ("output", not Path(args.output).is_file(), "that is a file; name a folder"),
        (
            "output",
            not Path(args.output, "scores.json").exists(),
            "there are results in it already; name another folder",
        ),
    ]
    for name, fine, rule in rules:
        if not fine:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: {rule}"
    model = Path(args.model)
    if not model.is_dir() and (model.is_absolute() or args.model.startswith(".")):
        return f"--model {args.model}: there is no such folder"
    if model.is_dir() and not (model / "config.json").is_file():
        return f"--model {args.model}: the folder has no config.json; name a model, or a checkpoint-N of arrol.py"
    return None


if __name__ == "__main__":
    ARGS = parse(sys.argv[1:])  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during them leaves no traceback

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see arrol.py
if __name__ == "__main__" and not ARGS.verbose:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from torch import Tensor

import voting
from confidence import Confidence
from engine import Engine, Rollout, Sampling
from quality_head import QualityHead
from support import data
from support.checkpoint import load_head
from support.distributed import start_process_group
from support.early_stop import early_stop
from support.evaluation import Benchmark, contaminated, load_benchmark
from support.grader import Grader
from support.judge import Candidates, Judge, candidates_curve, hits, sample_scores, signal_quality, with_interval
from support.launch import engine_from, load_tokenizer, quiet

# ------------------------------------------------------------------ the program


@dataclass
class Bench:
    """Everything that sampling needs, for the prompts that fit; `too_long` problems are in no plan and count as wrong."""

    args: TtsArgs
    engine: Engine
    judge: Judge
    prompts: dict[int, data.Prompt]
    too_long: int
    sampling: Sampling

    def sample(self, samples: int, first_sample: int = 0, **options: object) -> list[Rollout]:
        return self.engine.generate(
            {group: prompt.token_ids for group, prompt in self.prompts.items()},
            samples,
            self.sampling,
            seed=self.args.seed,
            rollout_seeds=True,
            first_sample=first_sample,
            last_states=True,
            progress=True,
            **{"confidence": Confidence(self.args.window)} | options,
        )

    def candidates(self, rollouts: list[Rollout]) -> list[Candidates]:
        """By problem; those whose prompt was too long come last, without any."""
        return self.judge(rollouts, self.prompts) + [self.judge.nobody()] * self.too_long


def run(args: TtsArgs, benchmark: Benchmark, bench: Bench, table: Tensor | None) -> dict:
    """Sample, judge, vote; writes the folder and returns what scores.json holds."""
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    whole = bench.sample(args.n)
    every = bench.candidates(whole)
    write_candidates(folder / "candidates.jsonl", bench, every)
    scores = sample_scores(every, args.n)
    votes, unsure = hits(every, args.share), sum(candidates.unsure for candidates in every)
    results = {
        "settings": dataclasses.asdict(args),
        "set": dataclasses.asdict(benchmark) | {"problems": len(benchmark.problems)},
        "counts": {
            "prompts too long (they count as wrong)": bench.too_long,
            "candidates": len(whole),
            "tokens": sum(len(rollout.token_ids) for rollout in whole),
            "cut at the length limit": sum(rollout.finish == "length" for rollout in whole),
            **Counter(verdict.kind for candidates in every for verdict in candidates.verdicts),
            **({"scores that are no number (they rank lowest)": unsure} if unsure else {}),
        },
        "samples": {name: with_interval(values, args.seed) for name, values in scores.items()},
        "votes": {name: with_interval(values, args.seed) for name, values in votes.items()},
        "signals": signal_quality(every, votes["majority"]),
    }
    if args.n > 1:
        results["curve"] = {"sizes": voting.sizes(args.n)} | candidates_curve(every, args.n, args.share, args.seed)
    save(results, folder)
    if args.n > 1:
        plot(results, folder / "votes.png")
    if args.early_stop:
        results["early_stop"] = early_stop(bench, whole, every, table)
        save(results, folder)
    return results


def write_candidates(path: Path, bench: Bench, every: list[Candidates]) -> None:
    """A line for each candidate: its answer, class, verdict, signals, and its weight under each rule."""
    with path.open("w", encoding="utf-8") as file:
        for candidates in every:
            weights = voting.ballots(candidates.classes, candidates.signals, bench.args.share)
            for i, (rollout, verdict) in enumerate(zip(candidates.rollouts, candidates.verdicts)):
                problem = bench.prompts[rollout.group].problem
                row = {
                    "problem": problem.id,
                    "candidate": i,
                    "tokens": len(rollout.token_ids),
                    "finish": rollout.finish,
                    "answer": verdict.answer,
                    "gold": problem.answer,
                    "class": candidates.classes[i],
                    "verdict": verdict.kind,
                    "signals": {name: values[i] for name, values in candidates.signals.items()},
                    "weights": {name: values[i] for name, values in weights.items()},
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def save(results: dict, folder: Path) -> None:
    (folder / "scores.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), "utf-8")


def show(results: dict) -> str:
    """The tables."""
    n = results["settings"]["n"]

    def line(name: str, score: dict[str, float]) -> str:
        return f"{name:34s} {score['value']:8.3f}   {score['low']:.3f} - {score['high']:.3f}"

    lines = [f"{'':34s} accuracy   95% interval over problems"]
    lines += [line(name, score) for name, score in results["samples"].items()]
    lines += [line(f"maj@{n}" if name == "majority" else name, score) for name, score in results["votes"].items()]
    lines.append(line(f"oracle (pass@{n})", results["samples"][f"pass@{n}"]))
    counts = results["counts"]
    lines += ["", ", ".join(f"{count:,} {name}" for name, count in counts.items())]
    lines += ["", f"{'AUC of right against wrong':34s}      all   within a problem   within, where majority fails"]
    for name, quality in results["signals"].items():
        cells = [quality[key] for key in ("auc", "auc_within", "auc_within_majority_wrong")]
        lines.append(
            f"{name:34s} "
            + "".join(f"{'-' if v is None else format(v, '.3f'):>{w}s}" for v, w in zip(cells, (8, 19, 30)))
        )
    if rows := results.get("early_stop"):
        lines += ["", f"{'stopped early':18s} {'rule':24s} tokens saved  accuracy  difference (95% interval)"]
        for row in rows:
            change = row["difference"]
            lines.append(
                f"{row['plan']:18s} {row['rule']:24s} {row['saved']:12.1%} {row['accuracy']['value']:9.3f}  "
                f"{change['value']:+.3f} ({change['low']:+.3f} - {change['high']:+.3f})"
            )
    return "\n".join(lines)


def plot(results: dict, path: Path) -> None:
    """PNG: accuracy against the number of candidates, a line for each rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    strong = {"majority": "black", "ARRoL": "tab:red", "ARRoL, probability": "tab:orange", "oracle": "tab:gray"}
    colors = iter(pyplot.get_cmap("Dark2").colors * 2)
    of_rule: dict[str, object] = {}  # a filtered rule has the colour of the whole one
    for name, values in results["curve"].items():
        if name in strong:
            style = dict(color=strong[name], linewidth=2.2, zorder=3)
        elif name != "sizes":
            whole, _, share = name.partition(", top ")
            if whole not in of_rule:
                of_rule[whole] = next(colors)
            style = dict(color=of_rule[whole], linewidth=1.2, linestyle="--" if share else "-")
        else:
            continue
        axes.plot(results["curve"]["sizes"], values, label=name, marker=".", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(results["curve"]["sizes"], labels=results["curve"]["sizes"])
    axes.set(xlabel="candidates per problem", ylabel="accuracy", title=results["set"]["name"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def prepare(args: TtsArgs) -> tuple[Benchmark, QualityHead | None, Tensor | None]:
    """What can fail before an engine is started: the set, the head, and whether the model was trained on the set."""
    try:
        benchmark = load_benchmark(args.data, "--data")
        head, table = (None, None)
        if args.head:
            try:
                head, table, detect_length = load_head(Path(args.head))
            except ValueError as error:
                raise ValueError(f"--head {error}") from error
            if args.early_stop and detect_length not in (None, args.detect_length):
                raise ValueError(f"--detect-length {args.detect_length}: {args.head} was trained at {detect_length}")
        if args.trained_on:
            try:
                seen = contaminated(benchmark.problems, data.load(args.trained_on)[0])
            except ValueError as error:
                raise ValueError(str(error).replace("--dataset", "--trained-on", 1)) from error
            report = f"{benchmark.report}; CONTAMINATED: {len(seen)} of them are in {args.trained_on}"
            benchmark = dataclasses.replace(benchmark, report=report)  # scores.json has it too
        print(benchmark.report)
        if args.early_stop and head is None:
            print("--early-stop: without a --head, by confidence alone")
    except ValueError as error:
        fail(str(error))
    return benchmark, head, table


@contextlib.contextmanager
def workbench(args: TtsArgs, benchmark: Benchmark, head: QualityHead | None) -> Iterator[Bench]:
    """Tokenizer, prompts, grader and engine, taken down at the end."""
    quiet(args.verbose)
    tokenizer, stop_token_ids, config = load_tokenizer(args)
    try:
        prompts, too_long = data.tokenize(
            benchmark.problems, tokenizer, args.max_prompt, args.instruction, args.thinking
        )
    except ValueError as error:
        fail(str(error))
    if not prompts:
        fail(f"--max-prompt {args.max_prompt}: no prompt of {benchmark.name} is that short")
    if head is not None and head.hidden.weight.shape[1] != config.hidden_size:
        fail(
            f"--head {args.head}: it reads states of {head.hidden.weight.shape[1]} numbers, the model's have "
            f"{config.hidden_size}; name the head that was trained with the model",
        )
    device = start_process_group()
    try:
        with Grader(args.grader_workers) as grader, engine_from(args, device) as engine:
            judge = Judge(tokenizer, grader, head, args.window, config.vocab_size)
            sampling = Sampling(args.max_length, tuple(stop_token_ids), args.temperature, args.top_p)
            yield Bench(args, engine, judge, dict(enumerate(prompts)), too_long, sampling)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(args: TtsArgs) -> int:
    """Score a model as `args` say; returns the exit status."""

    def files() -> str:
        return ", ".join(n for n in ("scores.json", "candidates.jsonl", "votes.png") if Path(args.output, n).is_file())

    benchmark, head, table = prepare(args)
    try:
        with workbench(args, benchmark, head) as bench:
            results = run(args, benchmark, bench, table)
    except KeyboardInterrupt:
        print(f"\nstopped; in {args.output}: {files() or 'nothing yet'}", file=sys.stderr)
        return 130
    print(f"\n{show(results)}\n\nresults: {args.output}  ({files()})")
    return 0


if __name__ == "__main__":
    for notice in (signal.SIGINT, signal.SIGTERM):  # a cluster's notice is treated as Ctrl-C
        signal.signal(notice, signal.default_int_handler)
    sys.exit(main(ARGS))
