"""What `tts.py` does: sample n answers to each problem, judge them, let them vote (App. A.2).

With `--early-stop`, it samples again, and the quality head stops candidates at L_detect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from engine import Decision, Rollout, Sampling
from quality_head import QualityHead
from support import data, evaluation, launch, metrics
from support.args import TtsArgs, fail
from support.checkpoint import load_head
from support.distributed import start_process_group
from support.grader import Grader
from support.model import engine_from, load, load_tokenizer, vocabulary
from support.report import plot_votes
from support.show import aligned


@dataclasses.dataclass
class Candidates:
    """The complete candidates of one problem, ready to vote; `right` are its right classes."""

    rollouts: list[Rollout]
    classes: list[tts.Class]
    signals: dict[str, list[float]]
    right: set[int]
    count_right: int


class Sampler:
    """Samples and judges candidates for a set's problems; those `too_long` have none and are wrong.

    Flags that are of no use end the program with one sentence, before anything is created.
    """

    def __init__(self, args: TtsArgs) -> None:
        launch.quiet(args.verbose)
        tokenizer, stop_token_ids, config = load_tokenizer(args)
        hidden_size = config.get_text_config().hidden_size
        try:
            head, self.table, self.finished, trained_at = load_head(Path(args.head)) if args.head else [None] * 4
            benchmark = evaluation.load_benchmark(args.data, "--data")
            training = data.load(args.trained_on)[0] if args.trained_on else []
            self.report = benchmark.prepare(tokenizer, args, training)
        except ValueError as error:
            fail(str(error).replace("--dataset ", "--trained-on ", 1))
        if not benchmark.prompts:
            fail(f"--max-prompt {args.max_prompt}: no prompt of {benchmark.name} is that short")
        if head is not None and (width := head.norm.weight.numel()) != hidden_size:
            fail(f"--head {args.head}: it reads states of {width} numbers, the model's have {hidden_size}")
        if args.early_stop and trained_at not in (None, args.detect_length):
            fail(f"--detect-length {args.detect_length}: {args.head} was trained at {trained_at}")
        if not getattr(config, "quantization_config", None):
            # Nothing is kept: vLLM would make up parameters that it does not find.
            load(args.model, "auto")
        self.args, self.benchmark, self.prompts = args, benchmark, dict(enumerate(benchmark.prompts))
        self.too_long = len(benchmark.problems) - len(benchmark.prompts)
        self.head, self.tokenizer = head, tokenizer
        self.vocabulary = vocabulary(tokenizer, stop_token_ids, config)
        self.sampling = Sampling(args.max_length, tuple(stop_token_ids), args.temperature, args.top_p)

    @contextlib.contextmanager
    def running(self) -> Iterator[Sampler]:
        """With grader and engine, which are taken down at the end."""
        device = start_process_group()
        try:
            engine = engine_from(self.args, device, self.vocabulary)
            with Grader(launch.grader_workers()) as self.grader, engine as self.engine:
                yield self
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def sample(self, samples: int, **options: object) -> list[Rollout]:
        """So many rollouts of each prompt; `options` of `Engine.generate` go before these."""
        options = dict(last_states=True, confidence=True, progress=True, rollout_seeds=True) | options
        options["state_logprobs"] = bool(self.head and self.head.extras)
        prompts = {group: prompt.token_ids for group, prompt in self.prompts.items()}
        return self.engine.generate(prompts, samples, self.sampling, seed=self.args.seed, **options)

    def judge(self, rollouts: list[Rollout]) -> list[Candidates]:
        """By problem, those too long last. Pruned rollouts have no answer and are left out."""
        evaluation.grade(rollouts, self.prompts, self.tokenizer, self.grader)
        complete = [[r for r in rollouts if r.group == group and r.finish != "pruned"] for group in self.prompts]
        bar = tqdm(complete + [[]] * self.too_long, desc="answers", unit="problem", leave=False, disable=None)
        return [self._candidates(group) for group in bar]

    @torch.no_grad()
    def _candidates(self, rollouts: list[Rollout]) -> Candidates:
        answers, verdicts = [r.answer for r in rollouts], {r.answer: r.verdict for r in rollouts}
        classes = tts.answer_classes(answers, self.grader.equivalent)
        spelling = {c: tts.representative(answers, classes, c) for c in set(classes) - {None}}
        right = {c for c, answer in spelling.items() if verdicts[answer] == "right"}
        traces, logprobs = [np.asarray(r.confidences) for r in rollouts], [r.logprobs for r in rollouts]
        # DeepConf's 2,048 tokens, fewer where responses are shorter.
        window = 2048 if self.args.max_length >= 8192 else max(1, self.args.max_length // 32)
        signals = tts.trace_signals(traces, logprobs, window, self.vocabulary)
        if self.head is not None:
            signals["head"] = self.head(torch.stack([r.last_state for r in rollouts])).tolist() if rollouts else []
        for name, values in signals.items():
            # What overflowed becomes the lowest of the others, or 0: no rule could rank it.
            least = min(filter(math.isfinite, values), default=0.0)
            signals[name] = [value if math.isfinite(value) else least for value in values]
        if self.finished is not None:
            scores = torch.tensor(signals["head"]).sigmoid()
            signals["posterior"] = self.finished[bin_index(scores, len(self.finished))].tolist()
        return Candidates(rollouts, classes, signals, right, [r.verdict for r in rollouts].count("right"))


class KeepBetter:
    """Early stop: at L_detect, κ = `keep_ratio` of each problem's candidates go on, by posterior.

    Each is compared with all candidates of its problem that have arrived; lots decide ties and
    fractions. table: posterior of each bin of the score; None: the score itself. One whose score is
    NaN goes on and does not count as arrived.
    """

    def __init__(self, head: QualityHead, table: Tensor | None, keep_ratio: float, seed: int) -> None:
        self.head, self.table, self.keep_ratio, self.lots = head, table, keep_ratio, random.Random(seed)
        self.arrived: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.fraction: dict[int, float] = defaultdict(self.lots.random)

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        scores = self.head(states).sigmoid().cpu()
        q = scores if self.table is None else self.table[bin_index(scores.nan_to_num(), len(self.table))]
        rows = [(value, self.lots.random()) for value in q.where(~scores.isnan(), math.nan).tolist()]
        for group, row in zip(groups, rows):
            if not math.isnan(row[0]):
                self.arrived[group].append(row)
        places = [self.keep_ratio * len(self.arrived[group]) - self.fraction[group] for group in groups]
        better = [sum(other > row for other in self.arrived[group]) for group, row in zip(groups, rows)]
        keep = [math.isnan(row[0]) or b < place for row, b, place in zip(rows, better, places)]
        return [Decision(*row) for row in zip(keep, scores.tolist(), q.tolist())]


def accuracies(problems: Sequence[Candidates], size: int, seed: int) -> dict[str, list[float]]:
    """Rule -> for each problem, how often its winner among `size` candidates is right.

    "oracle" is pass@size. A problem with fewer candidates, if some were stopped, counts with all.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for number, one in enumerate(problems):
        k, rng = min(size, len(one.rollouts)), np.random.default_rng((seed, number, size))
        for rule, value in tts.accuracy(one.classes, one.signals, one.right, k, rng).items():
            found[rule].append(value)
        found["oracle"].append(metrics.pass_at_k(len(one.rollouts), one.count_right, k) if k else 0.0)
    return dict(found)


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
    args, folder, name = sampler.args, Path(sampler.args.output), sampler.benchmark.name

    def score(values: Sequence[float]) -> dict[str, float]:
        low, high = metrics.interval(values, args.seed)
        return {"value": statistics.fmean(values), "low": low, "high": high}

    def save() -> None:
        (folder / "scores.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), "utf-8")

    folder.mkdir(parents=True, exist_ok=True)
    rollouts = sampler.sample(args.n)
    problems = sampler.judge(rollouts)
    write_candidates(folder / "candidates.jsonl", sampler, problems)
    sizes = [*(2**i for i in range((args.n - 1).bit_length())), args.n]
    scores = {size: accuracies(problems, size, args.seed) for size in sizes}
    samples = {f"avg@{args.n}": [one.count_right / args.n for one in problems]}
    samples |= {f"pass@{size}": of_size["oracle"] for size, of_size in scores.items()}
    votes, tokens = scores[args.n], sum(len(rollout.token_ids) for rollout in rollouts)
    curve = {rule: [statistics.fmean(scores[size][rule]) for size in sizes] for rule in votes}
    results = {
        "settings": vars(args),
        "set": {"name": name, "problems": len(problems), "digest": sampler.benchmark.digest, "report": sampler.report},
        "counts": {
            "prompts too long (they count as wrong)": sampler.too_long,
            "candidates": len(rollouts),
            "tokens": tokens,
            "cut at the length limit": sum(rollout.finish == "length" for rollout in rollouts),
            **Counter(rollout.verdict for rollout in rollouts),
        },
        "samples": {label: score(values) for label, values in samples.items()},
        "votes": {rule: score(values) for rule, values in votes.items()},
        "curve": {"sizes": sizes} | curve,
    }
    save()
    plot_votes(name, sizes, curve, folder / "votes.png")
    if args.early_stop:
        stopped = sampler.sample(args.n, pruner=KeepBetter(sampler.head, sampler.table, args.keep_ratio, args.seed))
        after = accuracies(sampler.judge(stopped), args.n, args.seed)
        results["early_stop"] = {"tokens saved": 1 - sum(len(r.token_ids) for r in stopped) / tokens}
        for rule in ("majority", "ARRoL"):
            change = [b - a for a, b in zip(votes[rule], after[rule])]
            results["early_stop"] |= {rule: score(after[rule]), f"{rule}, change": score(change)}
        save()
    return results


def write_candidates(path: Path, sampler: Sampler, problems: Sequence[Candidates]) -> None:
    """A line for each candidate: answer, class, verdict, signals, and weight under each rule."""
    with path.open("w", encoding="utf-8") as file:
        for one in problems:
            weights = {rule.name: rule.ballot(one.classes, one.signals)[1] for rule in tts.rules_for(one.signals)}
            tables = {"signals": one.signals, "weights": weights}
            for i, rollout in enumerate(one.rollouts):
                problem = sampler.prompts[rollout.group].problem
                row = {"problem": problem.id, "gold": problem.answer, "candidate": i, "class": one.classes[i]}
                row |= {name: getattr(rollout, name) for name in ("answer", "verdict", "finish")}
                row["tokens"] = len(rollout.token_ids)
                row |= {key: {name: values[i] for name, values in table.items()} for key, table in tables.items()}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def show(results: dict) -> str:
    """The tables."""
    n, stopped = results["settings"]["n"], dict(results.get("early_stop", {}))
    saved = stopped.pop("tokens saved", 0.0)
    rows = results["samples"] | results["votes"] | {f"stopped early: {name}": score for name, score in stopped.items()}
    names = {"majority": f"maj@{n}", "oracle": f"oracle (pass@{n})"}
    table = [["", "accuracy", "95% interval over problems"]]
    for name, s in rows.items():
        table.append([names.get(name, name), f"{s['value']:.3f}", f"{s['low']:.3f} - {s['high']:.3f}"])
    table += [["stopped early: tokens saved", f"{saved:.1%}", ""]] if stopped else []
    counts = ", ".join(f"{count:,} {name}" for name, count in results["counts"].items())
    return f"{aligned(table)}\n\n{counts}"
