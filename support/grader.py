"""Right or wrong: the answer that a response commits itself to, and whether it equals the gold.

with Grader(workers=4) as grader:
    verdicts = grader.grade(texts, golds)

Importing this needs the standard library only; math-verify runs in processes that can be killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import select
import signal
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACES = re.compile(r"\\?\\(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\.|[{}]", re.DOTALL)
# What a box without braces holds: it begins with a digit, sign, bracket, command or single letter
# and ends with white space or the formula.
_UNBRACED = re.compile(
    r"(?=\.?\d|[-+(\[\\]|[^\x00-\x7f]|[A-Za-z](?![A-Za-z]))(?:\\\{[^{}$\n]*\\\}|[(\[][^()\[\]$\n]*[)\]]"
    r"|\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+ ?|\\[%,!$]|(?!\*\*)[^\s\\(){}\[\]$])+"
)
# An `Answer:` line, or GSM8K's `#### 42`. Headings are no answers: they have words.
_NO_WORDS = r"(?:\\[A-Za-z]++|\\[^A-Za-z\n]|(?![^\W\d_])[^\n\\]|[^\W\d_](?![^\W\d_]))++$"
_ANSWER_LINE = re.compile(
    r"^[ \t>*_#-]*(?:(?:the )?(?:final )?answer[ \t*_]*[:\uff1a]|(?<=####)(?!#)(?=" + _NO_WORDS + r"))[ \t*_]*(.*)$",
    re.IGNORECASE | re.MULTILINE,
)


def last_box(text: str) -> tuple[str, int]:
    r"""What the last balanced `\boxed{…}`, `\fbox{…}` or `\boxed 5` holds, and where it ends; ("", 0) if none.

    A box in a box is one. Linear time.
    """
    if (first := text.find("box")) < 0:
        return "", 0
    # of each open brace: where its command begins, where its content begins
    opened: list[tuple[int, int]] = []
    box = content = (0, 0)
    for token in _BRACES.finditer(text, max(first - 3, 0)):
        symbol, (at, end) = token[0], token.span()
        if symbol == "}":
            begin, start = opened.pop() if opened else (-1, -1)
            if begin >= 0:
                if start > box[0] or (text[start : box[0]] + text[box[1] : at]).strip():
                    content = (start, at)
                box = (begin, end)
        elif symbol == "{":
            opened.append((-1, -1))
        elif len(symbol) > 2 and symbol[-1] == "{":
            opened.append((at, end))
        elif len(symbol) > 2 and (bare := _UNBRACED.match(text, end)):
            box, content = (at, bare.end()), bare.span()
    return text[content[0] : content[1]].strip(), box[1]


def extract_answer(text: str) -> str | None:
    r"""The answer that a response commits itself to: its last box, `Answer:` line or `#### 42`.

    Thinking does not count, be it finished or not. None if nothing is explicit.

    >>> extract_answer(r"<think> \boxed{1} </think> So \boxed{2}, no, \boxed{3}."), extract_answer("it is 5")
    ('3', None)
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer, end = last_box(text)
    for line in reversed(_ANSWER_LINE.findall(text, end)):
        line = line.strip().rstrip("*_").removesuffix(".").rstrip("*_ ")
        # A box after `end` is one that was cut off.
        if line and not _BOX.search(line):
            answer = line
            break
    return _bare(answer) or None


def _bare(text: str) -> str:
    """Without delimiters of inline math and punctuation around it, and with single spaces."""
    if text.isalnum():
        return text
    text = " ".join(text.split())
    # twice, for `$5.$` and `$5$.`
    for _ in range(2):
        text = text.rstrip(" ,;:~\\")
        text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
        if text.startswith("\\(") and text.endswith("\\)") and text.count("\\(") == 1:
            text = text[2:-2].strip()
        inner = text.strip("$").strip()
        text = text if "$" in inner or inner.endswith("\\") else inner
    return text


