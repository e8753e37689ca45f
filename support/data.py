"""Data sets in, prompts out.

problems, report = load("BytedTsinghua-SIA/DAPO-Math-17k")
prompts, dropped = tokenize(problems, tokenizer, max_prompt_tokens=1024)
"""

from __future__ import annotations

import codecs
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.grader import canonical, gold_text

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet
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


def sums_range(source: str, flag: str = "--dataset") -> tuple[tuple[int, int], int] | None:
    """(terms, largest) that `sums` or `sums:2-3:20` (2 to 3 numbers, up to 20) asks for; else None."""
    if source != "sums" and not source.startswith("sums:"):
        return None
    match = re.fullmatch(r"sums(?::([1-9][0-9]?)-([1-9][0-9]?):([1-9][0-9]{0,8}))?", source)
    low, high, largest = (int(n) for n in match.groups(default="0")) if match else (2, 1, 0)
    if low > high:
        raise ValueError(f"{flag} {source}: write sums, or sums:2-3:20 for 2 to 3 numbers of at most 20")
    return ((low, high), largest) if low else ((3, 10), 15)


def sums_count(terms: tuple[int, int], largest: int) -> int:
    """How many sums there are of `terms` numbers up to `largest`."""
    return sum(largest**n * 2 ** (n - 1) for n in range(terms[0], terms[1] + 1))


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
        count = min(20_000, sums_count(*wanted) // 2)
        problems = sums(count, seed, "train", *wanted)
        report = f"{source}: {count} sums of {low} to {high} numbers up to {largest}"
    else:
        try:
            problems, report = _collect(Path(source).name, _rows(source))
        except DataError as error:
            raise ValueError(f"--dataset {error}") from error
    if not problems:
        raise ValueError(f"--dataset {source}: no usable problem in it ({report}); name another data set")
    return problems, report


# What the readers yield: row or line number (from 1), raw text, answer ("" for none), how many rows were like it.
_Row = tuple[int, str | None, str, int]


class DataError(ValueError):
    """What is wrong with a data set, in one sentence: the place, the fault, the remedy. The caller names the flag."""

    def __init__(self, place: str | Path, fault: str, remedy: str) -> None:
        super().__init__(f"{place}: {' '.join(fault.split())}; {remedy}")


def _rows(source: str) -> Iterator[_Row]:
    if not is_file(source):
        yield from _hub_rows(source)
        return
    path = Path(source)
    try:
        if path.suffix.lower() == ".parquet":
            file, columns = open_parquet(path)
            yield from _arrow_rows(file.iter_batches(65_536, columns=list(columns)), columns, path)
        else:
            yield from ((number, *cells(row, place)[:2], 1) for number, place, row in json_rows(path))
    except OSError as error:
        raise DataError(source, error.strerror or str(error), "name a readable file or a hub id") from error


def is_file(source: str) -> bool:
    """Whether `source` names a file, there or not, and no hub id. Raises DataError for one of another kind."""
    known = Path(source).suffix.lower() in (".jsonl", ".json", ".parquet")
    if not known and Path(source).is_file():
        raise DataError(source, "not a .jsonl, .json or .parquet file", "convert it to one of them")
    return known


def json_rows(path: Path) -> Iterator[tuple[int, str, dict[str, object]]]:
    """The rows of a JSON list or of JSON lines, each with its number (from 1) and its place for messages.

    Lines are split at newline bytes alone: U+2028 inside a string ends none. Raises DataError and OSError.
    """
    remedy = "mend or delete that line (one JSON object a line)"
    with open(path, "rb") as file:
        if path.suffix.lower() == ".json" and file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            file.seek(0)
            try:
                listed = json.loads(file.read())
            except (ValueError, RecursionError) as error:
                place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
                raise DataError(place, f"bad JSON ({error})", "mend it (a list of objects)") from error
            yield from (_json_row(row, number, f"{path} (row {number})") for number, row in enumerate(listed, 1))
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line := line.removeprefix(codecs.BOM_UTF8).strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}:{number}", f"bad JSON ({error})", remedy) from error
                yield _json_row(row, number, f"{path}:{number}")


def _json_row(row: object, number: int, place: str) -> tuple[int, str, dict[str, object]]:
    if not isinstance(row, dict):
        raise DataError(place, f"a JSON {type(row).__name__} where a row is due", "write one object for each problem")
    return number, place, row


