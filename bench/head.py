"""What the quality head can know, from when on, and how well calibrated its posterior is (Fig. 2 b-d).

    python -m bench.head                                    a checkpoint of the ARRoL runs of bench/runs
    python -m bench.head --model runs/NAME/checkpoint-20    any flag of tts.py goes too

Samples 16 answers to each of 200 held-out problems, and takes the states that produced their tokens from
a transformers pass. At each of eight detection lengths L a head is trained on one half of the problems and
judged on the other, both ways, for three splits; it sees the rollouts that go on beyond L, as in training.
Beside it: the mean of H_t and the sum of the sampled tokens' log-probs, over the same L tokens. Then, at the
run's own L_detect: the distribution of scores, the calibration of the posterior on problems that neither head
nor calibration has seen, which training states make the best head, and which state to vote with.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import tts
from bench import runs
from bench.tables import described, markdown, new_figure, save, table
from calibration import Calibrator, bin_index
from engine import Rollout
from quality_head import HeadTrainer, QualityHead
from support import checkpoint
from support.args import TtsArgs, fail, parse_tts
from support.metrics import auc, ece, head_metrics, spearman, within_group_auc
from support.test_time import Candidates, Sampler, signal_quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Detection lengths, of the mean length.
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
SPLITS = (0, 1, 2)
# Calls of HeadTrainer.train, each 4 passes: AUCs change by less than their spread from 4 to 16 of them.
ROUNDS = 8
# Samples per problem of the generations that are timed, and how often.
TIMED, REPEATS = 2, 3
BINS = (128, 32, 10)
SIGNALS = {
    "head": "quality head",
    "head + log-prob": "head on state and log-probs",
    "confidence": "mean of H_t",
    "log-prob": "sum of log-probs",
}
Cells = dict[str, float]

# ------------------------------------------------------------------ the sample


@dataclass
class Sample:
    """Judged rollouts, and the states that produced token L of each, the last token of shorter ones."""

    # L, or "last" -> (N, hidden) fp32
    states: dict[int | str, Tensor]
    # (N,) tokens; 0 or 1; problem
    lengths: Tensor
    labels: Tensor
    groups: Tensor
    # "confidence" (mean of H_t), "log-prob" (sum) -> L -> (N,) over the first L tokens
    signals: dict[str, dict[int, Tensor]]
    # the eight L, and the run's own
    detections: list[int]
    detect: int

    def reach(self, length: int) -> Tensor:
        """Which rollouts (N,) are scored at L: those that have not ended there."""
        return self.lengths > length


@torch.no_grad()
def visit_states(sampler: Sampler, rollouts: Sequence[Rollout], visit: Callable[[int, Tensor], None]) -> None:
    """Call visit(i, states (tokens, hidden)) for each rollout i with the states that produced its tokens.

    All states of all rollouts would not fit into memory.
    """
    model = AutoModelForCausalLM.from_pretrained(sampler.args.model, dtype=torch.float32).eval()
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))
    for start in range(0, len(order), 128):
        rows = order[start : start + 128]
        prompts = [sampler.prompts[rollouts[i].group].token_ids for i in rows]
        ids = [torch.tensor(prompt + rollouts[i].token_ids) for prompt, i in zip(prompts, rows)]
        # A causal model never looks at padding on the right.
        states = model.model(pad_sequence(ids, batch_first=True)).last_hidden_state
        for row, i in enumerate(rows):
            visit(i, states[row, len(prompts[row]) - 1 : len(ids[row]) - 1])


def draw_sample(sampler: Sampler, rollouts: list[Rollout]) -> tuple[Sample, dict[str, list[float]]]:
    """The sample of graded rollouts; and the logit that the run's own head gives each, by state that it scores."""
    judged = [i for i, rollout in enumerate(rollouts) if rollout.reward is not None]
    lengths = torch.tensor([len(rollouts[i].token_ids) for i in judged])
    detections = sorted({max(1, round(f * lengths.double().mean().item())) for f in FRACTIONS})
    detect, positions = sampler.args.detect_length, [*detections, sampler.args.detect_length]
    picked: dict[int, Tensor] = {}
    logits: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(rollouts))

    def visit(i: int, states: Tensor) -> None:
        picked[i] = torch.stack([*(states[min(length, len(states)) - 1] for length in positions), states[-1]])
        if sampler.head is not None:
            scores = sampler.head(states)
            logits["the one that produced the last token"][i] = scores[-1].item()
            logits["at L_detect"][i] = scores[min(detect, len(scores)) - 1].item()
            logits["the opening of the box"][i] = scores[box(sampler.tokenizer, rollouts[i].token_ids)].item()
            logits["mean score of the last ten tokens"][i] = scores[-10:].mean().item()
            logits["mean score of all tokens"][i] = scores.mean().item()

    visit_states(sampler, rollouts, visit)

    def until(length: int, values: list[Sequence[float]]) -> Tensor:
        return torch.tensor([float(sum(v[:length])) for v in values], dtype=torch.float64)

    traces, logprobs = [rollouts[i].confidences for i in judged], [rollouts[i].logprobs for i in judged]
    states = torch.stack([picked[i] for i in judged]).float().unbind(1)
    sample = Sample(
        states=dict(zip([*positions, "last"], states, strict=True)),
        lengths=lengths,
        labels=torch.tensor([rollouts[i].reward for i in judged]),
        groups=torch.tensor([rollouts[i].group for i in judged]),
        signals={
            "confidence": {length: until(length, traces) / lengths.clamp_max(length) for length in positions},
            "log-prob": {length: until(length, logprobs) for length in positions},
        },
        detections=detections,
        detect=detect,
    )
    return sample, logits


