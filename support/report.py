"""What a run leaves for people: metrics, metrics.jsonl, rollouts.jsonl, the table at the end, the picture of reward against time."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from engine import Rollout

Metrics = dict[str, float]


class RunLog:
    """Appends to the two JSONL files of a run folder and, if asked, to a tracker.

    resumed_step: lines of later steps, left by the interrupted run, are dropped first. write: whether this process does all that;
    of several ranks one does.
    """

    def __init__(
        self, folder: Path, tracker: str = "none", resumed_step: int | None = None, write: bool = True
    ) -> None:
        self.files: dict[str, TextIO] = {}
        self.track, self.close_tracker = _tracker(tracker if write else "none", folder)
        if not write:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "rollouts"):
            path = folder / f"{name}.jsonl"
            kept = [line for line in _lines(path) if line["step"] <= resumed_step] if resumed_step is not None else []
            temporary = folder / f".{name}.jsonl"  # never truncate the only copy
            temporary.write_text("".join(_dump(line) for line in kept), "utf-8")
            temporary.replace(path)
            self.files[name] = path.open("a", encoding="utf-8")

    def metrics(self, metrics: Metrics) -> None:
        """One line of metrics.jsonl; NaN and infinity, which JSON does not have, are left out."""
        finite = {
            name: value for name, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)
        }
        self._write("metrics", [finite])
        self.track({name: value for name, value in finite.items() if name != "step"}, int(metrics["step"]))

    def rollouts(self, rows: Iterable[dict]) -> None:
        """Lines of rollouts.jsonl."""
        self._write("rollouts", rows)

    def _write(self, name: str, rows: Iterable[dict]) -> None:
        if name in self.files:
            self.files[name].writelines(_dump(row) for row in rows)
            self.files[name].flush()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.close_tracker()


def _tracker(name: str, folder: Path) -> tuple[Callable[[Metrics, int], None], Callable[[], None]]:
    """Two functions, report(values, step) and close(); for "none" they do nothing."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        return lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()], writer.close
    if name == "wandb":
        import wandb

        run = wandb.init(project="arrol", name=folder.name, dir=str(folder), reinit="create_new")
        return lambda values, step: run.log(values, step=step), run.finish
    return lambda values, step: None, lambda: None


