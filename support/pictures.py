"""Pictures of a run: reward against time, and one group of rollouts."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from support.metrics import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"right": "tab:green", "wrong": "tab:red", "no answer": "tab:orange", None: "lightgray"}


@contextlib.contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Draw in the block, without a screen; then the PNG is written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    yield axes
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_reward(runs: dict[str, list[Metrics]], path: Path) -> None:
    """Mean reward of all rollouts against seconds of training; thin: each step, thick: mean of 5 steps."""
    with picture(path, 7, 4.2) as axes:
        for (name, lines), color in zip(runs.items(), ("tab:gray", "tab:blue")):
            steps = [m for m in lines if "reward" in m]
            seconds, reward = [m["wall_clock"] for m in steps], [m["reward"] for m in steps]
            smooth = [statistics.mean(reward[max(0, i - 4) : i + 1]) for i in range(len(reward))]
            axes.plot(seconds, reward, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(seconds, smooth, color=color, linewidth=2, label=name)
        axes.set(xlabel="wall-clock time of training (s)", ylabel="mean reward of all rollouts")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")


def plot_rollouts(rows: list[dict], detect_length: int, path: Path) -> None:
    """A group of rollouts: a bar over the tokens of each, grey and cut off where it was pruned.

    rows: lines of rollouts.jsonl, see `report.rollout_rows`. Beside a bar, where it was scored:
    score s', posterior q, survival probability p.
    """
    longest, seen = max(detect_length, *(row["tokens"] for row in rows)), set()
    with picture(path, 9, 1.2 + 0.3 * len(rows)) as axes:
        for place, row in enumerate(rows):
            kind = "pruned" if row["pruned"] else row["verdict"] or "not judged"
            color = COLORS.get(row["verdict"], "tab:purple")
            axes.barh(place, row["tokens"], 0.7, color=color, label=None if kind in seen else kind)
            seen.add(kind)
            if row["pruned"]:
                axes.plot(row["tokens"], place, marker="x", color="black")
            if row["score"] is not None:
                numbers = f"s′ {row['score']:.2f}   q {row['posterior']:.2f}   p {row['survival']:.2f}"
                axes.text(1.02 * longest, place, numbers, va="center", family="monospace", fontsize=8)
        axes.axvline(detect_length, color="black", linestyle=":", linewidth=1)
        axes.set(xlim=(0, 1.4 * longest), xlabel="tokens (dotted: L_detect)")
        axes.set_yticks(range(len(rows)), [str(row["sample"]) for row in rows], fontsize=8)
        axes.set(ylabel="rollout", title=f"step {rows[0]['step']}: {rows[0]['prompt']}"[:100])
        axes.invert_yaxis()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8, frameon=False)


def plot_votes(name: str, sizes: list[int], curve: dict[str, list[float]], path: Path) -> None:
    """Accuracy on the set `name` against the number of candidates, a line for each voting rule."""
    strong = {"majority": "black", "ARRoL": "tab:red", "oracle": "gray"}
    with picture(path, 8, 5) as axes:
        for rule, values in curve.items():
            width, style = 2.5 if rule in strong else 1, "--" if "top" in rule else "-"
            axes.plot(sizes, values, style, marker=".", color=strong.get(rule), linewidth=width, label=rule)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, sizes)
        axes.set(xlabel="candidates per problem", ylabel="accuracy", title=name)
        axes.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