def box(tokenizer, token_ids: list[int]) -> int:
    """The number of the token that opens the last box; of the last token where there is none."""
    text, opened = "", len(token_ids) - 1
    for number, token in enumerate(token_ids):
        text += tokenizer.decode([token])
        if "\\boxed{" in text:
            text, opened = "", number
    return opened


def costs(sampler: Sampler, sample: Sample) -> list[Cells]:
    """For each L: who gets there, and which share of all tokens and of all generation time that takes.

    Lengths are timed in turn, and shares are medians over the turns: a machine that gets slower does so for all.
    """
    limits, shares = [*sample.detections, sampler.sampling.max_tokens], []
    prompts = {group: prompt.token_ids for group, prompt in sampler.prompts.items()}
    for _ in range(REPEATS):
        seconds = []
        for limit in limits:
            sampling, start = dataclasses.replace(sampler.sampling, max_tokens=limit), time.perf_counter()
            sampler.engine.generate(prompts, TIMED, sampling, seed=sampler.args.seed, rollout_seeds=True)
            seconds.append(time.perf_counter() - start)
        shares.append([one / seconds[-1] for one in seconds])
    return [
        {
            "reached": sample.reach(length).double().mean().item(),
            "tokens": (sample.lengths.clamp_max(length).sum() / sample.lengths.sum()).item(),
            "time": statistics.median(share),
        }
        # the last share is all of it
        for length, share in zip(sample.detections, zip(*shares, strict=True))
    ]


# ------------------------------------------------------------------ heads


def halves(groups: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Two-fold split over problems: (rows to train on, rows to judge on), each (N,) bool, both ways."""
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
    """Accuracy on new rows of the threshold that is best on the old ones: right is above it. NaN without rows."""
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
    return {"auc": auc(v, y), "auc_within": within_group_auc(v, y, g), "accuracy": accuracy, "spearman": spearman(v, y)}


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the halves, of those in which the value is defined."""

    mean: float | None
    deviation: float | None

    def show(self) -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:.3f}" + ("" if self.deviation is None else f" ± {self.deviation:.3f}")


Rows = dict[str, dict[str, Spread]]


def spreads(rows: dict[str, list[Cells]]) -> Rows:
    """Row -> column -> mean and deviation over the halves."""
    table: Rows = {name: {} for name in rows}
    for name, cells in rows.items():
        for key in cells[0]:
            known = [one[key] for one in cells if not math.isnan(one[key])]
            mean = statistics.fmean(known) if known else None
            table[name][key] = Spread(mean, statistics.stdev(known) if len(known) > 1 else None)
    return table


