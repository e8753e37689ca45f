"""Held-out accuracy of GRPO without and with ARRoL, at equal steps, time and tokens (Table 1).

    python -m bench.accuracy                                  the embedded model, two regimes
    python -m bench.accuracy --model Qwen/Qwen3-1.7B-Base --eval-data math500 amc23

Equal time is when the faster run of a seed ended, equal tokens when the more frugal one did. The
other one's score lies there on the straight line between its evaluations before and after. Learning
slows down, so that the true curve is above such a line and the slower method is put a little low.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.runs import Run, interpolate, read_flags, run_parser, train
from bench.tables import COLORS, Estimate, estimates, markdown, new_figure, plot_seeds, publish, show

METHODS = ("GRPO", "GRPO + ARRoL", "GRPO, G = 8")
# Methods that the table could do without have three seeds.
FEWER = dict.fromkeys(METHODS[2:], 3)
AXES = ("steps", "time", "tokens")
# Mean of six sets in percent, without and with ARRoL, and the speed-up.
PAPER = {
    "GRPO": [
        ("Table 1, Qwen3-1.7B-Base", 34.79, 37.09, 1.61),
        ("Table 1, Qwen3-4B-Base", 51.01, 53.54, 1.63),
        ("Table 1, Qwen3-8B-Base", 56.66, 59.53, 1.62),
        ("Table 1, Llama-3.2-1B-Instruct", 14.63, 17.49, 1.67),
    ],
    "DAPO": [("Table 2, Qwen3-1.7B-Base", 36.43, 39.42, 1.70)],
}


def against(plain: Run, run: Run) -> dict[str, float]:
    """A run beside the unpruned one of its seed: scores, differences of avg, times."""
    found = {
        "avg": run.score("avg"),
        "greedy": run.score("greedy"),
        "seconds": run.seconds,
        "speed-up": plain.seconds / run.seconds,
        "speed-up of a step": plain.step_seconds / run.step_seconds,
    }
    for axis in AXES:
        one, other = plain.curve("avg", axis), run.curve("avg", axis)
        end = min(one[-1][0], other[-1][0])
        found[f"equal {axis}"] = interpolate(other, end) - interpolate(one, end)
    return found


def table(found: dict[str, dict[str, Estimate]], samples: int) -> str:
    plain, *others = found
    differences = [f"− {plain}, equal {axis} (95% interval)" for axis in AXES]
    times = ["training, s", "speed-up", "of a step after the cold start"]
    rows = [["", f"avg@{samples}", "greedy", *differences, *times]]
    for method, one in found.items():
        pruned = method in others
        gains = [show(one, f"equal {axis}", "+.3f") if pruned else "" for axis in AXES]
        speedups = [show(one, key, ".2f", " ×") if pruned else "" for key in ("speed-up", "speed-up of a step")]
        seeds = len(one["avg"].values)
        name = method if seeds == len(found[plain]["avg"].values) else f"{method} ({seeds} seeds)"
        rows.append([name, show(one, "avg"), show(one, "greedy"), *gains, show(one, "seconds", ".0f"), *speedups])
    for name, before, after, speedup in PAPER[plain]:
        gain = f"{(after - before) / 100:+.3f}"
        rows.append([f"paper, {name}", f"{after / 100:.3f}", "", gain, "", "", "", f"{speedup:.2f} ×", ""])
    return markdown(rows)


def main(doc: str, name: str = "accuracy", methods: Sequence[str] = METHODS, seeds: Sequence[int] = range(5)) -> None:
    plan, _ = read_flags(run_parser(doc, seeds))
    runs = train(plan, methods, FEWER)
    found = {
        regime: {method: estimates(map(against, of[methods[0]], some)) for method, some in of.items()}
        for regime, of in runs.items()
    }
    figure, panels = new_figure(*(f"{regime}: held-out accuracy" for regime in runs))
    for axes, of in zip(panels, runs.values(), strict=True):
        for method, some in of.items():
            plot_seeds(axes, method, COLORS[method], [run.curve("avg", "time") for run in some])
        axes.set(xlabel="seconds of training", ylabel="accuracy")
        axes.legend()
    tables = {r: table(one, runs[r][methods[0]][0].args["eval_n"]) for r, one in found.items()}
    publish(name, plan, runs, {"regimes": found, "paper": PAPER[methods[0]]}, figure, table=tables)


if __name__ == "__main__":
    main(__doc__)