def cells(row: dict[str, object], place: str) -> tuple[str | None, str, tuple[str, str]]:
    """The text (None for none) and the gold answer ("" for none) of a row, and the columns that they come from."""
    names = columns_of(row, place)
    text, answer = (row[name] for name in names)
    if isinstance(text, list):  # a chat: its last message by the user
        asked = [m.get("content") for m in text if isinstance(m, dict) and m.get("role") == "user"]
        text = asked[-1] if asked else None
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    return text if isinstance(text, str) else None, gold_text(answer, names[1]), names


def columns_of(names: Iterable[str], place: str | Path) -> tuple[str, str]:
    """Which of a data set's columns hold the problem's text and its answer. Raises DataError."""
    names = list(names)
    text = next((n for n in ("problem", "question", "Problem", "Question", "prompt") if n in names), None)
    answer = next((n for n in ("answer", "Answer", "final_answer", "reward_model", "solution") if n in names), None)
    if text is None or answer is None:
        raise DataError(
            place, f"no problem or no answer among the columns {names}", "rename them to problem and answer"
        )
    return text, answer


def open_parquet(path: Path) -> tuple[parquet.ParquetFile, tuple[str, str]]:
    """The file and its columns of text and answer. Raises DataError and OSError."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(path, f"no parquet file ({error})", "write it anew") from error
    return file, columns_of(file.schema_arrow.names, path)


def _hub_rows(source: str) -> Iterator[_Row]:
    import datasets

    try:
        table = datasets.load_dataset(source, split="train")
    except (OSError, ValueError) as error:
        raise DataError(source, f"no such file, and the hub gave no train split ({error})", "check the name") from error
    columns = columns_of(table.column_names, source)
    tables = table.select_columns(list(columns)).with_format("arrow").iter(65_536)
    yield from _arrow_rows((b for t in tables for b in t.combine_chunks().to_batches()), columns, source)


def _arrow_rows(batches: Iterable[pyarrow.RecordBatch], columns: tuple[str, str], place: str | Path) -> Iterator[_Row]:
    """DAPO has each problem 100 times in 1.8 million nested rows: arrow merges equal ones, Python sees the rest."""
    import numpy
    import pyarrow

    merged, rows = None, 0
    for batch in batches:
        try:
            texts, answers = (_flat(batch.column(batch.schema.get_field_index(column))) for column in columns)
        except pyarrow.ArrowException as error:
            fault = f"columns {columns} hold no text, chat or ground_truth ({error})"
            raise DataError(place, fault, "store them as text in columns problem and answer") from error
        numbers = numpy.arange(rows + 1, rows + 1 + len(batch))
        table = pyarrow.table([texts, answers, numbers, numpy.ones_like(numbers)], ["text", "answer", "row", "count"])
        groups = pyarrow.concat_tables([merged, table] if merged else [table]).group_by(["text", "answer"])
        merged = groups.aggregate([("row", "min"), ("count", "sum")]).rename_columns(["text", "answer", "row", "count"])
        rows += len(batch)
    for row in merged.sort_by("row").to_pylist() if merged else []:
        yield row["row"], row["text"], gold_text(row["answer"], columns[1]), row["count"]


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


def unwrap(text: str) -> str:
    """The problem without DAPO's request for an `Answer:` line, which is not the form that our instruction asks for."""
    text = re.sub(r"\ASolve the following math problem step by step\.( [^\n]*\bAnswer:[^\n]*)?\n", "", text.strip())
    body, found, _ = text.rpartition("\nRemember to put your answer on its own line after")
    return (body if found else text).strip()


def _collect(name: str, rows: Iterable[_Row]) -> tuple[list[Problem], str]:
    kept: dict[str, Problem] = {}
    occurrences, dropped, conflicting = Counter(), Counter(), set()
    for number, text, answer, count in rows:
        text = unwrap(text or "")
        if not text or not answer:
            dropped["without an answer" if text else "without a text"] += count
            continue
        key = " ".join(text.split())
        occurrences[key] += count
        first = kept.setdefault(key, Problem(f"{name}:{number}", text, answer))
        if canonical(first.answer) != canonical(answer):
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
