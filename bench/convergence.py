"""Reward against time of training (Fig. 4).

    python -m bench.convergence

The reward is that of all rollouts that were sampled, pruned ones by their survivors' weights. A
step's reward is that of the policy it begins with, so it is placed where the step begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.runs import Run, interpolate, read_flags, run_parser, train
from bench.tables import COLORS, Estimate, estimates, markdown, new_figure, plot_seeds, publish, show

METHODS = ("GRPO", "GRPO + ARRoL", "GRPO + random")
SMOOTH = 5


def smoothed(run: Run) -> list[tuple[float, float]]:
    """Seconds of training when each step began, and mean reward of the `SMOOTH` steps around it."""
    rewards, around = [line["reward"] for line in run.steps], SMOOTH // 2
    return [
        (line["wall_clock"] - line["time_step"], statistics.fmean(rewards[max(0, i - around) : i + around + 1]))
        for i, line in enumerate(run.steps)
    ]


def reached(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """When the curve first is at `level` or above, None if never."""
    return next((when for when, reward in curve if reward >= level), None)


def against(plain: Run, run: Run, end: float) -> dict[str, float]:
    """A run beside that of GRPO with the same seed: rewards at the end and after `end` seconds, and
    when it got to GRPO's last reward, if it did."""
    curve, level = smoothed(run), smoothed(plain)[-1][1]
    found = {"seconds": run.seconds, "last": curve[-1][1], "equal time": interpolate(curve, end)}
    there, plain_there = reached(curve, level), reached(smoothed(plain), level)
    if there is not None:
        found["time"] = there
    if there and plain_there is not None:
        found["ahead"] = plain_there / there
    return found


def compare(runs: dict[str, list[Run]]) -> dict[str, dict[str, Estimate]]:
    """`against`, for each method, over the seeds."""
    ends = [min(smoothed(run)[-1][0] for run in of_seed) for of_seed in zip(*runs.values())]
    return {method: estimates(map(against, runs["GRPO"], own, ends)) for method, own in runs.items()}


def table(found: dict[str, dict[str, Estimate]]) -> str:
    rows = [["", "training, s", "last reward", "reward at equal time", "time to GRPO's last reward, s", "ahead"]]
    for method, one in found.items():
        seeds, there = (len(one[key].values) if key in one else 0 for key in ("last", "time"))
        time = show(one, "time", ".0f") + (f" ({there} of {seeds} seeds got so far)" if there < seeds else "")
        cells = [show(one, "seconds", ".0f"), show(one, "last"), show(one, "equal time"), time]
        rows.append([method, *cells, show(one, "ahead", ".2f", " ×")])
    rows.append(["paper, Fig. 4, Qwen3-1.7B-Base", "", "", "higher with ARRoL", "less with ARRoL", ""])
    return markdown(rows)


def main() -> None:
    plan, _ = read_flags(run_parser(__doc__))
    runs = train(plan, METHODS)
    found = {regime: compare(of) for regime, of in runs.items()}
    figure, panels = new_figure(*(f"{regime}: reward of all rollouts, mean of {SMOOTH} steps" for regime in runs))
    for axes, of in zip(panels, runs.values(), strict=True):
        for method, some in of.items():
            plot_seeds(axes, method, COLORS[method], [smoothed(run) for run in some])
        axes.set(xlabel="seconds of training", ylabel="mean reward")
    panels[0].legend(loc="lower right")
    results = {"regimes": found, "smoothed_over_steps": SMOOTH}
    publish("convergence", plan, runs, results, figure, table={regime: table(of) for regime, of in found.items()})


if __name__ == "__main__":
    main()
