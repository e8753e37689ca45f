"""What a run has written, read without torch: its rollouts as a table, or those of two runs side by side.

    python -m support.show runs/NAME --step 20 [--group 320] [--wrong] [--pruned]
    python -m support.show runs/NAME/baseline runs/NAME

score: s'. q: its posterior. p: its survival probability. Rollouts that ended by L_detect have none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path

from support.args import fail

COLUMNS = ["#", "score", "q", "p", "kept", "verdict", "answer", "tokens"]


def load_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The complete lines of a run's file, if it is there; a last one that was cut off by a crash is left out."""
    if not (folder / name).exists():
        return []
    # Not splitlines: U+2028 inside a string is no line end.
    with (folder / name).open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def aligned(rows: list[list[str]]) -> str:
    """Rows in columns, the first to the left and the others to the right, below a heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths)] for row in rows]
    heading, *lines = ("  ".join([row[0].ljust(widths[0]), *cells[1:]]) for row, cells in zip(rows, padded))
    return "\n".join([heading, "-" * len(heading), *lines])


def read(folder: Path, step: int | None, group: int | None) -> list[dict]:
    """A group of rollouts.jsonl, of the newest step and the first group in it where none is named."""
    path, steps = folder / "rollouts.jsonl", {}
    try:
        for row in load_metrics(folder, path.name):
            steps.setdefault(row["step"], {}).setdefault(row["group"], []).append(row)
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{path}: it cannot be read, or not all of its lines are rollouts of arrol.py")
    if not steps:
        fail(f"{path}: no rollout is there; name the folder of a run, and not one of --log-rollouts none")
    step = max(steps) if step is None else step
    if step not in steps:
        fail(f"--step {step}: {path} has the steps {min(steps)} to {max(steps)}")
    group = next(iter(steps[step])) if group is None else group
    if group not in steps[step]:
        fail(f"--group {group}: step {step} of {path} has the groups {', '.join(map(str, steps[step]))}")
    return steps[step][group]


def table(folder: Path, rows: list[dict], asked: list[str], width: int) -> list[str]:
    """Lines of at most `width` characters. asked: "wrong" and "pruned" show such rollouts alone."""

    def cells(row: dict) -> list[str]:
        numbers = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("score", "posterior", "survival")]
        kept, verdict = "no" if row["pruned"] else "yes", row["verdict"] or "-"
        answer = "-" if row["answer"] is None else one_line(row["answer"])[:20]
        return [str(row["sample"]), *numbers, kept, verdict, answer, str(row["tokens"])]

    kinds = {"wrong": lambda row: row["verdict"] in ("wrong", "no answer"), "pruned": lambda row: row["pruned"]}
    shown = [row for row in rows if not asked or any(kinds[name](row) for name in asked)]
    left = aligned([COLUMNS, *map(cells, shown)]).splitlines()
    room = max(width - len(left[0]) - 2, len("tail"))
    tails = ["tail", "", *(one_line(row["tail"])[-room:] for row in shown)]
    first = rows[0]
    place = f"{folder}, step {first['step']}, group {first['group']}: {len(shown)} of {len(rows)} rollouts"
    head = [place[:width], one_line(f"gold {first['gold']}, problem {first['prompt']}")[:width], ""]
    return head + [f"{cells}  {tail}" for cells, tail in zip(left, tails)]


def one_line(text: str) -> str:
    """`text` without line ends, and without characters that would move a terminal's cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="one run folder or two")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--group", type=int, help="default: the first of the step; of others see --log-rollouts all")
    parser.add_argument("--wrong", dest="asked", action="append_const", const="wrong", default=[], help="alone")
    parser.add_argument("--pruned", dest="asked", action="append_const", const="pruned", help="alone, or beside these")
    args = parser.parse_args()
    if len(args.runs) > 2:
        fail(f"{args.runs[2]}: two runs fit side by side, no more")
    width = (shutil.get_terminal_size((160, 24)).columns - 3 * (len(args.runs) - 1)) // len(args.runs)
    tables = [table(run, read(run, args.step, args.group), args.asked, width) for run in args.runs]
    for line in itertools.zip_longest(*tables, fillvalue=""):
        print(" | ".join(cell.ljust(width) for cell in line).rstrip())
