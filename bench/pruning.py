"""What random pruning, ARRoL and two selectors after generation leave of each group (Table 4).

    python -m bench.pruning

Random and ARRoL are runs of their own, so that their policies differ, too. To compare on the same
rollouts, a run is trained that scores all rollouts and prunes none; from its scores and windows
each rule says what it would have kept. So do PODS (the subset whose rewards vary most) and CPPO
(the largest absolute advantages). They see the rewards of rollouts that have all been generated:
they save no generation time and are a yardstick.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import calibration as cal
from bench.runs import Run, read_flags, run_parser, train
from bench.tables import COLORS, Estimate, estimates, markdown, new_figure, plot_seeds, publish, show
from support.grader import Verdict

METHODS = ("GRPO", "GRPO + random", "GRPO + ARRoL")
SCORED = "GRPO, scored"


@dataclass(frozen=True)
class Rule:
    """p = clip(κ + δ + tilt + extra, p_min, p_max), δ such that E[p] = κ."""

    balance: float | None = None  # λ; None: p = κ
    tilt: cal.Tilt = "group"
    # of posteriors q (N,) and the means μ_g (N,) of their groups
    extra: Callable[[Tensor, Tensor], Tensor] = lambda q, mean: torch.zeros_like(q)
    systematic: bool = False  # draws
    oracle: bool = False  # the score is the reward


def focus(f: float) -> Callable[[Tensor, Tensor], Tensor]:
    """f μ_g (1 − μ_g): κ by group, more of those that the head expects to be undecided."""
    return lambda q, mean: f * mean * (1 - mean)


def decided(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """−1, which is p_min, for groups of which less than a share is expected to be right, or wrong."""
    return lambda q, mean: -1.0 * (torch.minimum(mean, 1 - mean) < share)


def marginal(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """β times the information n₊ n₋ / (n₊ + n₋) that one rollout more would add, expected.

    A right one adds (1 − μ_g)², a wrong one μ_g²; expected are μ_g (1 − μ_g), which chooses among
    groups, and (1 − 2 μ_g) (q − μ_g), which evens out each.
    """
    return lambda q, mean: beta * (q * (1 - mean) ** 2 + (1 - q) * mean**2)


# The flags of the run are one more, "ARRoL".
RULES = {
    "random": Rule(),
    "random, systematic draws": Rule(systematic=True),
    "Eq. 2 as printed, λ = 0.5": Rule(0.5, "printed"),
    "ARRoL, λ = 0.5": Rule(0.5),
    "ARRoL, λ = 2": Rule(2.0),
    "ARRoL, λ = 8": Rule(8.0),
    "ARRoL, λ = 2, systematic draws": Rule(2.0, systematic=True),
    "ARRoL, λ = 8, systematic draws": Rule(8.0, systematic=True),
    "λ = 0, focus 4": Rule(0.0, extra=focus(4)),
    "ARRoL, λ = 2, focus 2": Rule(2.0, extra=focus(2)),
    "ARRoL, λ = 2, focus 4": Rule(2.0, extra=focus(4)),
    "ARRoL, λ = 2, focus 2, systematic draws": Rule(2.0, extra=focus(2), systematic=True),
    "ARRoL, λ = 2, focus 4, systematic draws": Rule(2.0, extra=focus(4), systematic=True),
    "ARRoL, λ = 2, decided groups dropped": Rule(2.0, extra=decided(0.1)),
    "marginal information, β = 2": Rule(0.0, extra=marginal(2)),
    "ARRoL, λ = 2, oracle": Rule(2.0, oracle=True),
    "ARRoL, λ = 2, focus 2, oracle": Rule(2.0, extra=focus(2), oracle=True),
}
DRAWS = 20
# Table 4: E[ρ̂] and E[ρ̂(1 − ρ̂)] of random pruning and of ARRoL.
PAPER = [
    ("Qwen3-4B-Base", (0.32, 0.21), (0.40, 0.23)),
    ("Llama-3.2-1B-Instruct", (0.14, 0.11), (0.23, 0.14)),
]
COLUMNS = ("rho_mean", "rho_variance", "zero_variance", "keep_ratio", "avg")


def pods(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` rollouts whose rewards vary most (PODS): the highest and the lowest.

    >>> pods([1.0, 0.0, 0.0, 0.0], 2)
    [0, 1]
    """
    if not 1 <= count <= len(rewards):
        raise ValueError(f"of {len(rewards)} rollouts {count} cannot be kept")
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    subsets = [[*order[:top], *order[len(order) - (count - top) :]] for top in range(count + 1)]
    return sorted(max(subsets, key=lambda subset: statistics.pvariance([rewards[i] for i in subset])))


