"""The flags of `arrol.py`: one dataclass, a help text per field, and the checks that need neither torch nor a model.

Defaults are the paper's where it gives one (Sec. 5.1, App. A.4), but for λ and the tilt. Without `--model`, the values of
`EMBEDDED` replace them: a model of a few MB that trains on a CPU in minutes. A flag that is given wins over both.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from support.data import INSTRUCTION

TINY = Path(__file__).resolve().parent.parent / "tiny"


def flag(default: object, help: str, choices: tuple[str, ...] | None = None) -> dataclasses.Field:
    """A field of `Args` with its help text."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Args:
    """Everything a run depends on; saved as `args.json` in its folder."""

    # what is trained, and on what
    model: str = flag("", "hub id or folder of the base model; none: the embedded one, on a CPU")
    dataset: str = flag(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "hub id, a .jsonl/.json/.parquet file, 'sums' or 'sums:2-3:20' (terms:largest)",
    )
    dataset_config: str = flag("", "which of its configs, of a hub id or a folder that has several")
    dataset_split: str = flag("train", "which of its splits")
    instruction: str = flag(
        INSTRUCTION,
        "appended to every problem; '' for none",
    )
    thinking: bool = flag(False, "turn on the thinking mode of chat templates that have one")
    output: str = flag("", "run folder (default: runs/ and the time)")
    resume: str = flag("", "run folder to go on with, from its newest checkpoint; its own flags apply")
    seed: int = flag(0, "fixes data order, samples, prune draws and the head's start")
    # one step
    steps: int = flag(200, "training steps")
    prompts: int = flag(
        64,
        "prompts per step, of all ranks; with 16 rollouts each, what one 96 GB GPU trains 1.7B with (the paper gives none)",
    )
    group_size: int = flag(16, "rollouts per prompt (G)")
    minibatches: int = flag(
        1, "optimizer steps per batch of rollouts; with 1 the old log-probs cost no pass of their own"
    )
    temperature: float = flag(1.0, "sampling temperature, of log-probs too")
    max_prompt: int = flag(1024, "longer prompts are dropped, in tokens")
    max_length: int = flag(8192, "prompt and response together, in tokens")
    # pruning (Sec. 4, App. A.4)
    prune: str = flag("arrol", "what decides at L_detect; random keeps with probability κ", ("arrol", "random", "none"))
    detect_length: int = flag(512, "response tokens at which a rollout is scored (L_detect)")
    keep_ratio: float = flag(0.5, "expected share of scored rollouts that survive (κ); 1 prunes nothing")
    positive_target: float = flag(0.5, "share of right ones among the survivors to steer to (ρ)")
    balance: float = flag(2.0, "strength of the steering (λ); with --tilt printed the paper's, 0.5")
    tilt: str = flag(
        "group", "group: Eq. 2's slope turned towards ρ in each group; printed: Eq. 2 as printed", ("group", "printed")
    )
    survival: str = flag(
        "bernoulli",
        "bernoulli: independent draws; systematic: same probabilities, a nearly fixed number per group",
        ("bernoulli", "systematic"),
    )
    p_min: float = flag(0.05, "least survival probability")
    p_max: float = flag(0.95, "largest survival probability")
    min_survivors: int = flag(2, "a group is never pruned below this")
    cold_start: int = flag(20, "first steps without pruning, in which head and windows fill")
    bins: int = flag(128, "bins of the calibration (B)")
    alpha: float = flag(1.0, "Laplace smoothing of the calibration (α)")
    window: int = flag(4096, "rollouts in the calibration's sliding windows")
    # quality head
    head_width: int = flag(256, "hidden units of the quality head")
    head_lr: float = flag(1e-3, "its learning rate")
    head_passes: int = flag(4, "its passes over the buffer per step, in all at most 32 minibatches")
    head_buffer: int = flag(4096, "labelled states in its buffer")
    head_states: str = flag(
        "both",
        "states it trains on: also the last one of every rollout, for voting, or at L_detect alone",
        ("both", "detect"),
    )
    # policy update
    algo: str = flag("grpo", "loss and sampling", ("grpo", "dapo"))
    lr: float = flag(1e-6, "learning rate of the policy")
    warmup_steps: int = flag(10, "optimizer steps of linear warm-up, constant after that")
    weight_decay: float = flag(0.1, "AdamW's, on all weights")
    beta1: float = flag(0.9, "AdamW's first momentum")
    beta2: float = flag(0.999, "AdamW's second momentum")
    grad_clip: float = flag(1.0, "largest gradient norm")
    clip_low: float = flag(0.2, "ratio is clipped at 1 - this (ε_low)")
    clip_high: float | None = flag(None, "ratio is clipped at 1 + this (ε_high); default 0.2 for grpo, 0.28 for dapo")
    beta: float = flag(0.0, "weight of the KL to the start model; 0 keeps no such model in memory")
    tis_cap: float | None = flag(None, "cap of the truncated importance weight trainer/sampler; default: off")
    max_refills: int = flag(3, "dapo: times that all-right and all-wrong groups are replaced by new prompts in a step")
    overlong_cache: int = flag(1024, "dapo: response tokens before the limit over which the length penalty rises to 1")
    token_budget: int = flag(32768, "tokens of a micro-batch, padding included")
    offload: bool = flag(False, "keep float32 weights, gradients and optimizer in main memory (FSDP2's CPU offload)")
    max_gap: float | None = flag(
        None, "largest allowed |log-prob of sampler - of trainer| of a sampled token; default 0.01 in fp32, 5 in bf16"
    )
    max_mean_gap: float | None = flag(None, "the same for its mean over a batch; default 0.001 in fp32, 0.1 in bf16")
    # engine, on each rank
    max_num_seqs: int = flag(512, "rollouts that vLLM decodes at once")
    rollout_seeds: bool = flag(
        False, "a generator for each rollout: the same ones on any number of ranks, and a tenth slower on a CPU"
    )
    tp: int = flag(1, "ranks that share one engine (tensor parallel); the policy is sharded over all ranks anyway")
    gpu_memory_utilization: float = flag(0.5, "share of the GPU that vLLM may use while it generates")
    kv_cache_gb: float = flag(4.0, "vLLM's KV cache on a CPU, in GiB")
    # evaluation, logs, checkpoints
    eval_data: list[str] = flag(
        ["held-out"],
        "sets to evaluate on: held-out (of the training set), math500, minerva, olympiadbench, amc23, aime24, aime25 "
        "(from the hub), NAME=FILE for a local copy of one, a file, or sums",
    )
    eval_every: int = flag(20, "steps between evaluations; 0: before the first step and after the last alone")
    eval_n: int = flag(
        4, "samples per problem; 16 at least for AMC and AIME, whose metric is pass@16; one more is greedy"
    )
    eval_temperature: float = flag(1.0, "their sampling temperature")
    eval_top_p: float = flag(1.0, "their sampling nucleus")
    eval_problems: int = flag(64, "size of held-out (a tenth of the training set at most) and of sums; 0: neither")
    baseline_steps: int = flag(
        0, "first train this many steps of plain GRPO (or DAPO) from the same start, for the table at the end"
    )
    checkpoint_every: int = flag(20, "steps between checkpoints; the last step always makes one")
    keep_checkpoints: int = flag(2, "newest checkpoints to keep")
    log_rollouts: str = flag(
        "sample", "rollouts.jsonl: all, the first group of each step, or none", ("sample", "all", "none")
    )
    grader_workers: int = flag(2, "processes that run math-verify, on each rank")
    tracker: str = flag("none", "where metrics go besides metrics.jsonl", ("none", "tensorboard", "wandb"))
    verbose: bool = flag(False, "show vLLM's own log lines")

    @property
    def embedded(self) -> bool:
        """Whether the embedded model is trained."""
        return Path(self.model) == TINY


