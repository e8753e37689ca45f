"""Evaluation sets in, verdicts on rollouts and scores out."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

import tiny.sums
from engine import Engine, Rollout, Sampling
from support import data
from support.args import SETS, Args, SamplingArgs
from support.data import DataError, Problem, Prompt
from support.distributed import engine_number, gather_rollouts, shard
from support.grader import Grader
from support.metrics import pass_at_k

# The six sets of the paper (App. A.2): hub id, split, rows, metric.
KNOWN = {
    "math500": ("HuggingFaceH4/MATH-500", "test", 500, "avg"),
    "minerva": ("math-ai/minervamath", "test", 272, "avg"),
    "olympiadbench": ("math-ai/olympiadbench", "test", 674, "avg"),
    "amc23": ("math-ai/amc23", "test", 40, "pass@16"),
    "aime24": ("HuggingFaceH4/aime_2024", "train", 30, "pass@16"),
    "aime25": ("math-ai/aime25", "test", 30, "pass@16"),
}


@dataclass
class Benchmark:
    """A set to evaluate on. Of its problems, those that are too long have no prompt and count as wrong."""

    name: str
    problems: list[Problem]
    metric: str  # its headline: "avg", or "pass@16" if it is small (Sec. 5.1)
    source: str
    prompts: list[Prompt] = field(default_factory=list)  # `prepare` makes them

    @property
    def digest(self) -> str:
        """Of the problems, their order and answers: scores compare where it is equal."""
        contents = json.dumps([[p.id, p.text, p.answer] for p in self.problems])
        return hashlib.sha256(contents.encode()).hexdigest()[:12]

    def prepare(self, tokenizer: Tokenizer, args: SamplingArgs, training: list[Problem]) -> str:
        """Make the prompts; returns a line on the set, on what is too long and what is in `training` too."""
        self.prompts, too_long = data.tokenize(self.problems, tokenizer, args)
        seen = len(contaminated(self.problems, training))
        size = f"{self.name}: {len(self.problems)} problems from {self.source}"
        long = f"; {too_long} longer than {args.max_prompt} tokens count as wrong" if too_long else ""
        known = f"; CONTAMINATED: {seen} of them are in the training set" if seen else ""
        return f"{size}, digest {self.digest}, headline {self.metric}{long}{known}"


def load_benchmark(spec: str, flag: str, sums_problems: int = 200) -> Benchmark:
    """The evaluation set that `spec` asks for, with every row of it, in its own order.

    `spec` is as `args.SETS` says; of sums these are the held-out ones, the same whatever the run's
    seed. Raises ValueError, a sentence that names `flag`, the row and its column, and the remedy.
    """
    name, _, file = spec.partition("=")
    hub, split, rows, metric = KNOWN.get(name, ("", "train", 0, "avg"))
    # A file's name may hold "=".
    file = file if hub else spec
    try:
        if wanted := tiny.sums.asked(spec, "test", sums_problems):
            name, problems, source = "sums", data.sums(seed=0, **wanted), f"held-out sums ({spec})"
        elif hub and not file:
            problems, source = data.read(hub, name, strict=True, split=split)
        elif "=" in spec and not hub and not Path(spec).is_file():
            raise DataError(spec, f"no set is known as {name!r}", f"write one of {SETS}")
        elif not data.is_file(file):
            raise DataError(spec, "neither a known set nor a file nor sums", f"write one of {SETS}")
        else:
            name = name if hub else Path(spec).stem
            problems, source = data.read(file, name, strict=True)
        if not problems:
            raise DataError(spec, "there is no problem in it", "name another set")
        if rows not in (0, len(problems)):
            fault = f"{len(problems)} rows, where {name} has {rows}"
            raise DataError(file or hub, fault, "take the whole set as published, or name the file without NAME=")
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    return Benchmark(name, problems, metric, source)


def contaminated(problems: list[Problem], training: Iterable[Problem]) -> list[Problem]:
    """Those of `problems` whose text is in the training set, wrapper, layout and punctuation aside.

    DAPO-Math-17k holds 8 of the 40 problems of AMC 2023; by white space alone one sees 5.
    """

    def key(problem: Problem) -> str:
        """Its letters, digits and operators, without the dashes and stars that begin a list's items."""
        return re.sub(r"^[ \t]*[-*][ \t]|[^\w+\-*/^=<>]", "", data.unwrap(problem.text).lower(), flags=re.MULTILINE)

    seen = {key(problem) for problem in training}
    return [problem for problem in problems if key(problem) in seen]


