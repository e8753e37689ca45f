"""Data sets in, prompts out; and the grader.

    problems, report = load("BytedTsinghua-SIA/DAPO-Math-17k")
    prompts, dropped = tokenize(problems, tokenizer, max_prompt_tokens=1024)
    with Grader(workers=4) as grader:
        verdicts = grader.grade(texts, golds)

Importing this file is light (standard library only), because the grader's worker processes run it as a script.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import queue
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# ------------------------------------------------------------------ data sets


@dataclass(frozen=True)
class Problem:
    """One problem: a stable `id` (unique within its set), its text and its gold answer."""

    id: str
    text: str
    answer: str


def sums(
    count: int, seed: int, split: str = "train", terms: tuple[int, int] = (3, 10), largest: int = 15
) -> list[Problem]:
    """`count` different sums such as `25-13+39=?`, each with its answer; the same for the same arguments.

    `split` is "train" or "test": a tenth of all sums, chosen by a hash of their text, is held out of training.
    """
    rng, found = random.Random(f"sums-{seed}-{split}"), {}
    for _ in range(1000 * count):
        if len(found) == count:
            break
        numbers = [rng.randint(1, largest) for _ in range(rng.randint(*terms))]
        signs = [rng.choice("+-") for _ in numbers[1:]]
        text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:])) + "=?"
        held_out = zlib.crc32(text.encode()) % 10 == 0
        if held_out == (split == "test") and text not in found:
            total = numbers[0] + sum(n if s == "+" else -n for s, n in zip(signs, numbers[1:]))
            found[text] = Problem(text, text, str(total))
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} different sums of {terms} terms up to {largest} exist in the {split} split"
        )
    return list(found.values())


def sums_range(source: str) -> tuple[tuple[int, int], int] | None:
    """(terms, largest) that `--dataset sums` or `sums:2-3:20` (2 to 3 numbers, up to 20) asks for; else None."""
    if source != "sums" and not source.startswith("sums:"):
        return None
    match = re.fullmatch(r"sums(?::([1-9][0-9]?)-([1-9][0-9]?):([1-9][0-9]{0,8}))?", source)
    low, high, largest = (int(n) for n in match.groups(default="0")) if match else (2, 1, 0)
    if low > high:
        raise ValueError(f"--dataset {source}: write sums, or sums:2-3:20 for 2 to 3 numbers of at most 20")
    return ((low, high), largest) if low else ((3, 10), 15)


def load(source: str, seed: int = 0) -> tuple[list[Problem], str]:
    """The problems of `source`, in its own order, and one line that says what was read and what was dropped.

    `source` is "sums" or "sums:2-3:20" (up to 20,000 training sums drawn with `seed`, which nothing else uses), a
    .jsonl, .json or .parquet file, or a hub id (its train split). Understood are the columns of DAPO and verl (`prompt`
    as a chat, `reward_model.ground_truth`) and of the usual benchmarks (`problem` or `question`; `answer`, or
    the last box of `solution`). A problem that comes with different answers is dropped altogether.

    Raises:
        ValueError: one sentence that names --dataset, the place and the remedy.
    """
    if wanted := sums_range(source):
        (low, high), largest = wanted
        # Half of all sums there are: to find the last few by drawing at random would take for ever.
        count = min(20_000, sum(largest**n * 2 ** (n - 1) for n in range(low, high + 1)) // 2)
        problems = sums(count, seed, "train", (low, high), largest)
        report = f"{source}: {count} sums of {low} to {high} numbers up to {largest}"
    else:
        problems, report = _collect(Path(source).name, _rows(source))
    if not problems:
        raise ValueError(f"--dataset {source}: no usable problem in it ({report}); name another data set")
    return problems, report


# What the readers yield: row or line number (from 1), raw text, answer ("" for none), how many rows were like it.
_Row = tuple[int, str | None, str, int]


def _error(place: str | Path, fault: str, remedy: str) -> ValueError:
    return ValueError(f"--dataset {place}: {' '.join(fault.split())}; {remedy}")


def _rows(source: str) -> Iterator[_Row]:
    path, ending = Path(source), Path(source).suffix.lower()
    if ending in (".jsonl", ".json", ".parquet") or path.is_file():
        if ending not in (".jsonl", ".json", ".parquet"):
            raise _error(source, "not a .jsonl, .json or .parquet file", "convert it to one of them")
        try:
            yield from _parquet_rows(path) if ending == ".parquet" else _json_rows(path)
        except OSError as error:
            raise _error(source, error.strerror or str(error), "name a readable file or a hub id") from error
    else:
        yield from _hub_rows(source)


def _json_rows(path: Path) -> Iterator[_Row]:
    """A JSON list, or else JSON lines, split at newline bytes alone: U+2028 inside a string ends no line."""
    remedy = "mend or delete that line (one JSON object a line)"
    with open(path, "rb") as file:
        if path.suffix.lower() == ".json" and file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            file.seek(0)
            try:
                listed = json.loads(file.read())
            except (ValueError, RecursionError) as error:
                place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
                raise _error(place, f"bad JSON ({error})", "mend it (a list of objects)") from error
            yield from (_json_row(row, number, f"{path} (row {number})") for number, row in enumerate(listed, 1))
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line := line.removeprefix(codecs.BOM_UTF8).strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _error(f"{path}:{number}", f"bad JSON ({error})", remedy) from error
                yield _json_row(row, number, f"{path}:{number}")


def _json_row(row: object, number: int, place: str) -> _Row:
    if not isinstance(row, dict):
        raise _error(place, f"a JSON {type(row).__name__} where a row is due", "write one object for each problem")
    text_column, answer_column = _columns(row, place)
    text, answer = row[text_column], row[answer_column]
    if isinstance(text, list):  # a chat: its last message by the user
        asked = [m.get("content") for m in text if isinstance(m, dict) and m.get("role") == "user"]
        text = asked[-1] if asked else None
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    return number, text if isinstance(text, str) else None, _gold(answer, answer_column), 1


def _columns(names: Iterable[str], place: str | Path) -> tuple[str, str]:
    names = list(names)
    text = next((n for n in ("problem", "question", "Problem", "Question", "prompt") if n in names), None)
    answer = next((n for n in ("answer", "Answer", "reward_model", "solution") if n in names), None)
    if text is None or answer is None:
        raise _error(place, f"no problem or no answer among the columns {names}", "rename them to problem and answer")
    return text, answer


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise _error(path, f"no parquet file ({error})", "write it anew") from error
    columns = _columns(file.schema_arrow.names, path)
    yield from _arrow_rows(file.iter_batches(65_536, columns=list(columns)), columns, path)


def _hub_rows(source: str) -> Iterator[_Row]:
    import datasets

    try:
        table = datasets.load_dataset(source, split="train")
    except (OSError, ValueError) as error:
        raise _error(source, f"no such file, and the hub gave no train split ({error})", "check the name") from error
    columns = _columns(table.column_names, source)
    tables = table.select_columns(list(columns)).with_format("arrow").iter(65_536)
    yield from _arrow_rows((b for t in tables for b in t.combine_chunks().to_batches()), columns, source)


def _arrow_rows(
    batches: Iterable[pyarrow.RecordBatch], columns: tuple[str, str], place: str | Path
) -> Iterator[_Row]:
    """DAPO has each problem 100 times in 1.8 million nested rows: arrow merges equal ones, Python sees the rest."""
    import numpy
    import pyarrow

    merged, rows = None, 0
    for batch in batches:
        try:
            texts, answers = (_flat(batch.column(batch.schema.get_field_index(column))) for column in columns)
        except pyarrow.ArrowException as error:
            fault = f"columns {columns} hold no text, chat or ground_truth ({error})"
            raise _error(place, fault, "store them as text in columns problem and answer") from error
        numbers = numpy.arange(rows + 1, rows + 1 + len(batch))
        table = pyarrow.table([texts, answers, numbers, numpy.ones_like(numbers)], ["text", "answer", "row", "count"])
        groups = pyarrow.concat_tables([merged, table] if merged else [table]).group_by(["text", "answer"])
        merged = groups.aggregate([("row", "min"), ("count", "sum")]).rename_columns(["text", "answer", "row", "count"])
        rows += len(batch)
    for row in merged.sort_by("row").to_pylist() if merged else []:
        yield row["row"], row["text"], _gold(row["answer"], columns[1]), row["count"]


def _flat(column: pyarrow.Array) -> pyarrow.Array:
    """A column as strings: of a chat the last message by the user, of a reward model its ground truth."""
    import numpy
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        column = compute.struct_field(column, "ground_truth")
    elif pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        messages, parents = column.flatten(), compute.list_parent_indices(column)
        asked = compute.equal(compute.struct_field(messages, "role"), "user")
        contents, parents = compute.struct_field(messages, "content").filter(asked), parents.filter(asked)
        last = numpy.full(len(column), -1)
        last[parents.to_numpy()] = numpy.arange(len(parents))  # of several, the last assignment stays
        column = contents.take(pyarrow.array(last, mask=last < 0))
    return column.cast(pyarrow.string())


def _gold(cell: object, column: str) -> str:
    """A gold answer as text, whatever type it had; "" where there is none."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    text = "" if cell is None or isinstance(cell, (list, dict)) else str(cell).strip()
    if column == "solution":
        text = _last_box(text) or ""
    elif "####" in text:  # GSM8K: the working, then the answer
        text = text.rpartition("####")[2].strip()
    return "" if text.lower() == "nan" else text


