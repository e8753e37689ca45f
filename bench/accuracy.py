"""Held-out accuracy of GRPO and DAPO without and with ARRoL (Tables 1 and 2).

    python -m bench.accuracy                                  the embedded model, 12 runs
    python -m bench.accuracy --model Qwen/Qwen3-1.7B-Base --eval-data math500 amc23

Equal time is when the faster run of a seed ended. The slower run's score at that time lies on the
straight line between its evaluations before and after. Learning slows down, so that the true curve
is above such a line and the slower method is put a little lower than it was.
"""

from __future__ import annotations

from bench.runs import Run, read_flags, run_parser, train
from bench.tables import COLORS, Estimate, estimates, markdown, new_figure, plot_seeds, publish, show

PAIRS = {"GRPO": "GRPO + ARRoL", "DAPO": "DAPO + ARRoL"}
# Mean of six sets in percent, without and with ARRoL, and the speed-up.
PAPER = [
    ("Table 1, GRPO, Qwen3-1.7B-Base", 34.79, 37.09, 1.61),
    ("Table 1, GRPO, Qwen3-4B-Base", 51.01, 53.54, 1.63),
    ("Table 1, GRPO, Qwen3-8B-Base", 56.66, 59.53, 1.62),
    ("Table 1, GRPO, Llama-3.2-1B-Instruct", 14.63, 17.49, 1.67),
    ("Table 2, DAPO, Qwen3-1.7B-Base", 36.43, 39.42, 1.70),
]
COLUMNS = ("avg, equal steps", "greedy, equal steps", "pass@16, equal steps", "avg, equal time", "greedy, equal time")


def compare(plain: Run, pruned: Run) -> dict[str, float]:
    """Two runs of one seed: times, speed-ups, scores at equal steps and at equal time."""
    end = min(plain.seconds, pruned.seconds)
    found = {
        "seconds, plain": plain.seconds,
        "seconds, pruned": pruned.seconds,
        "speed-up": plain.seconds / pruned.seconds,
        "speed-up of a step": plain.step_seconds / pruned.step_seconds,
    }
    for kind in plain.evaluations()[-1][1]:
        for name, at in ((f"{kind}, equal steps", None), (f"{kind}, equal time", end)):
            one, other = plain.score(kind, at), pruned.score(kind, at)
            found |= {f"{name}, plain": one, f"{name}, pruned": other, f"{name}, difference": other - one}
    return found


def table(found: dict[str, dict[str, Estimate]], samples: int) -> str:
    heads = [column.replace("avg", f"avg@{samples}") for column in COLUMNS]
    rows = [["", *heads, "training, s", "speed-up", "speed-up of a step after the cold start"]]
    for plain, pruned in PAIRS.items():
        pair = found[plain]
        for method, who in ((plain, "plain"), (pruned, "pruned")):
            scores = [show(pair, f"{column}, {who}") for column in COLUMNS]
            rows.append([method, *scores, show(pair, f"seconds, {who}", ".0f"), "", ""])
        gains = [show(pair, f"{column}, difference", "+.3f") for column in COLUMNS]
        speedups = [show(pair, key, ".2f", " ×") for key in ("speed-up", "speed-up of a step")]
        rows.append([f"**difference, {plain}** (95% interval)", *gains, "", *speedups])
    for name, before, after, speedup in PAPER:
        gain = f"{before / 100:.3f} → {after / 100:.3f} ({(after - before) / 100:+.3f})"
        rows.append([f"paper, {name}: mean of six sets", gain, *[""] * len(COLUMNS), f"{speedup:.2f} ×", ""])
    return markdown(rows)


def main() -> None:
    plan, _ = read_flags(run_parser(__doc__))
    runs = train(plan, [method for pair in PAIRS.items() for method in pair])
    found = {a: estimates(map(compare, runs[a], runs[b])) for a, b in PAIRS.items()}
    samples = runs["GRPO"][0].args["eval_n"]
    figure, (axes,) = new_figure(f"held-out accuracy (avg@{samples}) against time of training")
    for method, some in runs.items():
        curves = [[(when, score["avg"]) for when, score in run.evaluations()] for run in some]
        plot_seeds(axes, method, COLORS[method], curves)
    axes.set(xlabel="seconds of training", ylabel="accuracy")
    axes.legend()
    publish("accuracy", plan, runs, {"pairs": found, "paper": PAPER}, figure, table=table(found, samples))


if __name__ == "__main__":
    main()