_UNICODE = r"""
− - – - — - ‐ - ‑ - ‒ - ⁄ / ∕ / ∗ * · \cdot ⋅ \cdot ∙ \cdot × \times ÷ \div ± \pm ∓ \mp ≤ \le ⩽ \le ≥ \ge ⩾ \ge ≠ \ne
∞ \infty ∪ \cup ∩ \cap ∈ \in ∖ \setminus ∅ \emptyset ° ^\circ º ^\circ ′ ' ″ '' ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
… \ldots ⋯ \cdots ≈ \approx γ \gamma 。 . 、 , ℝ \mathbb{R} ℤ \mathbb{Z} ℕ \mathbb{N} ℚ \mathbb{Q} ℂ \mathbb{C}
""".split()
_UNICODE = str.maketrans({a: b + " " * b[-1].isalpha() for a, b in zip(_UNICODE[::2], _UNICODE[1::2])})
_FORMS = {"<super": "^{%s}", "<sub": "_{%s}", "<fraction": "\\frac{%s}"}


def _latex(text: str) -> str:
    r"""LaTeX of Unicode mathematics.

    >>> _latex("2√3"), _latex("1½"), _latex("x₁²≤−8"), _latex("８")
    ('2\\sqrt{3}', '1\\frac{1}{2}', 'x_{1}^{2}\\le -8', '8')
    """
    text = "".join(char for char in text if unicodedata.category(char) != "Cf").translate(_UNICODE)
    pieces = []
    for form, run in itertools.groupby(text, lambda char: unicodedata.decomposition(char).partition(">")[0]):
        plain = unicodedata.normalize("NFKC", "".join(run)).translate(_UNICODE)
        pieces.append(_FORMS.get(form, "%s") % (plain.replace("/", "}{") if form == "<fraction" else plain))
    text = re.sub(r"([√∛∜])\s*(\d+(?:\.\d+)?|\w|\([^()]*\))", r"\1{\2}", "".join(pieces))
    return text.replace("√", "\\sqrt").replace("∛", "\\sqrt[3]").replace("∜", "\\sqrt[4]")


_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,|,\\!|\{,\}|\\,|\\ | )[0-9]{3})+(?:\.0*)?")


def canonical(answer: str) -> str:
    """One spelling for integers, bare math and Unicode. Equal answers may have different ones."""
    text = _bare(answer if answer.isascii() else _latex(answer))
    return _integer(text) or text


def _integer(text: str) -> str | None:
    """Canonical digits of an integer (`070`, `70.0`), else None."""
    if (match := _INTEGER.fullmatch(text)) is None:
        return None
    # Digits stay text: int() refuses huge numbers.
    digits = match[2].lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


# characters; ten times the longest gold answer of the usual benchmarks
LONGEST_ANSWER = 2_000
START_SECONDS = 120.0


@dataclass(frozen=True)
class Verdict:
    """`kind` is "right", "wrong", "no answer", "timeout" or "bad gold"; `answer` was extracted.

    A timeout (of time or memory, spent on this answer) or a bad gold is no verdict on the response:
    it must neither train the quality head nor enter its group's baseline.
    """

    kind: str
    answer: str | None

    @property
    def reward(self) -> float | None:
        """1.0 for right, 0.0 for wrong and for no answer, None (no label) for timeout and bad gold."""
        return {"right": 1.0, "wrong": 0.0, "no answer": 0.0}.get(self.kind)


class GraderError(RuntimeError):
    """The workers cannot start or keep dying: the machine's fault, so no response gets a verdict."""


