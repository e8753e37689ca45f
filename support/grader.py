"""Right or wrong: the answer that a response commits itself to, and whether it equals the gold.

with Grader(workers=4) as grader:
    verdicts = grader.grade(texts, golds)

Importing this needs the standard library only: the worker processes run this file as a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

_ANSWER_LINE = re.compile(r"^[ \t>*_#-]*(?:the )?(?:final )?answer[ \t*_]*[:\uff1a][ \t*_]*(.*)$", re.I | re.M)
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_BRACES = re.compile(r"\\?\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_E_NOTATION = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,4})(?![\w.])")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,|,\\!|\{,\}|\\,)[0-9]{3})+(?:\.0*)?")


def _last_box(text: str) -> str | None:
    r"""What the last balanced `\boxed{…}` or `\fbox{…}` holds. A box in a box is one. Linear time."""
    # of each open brace: where its command begins, where its content begins
    opened: list[tuple[int, int]] = []
    box = content = (0, 0)
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            opened.append((-1, -1))
        elif token[0] == "}":
            begin, start = opened.pop() if opened else (-1, -1)
            if begin >= 0:
                around = text[start : box[0]] + text[box[1] : token.start()]
                content = content if start <= box[0] and not around.strip() else (start, token.start())
                box = (begin, token.end())
        elif token[0].endswith("{") and token[0] != "\\{":
            opened.append(token.span())
    return text[slice(*content)].strip() if box[1] else None


def extract_answer(text: str) -> str | None:
    r"""The answer that a response commits itself to: its last balanced box, or else `Answer:` line.

    Thinking does not count, be it finished or not. None if nothing is explicit.

    >>> extract_answer(r"<think> \boxed{1} </think> So \boxed{2}, no, \boxed{3}."), extract_answer("it is 5")
    ('3', None)
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer = _last_box(text)
    if answer is None and (lines := _ANSWER_LINE.findall(text)):
        answer = lines[-1].strip().rstrip("*_").removesuffix(".").rstrip("*_ ")
        answer = "" if _BOX.search(answer) else answer  # a box that was cut off
    return _bare(answer or "") or None


def _bare(text: str) -> str:
    """Without the delimiters of inline math around it, and with single spaces."""
    text = " ".join(text.split())
    if text.startswith("\\(") and text.endswith("\\)") and text.count("\\(") == 1:
        text = text[2:-2].strip()
    inner = text.strip("$").strip()
    return text if "$" in inner or inner.endswith("\\") else inner


def _integer(text: str, grouped: bool = False) -> str | None:
    """Canonical digits of an integer (`070`, `$70$`, `70.0`; if `grouped` also `1,234`), else None."""
    text = _bare(text)
    if grouped and _GROUPED.fullmatch(text):
        text = re.sub(r"[^0-9.+-]", "", text)
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    # Digits stay text: int() refuses huge numbers.
    digits = match[2].lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def canonical(answer: str) -> str:
    """One spelling for integers and for bare math. Equal answers may have different ones."""
    return _integer(answer) or _bare(answer)


def gold_text(cell: object, column: str = "answer") -> str:
    """A gold answer of any type as text, out of its box or list of one; "" where there is none."""
    if isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    text = "" if cell is None or isinstance(cell, (list, dict)) else str(cell).strip()
    if column == "solution" or _BOX.search(text):
        text = _last_box(text) or ""
    elif "####" in text:  # GSM8K: the working, then the answer
        text = text.rpartition("####")[2].strip()
    return "" if text.lower() == "nan" else text


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
    """The workers cannot start or keep dying."""