def _unwrap(text: str) -> str:
    """The problem without DAPO's request for an `Answer:` line, which is not the form that our instruction asks for."""
    text = re.sub(r"\ASolve the following math problem step by step\.( [^\n]*\bAnswer:[^\n]*)?\n", "", text.strip())
    body, found, _ = text.rpartition("\nRemember to put your answer on its own line after")
    return (body if found else text).strip()


def _collect(name: str, rows: Iterable[_Row]) -> tuple[list[Problem], str]:
    kept: dict[str, Problem] = {}
    occurrences, dropped, conflicting = Counter(), Counter(), set()
    for number, text, answer, count in rows:
        text = _unwrap(text or "")
        if not text or not answer:
            dropped["without an answer" if text else "without a text"] += count
            continue
        key = " ".join(text.split())
        occurrences[key] += count
        first = kept.setdefault(key, Problem(f"{name}:{number}", text, answer))
        if _canonical(first.answer) != _canonical(answer):
            conflicting.add(key)
    problems = [problem for key, problem in kept.items() if key not in conflicting]
    total = occurrences.total() + dropped.total()
    dropped["with conflicting answers"] = sum(occurrences[key] for key in conflicting)
    dropped["duplicates"] = occurrences.total() - dropped["with conflicting answers"] - len(problems)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()) if count) or "none"
    return problems, f"{name}: {total:,} rows read, {len(problems):,} problems kept; rows dropped: {reasons}"


