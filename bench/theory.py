"""Sec. 4.1 and App. A.4 against simulation: no model, about a minute of one core.

    python -m bench.theory

(a) Theorem 4.2's bound on |ρ̂ − ρ| beside what is measured, (b) what windows of survivors alone do
to the prior π, to q and to the keep rate, (c) how many of a group survive, Bernoulli against
systematic, (d) Eq. 2 as printed against `--tilt group`. All of it with the code that trains
(`calibration.py`).

The world: a prompt's success rate is μ ~ Beta(0.64, 1.36), with the mean 0.32 of Table 4's random
row; a rollout's latent success probability is q* ~ Beta(2μ, 2(1 − μ)), known once it is at
L_detect; its label is Bernoulli(q*), independent of all others.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import calibration as cal
from bench.runs import machine, results_parser
from bench.tables import Estimate, described, estimates, new_figure, save, table
from support.metrics import within_group_auc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (0, 1, 2, 3, 4)
# ρ, κ, --min-survivors and G: the defaults of training.
TARGET, KEEP, LEAST, SIZE = 0.5, 0.5, 2, 16
MEAN_RATE = 0.32
# δ of the theorem: how often its bound may fail.
DELTA = 0.05
NOISE = 0.1
SIZES = (4, 8, 16, 32, 64, 128)
BALANCES = (0.5, 1.0, 2.0)
# Of (b); the second half of its steps counts.
STEPS, COLD, PROMPTS = 45, 5, 64
BALANCE = "E[ρ̂(1 − ρ̂)]"
Cells = dict[str, float]
Rows = dict[str, dict[str, Estimate]]

# ------------------------------------------------------------------ the world


def population(groups: int, size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Success rates μ (groups, 1), latent q* and bool labels (groups, size)."""
    rate = rng.beta(2 * MEAN_RATE, 2 * (1 - MEAN_RATE), (groups, 1)).clip(1e-3, 1 - 1e-3)
    latent = rng.beta(2 * rate, 2 * (1 - rate), (groups, size))
    labels = rng.random((groups, size)) < latent
    return torch.from_numpy(rate), torch.from_numpy(latent), torch.from_numpy(labels)


