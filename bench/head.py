"""What the quality head can know, from when on, and how well its posterior is calibrated, beside trace confidence (Fig. 2 b-d).

    python bench/head.py                                    the newest ARRoL run in bench/runs; if there is none, 20 steps are trained
    python bench/head.py --model runs/NAME/checkpoint-20    any flag of tts.py goes too

Samples 16 answers to each of 200 held-out problems, and takes the states that produced their tokens from a transformers pass. At each of
eight detection lengths L a head is trained on one half of the problems and judged on the other, both ways, for three splits; it sees the
rollouts that go on beyond L, as in training. Beside it: the mean of H_t and the sum of the sampled tokens' log-probs, over the same L
tokens. Then, at the run's own L_detect, the distribution of scores, the calibration of the binned posterior on problems that neither
head nor calibration has seen, and which training states make the best head. Leaves bench/results/head.json, .md and .png.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch import Tensor

from bench.head_states import token_scores
from bench.runs import RECORD, last_words, run_program
from bench.tables import machine, markdown, save
from calibration import Calibrator, bin_index
from quality_head import HeadTrainer, QualityHead
from support import checkpoint
from support.args import TtsArgs, fail, parse_tts
from support.metrics import auc, ece, head_metrics, spearman, within_group_auc
from support.test_time import Sampler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)  # of the mean length
SPLITS = (0, 1, 2)
ROUNDS = 8  # of HeadTrainer.train, each 4 passes: AUCs change by less than their spread from 4 to 16
TIMED, REPEATS = 2, 3  # samples per problem of the generations that are timed, and how often
BINS = (128, 32, 10)
STEPS = 20  # of a run that is trained here
Cells = dict[str, float]

# ------------------------------------------------------------------ the sample


@dataclass
class Sample:
    """Judged rollouts, and the states that produced token L of each, the last token where it is shorter."""

    states: dict[int | str, Tensor]  # L, or "last" -> (N, hidden) fp32
    lengths: Tensor  # (N,) tokens
    labels: Tensor  # (N,) 0 or 1
    groups: Tensor  # (N,) problem
    confidence: dict[int, Tensor]  # L -> (N,) mean of H_t over the first L tokens
    logprob: dict[int, Tensor]  # L -> (N,) sum of the log-probs of the first L sampled tokens
    detections: list[int]  # the eight L
    detect: int  # the run's own

    def reach(self, length: int) -> Tensor:
        """Which rollouts (N,) are scored at L: those that have not ended there."""
        return self.lengths > length


def take(sampler: Sampler, n: int) -> tuple[Sample, list[Cells]]:
    """The sample, and what it costs to get to each length."""
    rollouts = sampler.sample(n)
    sampler.judge(rollouts)
    judged = [(rollout, rollout.reward) for rollout in rollouts if rollout.reward is not None]
    rollouts = [rollout for rollout, _ in judged]
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    detections = sorted({max(1, round(f * lengths.double().mean().item())) for f in FRACTIONS})
    detect, positions = sampler.args.detect_length, [*detections, sampler.args.detect_length]

    def pick(states: Tensor) -> Tensor:  # instead of a head: all the states of all rollouts would not fit
        return torch.stack([states[min(length, len(states)) - 1] for length in positions] + [states[-1]])

    asked = copy.copy(sampler)
    asked.head = pick
    states = torch.stack(token_scores(asked, rollouts)).float().unbind(1)

    def until(length: int, values: list) -> Tensor:
        return torch.tensor([float(sum(v[:length])) for v in values], dtype=torch.float64)

    traces, logprobs = [rollout.confidences for rollout in rollouts], [rollout.logprobs for rollout in rollouts]
    sample = Sample(
        states=dict(zip([*positions, "last"], states, strict=True)),
        lengths=lengths,
        labels=torch.tensor([label for _, label in judged]),
        groups=torch.tensor([rollout.group for rollout in rollouts]),
        confidence={length: until(length, traces) / lengths.clamp_max(length) for length in positions},
        logprob={length: until(length, logprobs) for length in positions},
        detections=detections,
        detect=detect,
    )
    return sample, costs(sampler, sample)


def costs(sampler: Sampler, sample: Sample) -> list[Cells]:
    """For each L: who gets there, and the share of all tokens and of all generation time that it takes to get all there.

    Times are taken in turn, and the shares are medians over the turns: a machine that gets slower does so for all lengths.
    """
    limits, shares = [*sample.detections, sampler.sampling.max_tokens], []
    for _ in range(REPEATS):
        taken = []
        for limit in limits:
            cut = copy.copy(sampler)
            cut.sampling = dataclasses.replace(sampler.sampling, max_tokens=limit)
            start = time.perf_counter()
            cut.sample(TIMED, confidence=False)
            taken.append(time.perf_counter() - start)
        shares.append([seconds / taken[-1] for seconds in taken])
    return [
        {
            "reached": sample.reach(length).double().mean().item(),
            "tokens": (sample.lengths.clamp_max(length).sum() / sample.lengths.sum()).item(),
            "time": statistics.median(share),
        }
        for length, share in zip(
            sample.detections, zip(*shares, strict=True), strict=False
        )  # the last one is all of it
    ]


# ------------------------------------------------------------------ heads


def halves(groups: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Two-fold split over problems: (rows to train on, rows to judge on), each (N,) bool, both ways."""
    ids, row = torch.unique(groups, return_inverse=True)
    first = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)) < len(ids) / 2
    return [(first[row], ~first[row]), (~first[row], first[row])]


