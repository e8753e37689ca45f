"""Evaluation sets in, verdicts on samples out: what test-time scaling and the evaluation inside training share.

    benchmark = load_benchmark("minerva=minerva.jsonl", "--data")
    verdicts = grade_rollouts(rollouts, prompts, tokenizer, grader)

Unlike training data, no row of an evaluation set is ever dropped, merged or guessed at: a set with one row less is
another set, and its scores compare with nobody's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from support import data
from support.data import DataError, Problem, Prompt
from support.distributed import engine_number, gather, leads, rank, share
from support.grader import Grader, Verdict
from support.metrics import pass_at_k

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine import Engine, Rollout, Sampling

# ------------------------------------------------------------------ benchmarks


@dataclass(frozen=True)
class Benchmark:
    """A set to evaluate on. Its `metric` is the headline: "avg", or "pass@16" for the small sets (Sec. 5.1).

    `digest` stands for the very problems, their order and their answers: scores with different ones do not compare.
    """

    name: str
    problems: list[Problem]
    metric: str
    digest: str
    report: str


@dataclass(frozen=True)
class _Known:
    hub: str
    split: str
    rows: int
    metric: str


# The six sets of the paper (App. A.2), from where most public evaluation code takes them.
KNOWN = {
    "math500": _Known("HuggingFaceH4/MATH-500", "test", 500, "avg"),
    "minerva": _Known("math-ai/minervamath", "test", 272, "avg"),
    "olympiadbench": _Known("math-ai/olympiadbench", "test", 674, "avg"),
    "amc23": _Known("math-ai/amc23", "test", 40, "pass@16"),
    "aime24": _Known("HuggingFaceH4/aime_2024", "train", 30, "pass@16"),  # its only split
    "aime25": _Known("math-ai/aime25", "test", 30, "pass@16"),
}


def load_benchmark(spec: str, flag: str, seed_problems: int = 200) -> Benchmark:
    """The evaluation set that `spec` asks for, with every row of it, in its own order.

    `spec` is the name of a known set (`math500`, read from the hub), `NAME=FILE` (a local copy of that set, which must
    have as many rows), a .jsonl, .json or .parquet file, or `sums` or `sums:2-3:20` (up to `seed_problems` of the sums
    that are held out of training, the same whatever the run's seed). Columns are understood as for training; besides,
    an answer may be a list of one.

    Raises:
        ValueError: one sentence that names `flag`, the row and its column, and the remedy.
    """
    try:
        if wanted := data.sums_range(spec, flag):
            problems, source = _held_out(spec, wanted, seed_problems), f"held-out sums ({spec})"
            name, metric = "sums", "avg"
        else:
            name, source, known = _resolve(spec)
            metric = known.metric if known else "avg"
            problems, columns = _problems(name, source, known)
            source += f" ({' and '.join(columns)})"
        if not problems:
            raise DataError(spec, "there is no problem in it", "name another set")
    except DataError as error:
        raise ValueError(f"{flag} {error}") from error
    repeated = len(problems) - len({p.text for p in problems})
    note = f", {repeated} of them repeated" if repeated else ""
    return _benchmark(name, problems, metric, f"{name}: {len(problems)} problems{note} from {source}")


def _benchmark(name: str, problems: list[Problem], metric: str, report: str) -> Benchmark:
    contents = json.dumps([[p.id, p.text, p.answer] for p in problems])
    digest = hashlib.sha256(contents.encode()).hexdigest()[:12]
    return Benchmark(name, problems, metric, digest, f"{report}, digest {digest}, headline {metric}")


def held_out_benchmark(problems: list[Problem]) -> Benchmark:
    """Problems that were taken out of a training set."""
    return _benchmark("held-out", problems, "avg", f"held-out: {len(problems)} problems of the training set")


def _held_out(spec: str, wanted: tuple[tuple[int, int], int], count: int) -> list[Problem]:
    # A twentieth of all sums is half of the held-out ones: as in training, to draw the last few would take for ever.
    count = min(count, data.sums_count(*wanted) // 20)
    try:
        return data.sums(count, 0, "test", *wanted)
    except ValueError as error:
        raise DataError(spec, str(error), "ask for larger numbers") from error


def _resolve(spec: str) -> tuple[str, str, _Known | None]:
    """Name, file or hub id, and what is known of the set."""
    if spec in KNOWN:
        return spec, KNOWN[spec].hub, KNOWN[spec]
    name, equals, file = spec.partition("=")
    if equals and not Path(spec).is_file():
        if name not in KNOWN:
            raise DataError(spec, f"no set is known as {name!r}", f"write one of {', '.join(KNOWN)}, or the file alone")
        if not data.is_file(file):
            raise DataError(spec, "not a .jsonl, .json or .parquet file", "name a local copy of the set after the =")
        return name, file, KNOWN[name]
    if not data.is_file(spec):
        remedy = f"write one of {', '.join(KNOWN)}, a .jsonl, .json or .parquet file, or sums"
        raise DataError(spec, "neither a known set nor a file nor sums", remedy)
    return Path(spec).stem, spec, None


def _problems(name: str, source: str, known: _Known | None) -> tuple[list[Problem], tuple[str, ...]]:
    """The problems and their columns. Ids are running numbers: the same from a local copy as from the hub."""
    problems, columns = [], ()
    for place, row in _rows(name, source, known):
        text, answer, names = data.cells(row, place)
        columns = columns or names
        if names != columns:
            fault = f"columns {' and '.join(names)}, where the rows before have {' and '.join(columns)}"
            raise DataError(place, fault, "use the same columns in every row")
        text = data.unwrap(text or "")
        if not text:
            raise _bad_cell(place, names[0], row, "no problem")
        if not answer or isinstance(row[names[1]], bool) or answer.lower() in ("inf", "-inf"):
            raise _bad_cell(place, names[1], row, "no answer")
        problems.append(Problem(f"{name}:{len(problems) + 1}", text, answer))
    if known and len(problems) != known.rows:
        fault = f"{len(problems)} rows, where {name} has {known.rows}"
        raise DataError(source, fault, "take the whole set as published, or name the file without NAME=")
    return problems, columns


def _bad_cell(place: str, column: str, row: Mapping[str, object], fault: str) -> DataError:
    cell = json.dumps(row[column], default=str, ensure_ascii=False)
    shown = cell if len(cell) <= 60 else cell[:57] + "..."
    remedy = "fill it in (text, a number, or a list of one): no row of an evaluation set is dropped"
    return DataError(place, f"{fault} in column {column}, which holds {shown}", remedy)


def _rows(name: str, source: str, known: _Known | None) -> Iterator[tuple[str, dict[str, object]]]:
    """Every row with its place for messages."""
    if known and source == known.hub:
        yield from _hub_rows(name, known)
        return
    path = Path(source)
    try:
        if path.suffix.lower() == ".parquet":
            file, columns = data.open_parquet(path)
            for number, row in enumerate(file.read(columns=list(columns)).to_pylist(), 1):
                yield f"{path} (row {number})", row
        else:
            yield from ((place, row) for _, place, row in data.json_rows(path))
    except OSError as error:
        raise DataError(source, error.strerror or str(error), "name a readable file") from error


def _hub_rows(name: str, known: _Known) -> Iterator[tuple[str, dict[str, object]]]:
    import datasets

    try:
        table = datasets.load_dataset(known.hub, split=known.split)
    except (OSError, ValueError) as error:
        fault = f"the hub gave no {known.split} split of {known.hub} ({error})"
        raise DataError(name, fault, f"fetch the file by other means and write {name}=FILE") from error
    columns = data.columns_of(table.column_names, known.hub)
    for number, row in enumerate(table.select_columns(list(columns)), 1):
        yield f"{known.hub} (row {number})", row


def contaminated(problems: list[Problem], training: Iterable[Problem]) -> list[Problem]:
    """Those of `problems` whose text is in the training set, DAPO's wrapper, layout and punctuation aside.

    DAPO-Math-17k holds 8 of the 40 problems of AMC 2023, 6 of MATH-500 and 10 of OlympiadBench, but by white space
    alone one would see 5, 4 and 1 of them: copies differ in `z^5` and `z^{5}`, in dollar signs and in full stops.
    """
    seen = {_key(problem.text) for problem in training}
    return [problem for problem in problems if _key(problem.text) in seen]


def _key(text: str) -> str:
    """Its letters, digits and operators, without the dashes and stars that begin the items of a list."""
    return re.sub(r"^[ \t]*[-*][ \t]|[^\w+\-*/^=<>]", "", data.unwrap(text).lower(), flags=re.MULTILINE)


# ------------------------------------------------------------------ verdicts


def grade_rollouts(
    rollouts: list[Rollout], prompts: Mapping[int, Prompt], tokenizer: PreTrainedTokenizerBase, grader: Grader
) -> list[Verdict | None]:
    """A verdict on each rollout by its prompt's gold answer; None for one that was pruned. `prompts` is by group."""
    survivors = [rollout for rollout in rollouts if rollout.finish != "pruned"]
    # Each by itself: `batch_decode` makes one empty text of no rollouts.
    texts = [tokenizer.decode(rollout.token_ids, skip_special_tokens=True) for rollout in survivors]
    # Some chat templates open the thinking block in the prompt: unless it knows, the grader takes thoughts for answers.
    opened = {g: tokenizer.decode(p.token_ids[-8:]).rstrip().endswith("<think>") for g, p in prompts.items()}
    texts = [("<think>" if opened[r.group] else "") + text for r, text in zip(survivors, texts, strict=True)]
    verdicts = iter(grader.grade(texts, [prompts[rollout.group].problem.answer for rollout in survivors]))
    return [None if rollout.finish == "pruned" else next(verdicts) for rollout in rollouts]


# ------------------------------------------------------------------ scores during training

PASS_K = 16  # of the paper's metric for the small sets


@dataclass(frozen=True)
class EvalSet:
    """A benchmark's prompts. Its `too_long` problems have none; they are sampled by nobody and count as wrong."""

    name: str
    metric: str
    prompts: list[Prompt]
    too_long: int


def evaluate(
    engine: Engine,
    sets: list[EvalSet],
    tokenizer: PreTrainedTokenizerBase,
    grader: Grader,
    sampling: Sampling,
    n: int,
    seed: int,
    rollout_seeds: bool = False,
) -> dict[str, float]:
    """avg@n, pass@16 where there are so many samples, and the accuracy of one greedy sample, of every set.

    Sets whose metric is pass@16 get 16 samples per problem at least. Keys are `eval/<set>/<score>`. Each rank samples its share of
    the problems, and all get the scores of all; with `rollout_seeds` they are the same on any number of ranks.
    """
    metrics: dict[str, float] = {}
    for chosen in sets:
        samples, size = (
            max(n, PASS_K) if chosen.metric == f"pass@{PASS_K}" else n,
            len(chosen.prompts) + chosen.too_long,
        )
        prompts = dict(enumerate(chosen.prompts))

        def right(count: int, how: Sampling) -> list[int]:
            """How many of `count` samples are right, for each problem."""
            mine = share(prompts)
            rollouts = engine.generate(
                {group: prompt.token_ids for group, prompt in mine.items()},
                count,
                how,
                seed=seed if rollout_seeds else seed + engine_number(),  # else all would draw the same numbers
                rollout_seeds=rollout_seeds,
                progress=rank() == 0,
            )
            verdicts = grade_rollouts(rollouts, mine, tokenizer, grader)
            correct = Counter(r.group for r, verdict in zip(rollouts, verdicts) if verdict.kind == "right")
            found = sum(gather(correct if leads() else Counter()), Counter())
            return [found[group] for group in prompts]

        counts, key = right(samples, sampling), f"eval/{chosen.name}"
        metrics[f"{key}/avg@{samples}"] = sum(counts) / (samples * size)
        if samples >= PASS_K:
            metrics[f"{key}/pass@{PASS_K}"] = sum(pass_at_k(samples, count, PASS_K) for count in counts) / size
        metrics[f"{key}/greedy"] = sum(right(1, replace(sampling, temperature=0.0, top_p=1.0))) / size
    return metrics