class Grader:
    """Grades responses; math-verify runs in `workers` child processes that can be killed.

    An answer may take `timeout` seconds and `memory_mb` of address space; what takes more is killed
    alone. Integers and literally equal answers need no worker; the first one starts when needed.
    Safe to use from several threads at once.
    """

    def __init__(self, workers: int = 1, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        self._timeout, self._memory_mb, self._closed = timeout, memory_mb, False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        # None: a worker yet to be started
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._alive: set[_Worker] = set()
        self._lock = threading.Lock()

    def grade(self, texts: list[str], golds: list[str]) -> list[Verdict]:
        """A verdict on each response in `texts` by its answer in `golds`.

        Raises RuntimeError if the workers cannot start or keep dying.
        """
        answers = [extract_answer(text) for text in texts]
        kinds = self._judge(list(zip([gold_text(gold) for gold in golds], answers, strict=True)))
        return [Verdict(kind, answer) for kind, answer in zip(kinds, answers)]

    def equivalent(self, pairs: list[tuple[str, str]]) -> list[bool]:
        """Whether the first of each pair, as gold, takes the second for right; not symmetric.

        What is empty equals nothing; what runs into a bound, nothing but its own spelling.
        Raises RuntimeError as `grade` does.
        """
        bare = [(_bare(first), _bare(second) or None) for first, second in pairs]
        # Each answer meets "1" first: one that hangs costs its bound once, not in all of its pairs.
        alone = [("1", answer) for answer in {answer for pair in bare if _settle(*pair) is None for answer in pair}]
        hostile = {answer for (_, answer), kind in zip(alone, self._judge(alone)) if kind == "timeout"}
        asked = [pair if pair[0] == pair[1] or hostile.isdisjoint(pair) else ("", None) for pair in bare]
        return [kind == "right" for kind in self._judge(asked)]

    def _judge(self, pairs: list[tuple[str, str | None]]) -> list[str]:
        """The kind of verdict on each pair of gold and answer."""
        # Rollouts of one group often agree: each different pair is verified once.
        kinds = {pair: _settle(*pair) for pair in pairs}
        unsettled = [pair for pair, kind in kinds.items() if kind is None]
        kinds.update(zip(unsettled, self._threads.map(self._verify, unsettled)))
        return [kinds[pair] for pair in pairs]

    def _verify(self, pair: tuple[str, str]) -> str:
        worker = self._idle.get()
        try:
            for _ in range(3):
                worker = worker or self._start()
                fresh = worker.jobs == 0
                reply = worker.ask(pair, self._timeout)
                if reply in ("right", "wrong"):
                    return reply
                with self._lock:
                    self._alive.discard(worker)
                worker.close()
                worker = None
                # A used worker may have run out of memory for other answers' sake: a new one tells.
                if reply == "timeout" or (reply == "memory" and fresh):
                    return "timeout"
            raise GraderError(f"grading workers keep dying ({reply}): is memory short, or math-verify not installed?")
        finally:
            self._idle.put(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            worker = _Worker(self._timeout, self._memory_mb)
            self._alive.add(worker)
        return worker

    def close(self) -> None:
        """Kills the workers, busy or not. A second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in self._alive:
                worker.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._alive:
            self._alive.pop().close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _settle(gold: str, answer: str | None) -> str | None:
    """The verdict that needs no mathematics, else None."""
    if not gold:
        return "bad gold"
    if answer is None:
        return "no answer"
    if _bare(gold) == answer:
        return "right"
    whole, given = _integer(gold), _integer(answer, grouped=True)
    if whole is not None and given is not None:
        return "right" if whole == given else "wrong"
    return "wrong" if len(answer) > max(LONGEST_ANSWER, 2 * len(gold)) else None


class _Worker:
    """The parent's end of one worker process: a line of JSON to its stdin for each pair, a word back.

    A fresh interpreter: a fork would copy an engine and threads, and multiprocessing's spawn would
    import the parent's main script again.
    """

    def __init__(self, timeout: float, memory_mb: int) -> None:
        bounds = [str(timeout), str(memory_mb), str(os.getpid())]
        command = [sys.executable, "-P", os.path.abspath(__file__), "--grade-worker", *bounds]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        self.jobs = 0

    def ask(self, pair: tuple[str, str], timeout: float) -> str:
        """One of "right", "wrong", "timeout", "memory", or else how the worker died."""
        if self.jobs == 0 and (greeting := self._read(START_SECONDS)) != "ready":
            return f"at the start: {greeting}"
        self.jobs += 1
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(pair).encode() + b"\n")
        return self._read(timeout)

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

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _serve(timeout: float, memory_mb: int, parent: int) -> None:
    """A worker's life: it ends with its stdin, with its parent, or by its alarm after the time bound."""
    # Ctrl-C reaches the process group; the parent cleans up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # What a library prints is no reply.
    replies = os.dup(1)
    os.dup2(2, 1)
    try:
        greeting = "ready" if _equivalent("\\frac{1}{2}", "0.5") else "math-verify cannot tell that 1/2 is 0.5"
    except (ImportError, MemoryError) as error:
        greeting = f"{type(error).__name__}: {error}".replace("\n", " ")
    os.write(replies, f"{greeting}\n".encode())
    while True:
        while not select.select([0], [], [], 1.0)[0]:
            # A forked sibling may hold the pipe open when the parent is gone.
            if os.getppid() != parent:
                return
        line = sys.stdin.buffer.readline()
        if not line:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout + 2.0)
        try:
            reply = "right" if _equivalent(*json.loads(line)) else "wrong"
        except MemoryError:
            reply = "memory"
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        os.write(replies, f"{reply}\n".encode())


def _equivalent(gold: str, answer: str) -> bool:
    r"""Whether math-verify takes the two for equal. It often finds no bare LaTeX, hence the boxes.

    The comparison is not symmetric. Its own time-outs are off: they do not stop C code.
    """
    from math_verify import parse, verify

    # As LaTeX first: `2e-1` may be Euler's number less one.
    for pair in dict.fromkeys([(gold, answer), (_program_notation(gold), _program_notation(answer))]):
        try:
            parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in pair]
            if verify(*parsed, timeout_seconds=None, raise_on_error=True) and not _apart(*parsed):
                return True
        except MemoryError:
            raise
        # Parsers and sympy raise anything on what a model writes.
        except Exception:
            continue
    return False


def _apart(gold: list[sympy.Basic | str], answer: list[sympy.Basic | str]) -> bool:
    """Whether two small numbers differ: math-verify rounds decimals to 6 places, others to 15."""
    values = [parsed[0] for parsed in (gold, answer)]
    if not all(getattr(value, "is_number", False) and value.is_real for value in values):
        return False
    first, second = (value.evalf() for value in values)
    largest = max(abs(first), abs(second))
    return bool(largest < 1e-3 and abs(first - second) > 1e-2 * largest)


def _program_notation(text: str) -> str:
    r"""LaTeX of numbers and functions as programs write them; a fifth of Minerva's golds are so.

    >>> _program_notation("3.83e35"), _program_notation("-1./3"), _program_notation("np.arcsin(10/13)")
    ('3.83 \\times 10^{35}', '-1/3', '\\arcsin(10/13)')
    """
    text = _E_NOTATION.sub(lambda m: f"{m[1]} \\times 10^{{{int(m[2])}}}", text)
    text = re.sub(r"(?<=[0-9])\.(?![0-9.])", "", text)
    return re.sub(r"\b(?:np|math)\.(?=[a-z])", r"\\", text)


if __name__ == "__main__" and sys.argv[1:2] == ["--grade-worker"]:
    _serve(float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