EMBEDDED = dict(
    model=str(TINY),
    dataset="sums",
    instruction="",
    steps=40,
    prompts=16,
    minibatches=2,
    max_prompt=64,
    max_length=256,
    detect_length=10,
    cold_start=5,
    window=2048,
    head_buffer=2048,
    lr=5e-5,
    warmup_steps=5,
    weight_decay=0.0,
    overlong_cache=32,
    token_budget=2048,
    bins=32,
    max_num_seqs=256,
    kv_cache_gb=0.5,
    eval_problems=200,
    baseline_steps=10,
    checkpoint_every=20,
)


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """A command-line flag for each field of the dataclass `settings`; only those that are given appear in the result."""
    for spec in dataclasses.fields(settings):
        name, help_text = "--" + spec.name.replace("_", "-"), spec.metadata["help"]
        default = spec.default if spec.default is not dataclasses.MISSING else " ".join(spec.default_factory())
        if default not in ("", None):
            help_text += f" (default: {default})"
        # SUPPRESS: the defaults depend on what is given
        common = dict(default=argparse.SUPPRESS, help=help_text.replace("%", "%%"))
        if spec.type == "bool":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **common)
            continue
        common["metavar"] = spec.name.upper().split("_")[-1]
        if spec.type == "list[str]":
            parser.add_argument(name, nargs="*", **common)
        else:
            kind = {"int": int, "float": float, "float | None": float}.get(spec.type, str)
            parser.add_argument(name, type=kind, choices=spec.metadata["choices"], **common)


