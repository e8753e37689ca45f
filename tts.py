"""Test-time scaling: sample n answers to each problem, judge them, and let them vote (Sec. 4.4, Table 3, App. A.2).

    python tts.py --model runs/NAME/checkpoint-200 --data aime24 --n 32
    python tts.py --model Qwen/Qwen3-1.7B-Base --head quality_head.safetensors --data math500 --early-stop

Prints avg@n, pass@k, maj@n and a row for each voting rule of `voting.py`, with 95% intervals over problems; leaves the same as
`scores.json`, every candidate in `candidates.jsonl`, and a picture of accuracy against the number of candidates. With
`--early-stop`, what it costs and saves to stop candidates while they are sampled: by the quality head at L_detect.
Every candidate has a seed of its own, so that all plans are about the same candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.args import TtsArgs, fail, parse_tts

if __name__ == "__main__":
    ARGS = parse_tts(sys.argv[1:])  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during them leaves no traceback

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see arrol.py
if __name__ == "__main__" and not ARGS.verbose:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from torch import Tensor

import voting
from engine import Engine, Rollout, Sampling
from quality_head import QualityHead
from support import data
from support.checkpoint import load_head
from support.distributed import start_process_group
from support.early_stop import early_stop
from support.evaluation import Benchmark, contaminated, load_benchmark
from support.grader import Grader
from support.judge import Candidates, Judge, candidates_curve, hits, sample_scores, signal_quality, with_interval
from support.launch import engine_from, grader_workers, load_tokenizer, quiet

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

    def sample(self, samples: int, **options: object) -> list[Rollout]:
        return self.engine.generate(
            {group: prompt.token_ids for group, prompt in self.prompts.items()},
            samples,
            self.sampling,
            seed=self.args.seed,
            rollout_seeds=True,
            last_states=True,
            progress=True,
            **{"confidence": True} | options,
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
            print("--early-stop: without a --head there is nothing to stop by")
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
        with Grader(grader_workers()) as grader, engine_from(args, device) as engine:
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
