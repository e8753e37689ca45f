"""Data sets in (`load`), prompts out (`tokenize`)."""

from __future__ import annotations

import ast
import codecs
import functools
import itertools
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tiny.sums
from support.args import SamplingArgs
from support.grader import canonical, last_box

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig
    from transformers import PreTrainedTokenizerBase as Tokenizer

REMEDY = "choose by --dataset-config and --dataset-split, or name one file of it (.jsonl, .json or .parquet)"


@dataclass(frozen=True)
class Problem:
    """One problem: a stable `id` (unique within its set), its text and its gold answer."""

    id: str
    text: str
    answer: str


def sums(*arguments: object, **options: object) -> list[Problem]:
    """`tiny.sums.sums`, as problems."""
    return [Problem(text, text, answer) for text, answer in tiny.sums.sums(*arguments, **options).items()]


def load(source: str, seed: int = 0, config: str = "", split: str = "train") -> tuple[list[Problem], str]:
    """The problems of `source`, in its own order, and a line on what was read and what was dropped.

    `source` is "sums" or "sums:2-3:20" (up to 20,000, drawn with `seed`), or what `read` takes.
    Raises ValueError, a sentence that names --dataset, the place and the remedy.
    """
    try:
        wanted = tiny.sums.asked(source, "train", 20_000)
        if (config or split != "train") and (wanted or is_file(source)):
            raise DataError(source, "it has no configs and splits", "leave out --dataset-config and --dataset-split")
        if wanted:
            problems, report = sums(seed=seed, **wanted), f"{source}: {wanted['count']} sums"
        else:
            problems, report = read(source, Path(source).name, strict=False, config=config, split=split)
        if not problems:
            raise DataError(source, f"no usable problem in it ({report})", "name another data set")
    except ValueError as error:
        raise ValueError(f"--dataset {error}") from error
    return problems, report


class DataError(ValueError):
    """What is wrong with a data set, in one sentence, without the flag."""

    def __init__(self, place: str, fault: object, remedy: str) -> None:
        super().__init__(f"{place}: {' '.join(str(fault).split())[:500]}; {remedy}")


def read(source: str, name: str, strict: bool, config: str = "", split: str = "train") -> tuple[list[Problem], str]:
    """A .jsonl, .json or .parquet file, or the `config` and `split` of a folder or hub id.

    Gives the problems, in order, with ids from `name`, and a line on what was read and dropped.
    strict, for evaluation: all rows, and one that is no problem with an answer is an error.
    Otherwise it is dropped; each problem comes once, and not at all if its answers differ.
    Raises DataError, which names the file or hub id, the row, the column and the remedy.
    """
    by_hand = is_file(source) and not source.lower().endswith(".parquet")
    kept: dict[str, Problem] = {}
    times, dropped, conflicting, columns = Counter(), Counter(), set(), ()
    remedy = f"fetch its file by other means and write {name}=FILE" if strict else REMEDY
    rows = _json(source) if by_hand else _arrow(source, config, split, remedy)
    for number, (place, row) in enumerate(rows, 1):
        columns = columns_of(row, place)
        text, answer = unwrap(_text(row[columns[0]])), gold_text(row[columns[1]], columns[1])
        if fault := _fault(text, answer):
            if strict:
                column = columns[1 if text else 0]
                fault = f"a problem {fault}: column {column}, which holds {row[column]!r:.60}"
                raise DataError(place, fault, "mend or delete it")
            dropped[fault] += 1
            continue
        key = place if strict else " ".join(text.split())
        times[key] += 1
        first = kept.setdefault(key, Problem(f"{name}:{number}", text, answer))
        if first.answer != answer and canonical(first.answer) != canonical(answer):
            conflicting.add(key)
    problems = [problem for key, problem in kept.items() if key not in conflicting]
    if strict:
        return problems, f"{source} ({' and '.join(columns)})"
    total = times.total() + dropped.total()
    dropped["with conflicting answers"] = sum(times[key] for key in conflicting)
    dropped["duplicates"] = times.total() - dropped["with conflicting answers"] - len(problems)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()) if count) or "none"
    return problems, f"{name}: {total:,} rows read, {len(problems):,} problems kept; rows dropped: {reasons}"


def is_file(source: str) -> bool:
    """Whether `source` names a file, and no hub id. Raises DataError on one that cannot be read, or of another kind."""
    known, there = Path(source).suffix.lower() in (".jsonl", ".json", ".parquet"), os.path.isfile(source)
    if there and not known:
        raise DataError(source, "not a .jsonl, .json or .parquet file", "convert it to one of them")
    if known and not (there and os.access(source, os.R_OK)):
        raise DataError(source, "No such file, or not a readable one", "name a file or a hub id")
    return known


