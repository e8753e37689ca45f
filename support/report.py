"""What a run leaves for people: metrics.jsonl, rollouts.jsonl, a progress bar, warnings, tables, pictures."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from engine import Rollout
from support.args import Args
from support.data import Prompt
from support.distributed import gather, rank
from support.metrics import Metrics
from support.show import aligned, load_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of metrics whose name does not begin with that of their group; the others are about rollouts.
GROUPS = {
    "time": "wall_clock memory_gb epoch",
    "prune": "pruning scored pruned keep_ratio positive_scored positive_kept rho_mean rho_variance"
    " zero_variance_after tokens_saved tokens_late",
    "head": "prior ece scores_rejected",
    "loss": "loss kl entropy grad_norm clip_low clip_high lr gap_mean gap_max optimizer_steps skipped nonfinite",
}
ROLLOUT_FIELDS = "group sample finish tail answer verdict score posterior survival advantage".split()
COLORS = {"right": "tab:green", "wrong": "tab:red", "no answer": "tab:orange", "pruned": "lightgray"}


class Clock:
    """Seconds by phase, added up until they are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def read(self) -> Metrics:
        """`time_<phase>` of each phase; starts anew."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return {f"time_{phase}": value for phase, value in seconds.items()}


class RunLog(contextlib.AbstractContextManager):
    """The files of a run folder, the tracker and the progress bar; all of them on rank 0 alone.

    resumed_step: lines of later steps, left by the interrupted run, are dropped first.
    """

    def __init__(self, args: Args, name: str, resumed_step: int | None = None) -> None:
        self.args, self.folder, self.write = args, Path(args.output), rank() == 0
        self.warned, self.zeros, self.last_group = False, 0, []
        if self.write:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in ("metrics.jsonl", "rollouts.jsonl"):
                kept = [m for m in load_metrics(self.folder, file) if m["step"] <= resumed_step] if resumed_step else []
                # Never truncate the only copy.
                temporary = self.folder / f".{file}"
                temporary.unlink(missing_ok=True)
                _append(temporary, kept)
                temporary.replace(self.folder / file)
        # Now that the folder is there: wandb would write elsewhere without a word.
        self.track, self.close_tracker = _tracker(args.tracker if self.write else "none", self.folder, args)
        self.bar = tqdm(total=args.steps, initial=resumed_step or 0, desc=name, unit="step", disable=not self.write)

    def __exit__(self, *raised: object) -> None:
        self.bar.close()
        if self.last_group:
            plot_rollouts(self.last_group, self.args.detect_length, self.folder / "rollouts.png")
        self.close_tracker()

    def metrics(self, metrics: Metrics) -> None:
        """One line of metrics.jsonl; NaN and infinity, which JSON does not have, are left out."""
        finite = {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}
        if self.write:
            _append(self.folder / "metrics.jsonl", [finite])
        named = {tracker_name(name): value for name, value in finite.items() if name != "step"}
        self.track(named, int(metrics["step"]))

    def step(self, metrics: Metrics, prompts: dict[int, Prompt], rollouts: list[Rollout]) -> None:
        """One training step: its line, its rollouts and their picture, the bar, a warning. All ranks call it."""
        self.metrics(metrics | {"memory_gb": max(gather(memory_in_use()))})
        if not self.write:
            return
        first = [r for r in rollouts if r.group == next(iter(prompts))]
        logged = {"none": [], "sample": first, "all": rollouts}[self.args.log_rollouts]
        _append(self.folder / "rollouts.jsonl", rollout_rows(int(metrics["step"]), prompts, logged))
        self.last_group = rollout_rows(int(metrics["step"]), prompts, first)
        rate = metrics["tokens_generated"] / metrics["time_generate"]
        self.bar.set_postfix_str(f"reward {metrics['reward']:.2f}, kept {metrics['keep_ratio']:.2f}, {rate:,.0f} tok/s")
        self.bar.update()
        self.zeros = self.zeros + 1 if metrics["reward"] == 0 else 0
        if not self.warned and (fault := find_fault(rollouts, self.zeros)):
            self.warned = True
            self.bar.write(f"{Path(sys.argv[0]).name}: warning: {fault}", file=sys.stderr)


def find_fault(rollouts: list[Rollout], zeros: int) -> str | None:
    """Why nothing can be learnt, with the flag that helps and an example. zeros: steps in a row without a reward."""
    judged = [r for r in rollouts if r.verdict is not None]
    faults = {
        "were cut off; raise --max-length": [r for r in judged if r.finish == "length"],
        "give no answer; see --instruction": [r for r in judged if r.verdict == "no answer"],
        "got no reward, as in two steps before; an easier --dataset may help": judged if zeros > 2 else [],
    }
    for fault, found in faults.items():
        if len(found) > 0.8 * len(judged):
            end = "".join(found[0].tail.strip().splitlines()[-1:])
            return f"{len(found)} of {len(judged)} survivors {fault}. One of them ends: {end!r}"
    return None


def rollout_rows(step: int, prompts: dict[int, Prompt], rollouts: Iterable[Rollout]) -> list[dict]:
    """The lines of rollouts.jsonl."""
    rows = []
    for r in rollouts:
        problem = prompts[r.group].problem
        row = {"step": step, "prompt": problem.id, "gold": problem.answer, "tokens": len(r.token_ids)}
        row |= {name: getattr(r, name) for name in ROLLOUT_FIELDS} | {"pruned": r.finish == "pruned"}
        rows.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})
    return rows


def memory_in_use() -> float:
    """GB of the GPU that are taken, by whomever; without one, resident GB of this process.

    malloc gives back what is free first (10 ms): fragments would look like a leak.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def tracker_name(metric: str) -> str:
    """A metric's name in a tracker, which groups by what stands before the slash.

    >>> [tracker_name(name) for name in ("keep_ratio", "time_sync", "reward", "eval/aime24/greedy")]
    ['prune/keep_ratio', 'time/sync', 'rollout/reward', 'eval/aime24/greedy']
    """
    if "/" in metric:
        return metric
    group, _, rest = metric.partition("_")
    if group in GROUPS and rest:
        return f"{group}/{rest}"
    return f"{next((group for group in GROUPS if metric in GROUPS[group].split()), 'rollout')}/{metric}"


