"""Data sets in, prompts out.

problems, report = load("BytedTsinghua-SIA/DAPO-Math-17k")
prompts, too_long = tokenize(problems, tokenizer, max_prompt_tokens=1024)
"""

from __future__ import annotations

import ast
import codecs
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from support.grader import canonical, gold_text
from tiny import sums as tiny_sums
from tiny.sums import sums_range as sums_range

if TYPE_CHECKING:
    import pyarrow
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Problem:
    """One problem: a stable `id` (unique within its set), its text and its gold answer."""

    id: str
    text: str
    answer: str


def sums(*arguments: object, **options: object) -> list[Problem]:
    """The problems of `tiny.sums.sums`."""
    return [Problem(text, text, answer) for text, answer in tiny_sums.sums(*arguments, **options).items()]


def load(source: str, seed: int = 0, config: str = "", split: str = "train") -> tuple[list[Problem], str]:
    """The problems of `source`, in its own order, and one line on what was read and what was dropped.

    `source` is "sums" or "sums:2-3:20" (up to 20,000 drawn with `seed`), or what `read` takes. A problem
    that comes with different answers is dropped.

    Raises:
        ValueError: one sentence that names --dataset, the place and the remedy.
    """
    found = tiny_sums.sums_for(source, "--dataset", "train", seed, 20_000)
    if found is not None:
        problems = [Problem(text, text, answer) for text, answer in found.items()]
        (low, high), largest = sums_range(source)
        report = f"{source}: {len(problems)} sums of {low} to {high} numbers up to {largest}"
    else:
        try:
            rows = read(source, strict=False, config=config, split=split)
            problems, report = _different(Path(source).name, rows)
        except DataError as error:
            raise ValueError(f"--dataset {error}") from error
    if not problems:
        raise ValueError(f"--dataset {source}: no usable problem in it ({report}); name another data set")
    return problems, report


def _different(name: str, rows: Iterable[Row]) -> tuple[list[Problem], str]:
    kept: dict[str, Problem] = {}
    occurrences, dropped, conflicting = Counter(), Counter(), set()
    for row in rows:
        if row.fault:
            dropped[row.fault] += row.count
            continue
        key = " ".join(row.text.split())
        occurrences[key] += row.count
        first = kept.setdefault(key, Problem(f"{name}:{row.number}", row.text, row.answer))
        if canonical(first.answer) != canonical(row.answer):
            conflicting.add(key)
    problems = [problem for key, problem in kept.items() if key not in conflicting]
    total = occurrences.total() + dropped.total()
    dropped["with conflicting answers"] = sum(occurrences[key] for key in conflicting)
    dropped["duplicates"] = occurrences.total() - dropped["with conflicting answers"] - len(problems)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()) if count) or "none"
    return problems, f"{name}: {total:,} rows read, {len(problems):,} problems kept; rows dropped: {reasons}"


# ------------------------------------------------------------------ one reader of data sets

REMEDY = "choose by --dataset-config and --dataset-split, or name one file of it (.jsonl, .json or .parquet)"


class DataError(ValueError):
    """What is wrong with a data set, in one sentence: place, fault, remedy. The caller adds the flag."""

    def __init__(self, place: str | Path, fault: object, remedy: str) -> None:
        super().__init__(f"{place}: {' '.join(str(fault).split())[:500]}; {remedy}")


class Row(NamedTuple):
    """A row as it was read: `number` from 1 (in JSON lines, of its line), the columns of text and answer."""

    number: int
    columns: tuple[str, str]
    text: str
    answer: str
    # why it is no problem, or ""
    fault: str
    # how many rows were like it
    count: int


# What a reader of files yields: number, place for messages, cells by column, how many rows were like it.
Cells = tuple[int, str, dict[str, object], int]