class Grader(contextlib.AbstractContextManager):
    """Grades responses; math-verify runs in `workers` child processes that can be killed.

    An answer may take `timeout` seconds and `memory_mb` of address space; what takes more is killed
    alone. Integers and literally equal answers need no worker; the first one starts when needed.
    Safe to use from several threads at once.
    """

    def __init__(self, workers: int = 1, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        self._threads, self._closed = ThreadPoolExecutor(workers), False
        self._workers = [_Worker(timeout, memory_mb) for _ in range(workers)]
        # One for each thread.
        self._idle = self._workers.copy()

    def grade(self, texts: list[str], golds: list[str]) -> list[Verdict]:
        """A verdict on each response in `texts` by its answer in `golds`, texts as `data.gold_text` makes them.

        Raises GraderError if the workers cannot start or keep dying.
        """
        answers = [extract_answer(text) for text in texts]
        spelled = {text: canonical(text) for text in {*golds, *answers} - {None}}
        kinds = self._judge([(spelled[g], spelled.get(a, "")) for g, a in zip(golds, answers, strict=True)])
        return [Verdict(kind, answer) for kind, answer in zip(kinds, answers)]

    def equivalent(self, pairs: list[tuple[str, str]]) -> list[bool]:
        """Whether the first of each pair, as gold, takes the second for right; not symmetric.

        What is empty equals nothing; what runs into a bound, nothing but its own spelling.
        Raises GraderError as `grade` does.
        """
        pairs = [(canonical(first), canonical(second)) for first, second in pairs]
        # Each answer meets "1" first: one that hangs costs its bound once, not in all of its pairs.
        alone = [("1", answer) for answer in {answer for pair in pairs if _settle(*pair) is None for answer in pair}]
        hostile = {answer for (_, answer), kind in zip(alone, self._judge(alone)) if kind == "timeout"}
        asked = [pair if pair[0] == pair[1] or hostile.isdisjoint(pair) else ("", "") for pair in pairs]
        return [kind == "right" for kind in self._judge(asked)]

    def _judge(self, pairs: list[tuple[str, str]]) -> list[str]:
        """The kind of verdict on each pair of canonical gold and answer."""
        # Rollouts of one group often agree: each different pair is verified once.
        kinds = {pair: _settle(*pair) for pair in pairs}
        unsettled = [pair for pair, kind in kinds.items() if kind is None]
        kinds.update(zip(unsettled, self._threads.map(self._verify, unsettled)))
        return [kinds[pair] for pair in pairs]

    def _verify(self, pair: tuple[str, str]) -> str:
        worker = self._idle.pop()
        try:
            for _ in range(3):
                if fresh := worker.process is None:
                    worker.start()
                # Only now: either `close` sees the new process, or this sees that all is closed.
                if self._closed:
                    raise RuntimeError("the grader is closed")
                reply = worker.ask(pair, fresh)
                if reply in ("right", "wrong"):
                    return reply
                worker.stop()
                # A used worker may have run out of memory for other answers' sake: a new one tells.
                if reply == "timeout" or (reply == "memory" and fresh):
                    return "timeout"
        finally:
            self._idle.append(worker)
        raise GraderError(f"grading workers keep dying ({reply}): is memory short, or math-verify not installed?")

    def close(self) -> None:
        """Kills the workers, busy or not. A second call does nothing."""
        self._closed = True
        for process in filter(None, [worker.process for worker in self._workers]):
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def __exit__(self, *raised: object) -> None:
        self.close()


def _settle(gold: str, answer: str) -> str | None:
    """The verdict on canonical texts if it needs no mathematics, else None."""
    if not gold or not answer:
        return "no answer" if gold else "bad gold"
    if gold == answer:
        return "right"
    if _INTEGER.fullmatch(gold):
        grouped = re.sub(r"[^0-9.+-]", "", answer) if _GROUPED.fullmatch(answer) else answer
        if (number := _integer(grouped)) is not None:
            return "right" if gold == number else "wrong"
    return "wrong" if len(answer) > max(LONGEST_ANSWER, 2 * len(gold)) else None


class _Worker:
    """One worker process, from its parent: a line of JSON to its stdin for each pair, a word back."""

    def __init__(self, timeout: float, memory_mb: int) -> None:
        self.timeout, self.memory_mb, self.process = timeout, memory_mb, None

    def start(self) -> None:
        # A fork would copy an engine and threads; multiprocessing's spawn would import the main script again.
        script, pipe = Path(__file__).resolve().parent / "equality.py", subprocess.PIPE
        command = [sys.executable, "-P", script, "--grade-worker", str(self.memory_mb)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)

    def ask(self, pair: tuple[str, str], fresh: bool) -> str:
        """One of "right", "wrong", "timeout", "memory", or else how the worker died."""
        if fresh and (greeting := self._read(START_SECONDS)) != "ready":
            return f"at the start: {greeting}"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(pair).encode() + b"\n")
        return self._read(self.timeout)

    def _read(self, seconds: float) -> str:
        # select() takes no file descriptor above 1023
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return "timeout"
        if reply := self.process.stdout.readline().decode().strip():
            return reply
        code = self.process.wait()
        # C libraries meet the memory bound with an abort or a segmentation fault.
        return "memory" if -code in (signal.SIGABRT, signal.SIGSEGV) else f"exit code {code}"

    def stop(self) -> None:
        if self.process:
            with self.process:
                self.process.kill()
            self.process = None
