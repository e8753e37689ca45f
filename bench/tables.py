"""What a table is made of: means over seeds with intervals, Markdown, a picture, provenance.

    publish("accuracy", plan, runs, found, figure, table={"sums": markdown(rows)})

leaves bench/results/accuracy.json, .md and .png; the text around the table is
bench/notes/accuracy.md. Intervals are Student's t over seeds: with three of them the half-width is
2.5 standard deviations of a single run (4.3 / √3). Differences are taken seed by seed, since both
runs of a seed share data and evaluation; the runs of all methods are in the order of seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.runs import ROOT, Plan, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTES = ROOT / "bench" / "notes"
# 97.5% quantile of Student's t for 1, 2, … degrees of freedom; for more, the last one.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
COLORS = {
    "GRPO": "tab:gray",
    "GRPO + ARRoL": "tab:blue",
    "GRPO, G = 8": "tab:brown",
    "DAPO": "tab:olive",
    "DAPO + ARRoL": "tab:red",
    "GRPO + random": "tab:orange",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval, which one seed alone does not have (`estimate`)."""

    values: list[float]
    mean: float
    low: float | None
    high: float | None

    def show(self, form: str = ".3f") -> str:
        """`0.759 ± 0.012`; with a sign in the form, `+0.010 (−0.002 to +0.022)`."""
        if self.low is None or self.high is None:
            return format(self.mean, form).replace("-", "−")
        if form.startswith("+"):
            return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})".replace("-", "−")
        return f"{self.mean:{form}} ± {(self.high - self.low) / 2:{form}}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of one value per seed, at least one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(list(values), mean, None, None)
    half = T[min(len(values) - 1, len(T)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(list(values), mean, mean - half, mean + half)


def estimates(rows: Iterable[Mapping[str, float]]) -> dict[str, Estimate]:
    """Of each key, over the rows (one per seed) that have it."""
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: estimate([row[key] for row in rows if key in row]) for key in keys}


def show(found: Mapping[str, Estimate], key: str, form: str = ".3f", unit: str = "") -> str:
    """A cell of a table; a dash where no run has a number."""
    return found[key].show(form) + unit if key in found else "–"


# ------------------------------------------------------------------ text


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def table(
    corner: str, body: Mapping[str, Mapping[str, Estimate]], paper: Mapping[str, Sequence[str]] | None = None
) -> str:
    """A table with a column for each key; `paper` has rows to put behind those of the same name."""
    columns = list(dict.fromkeys(key for row in body.values() for key in row))
    lines = [[corner, *columns]]
    for name, row in body.items():
        lines.append([name, *(show(row, key) for key in columns)])
        if paper and name in paper:
            lines.append([*paper[name], *[""] * (len(lines[0]) - len(paper[name]))])
    return markdown(lines)


def by_regime(plan: Plan, tables: Mapping[str, str]) -> str:
    """The tables of all regimes, each below its name and flags; of a single one without."""
    if len(tables) == 1:
        return "".join(tables.values())
    titles = {regime: f"**{regime}** (`{' '.join(plan.regimes[regime])}`)" for regime in tables}
    return "\n\n".join(f"{titles[regime]}\n\n{table}" for regime, table in tables.items())


def provenance(runs: Mapping[str, Mapping[str, Sequence[Run]]], plan: Plan) -> dict:
    """Flags, machines, code and time of runs: what the JSON of all tables of runs begins with."""
    listed = [run for methods in runs.values() for some in methods.values() for run in some]
    machines = {json.dumps(run.record["machine"], sort_keys=True): run.record["machine"] for run in listed}
    return {
        "seeds": plan.seeds,
        "flags": plan.flags,
        "regimes": plan.regimes,
        "machines": list(machines.values()),
        "code": sorted({run.record["code"] for run in listed}),
        "seconds_of_runs": sum(run.record["seconds"] for run in listed),
        "one_core": plan.cores != [None],
    }


def described(made: dict) -> str:
    """A `machine` in words."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"{made['processor']}, {made['cores']} core{'s' * (made['cores'] > 1)}, {versions}"


def measured_on(results: dict) -> str:
    """The sentence under a table."""
    seeds, machines = ", ".join(map(str, results["seeds"])), "; ".join(map(described, results["machines"]))
    flags = f"; flags `{' '.join(results['flags'])}`" if results["flags"] else ""
    clock = ", each run on one core, in seconds of that core" if results.get("one_core") else ""
    return (
        f"Seeds {seeds}{flags}{clock}; {machines}; code {', '.join(results['code'])}; "
        f"{results['seconds_of_runs']:,.0f} s of runs, which tables share."
    )


# ------------------------------------------------------------------ pictures and files


def new_figure(*panels: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for each title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = len(panels) // rows
    size = (6.5 * columns if columns > 1 else 8.0, 4.5 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, title in zip(grid.flat, panels, strict=True):
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    return figure, list(grid.flat)


def plot_seeds(axes: Axes, name: str, color: str, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Each seed's curve thin, and their mean where all of them are. Points by x."""
    for curve in curves:
        axes.plot(*zip(*curve), color=color, alpha=0.35, linewidth=0.7)
    if not curves:
        return
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = sorted({x for curve in curves for x, _ in curve if first <= x <= last})
    mean = np.mean([np.interp(grid, *zip(*curve)) for curve in curves], axis=0)
    axes.plot(grid, mean, color=color, linewidth=2.2, label=name, zorder=3)


def save(name: str, folder: Path, results: dict, figure: Figure | None = None, **tables: str) -> None:
    """Write `name`.json, .md and, of a figure, .png, and print the Markdown.

    Its text is bench/notes/`name`.md, filled in with numbers of `results` and with the `tables`.
    """
    text = (NOTES / f"{name}.md").read_text("utf-8").format(**results | tables)
    folder.mkdir(parents=True, exist_ok=True)
    plain = json.dumps(results, indent=2, ensure_ascii=False, default=dataclasses.asdict, allow_nan=False)
    (folder / f"{name}.json").write_text(plain + "\n", "utf-8")
    (folder / f"{name}.md").write_text(text, "utf-8")
    if figure:
        figure.savefig(folder / f"{name}.png", dpi=110)
    print(f"\n{text}\nresults: {folder / name}.json and what lies beside it", flush=True)


def publish(
    name: str,
    plan: Plan,
    runs: Mapping[str, Mapping[str, Sequence[Run]]],
    found: dict,
    figure: Figure,
    **tables: Mapping[str, str],
) -> None:
    """`save` the tables of training runs, by regime, with what these were measured on."""
    results = provenance(runs, plan) | found
    text = {key: by_regime(plan, of_regimes) for key, of_regimes in tables.items()}
    save(name, plan.results, results, figure, measured_on=measured_on(results), **text)
