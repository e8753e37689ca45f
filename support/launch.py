"""What a run needs before it starts: the tokenizer, the prompts to train on, the sets to evaluate on, and the engine itself.

Bad input ends the program here, with one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine import Engine
from support import data
from support.args import Args, fail
from support.distributed import say
from support.evaluation import EvalSet, contaminated, load_benchmark, make_benchmark
from tiny.sums import sums_range

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tts import TtsArgs


def load_prompts(args: Args, tokenizer) -> tuple[list[data.Prompt], list[EvalSet]]:
    """Prompts to train on and the sets to evaluate on; says in a line each what they are, ends the program where none is left."""
    try:
        problems, line = data.load(args.dataset, args.seed, args.dataset_config, args.dataset_split)
        built_in, held_out = sums_range(args.dataset), []
        if "held-out" in args.eval_data and not built_in:
            random.Random(0).shuffle(problems)  # not the run's seed: runs are compared on the same held-out problems
            cut = min(args.eval_problems, len(problems) // 10)
            problems, held_out = problems[cut:], problems[:cut]
        benchmarks = []
        for spec in args.eval_data:
            if spec == "held-out" and not built_in:
                benchmarks.append(make_benchmark("held-out", held_out, "avg", "the training set"))
            elif args.eval_problems or not sums_range(spec if spec != "held-out" else args.dataset):
                found = load_benchmark(args.dataset if spec == "held-out" else spec, "--eval-data", args.eval_problems)
                benchmarks.append(dataclasses.replace(found, name="held-out") if spec == "held-out" else found)
    except ValueError as error:
        fail(str(error))
    for name, count in Counter(benchmark.name for benchmark in benchmarks).items():
        if count > 1:
            fail(
                f"--eval-data: {count} sets are called {name}, and so are their scores; rename a file, or leave one out"
            )
    try:
        prompts, dropped = data.tokenize(problems, tokenizer, args.max_prompt, args.instruction, args.thinking)
    except ValueError as error:
        fail(str(error))
    if not prompts:
        fail(
            f"--dataset {args.dataset}: no prompt is left to train on ({line}; {dropped} longer than --max-prompt {args.max_prompt})"
        )
    say(f"{line}; {dropped} dropped as longer than {args.max_prompt} tokens; {len(prompts)} prompts")
    sets = []
    for benchmark in benchmarks:
        kept, too_long = data.tokenize(benchmark.problems, tokenizer, args.max_prompt, args.instruction, args.thinking)
        if not benchmark.problems:
            say(f"evaluation: {benchmark.report}; it is empty and not evaluated")
        else:
            sets.append(EvalSet(benchmark.name, benchmark.metric, kept, too_long))
            seen = len(contaminated(benchmark.problems, problems))
            say(
                f"evaluation: {benchmark.report}"
                + (f"; {too_long} longer than {args.max_prompt} tokens count as wrong" if too_long else "")
                + (f"; CONTAMINATED: {seen} of them are in the training set" if seen else "")
            )
    return prompts, sets


def load_tokenizer(args: Args | TtsArgs) -> tuple[PreTrainedTokenizerBase, list[int], PreTrainedConfig]:
    """The model's tokenizer, the ids that end a response, and its config; ends the program where they do not load."""
    try:
        config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        fail(f"--model {args.model}: its config or tokenizer cannot be loaded: {str(error).splitlines()[0]}")
    try:
        generation_config = GenerationConfig.from_pretrained(args.model)
    except OSError:  # many base models have none
        generation_config = None
    limit = getattr(config, "max_position_embeddings", args.max_length)
    if args.max_length > limit:
        fail(f"--max-length {args.max_length}: the model has {limit} positions")
    return tokenizer, data.stop_token_ids(tokenizer, config, generation_config), config


def quiet(verbose: bool) -> None:
    """Keep transformers from reporting on what it loads, unless `verbose`."""
    if not verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning)


def working_dtype(device: torch.device) -> torch.dtype:
    """What weights are sampled with and saved in: bfloat16 on a GPU; a CPU without AVX512-BF16 emulates it, 10 times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@contextlib.contextmanager
def engine_from(args: Args | TtsArgs, device: torch.device, tensor_parallel: int = 1) -> Iterator[Engine]:
    """The engine that the flags ask for, taken down at the end; the process group, which it uses, must outlive it."""
    engine = Engine(
        args.model,
        args.detect_length,
        args.max_length,
        args.max_num_seqs,
        tensor_parallel=tensor_parallel,
        dtype=working_dtype(device),
        seed=args.seed,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_gb=args.kv_cache_gb,
        verbose=args.verbose,
    )
    try:
        yield engine
    finally:
        engine.close()
