"""What the quality head can know, from when on, and how calibrated its posterior is (Fig. 2 b-d).

    python -m bench.head                                  a checkpoint of bench/runs
    python -m bench.head --model runs/NAME/checkpoint-20  any flag of tts.py goes too

Samples 16 answers to each of 200 held-out problems. At each of eight detection lengths L a head is
trained on one half of the problems and judged on the other, both ways, for three splits; it sees
the rollouts that go on beyond L, as in training. Beside it: the mean of H_t and the sum of the
sampled tokens' log-probs, over the same L tokens. Then, at the run's own L_detect: the distribution
of scores, the calibration of the posterior on problems that neither head nor calibration has seen,
which training states make the best head, and which state votes best.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench import runs
from bench.head_states import Sample, costs, draw_sample, scored_states
from bench.tables import Estimate, described, markdown, new_figure, save, show, table
from calibration import Calibrator
from quality_head import HeadTrainer, QualityHead
from support import checkpoint
from support.args import TtsArgs, fail, parse_tts
from support.metrics import auc, ece, head_metrics, within_group_auc
from support.test_time import Sampler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = (0, 1, 2)
# Calls of HeadTrainer.train: from 4 to 16 of them, AUCs change by less than their spread.
ROUNDS = 8
BINS = (128, 32, 10)
SIGNALS = {
    "head": "quality head",
    "head + log-prob": "head on state and log-probs",
    "confidence": "mean of H_t",
    "log-prob": "sum of log-probs",
}
Cells = dict[str, float]
Rows = dict[str, dict[str, Estimate]]

# ------------------------------------------------------------------ heads


def halves(groups: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Two-fold split over problems, both ways: rows to train on, rows to judge on, (N,) bool."""
    ids, row = torch.unique(groups, return_inverse=True)
    first = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)) < len(ids) / 2
    return [(first[row], ~first[row]), (~first[row], first[row])]