# ------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Prompt:
    """A problem and the token ids that the engine and the trainer both use: text is tokenized once, here."""

    problem: Problem
    token_ids: list[int]


def tokenize(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    instruction: str | None = INSTRUCTION,
    enable_thinking: bool = False,
) -> tuple[list[Prompt], int]:
    """Prompts of at most `max_prompt_tokens` tokens, and how many were longer and are left out.

    By the chat template where the tokenizer has one (`enable_thinking` is passed on to it), and otherwise as plain
    text: the problem, the instruction if any, each with a newline. No prompt starts with two BOS tokens, also not
    where both the template and the tokenizer add one.
    """
    if not problems:
        return [], 0
    texts = [f"{problem.text}\n{instruction}" if instruction else problem.text for problem in problems]
    bos = tokenizer.bos_token_id
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        ids = tokenizer.apply_chat_template(
            chats, tokenize=True, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False
        )
    else:
        # Some tokenizers also append EOS to what they encode, so only their BOS is taken over.
        start = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
        encoded = tokenizer([text + "\n" for text in texts], add_special_tokens=False)["input_ids"]
        ids = [start + row for row in encoded]
    prompts = []
    for problem, row in zip(problems, ids, strict=True):
        while bos is not None and row[:2] == [bos, bos]:
            row = row[1:]
        if not row:
            raise ValueError(f"the tokenizer makes no token of problem {problem.id}")
        if len(row) <= max_prompt_tokens:
            prompts.append(Prompt(problem, row))
    return prompts, len(problems) - len(prompts)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, generation_config: GenerationConfig | None
) -> list[int]:
    """Every id that ends a response, sorted: the EOS ids of tokenizer, config and generation config, which often
    differ (Qwen3 base checkpoints: 151643 and 151645), and the special token that ends a turn in the chat template."""
    found: set[int] = set()
    for holder in (tokenizer, config, generation_config):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "THE RESPONSE"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = tokenizer(text.rpartition("THE RESPONSE")[2], add_special_tokens=False)["input_ids"][:1]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        found.update(special.intersection(tail))
    return sorted(found)