def fit(states: Tensor, labels: Tensor, seed: int) -> QualityHead:
    """A head trained on these states (N, hidden) from scratch."""
    head = QualityHead(states.shape[1], seed=seed)
    trainer = HeadTrainer(head, capacity=max(1, len(labels)), seed=seed)
    trainer.add(states, labels)
    for _ in range(ROUNDS):
        trainer.train()
    return head


@torch.no_grad()
def scores(head: QualityHead, states: Tensor) -> Tensor:
    return head(states).sigmoid().double()


def threshold_accuracy(values: Tensor, labels: Tensor, new: Tensor, new_labels: Tensor) -> float:
    """Accuracy on new rows of the threshold that is best on the old ones: right is above it. NaN without rows."""
    if not len(values) or not len(new):
        return math.nan
    order = values.argsort()
    right = labels[order].double()
    # with the first k called wrong: wrong ones among them, right ones among the others
    hits = (
        torch.cat([torch.zeros(1), (1 - right).cumsum(0)]) + right.sum() - torch.cat([torch.zeros(1), right.cumsum(0)])
    )
    k = int(hits.argmax())
    threshold = values[order[k]] if k < len(values) else math.inf
    return ((new >= threshold) == new_labels.bool()).double().mean().item()


def signal_metrics(values: Tensor, labels: Tensor, groups: Tensor, train: Tensor, test: Tensor) -> Cells:
    """The metrics of a head for something that is no probability."""
    v, y, g = values[test], labels[test], groups[test]
    return {
        "auc": auc(v, y),
        "auc_within": within_group_auc(v, y, g),
        "accuracy": threshold_accuracy(values[train], labels[train], v, y),
        "spearman": spearman(v, y),
    }


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the halves, of those in which the value is defined."""

    mean: float | None
    deviation: float | None

    def show(self) -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:.3f}" + ("" if self.deviation is None else f" ± {self.deviation:.3f}")


def summed(rows: list[Cells]) -> dict[str, Spread]:
    """Column -> mean and deviation over the halves' rows."""
    table = {}
    for key in rows[0]:
        known = [row[key] for row in rows if not math.isnan(row[key])]
        table[key] = Spread(
            statistics.fmean(known) if known else None, statistics.stdev(known) if len(known) > 1 else None
        )
    return table


def with_logprob(states: Tensor, logprob: Tensor, train: Tensor) -> Tensor:
    """States (N, hidden + 1): beside each the sum of the log-probs so far, on the states' scale, standardised by the rows `train`."""
    known = logprob[train]
    column = (logprob - known.mean()) / known.std().clamp_min(1e-6) * states[train].std()
    return torch.cat([states, column[:, None].float()], 1)


