"""What the grader calls right: gold answers as they are, spelled otherwise, and with one thing changed.

    python -m bench.grading math500.jsonl minerva.jsonl --time dapo_math_17k.jsonl

Files are JSON lines with an `answer` each. Of the golds with one number, sign or bracket changed
none should be right: what passes there is what a policy would learn to write. Minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.data import gold_text
from support.grader import Grader

# Other spellings of the same answer: pattern and replacement
SPELLINGS: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "full stop": (r"(?<!\.)\Z", "."),
    "minus sign": (r"-", "\u2212"),
    "\\dfrac": (r"\\frac", r"\\dfrac"),
    "\\left": (r"(?<!left)(?<!left )([(\[])(?=[^()\[\]]*[)\]])([^()\[\]]*)([)\]])", r"\\left\1\2\\right\3"),
    "spaces": (r"(?<![\\^_{eE])([-+=])(?![\d!])", r" \1 "),
    "no \\text": (r"\A\\text\{\(?(\w+)\)?\}\Z", r"\1"),
    "\u03c0": (r"\\pi(?![a-z])", "\u03c0"),
    "\u221e": (r"\\infty", "\u221e"),
    "\u00b2": (r"\^(?:2(?!\d)|\{2\})", "\u00b2"),
    "\u221a": (r"\\sqrt\{(\d+)\}", "\u221a\\1"),
    "degree sign": (r"\^\{?\\circ\}?", "\u00b0"),
    "thousands": (r"\A-?[1-9]\d*\Z", lambda number: f"{int(number[0]):,}"),
    "as a fraction": (r"\A(\d*)\.(\d+)\Z", lambda n: f"\\frac{{{int(n[1] + n[2])}}}{{{10 ** len(n[2])}}}"),
    "a/b": (r"\A\\frac\{(\d+)\}\{(\d+)\}\Z", r"\1/\2"),
    "x =": (r"\A-?[\d.]+\Z", r"x = \g<0>"),
}


def changes(gold: str) -> Iterator[tuple[str, str]]:
    """Kind and text of what is no longer `gold`: one number, index, sign or bracket is another."""
    kinds = {"number up": r"\d+", "number down": r"\d*[1-9]\d*", "sign": r"(?<=\d) *[-+] *(?=\d)|\A-(?=[1-9\\])"}
    if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\],]*[)\]]", gold) and "infty" not in gold:
        kinds["bracket"] = r"\A[(\[]|[)\]]\Z"
    for kind, pattern in kinds.items():
        for found in re.finditer(pattern, gold):
            old = found[0]
            if kind.startswith("number"):
                new = str(int(old) + (1 if kind == "number up" else -1)).zfill(len(old))
            else:
                new = {"(": "[", "[": "(", ")": "]", "]": ")"}.get(old) or ("+" if "-" in old else "-")
            yield kind, gold[: found.start()] + new + gold[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--time", type=Path, help="a file whose golds are graded against themselves for the time")
    args = parser.parse_args()
    sets = {file.stem: [gold_text(json.loads(line)["answer"]) for line in file.open("rb")] for file in args.files}
    cases = [(f"{name} as it is", gold, gold, "right") for name, golds in sets.items() for gold in golds]
    for gold in sorted({gold for golds in sets.values() for gold in golds if gold}):
        for kind, (pattern, replacement) in SPELLINGS.items():
            if (text := re.sub(pattern, replacement, gold)) != gold:
                cases.append((kind, gold, text, "right"))
        cases += [(kind, gold, text, "wrong") for kind, text in changes(gold)]
    with Grader(workers=2, timeout=20.0) as grader:
        start = time.perf_counter()
        verdicts = grader.grade([f"\\boxed{{{text}}}" for _, _, text, _ in cases], [gold for _, gold, _, _ in cases])
        print(f"{len(cases):,} answers in {time.perf_counter() - start:.1f} s")
        for kind in dict.fromkeys(kind for kind, *_ in cases):
            mine = [(case, verdict.kind) for case, verdict in zip(cases, verdicts) if case[0] == kind]
            missed = [case for case, found in mine if found != case[3]]
            print(f"{kind:20s} {len(mine) - len(missed):5d} of {len(mine):5d} {mine[0][0][3]}")
            for _, gold, text, _ in missed[:8]:
                print(f"    {gold}   {text}")
        if args.time:
            golds = [str(json.loads(line)["answer"]) for line in args.time.open("rb")]
            texts, seconds = [f"\\boxed{{{gold}}}" for gold in golds], []
            for _ in range(15):
                start = time.process_time()
                grader.grade(texts, golds)
                seconds.append(time.process_time() - start)
            print(f"{len(golds):,} golds against themselves: {min(seconds):.3f} s of CPU, the best of {len(seconds)}")


if __name__ == "__main__":
    main()