def read(source: str, *, strict: bool, config: str = "", split: str = "train", remedy: str = REMEDY) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .parquet file, or of a folder or hub id with its `config` and `split`.

    Strict: all rows in their order, and one with a fault raises. Otherwise equal rows may be merged.

    Raises:
        DataError: one sentence with the file or hub id, the row, the column and the remedy.
    """
    by_hand = is_file(source) and Path(source).suffix.lower() != ".parquet"
    first = None
    for number, place, row, count in _json(source) if by_hand else _arrow(source, config, split, not strict, remedy):
        columns = columns_of(row, place)
        first = first or columns
        if strict and columns != first:
            fault = f"columns {' and '.join(columns)}, where the rows before have {' and '.join(first)}"
            raise DataError(place, fault, "use the same columns in every row")
        text, answer = unwrap(_text(row[columns[0]])), _gold(row[columns[1]], columns[1])
        fault = _fault(text, answer)
        if strict and fault:
            column = columns[1 if text else 0]
            shown = json.dumps(row[column], default=str, ensure_ascii=False)
            fault = f"a row {fault}: column {column}, which holds {shown[:60]}"
            raise DataError(place, fault, "mend it, or delete it: no row is dropped in silence here")
        yield Row(number, columns, text, answer, fault, count)


def is_file(source: str) -> bool:
    """Whether `source` names a file, and no hub id. Raises DataError where it is missing or of another kind."""
    known = Path(source).suffix.lower() in (".jsonl", ".json", ".parquet")
    if known or Path(source).is_file():
        try:
            open(source, "rb").close()
        except OSError as error:
            raise DataError(source, error.strerror, "name a readable file or a hub id") from error
        if not known:
            raise DataError(source, "not a .jsonl, .json or .parquet file", "convert it to one of them")
    return known


def _json(source: str) -> Iterator[Cells]:
    """JSON lines, or a list in a .json file. By hand: datasets rounds long integers, makes dates of texts that
    look like one, takes two objects in a line, and names no line where it fails. Lines end at newline bytes
    alone: U+2028 inside a string ends none."""
    with open(source, "rb") as file:
        head = file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
        listed = source.lower().endswith(".json") and head.startswith(b"[")
        for number, line in enumerate([file.read()] if listed else file, 1):
            if not (line := line.removeprefix(codecs.BOM_UTF8).strip()):
                continue
            try:
                rows = enumerate(json.loads(line), 1) if listed else [(number, json.loads(line))]
            except (ValueError, RecursionError) as error:
                place = f"{source}:{getattr(error, 'lineno', number) if listed else number}"
                raise DataError(place, f"bad JSON ({error})", "mend it (one object a line, or a list)") from error
            for index, row in rows:
                place = f"{source} (row {index})" if listed else f"{source}:{number}"
                # a problem of ORZ is a list of two messages
                if isinstance(row, list) and [type(message) for message in row] == [dict, dict]:
                    row = dict(zip("01", row))
                if not isinstance(row, dict):
                    raise DataError(place, f"a JSON {type(row).__name__}, no object", "write an object a problem")
                yield index, place, row, 1


def _arrow(source: str, config: str, split: str, merge: bool, remedy: str) -> Iterator[Cells]:
    """A parquet file, a folder or a set on the hub."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs it also raises
    what: dict[str, object] = {"path": source, "name": config or None, "split": split}
    with tempfile.TemporaryDirectory() as folder:
        # What is local is streamed: no cache that is older than the file, or in a home that is read-only.
        if Path(source).exists():
            what |= {"streaming": True, "cache_dir": folder}
        if is_file(source):
            what |= {"path": "parquet", "name": None, "data_files": source, "split": "train"}
        try:
            table = datasets.load_dataset(**what)
            columns = list(columns_of(table.column_names or next(iter(table)), source))
            if is_file(source):  # the other columns may be far larger
                table = datasets.load_dataset(**what, columns=columns)
            start = 1
            for batch in table.select_columns(columns).with_format("arrow").iter(131_072):
                numbers, counts = _distinct(batch) if merge else (range(len(batch)), [1] * len(batch))
                rows = batch.take(numbers).to_pylist() if merge else batch.to_pylist()
                for number, row, count in zip(numbers, rows, counts, strict=True):
                    yield start + number, f"{source} (row {start + number})", row, count
                start += len(batch)
        except DataError:
            raise
        except Exception as error:  # each builder of datasets raises its own kinds
            fault, remedy = (
                ("no parquet file", "write it anew") if is_file(source) else ("datasets cannot read it", remedy)
            )
            raise DataError(source, f"{fault} ({error})", remedy) from error


def _distinct(batch: pyarrow.Table) -> tuple[list[int], list[int]]:
    """The index of the first of equal rows, and how many they are, in order.

    DAPO-Math-17k has each problem 100 times in 1.8 million nested rows: arrow merges them before Python.
    """
    import pyarrow

    keys = [_key(column.combine_chunks()) for column in batch.columns]
    table = pyarrow.table([*keys, pyarrow.array(range(len(batch)))], ["text", "answer", "row"])
    groups = table.group_by(["text", "answer"]).aggregate([("row", "min"), ("row", "count")]).sort_by("row_min")
    return groups["row_min"].to_pylist(), groups["row_count"].to_pylist()


