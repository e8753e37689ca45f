"""bench/RESULTS.md from bench/results: what pruning gains, differences from the paper, targets, tables.

    python -m bench.report

Whether a target is met is computed. gains.md and differences.md in bench/results are written by hand.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from bench.runs import results_parser

ORDER = tuple("accuracy dapo convergence speed cost pruning keep_ratio voting early_stop head theory".split())
BY_HAND = {
    "gains": "What a user gains, and when not to prune",
    "differences": "What came out differently from the paper",
}
METHOD = "GRPO + ARRoL"
# What is wanted, the path to its estimate (file, then keys), the least of it, how to print it.
TARGETS: list[tuple[str, tuple[str, ...], float, str]] = [
    *(
        (
            f"ARRoL − GRPO, accuracy at equal {axis}, {regime}, {least}",
            ("accuracy", "regimes", regime, METHOD, f"equal {axis}"),
            0.0,
            "+.3f",
        )
        for axis, least in (("steps", "at least 0"), ("time", "above 0"))
        for regime in ("sums", "long sums")
    ),
    ("whole step at least 1.6 × faster", ("speed", "phases", "step", "ratio"), 1.6, ".2f"),
    *(
        (f"{regime}: {title}", (file, "regimes", regime, *path), least, "+.3f")
        for title, least, file, *path in (
            ("E[ρ̂(1 − ρ̂)], ARRoL − random, runs of their own, above 0", 0.0, "pruning", "difference", "rho_variance"),
            ("the same on the same rollouts, above 0", 0.0, "pruning", "above_random", "ARRoL", "rho_variance"),
            ("ARRoL's vote of 32 (ranks) − majority, at least 0", 0.0, "voting", METHOD, "ARRoL − majority"),
            ("the same, head on log-probs too", 0.0, "voting", f"{METHOD}, log-probs", "ARRoL − majority"),
            ("the same of 2, at least 0.03", 0.03, "voting", f"{METHOD}, log-probs", "ARRoL − majority, of 2"),
            ("the same of 4, at least 0.03", 0.03, "voting", f"{METHOD}, log-probs", "ARRoL − majority, of 4"),
        )
        for regime in ("sums", "long sums")
    ),
]


def verdict(found: dict, least: float, strictly: bool) -> str:
    """Whether the mean is where it is wanted, and whether its interval says so too."""
    mean, low, high = found["mean"], found["low"], found["high"]
    if not (mean > least if strictly else mean >= least):
        return "**not met**" + (", though the interval reaches it" if high is not None and high >= least else "")
    if low is None:
        return "met (no interval)"
    return "**met**" if low >= least else "**met** by the mean; the interval holds less, too"


def targets(results: dict[str, dict]) -> list[str]:
    """The lines of the table of targets."""
    lines = ["| target | measured, 95% interval | |", "|---|---|---|"]
    for title, path, least, form in TARGETS:
        try:
            found = functools.reduce(dict.__getitem__, path, results)
        except KeyError:
            lines.append(f"| {title} | no result | **not measured** |")
            continue
        shown = format(found["mean"], form)
        if found["low"] is not None:
            shown += f" ({found['low']:{form}} to {found['high']:{form}})"
        lines.append(f"| {title} | {shown.replace('-', '−')} | {verdict(found, least, 'above' in title)} |")
    return lines


def below(text: str) -> str:
    """A table's page under the headings of this one."""
    return re.sub(r"^#", "##", text, flags=re.MULTILINE) if text.startswith("# ") else text


def assemble(folder: Path) -> str:
    """The page; pictures are named relative to the folder above."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    tables = {path.stem: below(path.read_text("utf-8").strip()) for path in sorted(folder.glob("*.md"))}
    lines = [
        "# Results",
        "",
        "The paper's tables and figures by `make bench`, on the embedded model unless flags name another.",
        "",
    ]
    for name, heading in BY_HAND.items():
        lines += [f"## {heading}", "", tables.pop(name, "Not written yet."), ""]
    lines += ["## Targets", "", *targets(found), ""]
    for name in [*(name for name in ORDER if name in tables), *(name for name in tables if name not in ORDER)]:
        lines += [tables[name], ""]
        if (folder / f"{name}.png").is_file():
            lines += [f"![{name}]({folder.name}/{name}.png)", ""]
    if missing := [name for name in ORDER if name not in tables]:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = results_parser(__doc__)
    folder = parser.parse_args().results.resolve()
    if not folder.is_dir():
        parser.error(f"--results {folder}: there is no such folder")
    page = folder.parent / "RESULTS.md"
    page.write_text(assemble(folder), "utf-8")
    print(page)


if __name__ == "__main__":
    main()