def at_length(sample: Sample, length: int) -> dict[str, dict[str, Spread]]:
    """How well each signal tells right from wrong at L; `auc_within_same` is about the rollouts that all lengths score."""
    here, same = sample.reach(length), sample.reach(sample.detections[-1])
    rows: dict[str, list[Cells]] = {}
    for seed in SPLITS:
        for train, test in halves(sample.groups, seed):
            train, test = train & here, test & here
            if train.sum() < 2 or not test.any():
                continue
            both = with_logprob(sample.states[length], sample.logprob[length], train)
            heads = {"head": sample.states[length], "head + log-prob": both}
            values = {name: scores(fit(x[train], sample.labels[train], seed), x) for name, x in heads.items()}
            measured = {n: head_metrics(v[test], sample.labels[test], sample.groups[test]) for n, v in values.items()}
            for name, signal in (("confidence", sample.confidence[length]), ("log-prob", sample.logprob[length])):
                values[name] = signal
                measured[name] = signal_metrics(signal, sample.labels, sample.groups, train, test)
            common = test & same
            for name, cells in measured.items():
                within = within_group_auc(values[name][common], sample.labels[common], sample.groups[common])
                rows.setdefault(name, []).append(cells | {"auc_within_same": within})
    return {name: summed(cells) for name, cells in rows.items()}


def training_states(sample: Sample, own: QualityHead | None) -> dict[str, dict[str, Spread]]:
    """AUC at L_detect and at the last token, of heads trained on the states of the one, of the other, and of both; and of the run's own."""
    here = sample.reach(sample.detect)
    detect, last = sample.states[sample.detect], sample.states["last"]
    rows: dict[str, list[Cells]] = {}
    for seed in SPLITS:
        for train, test in halves(sample.groups, seed):
            parts = {"at L_detect": [(detect, train & here)], "last token": [(last, train)]}
            parts["both"] = parts["at L_detect"] + parts["last token"]
            heads = {
                name: fit(torch.cat([x[of] for x, of in part]), torch.cat([sample.labels[of] for _, of in part]), seed)
                for name, part in parts.items()
            }
            if own is not None:
                heads["the run's own head"] = own
            for name, head in heads.items():
                cells: Cells = {}
                for place, states, of in (("L_detect", detect, test & here), ("last token", last, test)):
                    found, labels = scores(head, states[of]), sample.labels[of]
                    cells[f"AUC, {place}"] = auc(found, labels)
                    cells[f"within, {place}"] = within_group_auc(found, labels, sample.groups[of])
                rows.setdefault(name, []).append(cells)
    return {name: summed(cells) for name, cells in rows.items()}


@dataclass
class Judged:
    """Scores at L_detect of heads that have not seen the problem, each rollout once for each split."""

    scores: Tensor
    confidence: Tensor
    labels: Tensor


def calibration(sample: Sample) -> tuple[dict[str, dict[str, Spread]], dict[str, list[list[float]]], Judged]:
    """Errors of the posterior by number of bins, its curve (mean q, positive ratio, share of rows for each tenth), and the scores.

    Head, posterior and errors are of three parts of the problems: half, a quarter and a quarter, as in training, where scores enter the
    window before the head sees their labels.
    """
    here, states = sample.reach(sample.detect), sample.states[sample.detect]
    rows: dict[str, list[Cells]] = {}
    points: dict[str, list[tuple[Tensor, Tensor]]] = {}
    seen: list[tuple[Tensor, Tensor]] = []
    for seed in SPLITS:
        for train, test in halves(sample.groups, seed):
            found = scores(fit(states[train & here], sample.labels[train & here], seed), states)
            seen.append((found[test & here], test & here))
            for first, second in halves(sample.groups, seed + 1000):
                old, new = test & here & first, test & here & second
                if not old.any() or not new.any():
                    continue
                quality = {"s′ itself": found[new]}
                for bins in BINS:
                    calibrator = Calibrator(bins, window=int(old.sum()))
                    calibrator.label(found[old], sample.labels[old])
                    quality[f"B = {bins}"] = calibrator.posterior(found[new])
                for name, q in quality.items():
                    rows.setdefault(name, []).append(errors(q, sample.labels[new], sample.groups[new], seed))
                    points.setdefault(name, []).append((q, sample.labels[new]))
    curves = {name: curve(*map(torch.cat, zip(*parts, strict=True))) for name, parts in points.items()}
    judged = Judged(
        torch.cat([values for values, _ in seen]),
        torch.cat([sample.confidence[sample.detect][of] for _, of in seen]),
        torch.cat([sample.labels[of] for _, of in seen]),
    )
    return {name: summed(cells) for name, cells in rows.items()}, curves, judged


