"""bench/RESULTS.md from what is in bench/results: what came out differently first, then the targets, then all tables and pictures.

    python bench/report.py

Whether a target is met is computed from the JSON files. bench/results/differences.md is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ORDER = ("accuracy", "convergence", "speed", "pruning", "keep_ratio", "voting", "head", "theory")
Json = dict


def _accuracy(when: str) -> Callable[[Json], Json]:
    return lambda results: results["pairs"]["GRPO"][f"avg, {when}, difference"]


def _vote(rule: str) -> Callable[[Json], Json]:
    return lambda results: results["methods"]["GRPO + ARRoL"][f"{rule} − majority"]


# what is wanted, of which file, its estimate, the least that is wanted, and how to print it
TARGETS: list[tuple[str, str, Callable[[Json], Json], float, str]] = [
    ("ARRoL − GRPO, accuracy at equal steps, at least 0", "accuracy", _accuracy("equal steps"), 0.0, "+.3f"),
    ("ARRoL − GRPO, accuracy at equal time, above 0", "accuracy", _accuracy("equal time"), 0.0, "+.3f"),
    ("whole step at least 1.6 × faster", "speed", lambda results: results["phases"]["step"]["ratio"], 1.6, ".2f"),
    (
        "E[ρ̂(1 − ρ̂)], ARRoL − random pruning, above 0 (runs of their own: policies differ, too)",
        "pruning",
        lambda r: r["difference"]["rho_variance"],
        0.0,
        "+.3f",
    ),
    (
        "the same on the same rollouts, above 0",
        "pruning",
        lambda r: r["above_random"]["ARRoL"]["rho_variance"],
        0.0,
        "+.3f",
    ),
    ("ARRoL's vote (ranks) − majority, at least 0", "voting", _vote("ARRoL"), 0.0, "+.3f"),
    ("ARRoL's vote (probability) − majority, at least 0", "voting", _vote("ARRoL, probability"), 0.0, "+.3f"),
]


def verdict(found: Json, least: float, strictly: bool) -> str:
    """Whether the mean is where it is wanted, and whether its interval says so too."""
    mean, low, high = found["mean"], found["low"], found["high"]
    if not (mean > least if strictly else mean >= least):
        return "**not met**" + (", though the interval reaches it" if high is not None and high >= least else "")
    if low is None:
        return "met (no interval)"
    return "**met**" if low >= least else "**met** by the mean; the interval holds less, too"


def targets(results: dict[str, Json]) -> list[str]:
    """The lines of the table of targets."""
    lines = ["| target | measured, 95% interval | |", "|---|---|---|"]
    for title, name, pick, least, form in TARGETS:
        try:
            found = pick(results[name])
        except KeyError:  # no such file, or all of its runs crashed
            lines.append(f"| {title} | no result | **not measured** |")
            continue
        shown = format(found["mean"], form)
        if found["low"] is not None:
            shown += f" ({found['low']:{form}} to {found['high']:{form}})"
        lines.append(f"| {title} | {shown.replace('-', '−')} | {verdict(found, least, 'above' in title)} |")
    return lines


def crashes(results: dict[str, Json]) -> list[str]:
    """A line for each training run that crashed, once."""
    found = {
        f"- {c['method']}, seed {c['seed']}, after step {c['step']}: {c['error']}"
        for one in results.values()
        for c in one.get("crashed", [])
    }
    found |= {
        f"- voting with {c['method']}, seed {c['seed']}" for one in results.values() for c in one.get("tts_crashed", [])
    }
    return sorted(found)


def _below(text: str) -> str:
    """A table's page under the headings of this one."""
    return re.sub(r"^#", "##", text, flags=re.MULTILINE) if text.startswith("# ") else text


def assemble(folder: Path) -> str:
    """The whole page; pictures are named relative to the folder above."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    tables = {path.stem: _below(path.read_text("utf-8").strip()) for path in sorted(folder.glob("*.md"))}
    lines = [
        "# Results",
        "",
        "The paper's tables and figures by `make bench`, on the embedded model where no flags under a table say otherwise.",
        "",
    ]
    if differences := tables.pop("differences", ""):
        lines += ["## What came out differently from the paper", "", differences, ""]
    lines += ["## Targets", "", *targets(found), ""]
    if bad := crashes(found):
        lines += ["## Runs that crashed", "", *bad, ""]
    names = [name for name in ORDER if name in tables] + [name for name in tables if name not in ORDER]
    for name in names:
        lines += [tables[name], ""]
        if (folder / f"{name}.png").is_file():
            lines += [f"![{name}]({folder.name}/{name}.png)", ""]
    if missing := [name for name in ORDER if name not in tables]:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=BENCH / "results", help="folder of the tables")
    folder = parser.parse_args().results
    if not folder.is_dir():
        parser.error(f"--results {folder}: there is no such folder")
    page = folder.resolve().parent / "RESULTS.md"
    page.write_text(assemble(folder.resolve()), "utf-8")
    print(page)


if __name__ == "__main__":
    main()