def _dump(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _lines(path: Path) -> list[dict]:
    """The whole lines of a JSONL file; a last one that was cut off by a crash is left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="\n") as file:  # not splitlines: U+2028 inside a string is no line end
        return [json.loads(line) for line in file if line.endswith("\n")]


def load_metrics(folder: Path) -> list[Metrics]:
    """The lines of a run's metrics.jsonl."""
    return _lines(folder / "metrics.jsonl")


def rollout_metrics(rollouts: list[Rollout], labels: list[float | None], detect_length: int) -> Metrics:
    """What the rollouts of a step tell about sampling and pruning; the README's glossary says what each number means.

    labels: 1.0 or 0.0, None for rollouts that were pruned or not judged. What is said of pruned ones is estimated: ratios and
    lengths from the scored survivors, each weighted by 1 / p (it stands for the 1 / p that arrived), and the chance that a group
    had no variance from how many survivors agree.
    """
    rows = [(r, y) for r, y in zip(rollouts, labels) if y is not None]
    pruned = [r for r in rollouts if r.finish == "pruned"]
    scored = [(r, y, 1 / (r.survival or 1.0)) for r, y in rows if len(r.token_ids) > detect_length]
    short = [y for r, y in rows if len(r.token_ids) <= detect_length]
    survived = sum(r.finish != "pruned" and len(r.token_ids) > detect_length for r in rollouts)  # judged or not
    arrived, weight = survived + len(pruned), sum(w for *_, w in scored)
    positive_scored = _ratio(sum(w * y for _, y, w in scored), weight)
    beyond = _ratio(sum(w * (len(r.token_ids) - detect_length) for r, _, w in scored), weight)
    groups = labels_by_group(rollouts, labels)
    means = [sum(known) / len(known) for known in groups.values() if known]
    lost = Counter(r.group for r in pruned)
    return {
        "rollouts": len(rollouts),
        "scored": arrived,
        "pruned": len(pruned),
        "keep_ratio": _ratio(survived, arrived),
        "reward": _ratio(
            sum(short) + (arrived * positive_scored if scored else 0.0), len(short) + (arrived if scored else 0)
        ),
        "positive_scored": positive_scored,
        "positive_kept": _ratio(sum(y for _, y, _ in scored), len(scored)),
        "rho_mean": _ratio(sum(means), len(means)),
        "rho_variance": _ratio(sum(m * (1 - m) for m in means), len(means)),
        "zero_variance_before": _ratio(sum(_chance_of_no_variance(groups[g], lost[g]) for g in groups), len(groups)),
        "zero_variance_after": _ratio(sum(len(set(known)) < 2 for known in groups.values()), len(groups)),
        "tokens_generated": sum(len(r.token_ids) for r in rollouts),
        "tokens_saved": beyond * len(pruned) if pruned else 0.0,
        "tokens_kept": sum(len(r.token_ids) for r in rollouts if r.finish != "pruned"),
        "length_mean": _ratio(sum(len(r.token_ids) for r, _ in rows), len(rows)),
        "truncated": _ratio(sum(r.finish == "length" for r, _ in rows), len(rows)),
    }


def labels_by_group(rollouts: list[Rollout], labels: list[float | None]) -> dict[int, list[float]]:
    """Labels of each group's survivors; a group without any is there, and empty."""
    found: dict[int, list[float]] = {rollout.group: [] for rollout in rollouts}
    for rollout, label in zip(rollouts, labels, strict=True):
        if label is not None:
            found[rollout.group].append(label)
    return found


def _chance_of_no_variance(labels: list[float], pruned: int) -> float:
    """Chance that all of a group were right, or all wrong, given its survivors: 0 if they differ, else by Laplace's rule of
    succession, (n + 1) / (n + m + 1) for m pruned siblings of n alike."""
    return 0.0 if len(set(labels)) > 1 else (len(labels) + 1) / (len(labels) + pruned + 1)


def _ratio(part: float, whole: float) -> float:
    """part / whole, NaN where there is nothing."""
    return part / whole if whole else math.nan


PHASES = ("generate", "grade", "logprob", "update", "head", "sync", "step")


def summary(runs: dict[str, list[Metrics]]) -> str:
    """The tables of phases, tokens and balance of one or two runs, the ratio of the first to the last behind, and of evaluations.

    runs: name -> lines of metrics.jsonl. Medians are over the steps in which pruning was on, where there is such a step.
    """
    names = list(runs)
    pruning = {
        name: [m for m in lines if m.get("pruning")] or [m for m in lines if m["step"] > 0]
        for name, lines in runs.items()
    }
    rows = [["median of a step", *names, *(["ratio"] if len(names) > 1 else [])]]

    def median(name: str, key: str) -> float:
        values = [m[key] for m in pruning[name] if key in m]
        return statistics.median(values) if values else math.nan

    def row(label: str, key: str, form: str, ratio: bool = False) -> None:
        values = [median(name, key) for name in names]
        cells = ["-" if math.isnan(value) else format(value, form) for value in values]
        comparable = ratio and len(values) > 1 and values[0] > 0 and values[-1] > 0
        rows.append(
            [label, *cells, *([f"{values[0] / values[-1]:.2f}x" if comparable else ""] if len(names) > 1 else [])]
        )

    for phase in PHASES:
        row("whole step, s" if phase == "step" else f"{phase}, s", f"time_{phase}", ".3f", ratio=True)
    row("tokens generated", "tokens_generated", ",.0f", ratio=True)
    row("tokens saved (estimate)", "tokens_saved", ",.0f")
    row("keep ratio of scored rollouts", "keep_ratio", ".3f")
    row("positive ratio before pruning (estimate)", "positive_scored", ".3f")
    row("positive ratio after pruning", "positive_kept", ".3f")
    row("zero-variance groups before pruning (estimate)", "zero_variance_before", ".3f")
    row("zero-variance groups after pruning", "zero_variance_after", ".3f")
    return f"{_aligned(rows)}\n\n{_aligned(evaluations(runs))}" if len(evaluations(runs)) > 1 else _aligned(rows)


def evaluations(runs: dict[str, list[Metrics]]) -> list[list[str]]:
    """A heading, and a row for each evaluation of each run: its step and all of its scores."""
    scores = {
        key: key.removeprefix("eval/").replace("/", " ")
        for m in sum(runs.values(), [])
        for key in m
        if key.startswith("eval/")
    }
    rows = [["evaluation", "step", *scores.values()]]
    for name, lines in runs.items():
        for m in lines:
            if any(key in m for key in scores):
                rows.append([name, f"{m['step']:.0f}", *(f"{m[key]:.3f}" if key in m else "-" for key in scores)])
    return rows


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def plot_reward(runs: dict[str, list[Metrics]], path: Path) -> None:
    """PNG of the mean reward of all rollouts against seconds of training; thin: each step, thick: mean of 5 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, lines), color in zip(runs.items(), ("tab:gray", "tab:blue")):
        steps = [m for m in lines if "reward" in m]
        seconds, reward = [m["wall_clock"] for m in steps], [m["reward"] for m in steps]
        smooth = [statistics.mean(reward[max(0, i - 4) : i + 1]) for i in range(len(reward))]
        axes.plot(seconds, reward, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(seconds, smooth, color=color, linewidth=2, label=name)
    axes.set(xlabel="wall-clock time of training (s)", ylabel="mean reward of all rollouts")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