def _key(column: pyarrow.Array) -> pyarrow.Array:
    """A text for each cell, different for different ones: arrow groups by no list or struct."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        return compute.binary_join_element_wise(*(_key(field) for field in column.flatten()), "\0")
    if pyarrow.types.is_nested(column.type):
        lengths = compute.fill_null(compute.list_value_length(column), 0).cast("int32")
        ends = pyarrow.concat_arrays([pyarrow.array([0], "int32"), compute.cumulative_sum(lengths)])
        return compute.binary_join(pyarrow.ListArray.from_arrays(ends, _key(column.flatten())), "\1")
    return compute.coalesce(column.cast("string"), "\2")


# ------------------------------------------------------------------ what a row says

# The first that a set has is read, in whatever capitals. "0" and "1" are the messages of ORZ.
TEXTS = "problem question prompt query instruction input messages conversations 0".split()
ANSWERS = (
    "answer final_answer expected_answer gt_answer ground_truth gt target reward_model verification_info solution 1"
).split()


def columns_of(names: Iterable[str], place: str | Path) -> tuple[str, str]:
    """Which of a data set's columns hold the problem's text and its answer. Raises DataError."""
    spelled = {name.lower(): name for name in names}
    text, answer = (next((spelled[name] for name in known if name in spelled), None) for known in (TEXTS, ANSWERS))
    if text is None or answer is None:
        fault = f"no problem or no answer among the columns {list(spelled.values())}"
        raise DataError(place, fault, "rename them to problem and answer")
    return text, answer


def _unpacked(cell: object) -> object:
    """JSON text (or Python's, which CSV files hold) as what it stands for, None if it is broken; else the cell."""
    if not isinstance(cell, str) or not (packed := re.match(r"""\s*(?:array\()?[\[{]\s*(\{?)\s*["']""", cell)):
        return cell
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None if "{" in packed[0] else cell


def _text(cell: object) -> str:
    """A text, or the last message by the user of a chat; "" for none."""
    cell = _unpacked(cell)
    if isinstance(cell, (dict, list)):
        messages = [m for m in (cell if isinstance(cell, list) else [cell]) if isinstance(m, dict)]
        asked = [m for m in messages if m.get("role", m.get("from", "user")) in ("user", "human")]
        cell = asked[-1].get("content", asked[-1].get("value")) if asked else None
    if isinstance(cell, list) and all(isinstance(piece, dict) and piece.get("type") == "text" for piece in cell):
        cell = "".join(str(piece.get("text")) for piece in cell)
    return cell if isinstance(cell, str) else ""


def _gold(cell: object, column: str) -> str:
    """The gold answer in a cell, be it packed in JSON, a list of one, a reward model or a solution; "" for none."""
    cell = _unpacked(cell)
    if isinstance(cell, dict):
        name = next((name for name in (*ANSWERS, "value") if name in cell), "")
        return _gold(cell.get(name), name)
    if isinstance(cell, list):
        return _gold(cell[0], column) if len(cell) == 1 else ""
    if column.lower() != "solution" or not isinstance(cell, str):
        return "" if isinstance(cell, bool) else gold_text(cell)
    # A solution without a box may be the answer alone, or end as GSM8K's do; prose is no answer.
    prose = len(cell) > 100 or re.search(r"\S\s*\n|[a-z]\.\s*$| [a-z]+ [a-z]+ ", cell)
    return gold_text(cell, "solution" if prose and "####" not in cell or "box" in cell else "answer")


_PLACEHOLDER = re.compile(
    r"(the )?proof\b.{0,40}|proved|proven|q ?e ?d|answer|solution|omitted|missing|unknown|null|none|nan|n ?/? ?a"
    r"|not ?(found|available|applicable|provided|given|specified)|no (final )?answer( found| given| provided)?"
    r"|(see|refer to)\b.{0,60}|tbd|to ?do|to be determined|[+-]?inf|"
)


def _fault(text: str, answer: str) -> str:
    """Why this is no problem with an answer, or ""."""
    if not text or not answer:
        return "without an answer" if text else "without a text"
    plain = re.sub(r"\\(text|mathrm|textbf)\b|[\s{}()\[\]$.,:;?!'\"*_]+", " ", answer.lower())
    return "with an answer that cannot be verified" if _PLACEHOLDER.fullmatch(" ".join(plain.split())) else ""


# From a sentence that asks for #### or an empty box to the end; from DAPO's last line.
_WISH = re.compile(r"(\s+Let's think step by step|((?<=[.?!$])\s+|\s*\n)(?=\S))[^.?!\n]*?(####|\\boxed\{\s*\})[^\n]*\Z")


@functools.lru_cache(100_000)
def unwrap(text: str) -> str:
    """The problem without its own wish for a form of the answer, such as DAPO's: `INSTRUCTION` asks for one."""
    text = re.sub(r"\ASolve the following math problem step by step\.( [^\n]*\bAnswer:[^\n]*)?\n", "", text.strip())
    body, found, _ = text.rpartition("\nRemember to put your answer on its own line")
    text = body if found else text
    return (_WISH.sub("", text) if "####" in text or "\\boxed" in text else text).strip()


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