def parse(argv: list[str]) -> Args:
    """`Args` from a command line; on bad input prints one sentence and exits with status 2. Creates nothing."""
    parser = argparse.ArgumentParser(
        prog="arrol.py", description="RLVR with online rollout pruning (ARRoL).", allow_abbrev=False
    )
    add_flags(parser, Args)
    given = vars(parser.parse_args(argv))
    if "resume" in given:
        saved = Path(given["resume"], "args.json")
        if not saved.is_file():
            fail(f"--resume {given['resume']}: there is no args.json in it, so that it is no run folder")
        before = json.loads(saved.read_text())
        for name in ("model", "output", "prune", "head_width"):
            if (
                name in given
                and given[name] != before[name]
                and not (name == "prune" and "none" not in (given[name], before[name]))
            ):
                fail(
                    f"--{name.replace('_', '-')} {given[name]}: the run in {given['resume']} has {before[name]}; start a new one for that"
                )
        args = Args(**before | given | {"output": given["resume"]})
    else:
        printed = {"balance": 0.5} if given.get("tilt") == "printed" else {}
        args = Args(**(EMBEDDED if "model" not in given else {}) | printed | given)
    args.output = args.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{args.prune}"
    if problem := first_problem(args):
        fail(problem)
    return args


def first_problem(args: Args) -> str | None:
    """What is wrong with these flags, in one sentence that names the flag and the remedy; None if nothing is."""
    ranges = [
        ("keep_ratio", 0 < args.keep_ratio <= 1, "must lie in (0, 1]; 1 prunes nothing"),
        ("positive_target", 0 <= args.positive_target <= 1, "must lie in [0, 1]"),
        ("balance", 0 <= args.balance < math.inf, "must not be negative, nor infinite"),
        ("p_min", 0 < args.p_min <= args.p_max, "must lie in (0, p_max]: 0 leaves some rollouts no chance"),
        ("p_max", args.p_max <= 1, "must not exceed 1"),
        (
            "temperature",
            args.temperature > 0,
            "must be above 0: greedy samples are all alike and have no log-prob ratio",
        ),
        *[
            (name, getattr(args, name) <= 2, "must not exceed 2, in vLLM")
            for name in ("temperature", "eval_temperature")
        ],
        ("seed", 0 <= args.seed < 2**32, "must lie in 0..4294967295"),
        ("group_size", args.group_size >= 2, "must be at least 2: a group of one has no advantage"),
        ("min_survivors", 0 <= args.min_survivors <= args.group_size, "must lie in 0..group_size"),
        ("minibatches", 1 <= args.minibatches <= args.prompts * args.group_size, "must lie in 1..prompts * group_size"),
        ("cold_start", args.cold_start >= 0, "must not be negative"),
        ("clip_low", 0 <= args.clip_low < 1, "must lie in [0, 1)"),
        ("lr", args.lr >= 0, "must not be negative"),
        ("grad_clip", args.grad_clip > 0, "must be above 0"),
        ("eval_n", args.eval_n >= 1, "must be at least 1; --eval-data without a name evaluates nothing"),
        ("eval_temperature", args.eval_temperature > 0, "must be above 0; one greedy sample per problem comes anyway"),
        ("eval_top_p", 0 < args.eval_top_p <= 1, "must lie in (0, 1]"),
        ("beta", args.beta >= 0, "must not be negative"),
        ("tis_cap", args.tis_cap is None or args.tis_cap > 0, "must be above 0"),
        ("max_gap", args.max_gap is None or args.max_gap > 0, "must be above 0"),
        ("max_mean_gap", args.max_mean_gap is None or args.max_mean_gap > 0, "must be above 0"),
        ("head_lr", args.head_lr > 0, "must be above 0"),
        ("beta1", 0 <= args.beta1 < 1, "must lie in [0, 1)"),
        ("beta2", 0 <= args.beta2 < 1, "must lie in [0, 1)"),
        ("clip_high", args.clip_high is None or args.clip_high >= 0, "must not be negative"),
        ("kv_cache_gb", args.kv_cache_gb > 0, "must be above 0"),
        ("alpha", args.alpha > 0, "must be above 0: an empty bin would have the posterior 0/0"),
        ("gpu_memory_utilization", 0 < args.gpu_memory_utilization < 1, "must lie in (0, 1)"),
        *[
            (name, getattr(args, name) >= 1, "must be at least 1")
            for name in (
                "steps",
                "prompts",
                "max_prompt",
                "detect_length",
                "bins",
                "window",
                "head_width",
                "head_passes",
                "head_buffer",
                "token_budget",
                "max_num_seqs",
                "checkpoint_every",
                "keep_checkpoints",
                "grader_workers",
                "overlong_cache",
                "tp",
            )
        ],
        *[
            (name, getattr(args, name) >= 0, "must not be negative")
            for name in (
                "eval_problems",
                "eval_every",
                "baseline_steps",
                "max_refills",
                "warmup_steps",
                "weight_decay",
            )
        ],
    ]
    for name, fine, rule in ranges:
        if not fine:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: {rule}"
    if args.max_prompt >= args.max_length:
        return f"--max-prompt {args.max_prompt}: must be below --max-length {args.max_length}, which counts prompt and response"
    if args.prune != "none" and args.detect_length >= args.max_length:
        return f"--detect-length {args.detect_length}: must be below --max-length {args.max_length}, or no rollout is ever scored"
    if args.prune == "arrol" and args.keep_ratio < 1 and not args.p_min <= args.keep_ratio <= args.p_max:
        return (
            f"--keep-ratio {args.keep_ratio}: must lie between --p-min {args.p_min} and --p-max {args.p_max}, or be 1"
        )
    if args.algo == "dapo" and args.overlong_cache > args.max_length:
        return f"--overlong-cache {args.overlong_cache}: must not exceed --max-length {args.max_length}"
    if args.algo == "dapo" and args.beta > 0:
        return f"--beta {args.beta}: DAPO has no KL term; use --algo grpo or --beta 0"
    return _missing_file(args)


def _missing_file(args: Args) -> str | None:
    if args.tracker != "none" and importlib.util.find_spec(args.tracker) is None:
        return f"--tracker {args.tracker}: it is not installed; pip install {args.tracker}"
    model = Path(args.model)
    if model.is_dir():
        if not (model / "config.json").is_file():
            return f"--model {args.model}: the folder has no config.json, so that it holds no transformers model"
        if not any(
            (model / name).is_file()
            for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        ):
            return f"--model {args.model}: the folder has no tokenizer; save one there with tokenizer.save_pretrained"
    elif model.is_absolute() or args.model.startswith("."):
        return f"--model {args.model}: there is no such folder"
    if Path(args.dataset).suffix in (".jsonl", ".json", ".parquet") and not Path(args.dataset).is_file():
        return f"--dataset {args.dataset}: there is no such file"
    if not args.resume and args.output and Path(args.output, "args.json").exists():
        return f"--output {args.output}: there is a run in it already; go on with it by --resume {args.output}, or name another folder"
    return None


def fail(sentence: str) -> NoReturn:
    """End the program with one sentence, as argparse does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once on a machine: all its ranks are given the same flags
        print(f"{Path(sys.argv[0]).name}: error: {sentence}", file=sys.stderr)
    sys.exit(2)