def errors(q: Tensor, labels: Tensor, groups: Tensor, seed: int) -> Cells:
    """ECE; what it would be, on so few rollouts, if q were the truth; Brier score; AUC within groups."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [(torch.rand(q.shape, generator=generator, dtype=q.dtype) < q).double() for _ in range(20)]
    return {
        "ECE": ece(q, labels),
        "ECE if q were true": statistics.fmean(ece(q, sampled) for sampled in drawn),
        "Brier": (q - labels).square().mean().item(),
        "AUC within": within_group_auc(q, labels, groups),
    }


def curve(q: Tensor, labels: Tensor) -> list[list[float]]:
    """Mean q, positive ratio and share of rows, of each tenth of [0, 1] that has any."""
    index = bin_index(q, 10)
    count = torch.bincount(index, minlength=10)
    filled = count > 0
    sums = [torch.bincount(index, values.double(), 10)[filled] / count[filled] for values in (q, labels)]
    return torch.stack([*sums, count[filled] / len(q)], 1).tolist()


# ------------------------------------------------------------------ tables and picture

SIGNALS = {
    "head": "quality head",
    "head + log-prob": "head on state and log-probs",
    "confidence": "mean of H_t",
    "log-prob": "sum of log-probs",
}


def text(results: dict) -> str:
    """head.md."""
    rows = [
        [
            "L",
            "beyond",
            "tokens",
            "time",
            "signal",
            "Spearman",
            "AUC",
            "within",
            "within, same",
            "accuracy",
            "base rate",
        ]
    ]
    for length, cost in results["costs"].items():
        for name, cells in results["lengths"][length].items():
            known = [f"**{length}**", *(f"{cost[key]:.0%}" for key in ("reached", "tokens", "time"))]
            rows.append([
                *(known if name == "head" else [""] * 4),
                SIGNALS[name],
                *(cells[key].show() for key in ("spearman", "auc", "auc_within", "auc_within_same", "accuracy")),
                cells["base_rate"].show() if "base_rate" in cells else "",
            ])  # fmt: skip
    rows.append(["*the paper's: 512*", "", "", "", "quality head", "a plateau", "", "", "", "0.824", ""])

    def table(head: str, body: dict[str, dict[str, Spread]]) -> str:
        columns = list(next(iter(body.values())))
        return markdown(
            [[head, *columns], *([name, *(cells[key].show() for key in columns)] for name, cells in body.items())]
        )

    made = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"""# Quality head and trace confidence (Fig. 2 b–d)

`{results["model"]}`: {results["rollouts"]:,} rollouts of {results["problems"]} problems, {results["right"]:.1%} right, {results["mean_length"]:.1f} tokens
on average, the run's L_detect {results["detect"]}. Heads are trained from scratch on one half of the problems and judged on the other, both ways,
for {len(SPLITS)} splits. ± is the standard deviation over these {2 * len(SPLITS)} halves.

## By detection length

"beyond": rollouts that go on after L tokens, which are the ones that are scored. "tokens", "time": of sampling all of it, what it takes to get
all of them to L. "within": AUC within problems. "within, same": on the rollouts that go on beyond the longest L, so that lengths compare. A
confidence has no natural threshold: its accuracy is that of the best one on the other half.

{markdown(rows)}

The paper's accuracy is that of Qwen3-1.7B in training (Sec. 5.2); its Fig. 2 (Qwen3-4B) gives no other number in words.

## Calibration at L_detect = {results["detect"]}

On a quarter of the problems that neither head nor posterior has seen; another quarter fills the window. Smoothing α = 1.

{table("posterior", results["calibration"])}

## Which states train the best head

Trained on the states at L_detect, on those of the last token, or on both (`--head-states`), and judged at each. Heads of this table other than the
run's own have seen half of these problems, {results["problems"] // 2}, and one policy; the run's own saw others, more of them, and all policies on the way.

{table("trained on", results["training_states"])}