# What opens and what ends thinking, in the order of the pairs; the grader knows the first.
OPENINGS = "<think> <thinking> <thought> <seed:think> [THINK] ◁think▷ <|begin_of_thought|> <|START_THINKING|>".split()
ENDINGS = "</think> </thinking> </thought> </seed:think> [/THINK] ◁/think▷ <|end_of_thought|> <|END_THINKING|>".split()


def grade(rollouts: list[Rollout], prompts: Mapping[int, Prompt], tokenizer: Tokenizer, grader: Grader) -> None:
    """Set tail, verdict, answer and reward of each rollout; of a pruned one the tail alone.

    prompts: by group. What is thought is no answer, whatever marks it and whoever began it.
    """
    # Special tokens are no text, but for those that mark thinking.
    tokens = tokenizer.added_tokens_decoder.items()
    hidden = {i for i, token in tokens if token.special and token.content not in OPENINGS + ENDINGS}

    def text(ids: list[int]) -> str:
        found = tokenizer.decode([i for i in ids if i not in hidden])
        for opening, ending in zip(OPENINGS, ENDINGS):
            found = found.replace(opening, "<think>").replace(ending, "</think>")
        return found

    # Some chat templates open the thinking in the prompt.
    start = {g: "<think>" * text(p.token_ids[-32:]).rstrip().endswith("<think>") for g, p in prompts.items()}
    survivors = [rollout for rollout in rollouts if rollout.finish != "pruned"]
    texts = [start[rollout.group] + text(rollout.token_ids) for rollout in survivors]
    verdicts = grader.grade(texts, [prompts[rollout.group].problem.answer for rollout in survivors])
    for rollout in rollouts:
        # 1,000 tokens make 200 characters, also where one takes four.
        rollout.tail = tokenizer.decode(rollout.token_ids[-1000:])[-200:]
    for rollout, verdict in zip(survivors, verdicts, strict=True):
        rollout.verdict, rollout.answer, rollout.reward = verdict.kind, verdict.answer, verdict.reward


def evaluate(
    engine: Engine, sets: list[Benchmark], tokenizer: Tokenizer, grader: Grader, sampling: Sampling, args: Args
) -> dict[str, float]:
    """avg@n, pass@16 where there are so many samples, accuracy of one greedy sample: `eval/<set>/<score>`.

    Sets whose metric is pass@16 get 16 samples per problem at least. Where problems were too long
    and count as wrong, `too_long` is their number. Each rank samples its share of the problems and
    gets all scores. sampling: of training; `args` have another temperature and nucleus.
    """

    def right(prompts: dict[int, Prompt], count: int, how: Sampling) -> list[int]:
        """How many of `count` samples are right, for each problem."""
        local = shard(prompts)
        ids = {group: prompt.token_ids for group, prompt in local.items()}
        # Engines with one seed would all draw the same numbers.
        seed = args.seed if args.rollout_seeds else args.seed + engine_number()
        options = {"rollout_seeds": args.rollout_seeds, "logprobs": 0, "progress": True}
        rollouts = engine.generate(ids, count, how, seed=seed, **options)
        grade(rollouts, local, tokenizer, grader)
        correct = Counter(r.group for r in gather_rollouts(rollouts) if r.verdict == "right")
        return [correct[group] for group in prompts]

    metrics: dict[str, float] = {}
    sampling = replace(sampling, temperature=args.eval_temperature, top_p=args.eval_top_p)
    for chosen in sets:
        samples = max(args.eval_n, 16) if chosen.metric == "pass@16" else args.eval_n
        prompts, size = dict(enumerate(chosen.prompts)), len(chosen.problems)
        counts = right(prompts, samples, sampling)
        scores = {f"avg@{samples}": sum(counts) / (samples * size)}
        if samples >= 16:
            scores["pass@16"] = sum(pass_at_k(samples, count, 16) for count in counts) / size
        scores["greedy"] = sum(right(prompts, 1, replace(sampling, temperature=0.0, top_p=1.0))) / size
        if too_long := size - len(prompts):
            scores["too_long"] = too_long
        metrics |= {f"eval/{chosen.name}/{key}": value for key, value in scores.items()}
    return metrics
