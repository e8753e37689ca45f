"""Rollouts of a run as a table, or of two runs side by side.

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

COLUMNS = ("#", "score", "q", "p", "kept", "verdict", "answer", "tokens", "tail")


def read(folder: Path, step: int | None, group: int | None) -> list[dict]:
    """A group of rollouts.jsonl, of the newest step and the first group in it where none is named."""
    path, steps, number = folder / "rollouts.jsonl", {}, 0
    try:
        # Not splitlines: U+2028 inside a string is no line end. The last one is empty, or was cut off by a crash.
        for line in path.read_text("utf-8").split("\n")[:-1]:
            number += 1
            row = json.loads(line)
            steps.setdefault(row["step"], {}).setdefault(row["group"], []).append(row)
    except OSError as error:
        fail(f"{path}: {error.strerror}; name the folder of a run of arrol.py")
    except (ValueError, KeyError, TypeError):
        fail(f"{path}: line {number} is no rollout of arrol.py")
    if not steps:
        fail(f"{path}: it is empty; a step writes to it when it ends, unless --log-rollouts is none")
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
    body = [list(COLUMNS[:-1]), *map(cells, shown)]
    widths = [max(map(len, column)) for column in zip(*body)]
    left = ["  ".join(cell.rjust(size) for cell, size in zip(line, widths)) for line in body]
    room = max(width - len(left[0]) - 2, len(COLUMNS[-1]))
    tails = [COLUMNS[-1], *(one_line(row["tail"])[-room:] for row in shown)]
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