Seed {results["seed"]}, splits {", ".join(map(str, SPLITS))}; flags `{" ".join(results["flags"]) or "none"}`; {made["processor"]}, {made["cores"]} cores,
{versions}; {results["seconds"]:.0f} s.
"""


def picture(results: dict, judged: Judged) -> Figure:
    """head.png: distributions of confidence and score (Fig. 2b), correlation and cost by length (Fig. 2d), calibration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    right = judged.labels.bool()
    for axes, values, name in ((a, judged.confidence, "mean of H_t"), (b, judged.scores, "quality score s′")):
        edges = torch.linspace(values.min().item(), values.max().item() + 1e-9, 41).tolist()
        for of, color, label in ((right, "tab:green", "right"), (~right, "tab:red", "wrong")):
            axes.hist(values[of].tolist(), edges, density=True, alpha=0.5, color=color, label=label)
        axes.set(title=f"{name} of right and wrong rollouts at L = {results['detect']}", xlabel=name, ylabel="density")
    lengths = [int(length) for length in results["lengths"]]
    for name, color in zip(SIGNALS, ("tab:blue", "tab:green", "tab:orange", "tab:purple"), strict=True):
        for key, style in (("auc_within", "-"), ("spearman", "--")):
            points = [(n, results["lengths"][n][name][key].mean) for n in results["lengths"]]
            known = [(int(n), value) for n, value in points if value is not None]
            c.plot(*zip(*known, strict=True), color=color, linestyle=style, marker=".", label=f"{SIGNALS[name]}, {key}")
    for key, style in (("tokens", "-"), ("time", ":")):
        shares = [cost[key] for cost in results["costs"].values()]
        c.plot(lengths, shares, color="tab:gray", linestyle=style, label=f"share of {key} to get there")
    c.set(title="by detection length", xlabel="L, tokens")
    d.plot([0, 1], [0, 1], color="tab:gray", linewidth=0.8)
    for name, points in results["curves"].items():
        expected = results["calibration"][name]["ECE"].show()
        q, ratio, _ = zip(*points, strict=True)
        d.plot(q, ratio, marker=".", label=f"{name}: ECE {expected}")
    d.set(title="calibration on unseen problems", xlabel="mean q", ylabel="positive ratio")
    for axes in (a, b, c, d):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6 if axes is c else 7)
    return figure


# ------------------------------------------------------------------ the program


def checkpoint_to_use() -> Path:
    """The last one of the newest ARRoL run of bench/runs that ended well; if there is none, of a run of 20 steps, trained now."""
    runs = ROOT / "bench" / "runs"
    records = {path: json.loads(path.read_text("utf-8")) for path in runs.glob(f"*/{RECORD}")}
    well = [path for path, r in records.items() if r["method"] == "GRPO + ARRoL" and r["crash"] is None]
    for path in sorted(well, key=lambda path: path.stat().st_mtime, reverse=True):
        if found := checkpoint.complete(path.parent):
            return found[-1]
    folder = runs / "head"
    if not checkpoint.complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = f"--steps {STEPS} --baseline-steps 0 --eval-problems 0 --eval-every 0 --output".split()
        if run_program([str(ROOT / "arrol.py"), *flags, str(folder)], folder, "training", STEPS):
            sys.exit(f"head.py: training failed: {last_words(folder)}")
    return checkpoint.complete(folder)[-1]


def measure(args: TtsArgs, problems: int) -> tuple[dict, Judged]:
    """Everything that the tables and the picture show."""
    sampler = Sampler(args)
    sampler.prompts = dict(list(sampler.prompts.items())[:problems])
    with sampler.running():
        sample, cost = take(sampler, args.n)
    if not sample.reach(sample.detect).any():
        fail(f"--detect-length {sample.detect}: no rollout is longer")
    quality, curves, judged = calibration(sample)
    return {
        "rollouts": len(sample.labels),
        "problems": len(sample.groups.unique()),
        "right": sample.labels.mean().item(),
        "mean_length": sample.lengths.double().mean().item(),
        "detect": sample.detect,
        "costs": {str(length): cells for length, cells in zip(sample.detections, cost, strict=True)},
        "lengths": {str(length): at_length(sample, length) for length in sample.detections},
        "calibration": quality,
        "curves": curves,
        "training_states": training_states(sample, sampler.head),
    }, judged


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--problems", type=int, default=200, help="of the set, the first ones")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the tables")
    own, rest = parser.parse_known_args()
    if own.problems < 4:
        fail(f"--problems {own.problems}: must be at least 4, for head, posterior and judgement")
    given = any(word == "--model" or word.startswith("--model=") for word in rest)
    chosen = [] if given else ["--model", str(checkpoint_to_use())]
    args = parse_tts(["--n", "16", *chosen, *rest])
    results, judged = measure(args, own.problems)
    model = Path(args.model)
    shown = model.relative_to(ROOT) if model.is_absolute() and model.is_relative_to(ROOT) else model
    results |= {
        "model": str(shown).removesuffix("/model"),
        "data": args.data,
        "seed": args.seed,
        "flags": sys.argv[1:],
        "machine": machine(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    save("head", own.results, results, text(results), picture(results, judged))


if __name__ == "__main__":
    main()
