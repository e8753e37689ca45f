"""What `tts.py` does: sample n answers to each problem, judge them, let them vote (App. A.2).

Prints avg@n, pass@k, maj@n and a row for each of `tts.RULES`, with 95% intervals over problems.
Leaves the same in `scores.json`, each candidate in `candidates.jsonl`, and accuracy against the
number of candidates in `votes.png`. With `--early-stop` it samples again and lets the quality head
stop candidates at L_detect. Each has a seed of its own, so that they are the same candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import tts
from calibration import bin_index
from confidence import Confidence
from engine import Decision, Rollout, Sampling
from quality_head import QualityHead
from support import data, evaluation, launch, metrics
from support.args import TtsArgs, fail
from support.checkpoint import load_head
from support.distributed import start_process_group
from support.grader import Grader


@dataclasses.dataclass
class Candidates:
    """The complete candidates of one problem, ready to vote; `right` are the classes that are right."""

    rollouts: list[Rollout]
    classes: list[tts.Class]
    signals: dict[str, list[float]]
    right: set[int]

    @property
    def count_right(self) -> int:
        return sum(rollout.verdict == "right" for rollout in self.rollouts)


class Sampler:
    """Samples and judges candidates for a set's problems; those `too_long` have none and count as wrong.

    Flags that are of no use end the program with one sentence, before anything is created.
    """

    def __init__(self, args: TtsArgs) -> None:
        launch.quiet(args.verbose)
        self.args, self.head, self.table = args, None, None
        try:
            self.benchmark = evaluation.load_benchmark(args.data, "--data")
            self.report = self.benchmark.report
            if args.head:
                self.head, self.table, trained_at = load_head(Path(args.head))
            if args.trained_on:
                seen = evaluation.contaminated(self.benchmark.problems, data.load(args.trained_on)[0])
                self.report += f"; CONTAMINATED: {len(seen)} of them are in {args.trained_on}"
        except ValueError as error:
            fail(str(error).replace("--dataset", "--trained-on", 1))
        tokenizer, stop_token_ids, config = launch.load_tokenizer(args)
        if args.early_stop and self.head is None:
            fail("--early-stop: it takes a quality head; name one by --head, or a checkpoint by --model")
        if args.early_stop and trained_at not in (None, args.detect_length):
            fail(f"--detect-length {args.detect_length}: {args.head} was trained at {trained_at}")
        if self.head is not None and (width := self.head.hidden.in_features) != config.hidden_size:
            fail(f"--head {args.head}: it reads states of {width} numbers, the model's have {config.hidden_size}")
        problems, rest = self.benchmark.problems, (args.max_prompt, args.instruction, args.thinking)
        prompts, self.too_long = data.tokenize(problems, tokenizer, *rest)
        if not prompts:
            fail(f"--max-prompt {args.max_prompt}: no prompt of {self.benchmark.name} is that short")
        self.prompts, self.tokenizer, self.vocabulary = dict(enumerate(prompts)), tokenizer, config.vocab_size
        self.sampling = Sampling(args.max_length, tuple(stop_token_ids), args.temperature, args.top_p)

    @contextlib.contextmanager
    def running(self) -> Iterator[Sampler]:
        """With grader and engine, which are taken down at the end."""
        device = start_process_group()
        try:
            with (
                Grader(max(2, os.cpu_count() or 2)) as self.grader,
                launch.engine_from(self.args, device) as self.engine,
            ):
                yield self
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def sample(self, samples: int, **options: object) -> list[Rollout]:
        """So many rollouts of each prompt; `options` of `Engine.generate` go before these."""
        options = dict(last_states=True, confidence=Confidence(), progress=True, rollout_seeds=True) | options
        prompts = {group: prompt.token_ids for group, prompt in self.prompts.items()}
        return self.engine.generate(prompts, samples, self.sampling, seed=self.args.seed, **options)

    def judge(self, rollouts: list[Rollout]) -> list[Candidates]:
        """By problem, those too long last. Pruned rollouts have no answer to vote for: they are left out."""
        _grade(rollouts, self.prompts, self.tokenizer, self.grader)
        found: dict[int, list[Rollout]] = {group: [] for group in self.prompts}
        for rollout in rollouts:
            if rollout.finish != "pruned":
                found[rollout.group].append(rollout)
        bar = tqdm(found.values(), desc="answers", unit="problem", leave=False, disable=None)
        return [self._candidates(group) for group in bar] + [self._candidates([])] * self.too_long

    @torch.no_grad()
    def _candidates(self, rollouts: list[Rollout]) -> Candidates:
        answers, verdicts = [r.answer for r in rollouts], {r.answer: r.verdict for r in rollouts}
        classes = tts.answer_classes(answers, self.grader.equivalent)
        spelling = {c: tts.representative(answers, classes, c) for c in set(classes) - {None}}
        right = {c for c, answer in spelling.items() if verdicts[answer] == "right"}
        rows = [tts.trace_signals(r.confidences, r.logprobs, self.args.window, self.vocabulary) for r in rollouts]
        signals = {name: [row[name] for row in rows] for name in tts.SIGNALS if name != "head"}
        if self.head is not None:
            signals["head"] = self.head(torch.stack([r.last_state for r in rollouts])).tolist() if rollouts else []
        return Candidates(rollouts, classes, {name: _finite(values) for name, values in signals.items()}, right)


def _finite(values: list[float]) -> list[float]:
    """What overflowed becomes the lowest of the others, 0 if there are none: no rule could rank it."""
    least = min(filter(math.isfinite, values), default=0.0)
    return [value if math.isfinite(value) else least for value in values]


def _grade(rollouts, prompts, tokenizer, grader) -> None:
    for rollout, verdict in zip(rollouts, evaluation.grade_rollouts(rollouts, prompts, tokenizer, grader)):
        rollout.verdict, rollout.answer = (verdict.kind, verdict.answer) if verdict else (None, None)
        rollout.reward = verdict.reward if verdict else None


class KeepBetter:
    """Early stop: at L_detect, the κ = `keep_ratio` of each problem's candidates with the highest posterior go on.

    Each is held against all candidates of its problem that have arrived; lots decide ties, and
    whether a fraction of a candidate goes on. table: posterior of each bin of the score; None: the
    score itself. One whose score is NaN goes on and does not count among those that have arrived.
    """

    def __init__(self, head: QualityHead, table: Tensor | None, keep_ratio: float, seed: int) -> None:
        self.head, self.table, self.keep_ratio, self.lots = head, table, keep_ratio, random.Random(seed)
        self.arrived: dict[int, list[tuple[float, float]]] = defaultdict(list)

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        scores = self.head(states).sigmoid().cpu()
        q = scores if self.table is None else self.table[bin_index(scores.nan_to_num(), len(self.table))]
        rows = [(value, self.lots.random()) for value in q.where(~scores.isnan(), math.nan).tolist()]
        fraction = {group: self.lots.random() for group in groups}
        for group, row in zip(groups, rows):
            if not math.isnan(row[0]):
                self.arrived[group].append(row)
        keep = []
        for group, row in zip(groups, rows):
            better = sum(other > row for other in self.arrived[group])
            keep.append(math.isnan(row[0]) or better + fraction[group] < self.keep_ratio * len(self.arrived[group]))
        return [Decision(*row) for row in zip(keep, scores.tolist(), q.tolist())]


# ------------------------------------------------------------------ scores


def accuracies(problems: Sequence[Candidates], size: int, seed: int) -> dict[str, list[float]]:
    """Rule -> for each problem, how often its winner among `size` candidates is right (`tts.accuracy`).

    "oracle" is pass@size. A problem with fewer candidates, of which some were stopped, counts with all.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for number, one in enumerate(problems):
        k, rng = min(size, len(one.rollouts)), np.random.default_rng((seed, number, size))
        for rule, value in tts.accuracy(one.classes, one.signals, one.right, k, rng).items():
            found[rule].append(value)
        found["oracle"].append(metrics.pass_at_k(len(one.rollouts), one.count_right, k) if k else 0.0)
    return dict(found)