def _tracker(name: str, folder: Path, args: Args) -> tuple[Callable[[Metrics, int], None], Callable[[], None]]:
    """Two functions, report(values, step) and close()."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        return lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()], writer.close
    if name == "wandb":
        import wandb

        run = wandb.init(project="arrol", name=folder.name, dir=str(folder), config=vars(args), reinit="create_new")
        return lambda values, step: run.log(values, step=step), run.finish
    return lambda values, step: None, lambda: None


def _append(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# Of the table at the end: row -> metric, format, whether the runs' ratio says something.
ROWS = {
    **{f"{phase}, s": (f"time_{phase}", ".3f", True) for phase in "generate grade logprob update head sync".split()},
    "whole step, s": ("time_step", ".3f", True),
    "tokens generated": ("tokens_generated", ",.0f", True),
    "tokens saved (estimate)": ("tokens_saved", ",.0f", False),
    "keep ratio of scored rollouts": ("keep_ratio", ".3f", False),
    "positive ratio before pruning (estimate)": ("positive_scored", ".3f", False),
    "positive ratio after pruning": ("positive_kept", ".3f", False),
}


def summary(runs: dict[str, list[Metrics]]) -> str:
    """Phases, tokens and balance of one or two runs, the ratio of the first to the last, and evaluations.

    runs: name -> lines of metrics.jsonl. Medians are over the steps in which pruning was on, where
    there is such a step.
    """
    table = [["median of a step", *runs, "ratio" if len(runs) > 1 else ""]]
    steps = [[m for m in lines if m.get("pruning")] or [m for m in lines if m["step"] > 0] for lines in runs.values()]
    for label, (key, form, compared) in ROWS.items():
        values = [statistics.median([m[key] for m in lines if key in m] or [math.nan]) for lines in steps]
        comparable = compared and len(runs) > 1 and all(value > 0 for value in values)
        ratio = f"{values[0] / values[-1]:.2f}x" if comparable else ""
        table.append([label, *("-" if math.isnan(value) else format(value, form) for value in values), ratio])
    evaluated = [(name, m) for name, lines in runs.items() for m in lines if any(key.startswith("eval/") for key in m)]
    keys = dict.fromkeys(key for _, m in evaluated for key in m if key.startswith("eval/"))
    scores = [["evaluation", "step", *(key.removeprefix("eval/").replace("/", " ") for key in keys)]]
    for name, m in evaluated:
        scores.append([name, f"{m['step']:.0f}", *(f"{m[key]:.3f}" if key in m else "-" for key in keys)])
    return aligned(table) + (f"\n\n{aligned(scores)}" if keys else "")


@contextlib.contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Draw in the block; then the PNG is written."""
    # Training needs it for pictures alone.
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=150, layout="constrained")
    yield figure.subplots()
    figure.savefig(path)


def plot_reward(runs: dict[str, list[Metrics]], path: Path) -> None:
    """Mean reward of all rollouts against seconds of training; thin: each step, thick: mean of 5 steps."""
    with picture(path, 7, 4.2) as axes:
        for (name, lines), color in zip(runs.items(), ("tab:gray", "tab:blue")):
            steps = [m for m in lines if "reward" in m]
            seconds, reward = [m["wall_clock"] for m in steps], [m["reward"] for m in steps]
            smooth = [statistics.mean(reward[max(0, i - 4) : i + 1]) for i in range(len(reward))]
            axes.plot(seconds, reward, color=color, linewidth=0.3)
            axes.plot(seconds, smooth, color=color, linewidth=2, label=name)
        axes.set(xlabel="wall-clock time of training (s)", ylabel="mean reward of all rollouts")
        axes.legend()


def plot_rollouts(rows: list[dict], detect_length: int, path: Path) -> None:
    """A group of rollouts: a bar over the tokens of each, grey where it was pruned.

    rows: lines of rollouts.jsonl, see `rollout_rows`. Beside a bar the rollout's number and, where
    it was scored: score s', posterior q, survival probability p.
    """
    kinds = ["pruned" if row["pruned"] else row["verdict"] or "not judged" for row in rows]
    labels = []
    for row in rows:
        numbers = zip(("s′", "q", "p"), (row["score"], row["posterior"], row["survival"]))
        found = [f"{symbol} {value:.2f}  " for symbol, value in numbers if value is not None]
        labels.append(f"{''.join(found)}{row['sample']:3d}")
    with picture(path, 9, 1.2 + 0.3 * len(rows)) as axes:
        for kind in dict.fromkeys(kinds):
            places = [place for place, other in enumerate(kinds) if other == kind]
            tokens = [rows[place]["tokens"] for place in places]
            axes.barh(places, tokens, color=COLORS.get(kind, "tab:purple"), label=kind)
        axes.axvline(detect_length, color="black", linestyle=":")
        axes.set_yticks(range(len(rows)), labels, family="monospace")
        axes.set(xlabel="tokens (dotted: L_detect)", title=f"step {rows[0]['step']}: {rows[0]['prompt']}"[:100])
        axes.invert_yaxis()
        axes.figure.legend(loc="outside lower center", ncols=5)


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
        axes.figure.legend(loc="outside right upper", fontsize=8)