def folds(groups: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Seed and `halves` of all splits."""
    return [(seed, *rows) for seed in SPLITS for rows in halves(groups, seed)]


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
    """Accuracy on new rows of the threshold that is best on the old ones. NaN without rows."""
    if not len(values) or not len(new):
        return math.nan
    order = values.argsort()
    right, zero = labels[order].double(), torch.zeros(1)
    # With the first k called wrong: wrong ones among them, right ones among the others.
    hits = torch.cat([zero, (1 - right).cumsum(0)]) + right.sum() - torch.cat([zero, right.cumsum(0)])
    k = int(hits.argmax())
    threshold = values[order[k]] if k < len(values) else math.inf
    return ((new >= threshold) == new_labels.bool()).double().mean().item()


def signal_metrics(values: Tensor, labels: Tensor, groups: Tensor, train: Tensor, test: Tensor) -> Cells:
    """The metrics of a head for something that is no probability."""
    v, y, g = values[test], labels[test], groups[test]
    accuracy = threshold_accuracy(values[train], labels[train], v, y)
    return {"auc": auc(v, y), "auc_within": within_group_auc(v, y, g), "accuracy": accuracy}


def spreads(rows: dict[str, list[Cells]]) -> Rows:
    """Row -> column -> mean ± standard deviation over the halves in which there is a number."""
    found: Rows = {name: {} for name in rows}
    for name, halves in rows.items():
        for key in halves[0]:
            if values := [cells[key] for cells in halves if not math.isnan(cells[key])]:
                mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
                found[name][key] = Estimate(values, mean, mean - deviation, mean + deviation)
    return found


def with_logprob(states: Tensor, logprob: Tensor, train: Tensor) -> Tensor:
    """States with the sum of the log-probs (N, hidden + 1), scaled by the rows `train`."""
    known = logprob[train]
    column = (logprob - known.mean()) / known.std().clamp_min(1e-6) * states[train].std()
    return torch.cat([states, column[:, None].float()], 1)


def at_length(sample: Sample, length: int) -> Rows:
    """How well each signal tells right from wrong at L; "same": on rollouts that all L score."""
    here, same = sample.reach(length), sample.reach(sample.detections[-1])
    states, labels, groups = sample.states[length], sample.labels, sample.groups
    rows: dict[str, list[Cells]] = defaultdict(list)
    for seed, train, test in folds(groups):
        train, test = train & here, test & here
        if train.sum() < 2 or not test.any():
            continue
        both = with_logprob(states, sample.signals["log-prob"][length], train)
        inputs = {"head": states, "head + log-prob": both}
        values = {name: scores(fit(x[train], labels[train], seed), x) for name, x in inputs.items()}
        measured = {name: head_metrics(v[test], labels[test], groups[test]) for name, v in values.items()}
        for name, signal in sample.signals.items():
            values[name] = signal[length]
            measured[name] = signal_metrics(values[name], labels, groups, train, test)
        common = test & same
        for name, cells in measured.items():
            within = within_group_auc(values[name][common], labels[common], groups[common])
            rows[name].append(cells | {"auc_within_same": within})
    return spreads(rows)


def training_states(sample: Sample, own: QualityHead | None) -> Rows:
    """AUC at both places of heads trained on states of one or both, and of the run's own."""
    here = sample.reach(sample.detect)
    detect, last, labels, groups = sample.states[sample.detect], sample.states["last"], sample.labels, sample.groups
    rows: dict[str, list[Cells]] = defaultdict(list)
    for seed, train, test in folds(groups):
        sets = {"at L_detect": [(detect, train & here)], "last token": [(last, train)]}
        sets["both"] = sets["at L_detect"] + sets["last token"]
        heads = {
            name: fit(torch.cat([x[of] for x, of in pairs]), torch.cat([labels[of] for _, of in pairs]), seed)
            for name, pairs in sets.items()
        }
        if own is not None:
            heads["the run's own head"] = own
        for name, head in heads.items():
            cells: Cells = {}
            for place, states, of in (("L_detect", detect, test & here), ("last token", last, test)):
                found = scores(head, states[of])
                cells[f"AUC, {place}"] = auc(found, labels[of])
                cells[f"within, {place}"] = within_group_auc(found, labels[of], groups[of])
            rows[name].append(cells)
    return spreads(rows)


def calibration(sample: Sample) -> tuple[Rows, Tensor, Tensor]:
    """Errors of q by number of bins; scores (M,) of heads on unseen problems, their rows (M,).

    Head, posterior and errors are of a half and two quarters of the problems: in training, too,
    scores enter the window before the head sees their labels.
    """
    here, states, labels = sample.reach(sample.detect), sample.states[sample.detect], sample.labels
    rows: dict[str, list[Cells]] = defaultdict(list)
    seen: list[tuple[Tensor, Tensor]] = []
    for seed, train, test in folds(sample.groups):
        found = scores(fit(states[train & here], labels[train & here], seed), states)
        seen.append((found[test & here], (test & here).nonzero()[:, 0]))
        for first, second in halves(sample.groups, seed + 1000):
            old, new = test & here & first, test & here & second
            if not old.any() or not new.any():
                continue
            quality = {"s′ itself": found[new]}
            for bins in BINS:
                calibrator = Calibrator(bins, window=int(old.sum()))
                calibrator.label(found[old], labels[old])
                quality[f"B = {bins}"] = calibrator.posterior(found[new])
            for name, q in quality.items():
                rows[name].append(errors(q, labels[new], sample.groups[new], seed))
    return spreads(rows), *map(torch.cat, zip(*seen))


def errors(q: Tensor, labels: Tensor, groups: Tensor, seed: int) -> Cells:
    """ECE, and what it would be on so few rollouts if q were true; Brier score; AUC."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [(torch.rand(q.shape, generator=generator, dtype=q.dtype) < q).double() for _ in range(20)]
    return {
        "ECE": ece(q, labels),
        "ECE if q were true": statistics.fmean(ece(q, sampled) for sampled in drawn),
        "Brier": (q - labels).square().mean().item(),
        "AUC within": within_group_auc(q, labels, groups),
    }


# ------------------------------------------------------------------ tables and picture


def by_length(results: dict) -> str:
    columns = ("AUC", "within", "within, same", "accuracy", "base rate")
    keys = ("auc", "auc_within", "auc_within_same", "accuracy", "base_rate")
    rows = [["L", "beyond", "tokens", "time", "signal", *columns]]
    for length, cost in results["costs"].items():
        known = [f"**{length}**", *(f"{cost[key]:.0%}" for key in ("reached", "tokens", "time"))]
        for name, cells in results["lengths"][length].items():
            rows.append([*known, SIGNALS[name], *(show(cells, key) for key in keys)])
            known = [""] * 4
    rows.append(["*the paper's: 512*", "", "", "", "quality head", "", "", "", "0.824", ""])
    return markdown(rows)


def picture(results: dict, sample: Sample, scores: Tensor, rows: Tensor) -> Figure:
    """head.png: distributions of confidence and score (Fig. 2b); quality and cost by L (2d)."""
    names = ("mean of H_t", "quality score s′")
    titles = [f"{name} of right and wrong rollouts at L = {sample.detect}" for name in names]
    figure, (*pair, axes) = new_figure(*titles, "by detection length")
    right = sample.labels[rows].bool()
    for panel, values, name in zip(pair, (sample.signals["confidence"][sample.detect][rows], scores), names):
        edges = torch.linspace(values.min().item(), values.max().item() + 1e-9, 41).tolist()
        for of, color, label in ((right, "tab:green", "right"), (~right, "tab:red", "wrong")):
            panel.hist(values[of].tolist(), edges, density=True, alpha=0.5, color=color, label=label)
        panel.set(xlabel=name, ylabel="density")
        panel.legend()
    for name, color in zip(SIGNALS, ("tab:blue", "tab:green", "tab:orange", "tab:purple")):
        for key, style in (("auc_within", "-"), ("auc", "--")):
            cells = [results["lengths"][length][name].get(key) for length in sample.detections]
            values = [one.mean if one else math.nan for one in cells]
            axes.plot(sample.detections, values, style, color=color, marker=".", label=f"{SIGNALS[name]}, {key}")
    for key, style in (("tokens", "-"), ("time", ":")):
        shares = [cost[key] for cost in results["costs"].values()]
        axes.plot(sample.detections, shares, style, color="tab:gray", label=f"share of {key} to get there")
    axes.set(xlabel="L, tokens")
    axes.legend(fontsize=6)
    return figure


# ------------------------------------------------------------------ the program


def default_model() -> Path:
    """The last checkpoint of an ARRoL run of bench/runs, which is trained if it is missing."""
    plan, _ = runs.read_flags(runs.run_parser(__doc__), ["--seeds", "2"])
    plan = dataclasses.replace(plan, regimes={"sums": plan.regimes["sums"]})
    return checkpoint.complete(runs.train(plan, ["GRPO + ARRoL"])["sums"]["GRPO + ARRoL"][0].folder)[-1]


def measure(args: TtsArgs, problems: int) -> tuple[dict, Figure]:
    """Everything that the tables show, and the picture."""
    sampler = Sampler(args)
    if sampler.head is not None and sampler.head.extras:
        fail(f"--head {args.head}: it sees log-probs too, and here heads are compared that see states alone")
    sampler.prompts = dict(list(sampler.prompts.items())[:problems])
    with sampler.running():
        rollouts = sampler.sample(args.n)
        candidates = sampler.judge(rollouts)
        sample, logits = draw_sample(sampler, rollouts)
        cost = costs(sampler, sample)
    if not sample.reach(sample.detect).any():
        fail(f"--detect-length {sample.detect}: no rollout is longer")
    errors_of_q, *judged = calibration(sample)
    results = {
        "rollouts": len(sample.labels),
        "problems": len(sample.groups.unique()),
        "right": sample.labels.mean().item(),
        "mean_length": sample.lengths.double().mean().item(),
        "detect": sample.detect,
        "costs": cost,
        "lengths": {length: at_length(sample, length) for length in sample.detections},
        "calibration": errors_of_q,
        "training_states": training_states(sample, sampler.head),
        "scored_states": scored_states(candidates, logits),
    }
    return results, picture(results, sample, *judged)


def main() -> None:
    start, parser = time.perf_counter(), runs.results_parser(__doc__)
    parser.add_argument("--problems", type=int, default=200, help="of the set, the first ones")
    own, rest = parser.parse_known_args()
    if own.problems < 4:
        fail(f"--problems {own.problems}: must be at least 4, for head, posterior and judgement")
    args = parse_tts(["--n", "16", *([] if runs.names_model(rest) else ["--model", str(default_model())]), *rest])
    results, figure = measure(args, own.problems)
    results |= {
        "model": args.model.removeprefix(f"{runs.ROOT}/").removesuffix("/model"),
        "data": args.data,
        "seed": args.seed,
        "flags": sys.argv[1:],
        "machine": runs.machine(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    corners = {"calibration": "posterior", "training_states": "trained on", "scored_states": "state that is scored"}
    tables = {name: table(corner, results[name]) if results[name] else "No head." for name, corner in corners.items()}
    tables |= {"by_length": by_length(results), "machine": described(results["machine"])}
    save("head", own.results, results, figure, flags=" ".join(sys.argv[1:]) or "none", **tables)


if __name__ == "__main__":
    main()