def with_logprob(states: Tensor, logprob: Tensor, train: Tensor) -> Tensor:
    """States (N, hidden + 1) with the sum of the log-probs, on their scale, standardised by the rows `train`."""
    known = logprob[train]
    column = (logprob - known.mean()) / known.std().clamp_min(1e-6) * states[train].std()
    return torch.cat([states, column[:, None].float()], 1)


def at_length(sample: Sample, length: int) -> Rows:
    """How well each signal tells right from wrong at L; `auc_within_same`: on the rollouts that all L score."""
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
    """AUC at L_detect and at the last token, of heads trained on either, on both, and the run's own."""
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


def calibration(sample: Sample) -> tuple[Rows, dict[str, list[list[float]]], tuple[Tensor, Tensor]]:
    """Errors of the posterior by number of bins, its `curve`, and (scores, row numbers) of heads on unseen problems.

    Head, posterior and errors are of a half and two quarters of the problems: in training, too, scores enter
    the window before the head sees their labels.
    """
    here, states, labels = sample.reach(sample.detect), sample.states[sample.detect], sample.labels
    rows: dict[str, list[Cells]] = defaultdict(list)
    points: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
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
                points[name].append((q, labels[new]))
    curves = {name: curve(*map(torch.cat, zip(*parts))) for name, parts in points.items()}
    return spreads(rows), curves, tuple(map(torch.cat, zip(*seen)))


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


def scored_states(problems: list[Candidates], logits: dict[str, list[float]]) -> Rows:
    """State that the run's own head scores -> AUC, and accuracy of the vote by the scores' ranks."""
    rows: Rows = {}
    for name, values in logits.items():
        # in the order of the rollouts
        number = iter(values)
        for one in problems:
            one.signals = {"head": [next(number) for _ in one.rollouts]}
        won = statistics.fmean(tts.winners(one.classes, one.signals)["ARRoL"] in one.right for one in problems)
        cells = signal_quality(problems)["head"] | {"ARRoL vote": won}
        rows[name] = {key: Spread(value, None) for key, value in cells.items()}
    return rows


# ------------------------------------------------------------------ tables and picture


def by_length(results: dict) -> str:
    columns = ("Spearman", "AUC", "within", "within, same", "accuracy", "base rate")
    keys = ("spearman", "auc", "auc_within", "auc_within_same", "accuracy", "base_rate")
    rows = [["L", "beyond", "tokens", "time", "signal", *columns]]
    for length, cost in results["costs"].items():
        known = [f"**{length}**", *(f"{cost[key]:.0%}" for key in ("reached", "tokens", "time"))]
        for name, cells in results["lengths"][length].items():
            rows.append([*known, SIGNALS[name], *(cells[key].show() if key in cells else "" for key in keys)])
            known = [""] * 4
    rows.append(["*the paper's: 512*", "", "", "", "quality head", "a plateau", "", "", "", "0.824", ""])
    return markdown(rows)