def posteriors(rate: Tensor, latent: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    """What a head may make of q*, without labels: q (groups, size) by name."""
    noise = torch.from_numpy(rng.uniform(-NOISE, NOISE, latent.shape))
    return {"exact": latent, "noisy": (latent + noise).clamp(0, 1), "knows the prompt alone": rate.expand_as(latent)}


def survival(q: Tensor, tilt: cal.Tilt, balance: float) -> Tensor:
    """Survival probabilities (groups, size) of posteriors q, the bias solved over all of them."""
    settings = cal.Settings(balance=balance, tilt=tilt)
    t = cal.tilts(q.flatten(), group_ids(q).flatten(), settings)
    return cal.survival_probability(t, cal.solve_bias(t, settings), settings).view_as(q)


def draw(p: Tensor, how: str, generator: torch.Generator, least: int = LEAST) -> Tensor:
    """Keep decisions (groups, size); once only `least` of a group are left, they stay."""
    if how == "systematic":
        keep = cal.SystematicDraw(generator)(p.flatten(), group_ids(p).flatten()).view_as(p)
    else:
        keep = cal.draw_bernoulli(p, generator)
    return keep | ((~keep).cumsum(1) > p.shape[1] - least)


def group_ids(p: Tensor) -> Tensor:
    return torch.arange(len(p))[:, None].expand_as(p)


def positive_ratio(labels: Tensor, keep: Tensor) -> Tensor:
    """ρ̂ of each group's survivors (groups,)."""
    return (labels & keep).sum(1).double() / keep.sum(1)


def oracle_ratio(labels: Tensor, count: int) -> Tensor:
    """ρ̂ (groups,) of the `count` survivors nearest to balance, chosen by their labels."""
    right = labels.sum(1).double()
    return torch.maximum(torch.full_like(right, count // 2), count - (labels.shape[1] - right)).minimum(right) / count


# ------------------------------------------------------------------ (a) Theorem 4.2


def bound(latent: Tensor, epsilon: Tensor | float, target: float = TARGET, delta: float = DELTA) -> Tensor:
    """Theorem 4.2 for q* (groups, G): min_j |μ*_-j − ρ| + 2ε + √(log(2/δ) / (2(G − 1)))."""
    size = latent.shape[1]
    without = (latent.sum(1, keepdim=True) - latent) / (size - 1)
    return (without - target).abs().amin(1) + 2 * epsilon + math.sqrt(math.log(2 / delta) / (2 * (size - 1)))


def prune_one(q: Tensor, target: float = TARGET) -> Tensor:
    """The theorem's rule drops one: the mean q of the others is nearest to ρ; keep (groups, G)."""
    without = (q.sum(1, keepdim=True) - q) / (q.shape[1] - 1)
    return torch.arange(q.shape[1]) != (without - target).abs().argmin(1, keepdim=True)


def theorem(seed: int, groups: int = 4000) -> dict[str, Cells]:
    """Row `G, quality of q` -> means over groups."""
    rows = {}
    for size in SIZES:
        rng, generator = np.random.default_rng((seed, size)), torch.Generator().manual_seed(seed)
        rate, latent, labels = population(groups, size, rng)
        # min_j |μ*_-j − ρ|: the best that one removal can do
        best = bound(latent, 0.0) - bound(torch.full((1, size), TARGET), 0.0)
        for name, q in posteriors(rate, latent, rng).items():
            # with the smallest ε that these q allow
            limit, keep = bound(latent, (q - latent).abs().amax(1)), prune_one(q)
            off = (positive_ratio(labels, keep) - TARGET).abs()
            half = draw(survival(q, "group", 0.5), "bernoulli", generator)
            rows[f"{size}, {name}"] = {
                "bound": limit.mean().item(),
                "measured": off.mean().item(),
                "beyond the best, allowed": (limit - best).mean().item(),
                "measured, 95%": (off - best).quantile(1 - DELTA).item(),
                "violated": (off > limit).double().mean().item(),
                "says something": (limit < 0.5).double().mean().item(),
                "unpruned": (labels.double().mean(1) - TARGET).abs().mean().item(),
                "latent, unpruned": (latent.mean(1) - TARGET).abs().mean().item(),
                "one pruned": ((latent * keep).sum(1) / keep.sum(1) - TARGET).abs().mean().item(),
                "half pruned": ((latent * half).sum(1) / half.sum(1) - TARGET).abs().mean().item(),
            }
    return rows


# ------------------------------------------------------------------ (b) windows


class TwoBuffers(cal.Calibrator):
    """App. A.4 to the letter: a buffer of scores for each label, here of half the window each."""

    def label(self, scores: Tensor, labels: Tensor) -> None:
        scores, labels = (torch.cat(pair) for pair in zip(self._labelled, (scores, labels.bool())))
        newest = [(labels == value).nonzero()[:, 0][-self.window // 2 :] for value in (True, False)]
        self._labelled = [column[:0] for column in self._labelled]
        super().label(scores[torch.cat(newest)], labels[torch.cat(newest)])


# Name -> calibrator, and whether δ sees pruned rollouts.
WINDOWS: dict[str, tuple[type[cal.Calibrator], bool]] = {
    "ours": (cal.Calibrator, True),
    "survivors only": (cal.Calibrator, False),
    "two capped buffers": (TwoBuffers, True),
}


def score_of(latent: Tensor, rng: np.random.Generator) -> Tensor:
    """s′ of a head that knows q* roughly and is too timid: only q can be had from it, not q*."""
    return torch.sigmoid(0.5 * torch.logit(latent, 1e-6) + torch.from_numpy(rng.normal(0, 0.5, latent.shape))).float()


def truth_table(bins: int, rng: np.random.Generator) -> Tensor:
    """P(Y = 1 | b) of each bin (bins,) where nothing is pruned, from 2 million rollouts."""
    _, latent, _ = population(125_000, SIZE, rng)
    index = cal.bin_index(score_of(latent, rng), bins).flatten()
    return torch.bincount(index, latent.flatten(), bins) / torch.bincount(index, minlength=bins)


def windows(name: str, tilt: cal.Tilt | None, balance: float, seed: int, truth: Tensor) -> Cells:
    """One kind of windows over `STEPS` steps: means over what arrives in the second half of them.

    tilt None: random survivors, p = κ. Theory: survivors are drawn with weight p, so that π of a
    window of them is off by Cov(p, q*) / E[p]. With δ solved over survivors κ = E[p²] / E[p], hence
    E[p] = κ − Var(p) / E[p] under Eq. 2 as printed. The group tilt sums to 0 over whoever is left
    of a group, so that δ stays 0.
    """
    make, sees_pruned = WINDOWS[name]
    calibrator, rng, generator = make(), np.random.default_rng((seed, 1)), torch.Generator().manual_seed(seed)
    lines: list[Cells] = []
    for step in range(STEPS):
        _, latent, labels = population(PROMPTS, SIZE, rng)
        scores, groups = score_of(latent, rng), group_ids(latent) + step * PROMPTS
        q, p = calibrator.posterior(scores.flatten()), torch.ones_like(latent)
        if step >= COLD and tilt is None:
            p = torch.full_like(latent, KEEP)
        elif step >= COLD:
            settings = cal.Settings(balance=balance, tilt=tilt)
            p = calibrator.survival(q, groups.flatten(), settings).view_as(latent)
        keep = draw(p, "bernoulli", generator)
        best, arrivals = truth[cal.bin_index(scores, calibrator.bins)], labels.double().mean().item()
        wrong = q.view_as(latent) - best
        lines.append({
            "π − P(Y = 1)": calibrator.prior - arrivals,
            "theory of π": ((p * latent).mean() / p.mean() - latent.mean()).item(),
            "mean error of q": wrong.mean().item(),
            "RMSE of q": wrong.square().mean().sqrt().item(),
            "q shrinks": -((wrong * (best - best.mean())).mean() / best.var()).item(),
            "keep rate": keep.double().mean().item(),
            "theory of it": KEEP - (0.0 if sees_pruned or tilt != "printed" else (p.var() / p.mean()).item()),
        })  # fmt: skip
        seen = torch.ones_like(keep) if sees_pruned else keep
        calibrator.label(scores[keep], labels[keep])
        calibrator.observe(scores[seen], groups[seen])
    return {key: statistics.fmean(line[key] for line in lines[STEPS // 2 :]) for key in lines[0]}


# ------------------------------------------------------------------ (c) survivors per group


def survivors(seed: int, groups: int = 60, repeats: int = 100) -> dict[str, Cells]:
    """Variance, over draws, of the number of a group's survivors, without --min-survivors."""
    rows = {}
    for size in (4, 8, 16, 32, 64):
        _, latent, labels = population(groups, size, np.random.default_rng((seed, 2, size)))
        p = survival(latent, "group", 1.0)
        fraction = p.sum(1).frac()
        theory = {"bernoulli": (p * (1 - p)).sum(1).mean(), "systematic": (fraction * (1 - fraction)).mean()}
        for how, expected in theory.items():
            many = p.repeat(repeats, 1)
            keep = draw(many, how, torch.Generator().manual_seed(seed), least=0)
            count = keep.sum(1).double().view(repeats, groups)
            ratio = positive_ratio(labels.repeat(repeats, 1), keep)
            rows[f"{size}, {how}"] = {
                "variance": count.var(0).mean().item(),
                "theory": expected.item(),
                "most survivors / G": count.max().item() / size,
                "groups with fewer than 2": (count < LEAST).double().mean().item(),
                BALANCE: (ratio * (1 - ratio)).nan_to_num(0).mean().item(),
            }
    return rows


# ------------------------------------------------------------------ (d) tilts

# Of the success rate, for the picture.
BINS = 10


def tilts(seed: int, groups: int = 4000) -> tuple[dict[str, Cells], dict[str, list[float]]]:
    """Of each rule: means over groups, and ρ̂(1 − ρ̂) by success rate (`BINS` numbers)."""
    rng, generator = np.random.default_rng((seed, 3)), torch.Generator().manual_seed(seed)
    rate, latent, labels = population(groups, SIZE, rng)

    def kept(p: Tensor) -> Tensor:
        return positive_ratio(labels, draw(p, "bernoulli", generator))

    ratios = {
        "nothing pruned": positive_ratio(labels, torch.ones_like(labels)),
        "random": kept(torch.full_like(latent, KEEP)),
        "oracle": oracle_ratio(labels, int(KEEP * SIZE)),
    }
    for name, q in posteriors(rate, latent, rng).items():
        for tilt in ("printed", "group"):
            ratios |= {f"{tilt}, λ {balance:g}, {name}": kept(survival(q, tilt, balance)) for balance in BALANCES}
    place = cal.bin_index(rate[:, 0], BINS)
    sides = {"low": rate[:, 0] < 1 / 3, "middle": (rate[:, 0] - 0.5).abs() <= 1 / 6, "high": rate[:, 0] > 2 / 3}
    rows: dict[str, Cells] = {}
    by_rate: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        balance = ratio * (1 - ratio)
        rows[name] = {
            "E[ρ̂]": ratio.mean().item(),
            BALANCE: balance.mean().item(),
            "no variance": (balance == 0).double().mean().item(),
            **{side: balance[rows_of].mean().item() for side, rows_of in sides.items()},
        }
        by_rate[name] = (torch.bincount(place, balance, BINS) / torch.bincount(place, minlength=BINS)).tolist()
    return rows, by_rate


# ------------------------------------------------------------------ tables and picture

# Table 4, Qwen3-4B-Base: its groups are those of a training run, ours those of a fixed world.
PAPER = {
    "random": ("*the paper's, Table 4, random*", "0.32", "0.21"),
    "group, λ 0.5, noisy": ("*the paper's, Table 4, ARRoL*", "0.40", "0.23"),
}


def picture(results: dict) -> Figure:
    """theory.png: (a) the bound by G, (d) balance by success rate."""
    figure, (a, d) = new_figure("Theorem 4.2: |ρ̂ − ρ|, one rollout pruned", f"{BALANCE} above random pruning")
    for name, color in {"exact": "tab:blue", "noisy": "tab:orange", "knows the prompt alone": "tab:gray"}.items():
        rows = [results["theorem"][f"{size}, {name}"] for size in SIZES]
        for key, style in (("bound", "-"), ("measured", "--")):
            a.plot(SIZES, [row[key].mean for row in rows], color=color, linestyle=style, label=f"{key}, q {name}")
    a.axhline(0.5, color="black", linestyle=":", label="the largest possible")
    a.set_xscale("log", base=2)
    a.set(xlabel="G", ylim=(0, 2.4))
    lines = {"oracle": ("black", "-"), "nothing pruned": ("tab:gray", "-")}
    for balance, style in zip(BALANCES, ("-", "--", ":"), strict=True):
        lines |= {f"group, λ {balance:g}, noisy": ("tab:blue", style)}
        lines |= {f"printed, λ {balance:g}, noisy": ("tab:red", style)}
    middles, floor = (np.arange(BINS) + 0.5) / BINS, np.array(results["by_rate"]["random"])
    for name, (color, style) in lines.items():
        d.plot(middles, np.array(results["by_rate"][name]) - floor, color=color, linestyle=style, label=name)
    d.axhline(0, color="tab:gray", linewidth=0.8)
    d.set(xlabel="success rate of the prompt")
    for axes in (a, d):
        axes.legend(fontsize=7)
    return figure


def over_seeds(runs: list[dict[str, Cells]]) -> Rows:
    """Row -> column -> mean over seeds with its interval."""
    return {row: estimates([run[row] for run in runs]) for row in runs[0]}


def main() -> None:
    folder = results_parser(__doc__).parse_args().results
    # The tensors are small.
    torch.set_num_threads(1)
    start = time.process_time()
    truth = truth_table(128, np.random.default_rng(99))
    rules: dict[str, tuple[str, cal.Tilt | None, float]] = {"random": ("ours", None, 0.0)}
    for tilt in ("printed", "group"):
        rules |= {f"{tilt}, λ {balance:g}, {name}": (name, tilt, balance) for balance in (0.5, 1.0) for name in WINDOWS}
    by_seed = [tilts(seed) for seed in SEEDS]
    _, latent, labels = population(4000, SIZE, np.random.default_rng(0))
    results = {
        "theorem": over_seeds([theorem(seed) for seed in SEEDS]),
        "windows": over_seeds([{name: windows(*rule, seed, truth) for name, rule in rules.items()} for seed in SEEDS]),
        "survivors": over_seeds([survivors(seed) for seed in SEEDS]),
        "tilts": over_seeds([cells for cells, _ in by_seed]),
        "by_rate": {name: np.mean([rates[name] for _, rates in by_seed], 0).tolist() for name in by_seed[0][1]},
        "auc_within_of_exact_q": within_group_auc(latent.flatten(), labels.flatten(), group_ids(latent).flatten()),
        "machine": machine(),
        "seeds": SEEDS,
        "seconds": round(time.process_time() - start, 1),
    }
    corners = {"theorem": "G, quality of q", "windows": "tilt, λ, windows", "survivors": "G, draw"}
    tables = {name: table(corner, results[name]) for name, corner in corners.items()}
    tables |= {"tilts": table("rule", results["tilts"], PAPER), "machine": described(machine())}
    save("theory", folder, results, picture(results), **tables)


if __name__ == "__main__":
    main()
