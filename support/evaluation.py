"""Evaluation sets in, verdicts on rollouts and scores out.

benchmark = load_benchmark("minerva=minerva.jsonl", "--data")
grade(rollouts, prompts, tokenizer, grader)

Unlike training data, no row of an evaluation set is dropped or merged: with one row less it is another
set, and its scores compare with nobody's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from support import data
from support.data import DataError, Problem, Prompt
from support.distributed import gather_rollouts, shard
from support.grader import Grader
from support.metrics import pass_at_k
from tiny import sums as tiny_sums

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine import Engine, Rollout, Sampling

# ------------------------------------------------------------------ benchmarks


@dataclass(frozen=True)
class Benchmark:
    """A set to evaluate on. Its `metric` is the headline: "avg", or "pass@16" for small sets (Sec. 5.1).

    `digest` stands for the problems, their order and their answers: scores compare where it is equal.
    """

    name: str
    problems: list[Problem]
    metric: str
    digest: str
    report: str


# The six sets of the paper (App. A.2): hub id, split, rows, metric.
KNOWN = {
    "math500": ("HuggingFaceH4/MATH-500", "test", 500, "avg"),
    "minerva": ("math-ai/minervamath", "test", 272, "avg"),
    "olympiadbench": ("math-ai/olympiadbench", "test", 674, "avg"),
    "amc23": ("math-ai/amc23", "test", 40, "pass@16"),
    # "train" is its only split
    "aime24": ("HuggingFaceH4/aime_2024", "train", 30, "pass@16"),
    "aime25": ("math-ai/aime25", "test", 30, "pass@16"),
}


def load_benchmark(spec: str, flag: str, seed_problems: int = 200) -> Benchmark:
    """The evaluation set that `spec` asks for, with every row of it, in its own order.

    `spec` is the name of a known set (`math500`, read from the hub), `NAME=FILE` (a local copy of that
    set, which must have as many rows), a .jsonl, .json or .parquet file, or `sums` or `sums:2-3:20` (up
    to `seed_problems` of the held-out sums, the same whatever the run's seed).

    Raises:
        ValueError: one sentence that names `flag`, the row and its column, and the remedy.
    """
    found = tiny_sums.sums_for(spec, flag, "test", 0, seed_problems)
    if found is not None:
        name, metric, source = "sums", "avg", f"held-out sums ({spec})"
        problems = [Problem(text, text, answer) for text, answer in found.items()]
    else:
        try:
            name, source, split, rows, metric = _resolve(spec)
            remedy = data.REMEDY if source != KNOWN.get(name, ("",))[0] else f"fetch it otherwise and write {name}=FILE"
            read = list(data.read(source, strict=True, split=split, remedy=remedy))
            # Running numbers, not lines: the same from a local copy as from the hub.
            problems = [Problem(f"{name}:{number}", row.text, row.answer) for number, row in enumerate(read, 1)]
            if rows not in (0, len(problems)):
                fault = f"{len(problems)} rows, where {name} has {rows}"
                raise DataError(source, fault, "take the whole set as published, or name the file without NAME=")
            source += f" ({' and '.join(read[0].columns)})" if read else ""
        except DataError as error:
            raise ValueError(f"{flag} {error}") from error
    if not problems:
        raise ValueError(f"{flag} {spec}: there is no problem in it; name another set")
    repeated = len(problems) - len({p.text for p in problems})
    note = f", {repeated} of them repeated" if repeated else ""
    return _benchmark(name, problems, metric, f"{name}: {len(problems)} problems{note} from {source}")


def _resolve(spec: str) -> tuple[str, str, str, int, str]:
    """Name, file or hub id, split, rows (0: any) and metric."""
    name, equals, file = spec.partition("=")
    remedy = f"write one of {', '.join(KNOWN)}, a .jsonl, .json or .parquet file, or sums"
    if name in KNOWN:
        hub, split, rows, metric = KNOWN[name]
        if equals and not data.is_file(file):
            raise DataError(spec, "not a .jsonl, .json or .parquet file", "name a local copy of the set after the =")
        return name, file or hub, split, rows, metric
    if equals and not Path(spec).is_file():
        raise DataError(spec, f"no set is known as {name!r}", remedy)
    if not data.is_file(spec):
        raise DataError(spec, "neither a known set nor a file nor sums", remedy)
    return Path(spec).stem, spec, "", 0, "avg"


def _benchmark(name: str, problems: list[Problem], metric: str, report: str) -> Benchmark:
    contents = json.dumps([[p.id, p.text, p.answer] for p in problems])
    digest = hashlib.sha256(contents.encode()).hexdigest()[:12]
    return Benchmark(name, problems, metric, digest, f"{report}, digest {digest}, headline {metric}")


def held_out_benchmark(problems: list[Problem]) -> Benchmark:
    """Problems that were taken out of a training set."""
    return _benchmark("held-out", problems, "avg", f"held-out: {len(problems)} problems of the training set")


def contaminated(problems: list[Problem], training: Iterable[Problem]) -> list[Problem]:
    """Those of `problems` whose text is in the training set, wrapper, layout and punctuation aside.

    DAPO-Math-17k holds 8 of the 40 problems of AMC 2023, 6 of MATH-500 and 10 of OlympiadBench; by white
    space alone one would see 5, 4 and 1: copies differ in `z^5` and `z^{5}`, dollar signs, full stops.
    """
    seen = {_key(problem.text) for problem in training}
    return [problem for problem in problems if _key(problem.text) in seen]


def _key(text: str) -> str:
    """Its letters, digits and operators, without the dashes and stars that begin the items of a list."""
    return re.sub(r"^[ \t]*[-*][ \t]|[^\w+\-*/^=<>]", "", data.unwrap(text).lower(), flags=re.MULTILINE)


# ------------------------------------------------------------------ verdicts

# What opens and what ends a block of thinking; the grader knows the first pair.
THINKING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}


def grade(
    rollouts: list[Rollout], prompts: Mapping[int, Prompt], tokenizer: PreTrainedTokenizerBase, grader: Grader
) -> None:
    """Set verdict, answer, reward and tail of each rollout, by the gold answer of its prompt in `prompts` (by group).

    A pruned rollout gets its tail alone.
    """
    markers = "".join(f"{opening}{ending}" for opening, ending in THINKING.items())
    # Markers of thinking stay, be they special tokens or not; other special tokens are no text.
    special = {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in markers
    }

    def text(ids: list[int]) -> str:
        found = tokenizer.decode([i for i in ids if i not in special])
        for opening, ending in THINKING.items():
            found = found.replace(opening, "<think>").replace(ending, "</think>")
        return found

    # Some chat templates open the thinking block in the prompt.
    opened = {group: text(prompt.token_ids[-32:]).rstrip().endswith("<think>") for group, prompt in prompts.items()}
    survivors = [rollout for rollout in rollouts if rollout.finish != "pruned"]
    texts = [("<think>" if opened[rollout.group] else "") + text(rollout.token_ids) for rollout in survivors]
    golds = [prompts[rollout.group].problem.answer for rollout in survivors]
    for rollout in rollouts:
        # The last 1,000 tokens: more than 200 characters, also where one takes four tokens.
        rollout.verdict, rollout.answer, rollout.reward = None, None, None
        rollout.tail = tokenizer.decode(rollout.token_ids[-1000:])[-200:]
    for rollout, verdict in zip(survivors, grader.grade(texts, golds), strict=True):
        rollout.verdict, rollout.answer, rollout.reward = verdict.kind, verdict.answer, verdict.reward


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

    Sets whose metric is pass@16 get 16 samples per problem at least. Keys are `eval/<set>/<score>`, and
    `eval/<set>/too_long` where problems were too long and count as wrong. Each rank samples its share of
    the problems, and all get the scores of all; with `rollout_seeds` they are the same on any number of
    ranks.
    """
    metrics: dict[str, float] = {}
    for chosen in sets:
        samples = max(n, PASS_K) if chosen.metric == f"pass@{PASS_K}" else n
        size, prompts, key = (
            len(chosen.prompts) + chosen.too_long,
            dict(enumerate(chosen.prompts)),
            f"eval/{chosen.name}",
        )

        def right(count: int, how: Sampling, prompts: dict[int, Prompt] = prompts) -> list[int]:
            """How many of `count` samples are right, for each problem."""
            local = shard(prompts)
            rollouts = engine.generate(
                {group: prompt.token_ids for group, prompt in local.items()},
                count,
                how,
                # Engines would all draw the same numbers.
                seed=seed if rollout_seeds else seed + engine.number,
                rollout_seeds=rollout_seeds,
                progress=True,
            )
            grade(rollouts, local, tokenizer, grader)
            correct = Counter(r.group for r in gather_rollouts(rollouts) if r.verdict == "right")
            return [correct[group] for group in prompts]

        counts = right(samples, sampling)
        metrics[f"{key}/avg@{samples}"] = sum(counts) / (samples * size)
        if samples >= PASS_K:
            metrics[f"{key}/pass@{PASS_K}"] = sum(pass_at_k(samples, count, PASS_K) for count in counts) / size
        metrics[f"{key}/greedy"] = sum(right(1, replace(sampling, temperature=0.0, top_p=1.0))) / size
        if chosen.too_long:
            metrics[f"{key}/too_long"] = chosen.too_long
    return metrics