def picture(results: dict, sample: Sample, judged: tuple[Tensor, Tensor]) -> Figure:
    """head.png: distributions of confidence and score (Fig. 2b), correlation and cost by length (2d), calibration."""
    names = ("mean of H_t", "quality score s′")
    titles = [f"{name} of right and wrong rollouts at L = {sample.detect}" for name in names]
    figure, (a, b, c, d) = new_figure(*titles, "by detection length", "calibration on unseen problems", rows=2)
    found, rows = judged
    right = sample.labels[rows].bool()
    for axes, values, name in zip((a, b), (sample.signals["confidence"][sample.detect][rows], found), names):
        edges = torch.linspace(values.min().item(), values.max().item() + 1e-9, 41).tolist()
        for of, color, label in ((right, "tab:green", "right"), (~right, "tab:red", "wrong")):
            axes.hist(values[of].tolist(), edges, density=True, alpha=0.5, color=color, label=label)
        axes.set(xlabel=name, ylabel="density")
    for name, color in zip(SIGNALS, ("tab:blue", "tab:green", "tab:orange", "tab:purple")):
        for key, style in (("auc_within", "-"), ("spearman", "--")):
            means = [results["lengths"][str(length)][name][key].mean for length in sample.detections]
            values = [math.nan if mean is None else mean for mean in means]
            c.plot(sample.detections, values, style, color=color, marker=".", label=f"{SIGNALS[name]}, {key}")
    for key, style in (("tokens", "-"), ("time", ":")):
        shares = [cost[key] for cost in results["costs"].values()]
        c.plot(sample.detections, shares, style, color="tab:gray", label=f"share of {key} to get there")
    c.set(xlabel="L, tokens")
    d.plot([0, 1], [0, 1], color="tab:gray", linewidth=0.8)
    for name, points in results["curves"].items():
        q, ratio, _ = zip(*points)
        d.plot(q, ratio, marker=".", label=f"{name}: ECE {results['calibration'][name]['ECE'].show()}")
    d.set(xlabel="mean q", ylabel="positive ratio")
    for axes in (a, b, c, d):
        axes.legend(fontsize=7)
    return figure


# ------------------------------------------------------------------ the program


def default_model() -> Path:
    """The last checkpoint of an ARRoL run of bench/runs, which is trained if it is missing."""
    plan, _ = runs.read_flags(runs.run_parser(__doc__), ["--seeds", "2"])
    return checkpoint.complete(runs.train(plan, ["GRPO + ARRoL"])["GRPO + ARRoL"][0].folder)[-1]


def measure(args: TtsArgs, problems: int) -> tuple[dict, Sample, tuple[Tensor, Tensor]]:
    """Everything that the tables and the picture show."""
    sampler = Sampler(args)
    sampler.prompts = dict(list(sampler.prompts.items())[:problems])
    with sampler.running():
        rollouts = sampler.sample(args.n)
        candidates = sampler.judge(rollouts)
        sample, logits = draw_sample(sampler, rollouts)
        cost = costs(sampler, sample)
    if not sample.reach(sample.detect).any():
        fail(f"--detect-length {sample.detect}: no rollout is longer")
    quality, curves, judged = calibration(sample)
    results = {
        "rollouts": len(sample.labels),
        "problems": len(sample.groups.unique()),
        "right": sample.labels.mean().item(),
        "mean_length": sample.lengths.double().mean().item(),
        "detect": sample.detect,
        "costs": {str(length): cells for length, cells in zip(sample.detections, cost)},
        "lengths": {str(length): at_length(sample, length) for length in sample.detections},
        "calibration": quality,
        "curves": curves,
        "training_states": training_states(sample, sampler.head),
        "scored_states": scored_states(candidates, logits),
    }
    return results, sample, judged


def main() -> None:
    start, parser = time.perf_counter(), runs.results_parser(__doc__)
    parser.add_argument("--problems", type=int, default=200, help="of the set, the first ones")
    own, rest = parser.parse_known_args()
    if own.problems < 4:
        fail(f"--problems {own.problems}: must be at least 4, for head, posterior and judgement")
    args = parse_tts(["--n", "16", *([] if runs.names_model(rest) else ["--model", str(default_model())]), *rest])
    results, sample, judged = measure(args, own.problems)
    results |= {
        "model": args.model.removeprefix(f"{runs.ROOT}/").removesuffix("/model"),
        "data": args.data,
        "seed": args.seed,
        "flags": sys.argv[1:],
        "machine": runs.machine(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    corners = {"calibration": "posterior", "training_states": "trained on", "scored_states": "state that is scored"}
    tables = {name: table(corner, results[name]) for name, corner in corners.items() if results[name]}
    words = {"flags": " ".join(sys.argv[1:]) or "none", "machine": described(results["machine"])}
    save(
        "head", own.results, results, picture(results, sample, judged), by_length=by_length(results), **words, **tables
    )


if __name__ == "__main__":
    main()