def signal_quality(problems: Sequence[Candidates]) -> dict[str, dict[str, float | None]]:
    """How well each signal tells right candidates from wrong ones: AUC over all, and within problems.

    Candidates without an answer do not count. None where there is no pair to tell apart.
    """
    rows = [(group, i) for group, one in enumerate(problems) for i, c in enumerate(one.classes) if c is not None]
    right = torch.tensor([problems[group].rollouts[i].verdict == "right" for group, i in rows])
    groups, quality = torch.tensor([group for group, _ in rows], dtype=torch.int64), {}
    for name in problems[0].signals if problems else ():
        values = torch.tensor([problems[group].signals[name][i] for group, i in rows], dtype=torch.float64)
        found = {"auc": metrics.auc(values, right), "auc_within": metrics.within_group_auc(values, right, groups)}
        quality[name] = {key: None if math.isnan(value) else value for key, value in found.items()}
    return quality


def with_interval(values: Sequence[float], seed: int) -> dict[str, float]:
    low, high = metrics.interval(values, seed)
    return {"value": statistics.fmean(values), "low": low, "high": high}


# ------------------------------------------------------------------ the program


def main(args: TtsArgs) -> int:
    """Score a model as `args` say; returns the exit status."""
    sampler = Sampler(args)
    print(sampler.report)
    try:
        with sampler.running():
            results = run(sampler)
    except KeyboardInterrupt:
        print(f"\nstopped; what was done is in {args.output}", file=sys.stderr)
        return 130
    print(f"\n{show(results)}\n\nresults: {args.output}  (scores.json, candidates.jsonl, votes.png)")
    return 0


