"""From flags to a running trainer, and from errors to one sentence each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from calibration import Settings
from engine import Engine, EngineError, NothingScored, PruneHook
from grpo import Learner, LossConfig, NonFiniteGradients, SamplerGapError
from support import checkpoint, data, distributed
from support.args import Args, fail
from support.distributed import print0, rank
from support.evaluation import Benchmark, load_benchmark
from support.grader import Grader, GraderError
from support.model import engine_from, load_policy, load_tokenizer, refuse_untrainable, vocabulary
from support.report import plot_reward, summary
from support.show import load_metrics
from tiny.sums import sums_range


@dataclasses.dataclass
class Parts:
    """What the runs of one process share."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    prompts: list[data.Prompt]
    eval_sets: list[Benchmark]
    stop_token_ids: list[int]
    grader: Grader
    device: torch.device


def load_prompts(args: Args, tokenizer: PreTrainedTokenizerBase) -> tuple[list[data.Prompt], list[Benchmark]]:
    """Prompts to train on and the sets to evaluate on, with a printed line on each."""
    try:
        problems, line = data.load(args.dataset, args.seed, args.dataset_config, args.dataset_split)
        sets = []
        for spec in args.eval_data:
            name, source = ("held-out", args.dataset) if spec == "held-out" else (None, spec)
            if name and not sums_range(source):
                # Not the run's seed: runs are compared on the same held-out problems.
                random.Random(0).shuffle(problems)
                cut = min(args.eval_problems, len(problems) // 10)
                sets += [Benchmark(name, problems[:cut], "avg", "the training set")] if cut else []
                problems = problems[cut:]
            elif args.eval_problems or not sums_range(source):
                found = load_benchmark(source, "--eval-data", args.eval_problems)
                sets.append(dataclasses.replace(found, name=name or found.name))
        prompts, dropped = data.tokenize(problems, tokenizer, args)
        reports = [chosen.prepare(tokenizer, args, problems) for chosen in sets]
    except ValueError as error:
        fail(str(error))
    for name, count in Counter(chosen.name for chosen in sets).items():
        if count > 1:
            fail(f"--eval-data: {count} sets are called {name}, as are their scores; rename a file or leave one out")
    line += f"; {dropped} dropped as longer than --max-prompt {args.max_prompt}; {len(prompts)} prompts"
    if not prompts:
        fail(f"--dataset {args.dataset}: no prompt is left to train on ({line})")
    print0(line)
    for report in reports:
        print0(f"evaluation: {report}")
    return prompts, sets


def quiet(verbose: bool) -> None:
    """Keep transformers from reporting on what it loads, unless `verbose`."""
    if not verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning)


def make_learner(args: Args, device: torch.device, vocabulary: int) -> Learner:
    """Policy, loss and optimizer as the flags say. vocabulary: the sampler's, see `Engine`."""
    high = args.clip_high if args.clip_high is not None else (0.28 if args.algo == "dapo" else 0.2)
    return Learner(
        load_policy(args, device, vocabulary),
        LossConfig(args.algo, args.clip_low, high, args.beta, args.tis_cap),
        reference=load_policy(args, device, vocabulary, frozen=True) if args.beta > 0 else None,
        **args.select("lr warmup_steps weight_decay grad_clip token_budget minibatches"),
    )


def make_pruner(pruner: type, args: Args, hidden_size: int, device: torch.device) -> PruneHook | None:
    """A `pruner` as the flags say, whose decisions all ranks of an engine share; None for `--prune none`."""
    if args.prune == "none":
        return None
    settings = Settings(**args.select("keep_ratio positive_target balance p_min p_max tilt"))
    same = args.select("min_survivors cold_start bins alpha window head_width head_inputs head_lr seed")
    made = pruner(hidden_size, args.group_size, settings, rule=args.prune, draw=args.survival, device=device, **same)
    return distributed.SharedDecisions(made) if args.tp > 1 else made


def grader_workers() -> int:
    """Processes that grade for this rank: half of its share of this machine's CPUs, 2 to 16."""
    cpus, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cpus // (2 * ranks), 2), 16)


