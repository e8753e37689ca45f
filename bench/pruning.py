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
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.runs import Run, read_flags, run_parser, train
from bench.tables import COLORS, Estimate, estimates, markdown, new_figure, plot_seeds, publish, show
from calibration import Calibrator, Settings, Tilt, draw_bernoulli
from support.grader import Verdict

METHODS = ("GRPO", "GRPO + random", "GRPO + ARRoL")
SCORED = "GRPO, scored"
# Tilt and λ; None: all survive with probability κ. "ARRoL" is added, as the run's flags say.
Rule = tuple[Tilt, float] | None
RULES: dict[str, Rule] = {
    "random": None,
    "Eq. 2 as printed, λ = 0.5": ("printed", 0.5),
    "ARRoL, λ = 0.5": ("group", 0.5),
}
DRAWS = 20
# Table 4: E[ρ̂] and E[ρ̂(1 − ρ̂)] of random pruning and of ARRoL.
PAPER = [
    ("Qwen3-4B-Base", (0.32, 0.21), (0.40, 0.23)),
    ("Llama-3.2-1B-Instruct", (0.14, 0.11), (0.23, 0.14)),
]
MEASURES = ("rho_mean", "rho_variance", "zero_variance")
COLUMNS = (*MEASURES, "keep_ratio", "avg")


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
    """`MEASURES` of one group of 0/1 rewards, and how many there are."""
    mean = statistics.fmean(rewards)
    alike = float(len(set(rewards)) < 2)
    return {"rho_mean": mean, "rho_variance": mean * (1 - mean), "zero_variance": alike, "kept": len(rewards)}


def steps_of(run: Run) -> Iterator[tuple[int, list[dict]]]:
    """Each step's rows of rollouts.jsonl, with their reward: None if it was not judged."""
    with (run.folder / "rollouts.jsonl").open(encoding="utf-8", newline="\n") as file:
        for step, lines in itertools.groupby(map(json.loads, file), key=operator.itemgetter("step")):
            rows = list(lines)
            for row in rows:
                row["reward"] = Verdict(row["verdict"], row["answer"]).reward if row["verdict"] else None
            yield step, rows


def survival(rows: list[dict], rule: Rule, keep_ratio: float, calibrator: Calibrator, args: dict) -> Tensor:
    """Survival probabilities (N,) of a step's rollouts under a rule; 1 where not scored."""
    if rule is None:
        return torch.tensor([1.0 if row["score"] is None else keep_ratio for row in rows], dtype=torch.float64)
    scores = torch.tensor([math.nan if row["score"] is None else row["score"] for row in rows])
    q, groups = calibrator.posterior(scores), torch.tensor([row["group"] for row in rows])
    tilt, strength = rule
    settings = Settings(keep_ratio, args["positive_target"], strength, args["p_min"], args["p_max"], tilt)
    return calibrator.survival(q, groups, settings)


def complete_groups(rows: list[dict]) -> list[list[int]]:
    """The row numbers of each group of which all were judged."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[row["group"]].append(number)
    return [members for members in groups.values() if all(rows[i]["reward"] is not None for i in members)]


def select(run: Run, keep_ratio: float) -> dict[str, dict[str, float]]:
    """Rule or selector -> means of `MEASURES` over what it leaves of complete groups.

    The cold start is left out. Windows hold all rollouts, not survivors alone. Rules draw `DRAWS`
    times, independently (`--survival bernoulli`), and see all of a group at once.
    """
    args, calibrator = run.args, Calibrator(run.args["bins"], run.args["alpha"], run.args["window"])
    rules = RULES | {"ARRoL": (args["tilt"], args["balance"])}
    generator = torch.Generator().manual_seed(run.seed)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for step, rows in steps_of(run):
        if step > args["cold_start"] and calibrator.ready:
            groups = complete_groups(rows)
            for members in groups:
                rewards = [rows[i]["reward"] for i in members]
                count = max(1, round(keep_ratio * len(rewards)))
                found["nothing pruned"].append(balance(rewards))
                for name, selector in (("PODS", pods), ("CPPO", cppo)):
                    found[name].append(balance([rewards[i] for i in selector(rewards, count)]))
            for name, rule in rules.items():
                p = survival(rows, rule, keep_ratio, calibrator, args)
                for _ in range(DRAWS):
                    keep = draw_bernoulli(p, generator)
                    for members in groups:
                        # Once only --min-survivors are left, all others stay.
                        own = keep[members] | ((~keep[members]).cumsum(0) > len(members) - args["min_survivors"])
                        if own.any():
                            found[name].append(balance([rows[i]["reward"] for i, kept in zip(members, own) if kept]))
        scored = [row for row in rows if row["score"] is not None]
        known = [row for row in scored if row["reward"] is not None]
        calibrator.label(torch.tensor([r["score"] for r in known]), torch.tensor([r["reward"] for r in known]))
        scores, ids = torch.tensor([r["score"] for r in scored]), torch.tensor([r["group"] for r in scored])
        calibrator.observe(scores, ids.long())
    return {name: {key: statistics.fmean(row[key] for row in some) for key in some[0]} for name, some in found.items()}


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
    columns = ("E[ρ̂]", "E[ρ̂(1 − ρ̂)]", "above random (95% interval)", "groups without variance", "kept of a group")
    rows = [["on the same rollouts", *columns]]
    for name in ("nothing pruned", *RULES, "ARRoL", "PODS", "CPPO"):
        one, gain = found.get(name, {}), gains.get(name, {})
        cells = [show(one, "rho_mean"), show(one, "rho_variance"), show(gain, "rho_variance", "+.3f")]
        rows.append([name, *cells, show(one, "zero_variance"), show(one, "kept", ".1f")])
    return markdown(rows)


def main() -> None:
    plan, _ = read_flags(run_parser(__doc__))
    runs = train(plan, [*METHODS, SCORED])
    keep_ratio = plan.folder("GRPO + ARRoL", plan.seeds[0])[1].keep_ratio
    chosen = [select(run, keep_ratio) for run in runs[SCORED]]
    names = dict.fromkeys(name for one in chosen for name in one)
    gains = {
        name: estimates([{key: one[name][key] - one["random"][key] for key in MEASURES} for one in chosen])
        for name in names
        if name != "random"
    }
    measured = {method: [of_run(run) for run in runs[method]] for method in METHODS}
    both = zip(measured["GRPO + random"], measured["GRPO + ARRoL"])
    found = {
        "keep_ratio": keep_ratio,
        "runs": {method: estimates(rows) for method, rows in measured.items()},
        "difference": estimates([{key: b[key] - a[key] for key in COLUMNS} for a, b in both]),
        "same_rollouts": {name: estimates([one[name] for one in chosen]) for name in names},
        "above_random": gains,
        "paper": PAPER,
    }
    figure, panels = new_figure("mean ρ̂(1 − ρ̂) of survivors, at each step", "groups without variance")
    for axes, key in zip(panels, ("rho_variance", "zero_variance_after"), strict=True):
        for method in METHODS:
            curves = [[(line["step"], line[key]) for line in run.steps if key in line] for run in runs[method]]
            plot_seeds(axes, method, COLORS[method], curves)
        axes.set(xlabel="step")
    panels[0].legend()
    tables = {
        "table": table(found["runs"], found["difference"]),
        "same_rollouts": same_rollouts(found["same_rollouts"], gains),
    }
    publish("pruning", plan, runs, found, figure, draws=str(DRAWS), **tables)


if __name__ == "__main__":
    main()