def cppo(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` rollouts with the largest absolute advantage (CPPO).

    The group's standard deviation divides all of its advantages and changes no order.
    """
    mean = statistics.fmean(rewards)
    return sorted(sorted(range(len(rewards)), key=lambda i: -abs(rewards[i] - mean))[:count])


def balance(rewards: Sequence[float]) -> dict[str, float]:
    """What one group of 0/1 rewards, n₊ ones and n₋ zeros, has to teach.

    Its gradient is the mean over the right less the mean over the wrong ones, with a variance of
    1/n₊ + 1/n₋ times a constant ("noise"; infinite if all are alike). "information": its inverse.
    """
    right, wrong, mean = sum(rewards), len(rewards) - sum(rewards), statistics.fmean(rewards)
    found = {"rho_mean": mean, "rho_variance": mean * (1 - mean), "zero_variance": float(right * wrong == 0)}
    found |= {"information": right * wrong / len(rewards), "kept": len(rewards)}
    return found | ({"noise": 1 / right + 1 / wrong} if right * wrong else {})


def means(groups: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of `balance`, each over the groups that have it, and the information of a survivor."""
    keys = dict.fromkeys(key for one in groups for key in one)
    found = {key: statistics.fmean(one[key] for one in groups if key in one) for key in keys}
    return found | {"per_survivor": found["information"] / found["kept"]}


def steps_of(run: Run) -> Iterator[tuple[int, list[dict]]]:
    """Each step's rows of rollouts.jsonl, with their reward: None if it was not judged."""
    with (run.folder / "rollouts.jsonl").open(encoding="utf-8", newline="\n") as file:
        for step, lines in itertools.groupby(map(json.loads, file), key=operator.itemgetter("step")):
            rows = list(lines)
            for row in rows:
                row["reward"] = Verdict(row["verdict"], row["answer"]).reward if row["verdict"] else None
            yield step, rows


def group_means(q: Tensor, groups: Tensor) -> Tensor:
    """Mean posterior μ_g (N,) of each row's group, over those that are numbers."""
    ids, row = torch.unique(groups, return_inverse=True)
    counts = torch.bincount(row, q.isfinite().double(), len(ids))
    return (torch.bincount(row, q.nan_to_num(), len(ids)) / counts.clamp_min(1))[row]


def survival(
    rule: Rule, scores: Tensor, groups: Tensor, keep_ratio: float, calibrator: cal.Calibrator, args: dict
) -> Tensor:
    """Survival probabilities (N,) fp64 of a step's scores (N,), NaN where there is none: there 1."""
    if rule.balance is None:
        return torch.where(scores.isnan(), 1.0, keep_ratio).double()
    bounds = args["p_min"], args["p_max"]
    settings = cal.Settings(keep_ratio, args["positive_target"], rule.balance, *bounds, rule.tilt)

    def tilt(scores: Tensor, groups: Tensor) -> Tensor:
        q = calibrator.posterior(scores)
        return cal.tilts(q, groups, settings) + rule.extra(q, group_means(q, groups))

    window = calibrator.state_dict()
    bias = cal.solve_bias(tilt(window["observed_scores"], window["observed_groups"]), settings)
    return cal.survival_probability(tilt(scores, groups), bias, settings)


def complete_groups(rows: list[dict]) -> list[list[int]]:
    """The row numbers of each group of which all were judged."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[row["group"]].append(number)
    return [members for members in groups.values() if all(rows[i]["reward"] is not None for i in members)]


def select(run: Run, keep_ratio: float) -> dict[str, dict[str, float]]:
    """Rule or selector -> `means` over what it leaves of complete groups.

    The cold start is left out. Windows hold all rollouts, not survivors alone. Rules draw `DRAWS`
    times, and see all of a group at once.
    """
    args, generator = run.args, torch.Generator().manual_seed(run.seed)
    flags = (args[name] for name in ("balance", "tilt"))
    rules = RULES | {"ARRoL": Rule(*flags, systematic=args["survival"] == "systematic")}
    calibrators = {oracle: cal.Calibrator(args["bins"], args["alpha"], args["window"]) for oracle in (False, True)}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for step, rows in steps_of(run):
        ids = torch.tensor([row["group"] for row in rows])
        head, labels = (
            torch.tensor([math.nan if row[key] is None else row[key] for row in rows]) for key in ("score", "reward")
        )
        scores = {False: head, True: torch.where(head.isnan(), math.nan, 0.25 + labels / 2)}
        if step > args["cold_start"] and calibrators[True].ready:
            groups = complete_groups(rows)
            for members in groups:
                rewards = labels[members].tolist()
                count = max(1, round(keep_ratio * len(rewards)))
                found["nothing pruned"].append(balance(rewards))
                for name, selector in (("PODS", pods), ("CPPO", cppo)):
                    found[name].append(balance([rewards[i] for i in selector(rewards, count)]))
            for name, rule in rules.items():
                p = survival(rule, scores[rule.oracle], ids, keep_ratio, calibrators[rule.oracle], args)
                for _ in range(DRAWS):
                    keep = (
                        cal.SystematicDraw(generator)(p, ids) if rule.systematic else cal.draw_bernoulli(p, generator)
                    )
                    for members in groups:
                        # Once only --min-survivors are left, all others stay.
                        own = keep[members] | ((~keep[members]).cumsum(0) > len(members) - args["min_survivors"])
                        if own.any():
                            found[name].append(balance(labels[members][own].tolist()))
        judged = ~labels.isnan()
        for oracle, calibrator in calibrators.items():
            calibrator.label(scores[oracle][judged], labels[judged])
            calibrator.observe(scores[oracle], ids)
    return {name: means(some) for name, some in found.items()}


def of_run(run: Run) -> dict[str, float]:
    """`COLUMNS` of a run."""
    metrics = ("rho_mean", "rho_variance", "zero_variance_after", "keep_ratio")
    return dict(zip(COLUMNS, [*map(run.mean, metrics), run.score("avg")], strict=True))


def table(found: dict[str, dict[str, Estimate]], difference: dict[str, Estimate]) -> str:
    rows = [["", "E[ρ̂]", "E[ρ̂(1 − ρ̂)]", "groups without variance", "kept of scored", "accuracy (avg)"]]
    rows += [[m, *(show(found[m], key) for key in COLUMNS)] for m in METHODS]
    rows.append(["**ARRoL − random** (95% interval)", *(show(difference, key, "+.3f") for key in COLUMNS)])
    for model, *values in PAPER:
        for method, (mean, variance) in zip(("random", "ARRoL"), values, strict=True):
            rows.append([f"paper, Table 4, {model}, {method}", f"{mean:.2f}", f"{variance:.2f}", "", "", ""])
    return markdown(rows)


def same_rollouts(found: dict[str, dict[str, Estimate]], gains: dict[str, dict[str, Estimate]]) -> str:
    above = "above random (95% interval)"
    rows = [["on the same rollouts", "kept of a group", "E[ρ̂]", "E[ρ̂(1 − ρ̂)]", above, "groups without variance", above]]
    rows[0] += ["information", "per survivor", above, "1/n₊ + 1/n₋ of the others"]
    for name in ("nothing pruned", *RULES, "ARRoL", "PODS", "CPPO"):
        one, gain = found.get(name, {}), gains.get(name, {})
        cells = [show(one, "kept", ".1f"), show(one, "rho_mean"), show(one, "rho_variance")]
        cells += [show(gain, "rho_variance", "+.3f"), show(one, "zero_variance"), show(gain, "zero_variance", "+.3f")]
        cells += [show(one, "information"), show(one, "per_survivor"), show(gain, "per_survivor", "+.3f")]
        rows.append([name, *cells, show(one, "noise")])
    return markdown(rows)


def of_regime(runs: dict[str, list[Run]], keep_ratio: float) -> dict:
    """What a regime's runs say: of their own, and with each rule's choice among the same rollouts."""
    chosen = [select(run, keep_ratio) for run in runs[SCORED]]
    names = dict.fromkeys(name for one in chosen for name in one)
    above = {
        name: [
            {key: one[name][key] - value for key, value in one["random"].items() if key in one[name]} for one in chosen
        ]
        for name in names
        if name != "random"
    }
    measured = {method: [of_run(run) for run in runs[method]] for method in METHODS}
    both = zip(measured["GRPO + random"], measured["GRPO + ARRoL"])
    return {
        "keep_ratio": keep_ratio,
        "runs": {method: estimates(rows) for method, rows in measured.items()},
        "difference": estimates([{key: b[key] - a[key] for key in COLUMNS} for a, b in both]),
        "same_rollouts": {name: estimates([one[name] for one in chosen]) for name in names},
        "above_random": {name: estimates(rows) for name, rows in above.items()},
    }


def main() -> None:
    plan, _ = read_flags(run_parser(__doc__))
    runs, found = train(plan, [*METHODS, SCORED]), {}
    for regime, of in runs.items():
        found[regime] = of_regime(of, plan.folder(regime, "GRPO + ARRoL", plan.seeds[0])[1].keep_ratio)
    keys = {"rho_variance": "mean ρ̂(1 − ρ̂) of survivors", "zero_variance_after": "groups without variance"}
    figure, panels = new_figure(*(f"{regime}: {title}" for regime in runs for title in keys.values()), rows=len(runs))
    for axes, (of, key) in zip(panels, itertools.product(runs.values(), keys), strict=True):
        for method in METHODS:
            curves = [[(line["step"], line[key]) for line in run.steps if key in line] for run in of[method]]
            plot_seeds(axes, method, COLORS[method], curves)
        axes.set(xlabel="step")
    panels[0].legend()
    tables = {
        "table": {regime: table(one["runs"], one["difference"]) for regime, one in found.items()},
        "same_rollouts": {r: same_rollouts(one["same_rollouts"], one["above_random"]) for r, one in found.items()},
    }
    publish("pruning", plan, runs, {"regimes": found, "paper": PAPER, "draws": DRAWS}, figure, **tables)


if __name__ == "__main__":
    main()