@contextlib.contextmanager
def open_parts(args: Args) -> Iterator[Parts]:
    """Data, grader and engine, taken down at the end. Bad input ends the program with one sentence."""
    quiet(args.verbose)
    device = distributed.start_process_group(args.tp)
    try:
        tokenizer, stop_token_ids, config = load_tokenizer(args)
        refuse_untrainable(config, args, device)
        prompts, eval_sets = load_prompts(args, tokenizer)
        ids = vocabulary(tokenizer, stop_token_ids, config)
        with Grader(grader_workers()) as grader, engine_from(args, device, ids, args.tp) as engine:
            # Before the trainer's weights go to the GPU.
            engine.sleep()
            yield Parts(engine, tokenizer, prompts, eval_sets, stop_token_ids, grader, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: Args, trainer: type) -> int:
    """Train as `args` say, after a baseline if they ask for one; returns the exit status."""
    for notice in (signal.SIGINT, signal.SIGTERM):
        # A cluster's notice is treated as Ctrl-C.
        signal.signal(notice, signal.default_int_handler)
    found = checkpoint.complete(Path(args.output)) if args.resume else [None]
    if not found:
        fail(f"--resume {args.resume}: there is no complete checkpoint in it; start again with another --output")
    try:
        with open_parts(args) as parts:
            # Rank 0's: ranks may differ in the time of day, which names the folder.
            args.output, resume_from = distributed.gather((args.output, found[-1]))[0]
            _train(args, parts, trainer, resume_from)
        return 0
    except KeyboardInterrupt:
        print0(f"\nstopped; the step under way was dropped. {where_to_resume(Path(args.output))}", sys.stderr)
        return 130
    except (EngineError, GraderError, NonFiniteGradients, NothingScored, SamplerGapError) as error:
        # On all ranks, or on this one alone.
        print(f"\narrol.py, rank {rank()}: stopped: {error}\n{where_to_resume(Path(args.output))}", file=sys.stderr)
        return 1


def _train(args: Args, parts: Parts, trainer: type, resume_from: Path | None) -> None:
    """The baseline, the run, the table and the pictures."""
    folder = Path(args.output)
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        # Never truncate the only copy: a resumed run writes it again.
        temporary = folder / ".args.json"
        temporary.write_text(json.dumps(vars(args) | {"resume": ""}, indent=2, ensure_ascii=False))
        temporary.replace(folder / "args.json")
    dist.barrier()
    runs, method, baseline = {}, args.algo.upper(), folder / "baseline"
    if args.baseline_steps and args.prune != "none" and not resume_from:
        plain = dataclasses.replace(args, prune="none", steps=args.baseline_steps, output=str(baseline))
        trainer(plain, parts).run(method, checkpoints=False)
    if baseline.is_dir():
        runs[method] = load_metrics(baseline)
    name = method + {"arrol": " + ARRoL", "random": " + random pruning", "none": ""}[args.prune]
    runs[name] = trainer(args, parts).run(name, resume_from)
    if rank() == 0:
        plot_reward(runs, folder / "reward.png")
        print(f"{summary(runs)}\n\npictures: {folder / 'reward.png'}, {folder / 'rollouts.png'}")
        saved = "".join(f", {found.name}" for found in checkpoint.complete(folder)[-1:])
        print(f"run folder: {folder}  (metrics.jsonl, rollouts.jsonl{saved})")


def save_or_warn(trainer: object, folder: Path) -> None:
    """A checkpoint that cannot be written costs the checkpoint and not the run."""
    try:
        trainer.save(folder)
    except checkpoint.SaveError as error:
        print0(f"\n{Path(sys.argv[0]).name}: {error}. {where_to_resume(folder)} The run goes on.", sys.stderr)


def where_to_resume(folder: Path) -> str:
    """One sentence on the newest checkpoint of a run folder."""
    found = checkpoint.complete(folder)
    if not found:
        return f"There is no checkpoint in {folder} yet."
    return f"The last checkpoint is {found[-1]}: go on with --resume {folder}"