# ------------------------------------------------------------------ answers

_ANSWER_LINE = re.compile(r"^[ \t>*_#-]*(?:the )?(?:final )?answer[ \t*_]*[:\uff1a][ \t*_]*(.*)$", re.I | re.M)
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_BRACES = re.compile(r"\\?\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,|,\\!|\{,\}|\\,)[0-9]{3})+(?:\.0*)?")


def _last_box(text: str) -> str | None:
    r"""What the last balanced `\boxed{…}` or `\fbox{…}` holds; a box in a box is one box. In linear time."""
    opened: list[tuple[int, int]] = []  # an open brace: where its command begins, where its content begins
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
    r"""The answer that a response commits itself to: its last balanced box, or else its last `Answer:` line.

    What stands before the last `</think>`, or in a block of thinking that never ends, does not count. None if there
    is nothing explicit: a number in passing earns nothing.

    >>> extract_answer(r"<think> \boxed{1} </think> So \boxed{2}, no, \boxed{\frac{3}{4}}."), extract_answer("it is 5")
    ('\\frac{3}{4}', None)
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer = _last_box(text)
    if answer is None and (lines := _ANSWER_LINE.findall(text)):
        answer = lines[-1].strip().rstrip("*_").removesuffix(".").rstrip("*_ ")
        answer = "" if _BOX.search(answer) else answer  # a box that was cut off
    return _bare(answer or "") or None


def _bare(text: str) -> str:
    """Without the dollar signs or the brackets of inline math around it, and with single spaces."""
    text = " ".join(text.split())
    if text.startswith("\\(") and text.endswith("\\)") and text.count("\\(") == 1:
        text = text[2:-2].strip()
    inner = text.strip("$").strip()
    return text if "$" in inner or inner.endswith("\\") else inner


def _integer(text: str, grouped: bool = False) -> str | None:
    """The integer that `text` is (`070`, `$70$`, `70.0`; if `grouped` also `1,234`), as canonical digits; else None.

    Digits stay text: int() refuses, and takes quadratic time for, the huge numbers that models write.
    """
    text = _bare(text)
    if grouped and _GROUPED.fullmatch(text):
        text = re.sub(r"[^0-9.+-]", "", text)
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def _canonical(answer: str) -> str:
    return _integer(answer) or _bare(answer)


# ------------------------------------------------------------------ the grader

LONGEST_ANSWER = 2_000  # characters; ten times the longest gold answer of the usual benchmarks
START_SECONDS = 120.0


@dataclass(frozen=True)
class Verdict:
    """`kind` is "right", "wrong", "no answer", "timeout" or "bad gold"; `answer` what was extracted from the text.

    A timeout (the time or memory bound, spent on this answer) or a bad gold is no verdict on the response, so it has
    no reward: it must neither train the quality head nor enter its group's baseline.
    """

    kind: str
    answer: str | None

    @property
    def reward(self) -> float | None:
        """1.0 for right, 0.0 for wrong and for no answer, None (no label) for timeout and bad gold."""
        return {"right": 1.0, "wrong": 0.0, "no answer": 0.0}.get(self.kind)


class Grader:
    """Grades responses; math-verify runs in `workers` child processes that can be killed.

    An answer may take `timeout` seconds of wall-clock time and `memory_mb` of address space: what is over is
    killed and costs nobody else anything. Integers and literally equal answers are settled without math-verify, and
    the first worker starts with the first answer that is not. Safe to use from several threads at once.
    """

    def __init__(self, workers: int = 1, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        if workers < 1 or timeout <= 0:
            raise ValueError(f"a grader needs a worker and a time bound above 0, not {workers} and {timeout}")
        self._timeout, self._memory_mb, self._closed = timeout, memory_mb, False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: a worker yet to be started
        for _ in range(workers):
            self._idle.put(None)
        self._alive: set[_Worker] = set()
        self._lock = threading.Lock()

    def grade(self, texts: list[str], golds: list[str]) -> list[Verdict]:
        """A verdict on each response in `texts` by its answer in `golds`.

        Raises:
            RuntimeError: the workers cannot start or keep dying; no reward is given for that.
        """
        answers = [extract_answer(text) for text in texts]
        golds = [_gold(gold, "") for gold in golds]
        kinds = [_settle(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
        # Rollouts of one group often agree: each different pair is verified once.
        rows = list(zip(golds, answers, kinds))
        pairs = list(dict.fromkeys((gold, answer) for gold, answer, kind in rows if kind is None))
        verified = dict(zip(pairs, self._threads.map(self._verify, pairs)))
        return [Verdict(kind or verified[gold, answer], answer) for gold, answer, kind in rows]

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
                # A worker that had served others may have run out of memory for their sake: a new one has to tell.
                if reply == "timeout" or (reply == "memory" and fresh):
                    return "timeout"
            raise RuntimeError(f"grading workers keep dying ({reply}): is memory short, or math-verify not installed?")
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
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._alive:
            self._alive.pop().close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _settle(gold: str, answer: str | None) -> str | None:
    """The verdict where it takes no mathematics to find it, else None."""
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
    """The parent's end of one worker process: a line of JSON down its stdin for each pair, a word back.

    A fresh interpreter and neither a fork (the parent holds an engine, threads and much memory) nor multiprocessing's
    spawn (it would import the parent's main script again).
    """

    def __init__(self, timeout: float, memory_mb: int) -> None:
        script = [os.path.abspath(__file__), "--grade-worker", str(timeout), str(memory_mb), str(os.getpid())]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-P", *script], stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0
        )
        self.jobs = 0

    def ask(self, pair: tuple[str, str], timeout: float) -> str:
        """One of "right", "wrong", "timeout" and "memory", or else how the worker died."""
        if self.jobs == 0 and (greeting := self._read(START_SECONDS)) != "ready":
            return f"at the start: {greeting}"
        self.jobs += 1
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
        except BrokenPipeError:
            return self._death()
        return self._read(timeout)

    def _read(self, seconds: float) -> str:
        poll = select.poll()  # select() itself takes no file descriptor above 1023
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return "timeout"
        return self._process.stdout.readline().decode().strip() or self._death()

    def _death(self) -> str:
        code = self._process.wait()
        # Aborts and segmentation faults are how C libraries take the memory bound; SIGKILL comes from elsewhere.
        return "memory" if -code in (signal.SIGABRT, signal.SIGSEGV) else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def _serve(timeout: float, memory_mb: int, parent: int) -> None:
    """A worker's life. It ends with its stdin, with its parent, or, busy, by its own alarm soon after the bound."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent cleans up
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    try:
        greeting = "ready" if _equivalent("\\frac{1}{2}", "0.5") else "math-verify cannot tell that 1/2 is 0.5"
    except (ImportError, MemoryError) as error:
        greeting = f"{type(error).__name__}: {error}".replace("\n", " ")
    os.write(replies, f"{greeting}\n".encode())
    while True:
        while not select.select([0], [], [], 1.0)[0]:
            if os.getppid() != parent:  # a forked sibling may hold the pipe open when the parent is gone
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
    r"""Whether math-verify takes the two for equal. Both go in as `\boxed{…}`: bare LaTeX is often not found at all.

    The gold goes first, for the comparison is not symmetric. What cannot be parsed equals nothing here (equal
    strings never come here). math-verify's own time-outs are off: they need a main thread and stop no C code.
    """
    from math_verify import parse, verify

    try:
        parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in (gold, answer)]
        return verify(*parsed, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # parsers and sympy raise whatever they like on whatever a model writes
        return False


if __name__ == "__main__" and sys.argv[1:2] == ["--grade-worker"]:
    _serve(float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