def _json(source: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Place and cells of each row of JSON lines, or of a list in a .json file."""
    # By hand: datasets rounds long integers, makes dates of texts, takes two objects in a line, and
    # names no line where it fails. Only newline bytes end lines: U+2028 in a string does not.
    with open(source, "rb") as file:
        head = file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
        listed = head.startswith(b"[") and source.lower().endswith(".json")
        for number, line in enumerate([file.read()] if listed else file, 1):
            if not (line := line.removeprefix(codecs.BOM_UTF8).strip()):
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                place = f"{source}:{getattr(error, 'lineno', 1) if listed else number}"
                raise DataError(place, f"bad JSON ({error})", "mend it (one object a line, or a list)") from error
            for index, row in enumerate(found if listed else [found], 1):
                place = f"{source} (row {index})" if listed else f"{source}:{number}"
                # ORZ: question and answer as two messages
                if isinstance(row, list) and [type(message) for message in row] == [dict, dict]:
                    row = dict(zip("01", row))
                if not isinstance(row, dict):
                    raise DataError(place, f"a JSON {type(row).__name__}, no row", "write one object for each problem")
                yield place, row


def _arrow(source: str, config: str, split: str, remedy: str) -> Iterator[tuple[str, dict[str, object]]]:
    """The same of a parquet file, a folder or a set on the hub, all by datasets."""
    import datasets

    # It also raises what it logs.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    what: dict[str, object] = {"path": source, "name": config or None, "split": split}
    if is_file(source):
        what, remedy = {"path": "parquet", "data_files": source, "split": "train"}, "write the parquet file anew"
    with tempfile.TemporaryDirectory() as folder:
        # What is local is streamed: no cache older than the file, or in a home that is read-only.
        local = {"streaming": True, "cache_dir": folder} if Path(source).exists() else {}
        try:
            table = datasets.load_dataset(**what, **local)
            columns = list(columns_of(table.column_names or next(iter(table)), source))
            # By batches of arrow: row by row, the 1.8 million of DAPO-Math-17k take a minute more.
            batches = table.select_columns(columns).with_format("arrow").iter(16_384)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield f"{source} (row {number})", row
        except DataError:
            raise
        # Each of the builders of datasets raises its own kinds.
        except Exception as error:
            raise DataError(source, f"datasets cannot read it ({error})", remedy) from error


# The first that a set has is read, in whatever capitals. "0" and "1" are the messages of ORZ.
TEXTS = "problem question prompt query instruction input messages conversations 0".split()
ANSWERS = "answer final_answer expected_answer gt_answer ground_truth gt target reward_model verification_info".split()
ANSWERS += ["solution", "1"]


def columns_of(names: Iterable[str], place: str) -> tuple[str, str]:
    """Which of a data set's columns hold the problem's text and its answer. Raises DataError."""
    spelled = {name.lower(): name for name in names}
    text, answer = (next((spelled[name] for name in known if name in spelled), None) for known in (TEXTS, ANSWERS))
    if text is None or answer is None:
        fault = f"no problem or no answer among the columns {list(spelled.values())}"
        raise DataError(place, fault, "rename them to problem and answer")
    return text, answer


def _unpacked(cell: object) -> object:
    """JSON text, or Python's as in CSV files, as what it stands for (None: broken); else the cell."""
    packed = re.match(r"""\s*(?:array\()?[\[{]\s*(\{?)\s*["']""", cell) if isinstance(cell, str) else None
    # datasets makes JSON of a column that holds texts and numbers.
    quoted = isinstance(cell, str) and cell[:1] == cell[-1:] == '"'
    for parse in (json.loads, ast.literal_eval) if packed else (json.loads,) if quoted else ():
        try:
            found = parse(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, (dict, list, str)) else cell
    return None if packed and "{" in packed[0] else cell


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


def gold_text(cell: object, column: str = "answer") -> str:
    """The gold answer in a cell: of a reward model, a list of one, a box, a solution; "" for none."""
    cell = _unpacked(cell)
    if isinstance(cell, dict):
        return gold_text(next((cell[name] for name in ("ground_truth", "answer", "value") if name in cell), None))
    if isinstance(cell, list):
        return gold_text(cell[0], column) if len(cell) == 1 else ""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    text = "" if cell is None or isinstance(cell, bool) else str(cell).strip()
    if "\\boxed" in text or "\\fbox" in text:
        return last_box(text)[0]
    # GSM8K: the working, then the answer.
    if "####" in text:
        return text.rpartition("####")[2].strip()
    # A solution may be the answer alone; prose is none.
    prose = len(text) > 100 or re.search(r"\S\s*\n|[a-z]\.\s*$| [a-z]+ [a-z]+ ", text)
    return "" if text.lower() == "nan" or (column.lower() == "solution" and prose) else text


# Golds that nothing can be checked against: 143,300 rows of NuminaMath-1.5 have one.
_PLACEHOLDER = re.compile(
    r"(the )?proof\b.{0,40}|proved|proven|q ?e ?d|answer|solution|omitted|missing|unknown|null|none|nan|n ?/? ?a"
    r"|(answer )?not ?(found|available|applicable|provided|given|specified)|no (final )?answer( found| given)?"
    r"|(see|refer to)\b.{0,60}|tbd|to ?do|to be determined|inf|"
)


def _fault(text: str, answer: str) -> str:
    """Why this is no problem with an answer, or ""."""
    if not text or not answer:
        return "without an answer" if text else "without a text"
    plain = re.sub(r"\\(text|mathrm|textbf)\b|[\s{}()\[\]$.,:;?!'\"*_\u2013\u2014-]+", " ", answer.lower())
    return "with an answer that cannot be verified" if _PLACEHOLDER.fullmatch(" ".join(plain.split())) else ""


# The last sentence, if it asks for #### or for an empty box.
_WISH = re.compile(r"(\s+Let's think step by step|((?<=[.?!$])\s+|\s*\n)(?=\S))[^.?!\n]*?(####|\\boxed\{\s*\})[^\n]*\Z")


@functools.lru_cache(100_000)
def unwrap(text: str) -> str:
    """The problem without its set's wish for a form of the answer: --instruction asks for another."""
    text = re.sub(r"\ASolve the following math problem step by step\.( [^\n]*\bAnswer:[^\n]*)?\n", "", text.strip())
    body, found, _ = text.rpartition("\nRemember to put your answer on its own line")
    text = body if found else text
    return (_WISH.sub("", text) if "####" in text or "\\boxed" in text else text).strip()


@dataclass(frozen=True)
class Prompt:
    """A problem and its token ids: text is tokenized once, for the engine and the trainer."""

    problem: Problem
    token_ids: list[int]


def tokenize(problems: list[Problem], tokenizer: Tokenizer, args: SamplingArgs) -> tuple[list[Prompt], int]:
    """Prompts of at most `max_prompt` tokens, and how many were longer and are left out.

    By the chat template where there is one, else as plain text: the problem and the instruction if
    any, each with a newline. No prompt starts with two BOS, also if template and tokenizer add one.
    Raises ValueError for a problem without a token, and thinking that the template has no switch for.
    """
    texts = [f"{problem.text}\n{args.instruction}" if args.instruction else problem.text for problem in problems]
    bos, prompts = tokenizer.bos_token_id, []
    if tokenizer.chat_template:
        ids = _chat_ids(texts, tokenizer, args.thinking)
        switched = ids[:1] != _chat_ids(texts[:1], tokenizer, not args.thinking)
    else:
        # Some tokenizers also append EOS to what they encode, so only their BOS is taken over.
        start = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
        encoded = tokenizer([text + "\n" for text in texts], add_special_tokens=False)["input_ids"]
        ids, switched = [start + row for row in encoded], False
    if args.thinking and not switched:
        raise ValueError("--thinking: the model's chat template has no switch for it; leave the flag out")
    for problem, row in zip(problems, ids, strict=True):
        while bos is not None and row[:2] == [bos, bos]:
            row = row[1:]
        if not row:
            raise ValueError(f"the tokenizer makes no token of problem {problem.id}")
        if len(row) <= args.max_prompt:
            prompts.append(Prompt(problem, row))
    return prompts, len(problems) - len(prompts)


def _chat_ids(texts: list[str], tokenizer: Tokenizer, thinking: bool) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    # Qwen3 and most others call the switch enable_thinking, DeepSeek and Granite thinking.
    switch = {"enable_thinking": thinking, "thinking": thinking}
    return tokenizer.apply_chat_template(chats, tokenize=True, add_generation_prompt=True, return_dict=False, **switch)


def stop_token_ids(tokenizer: Tokenizer, config: PreTrainedConfig, generation: GenerationConfig | None) -> list[int]:
    """Every id that ends a response, sorted: the EOS ids of tokenizer, config and generation config,
    which often differ (Qwen3 base: 151643, 151645), and the token that ends a turn in the template."""
    found: set[int] = set()
    for holder in (tokenizer, config, generation):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "THE RESPONSE"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = tokenizer(text.rpartition("THE RESPONSE")[2], add_special_tokens=False)["input_ids"][:1]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        found.update(special.intersection(tail))
    return sorted(found)