def run(sampler: Sampler) -> dict:
    """Sample, judge, vote; writes the folder and returns what scores.json holds."""
    args, folder = sampler.args, Path(sampler.args.output)
    folder.mkdir(parents=True, exist_ok=True)
    rollouts = sampler.sample(args.n)
    problems = sampler.judge(rollouts)
    write_candidates(folder / "candidates.jsonl", sampler, problems)
    sizes = [*(2**i for i in range((args.n - 1).bit_length())), args.n]
    curve = {size: accuracies(problems, size, args.seed) for size in sizes}
    samples = {f"avg@{args.n}": [one.count_right / args.n for one in problems]}
    samples |= {f"pass@{size}": scores["oracle"] for size, scores in curve.items()}
    votes, tokens = curve[args.n], sum(len(rollout.token_ids) for rollout in rollouts)
    benchmark = dataclasses.replace(sampler.benchmark, report=sampler.report)
    results = {
        "settings": dataclasses.asdict(args),
        "set": dataclasses.asdict(benchmark) | {"problems": len(benchmark.problems)},
        "counts": {
            "prompts too long (they count as wrong)": sampler.too_long,
            "candidates": len(rollouts),
            "tokens": tokens,
            "cut at the length limit": sum(rollout.finish == "length" for rollout in rollouts),
            **Counter(rollout.verdict for rollout in rollouts),
        },
        "samples": {name: with_interval(values, args.seed) for name, values in samples.items()},
        "votes": {rule: with_interval(values, args.seed) for rule, values in votes.items()},
        "signals": signal_quality(problems),
        "curve": {"sizes": sizes} | {r: [statistics.fmean(curve[k][r]) for k in sizes] for r in votes},
    }
    save(results, folder)
    plot(results, folder / "votes.png")
    if args.early_stop:
        stopped = sampler.sample(args.n, pruner=KeepBetter(sampler.head, sampler.table, args.keep_ratio, args.seed))
        after = accuracies(sampler.judge(stopped), args.n, args.seed)
        results["early_stop"] = {"tokens saved": 1 - sum(len(r.token_ids) for r in stopped) / tokens}
        for rule in ("majority", "ARRoL"):
            results["early_stop"][rule] = with_interval(after[rule], args.seed)
            change = [b - a for a, b in zip(votes[rule], after[rule])]
            results["early_stop"][f"{rule}, change"] = with_interval(change, args.seed)
        save(results, folder)
    return results


def save(results: dict, folder: Path) -> None:
    (folder / "scores.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), "utf-8")


def write_candidates(path: Path, sampler: Sampler, problems: Sequence[Candidates]) -> None:
    """A line for each candidate: its answer, class, verdict, signals, and its weight under each rule."""
    with path.open("w", encoding="utf-8") as file:
        for one in problems:
            tables = {"signals": one.signals, "weights": tts.ballots(one.classes, one.signals)}
            for i, rollout in enumerate(one.rollouts):
                problem = sampler.prompts[rollout.group].problem
                row = {"problem": problem.id, "gold": problem.answer, "candidate": i, "class": one.classes[i]}
                row |= {name: getattr(rollout, name) for name in ("answer", "verdict", "finish")}
                row |= {"tokens": len(rollout.token_ids)}
                row |= {key: {name: values[i] for name, values in table.items()} for key, table in tables.items()}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def show(results: dict) -> str:
    """The tables."""
    n, stopped = results["settings"]["n"], dict(results.get("early_stop", {}))
    saved = stopped.pop("tokens saved", 0.0)
    rows = results["samples"] | results["votes"] | {f"stopped early: {name}": score for name, score in stopped.items()}
    names = {"majority": f"maj@{n}", "oracle": f"oracle (pass@{n})"}
    lines = [f"{'':34s} accuracy   95% interval over problems"]
    for name, score in rows.items():
        lines.append(f"{names.get(name, name):34s} {score['value']:8.3f}   {score['low']:.3f} - {score['high']:.3f}")
    lines += [f"{'stopped early: tokens saved':34s} {saved:8.1%}"] if stopped else []
    lines += ["", ", ".join(f"{count:,} {name}" for name, count in results["counts"].items())]
    lines += ["", f"{'AUC of right against wrong':34s}      all   within a problem"]
    for name, quality in results["signals"].items():
        cells = ["-" if value is None else f"{value:.3f}" for value in quality.values()]
        lines.append(f"{name:34s} {cells[0]:>8s}{cells[1]:>19s}")
    return "\n".join(lines)


def plot(results: dict, path: Path) -> None:
    """PNG: accuracy against the number of candidates, a line for each rule."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure((8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=matplotlib.color_sequences["tab20"])
    sizes, *curves = results["curve"].items()
    for name, values in curves:
        strong = name in ("majority", "ARRoL", "oracle")
        axes.semilogx(sizes[1], values, ".-", base=2, label=name, linewidth=2.5 if strong else 1)
    axes.set(xlabel="candidates per problem", ylabel="accuracy", title=results["set"]["name"])
    axes.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.savefig(path, dpi=150)
