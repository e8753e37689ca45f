"""The flags of `arrol.py` and `tts.py`: one field each, with default, help and bounds in one place.

Defaults are the paper's where it gives one (Sec. 5.1, App. A.4), but for λ and the tilt. Where no
`--model` is named, those after `tiny=` hold, of the embedded model. A flag that is given wins.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import NoReturn

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
TINY = Path(__file__).resolve().parent.parent / "tiny"
SETS = "math500, minerva, olympiadbench, amc23, aime24, aime25 (from the hub, or such a NAME=FILE), a file, or sums"
TYPES = {"str": [str], "int": [int], "bool": [bool], "float": [float, int], "tuple[str, ...]": [tuple, list]}
TYPES["float | None"] = [float, int, type(None)]


def flag(default: object, help: str, allowed: str | tuple[str, ...] = "", tiny: object = None) -> Field:
    """A field. allowed: choices, or an interval: "(0, 1]" excludes 0, "[1, max_length)" ends before another flag."""
    return field(default=default, metadata={"help": help, "allowed": allowed, "tiny": tiny})


@dataclass
class SamplingArgs:
    """What both programs take: model, prompts, responses, vLLM."""

    model: str = flag("", "hub id or folder; of tts.py a checkpoint-N too; none: the embedded one", tiny=str(TINY))
    output: str = flag("", "folder for the results (default: runs/ and the time)")
    seed: int = flag(0, "fixes data order, samples, prune draws and the head's start", "[0, 4294967295]")
    instruction: str = flag(INSTRUCTION, "appended to every problem; '' for none", tiny="")
    thinking: bool = flag(False, "turn on the thinking mode of chat templates that have one")
    temperature: float = flag(1.0, "sampling temperature, of log-probs too; greedy ones have no ratio", "(0, 2]")
    max_prompt: int = flag(1024, "tokens; longer prompts are dropped, or wrong", "[1, max_length)", tiny=64)
    max_length: int = flag(8192, "prompt and response together, in tokens", "[2, inf)", tiny=256)
    detect_length: int = flag(512, "response tokens at which a rollout is scored (L_detect)", "[1, inf)", tiny=10)
    keep_ratio: float = flag(0.5, "expected share of scored rollouts that survive (κ); 1: all", "(0, 1]")
    max_num_seqs: int = flag(512, "rollouts that vLLM decodes at once, on each rank", "[1, inf)", tiny=96)
    gpu_memory_utilization: float = flag(0.5, "share of the GPU that vLLM may use while it generates", "(0, 1)")
    kv_cache_gb: float = flag(4.0, "vLLM's KV cache on a CPU, in GiB", "(0, inf)", tiny=0.5)
    verbose: bool = flag(False, "show vLLM's own log lines")

    def select(self, names: str) -> dict[str, object]:
        """These flags, for a function that takes them by the same names."""
        return {name: getattr(self, name) for name in names.split()}


@dataclass
class Args(SamplingArgs):
    """Everything a run of `arrol.py` depends on; saved as `args.json` in its folder."""

    dataset: str = flag("BytedTsinghua-SIA/DAPO-Math-17k", "hub id, file, or sums:2-3:20 (terms:largest)", tiny="sums")
    dataset_config: str = flag("", "which of its configs, of a hub id or a folder that has several")
    dataset_split: str = flag("train", "which of its splits")
    resume: str = flag("", "run folder to go on with, from its newest checkpoint; its own flags apply")
    steps: int = flag(200, "training steps", "[1, inf)", tiny=24)
    prompts: int = flag(64, "prompts per step, of all ranks; 64 suit 1.7B on one 96 GB GPU", "[1, inf)", tiny=24)
    group_size: int = flag(16, "rollouts per prompt (G)", "[2, inf)")
    minibatches: int = flag(1, "optimizer steps per batch; above 1 costs a pass for old log-probs", "[1, inf)")
    rollout_seeds: bool = flag(False, "a generator per rollout: the same on any number of ranks, but slower")
    tp: int = flag(1, "ranks that share an engine (tensor parallel); the policy is sharded over all anyway", "[1, inf)")
    prune: str = flag("arrol", "what decides at L_detect; random keeps with probability κ", ("arrol", "random", "none"))
    positive_target: float = flag(0.5, "share of right ones among the survivors to steer to (ρ)", "[0, 1]")
    balance: float = flag(2.0, "strength of the steering (λ); with --tilt printed the paper's, 0.5", "[0, inf)")
    tilt: str = flag("group", "Eq. 2 as printed, or its slope turned towards ρ in each group", ("group", "printed"))
    survival: str = flag("bernoulli", "draws; systematic: a nearly fixed number per group", ("bernoulli", "systematic"))
    p_max: float = flag(0.95, "largest survival probability", "(0, 1]")
    p_min: float = flag(0.05, "least survival probability; 0 would leave some rollouts no chance", "(0, p_max]")
    min_survivors: int = flag(2, "a group is never pruned below this", "[0, group_size]")
    cold_start: int = flag(20, "first steps without pruning, in which head and windows fill", "[0, inf)", tiny=4)
    bins: int = flag(128, "bins of the calibration (B)", "[1, inf)", tiny=32)
    alpha: float = flag(1.0, "Laplace smoothing of the calibration (α)", "(0, inf)")
    window: int = flag(4096, "rollouts that calibration and quality head remember", "[1, inf)", tiny=2048)
    head_width: int = flag(256, "hidden units of the quality head", "[1, inf)")
    head_inputs: str = flag("state", "what it sees; log-probs: of the tokens so far", ("state", "state+logprob"))
    head_lr: float = flag(1e-3, "its learning rate", "(0, inf)")
    algo: str = flag("grpo", "loss and sampling", ("grpo", "dapo"))
    scale_rewards: bool = flag(True, "divide advantages by the group's deviation; Dr. GRPO does not")
    lr: float = flag(1e-6, "learning rate of the policy", "[0, inf)", tiny=1e-4)
    warmup_steps: int = flag(10, "optimizer steps of linear warm-up, constant after that", "[0, inf)", tiny=5)
    weight_decay: float = flag(0.1, "AdamW's, on all weights", "[0, inf)", tiny=0.0)
    grad_clip: float = flag(1.0, "largest gradient norm", "(0, inf)")
    clip_low: float = flag(0.2, "ratio is clipped at 1 - this (ε_low)", "[0, 1)")
    clip_high: float | None = flag(None, "and at 1 + this (ε_high); default 0.2 for grpo, 0.28 for dapo", "[0, inf)")
    beta: float = flag(0.0, "weight of the KL to the start model; 0 keeps no such model in memory", "[0, inf)")
    tis_cap: float | None = flag(None, "cap of the importance weight trainer/sampler; default: off", "(0, inf)")
    max_refills: int = flag(3, "dapo: times that groups without variance are replaced in a step", "[0, inf)")
    overlong_cache: int = flag(1024, "dapo: tokens over which the length penalty rises to 1", "[1, inf)", tiny=32)
    token_budget: int = flag(32768, "tokens of a micro-batch, padding included", "[1, inf)", tiny=2048)
    offload: bool = flag(False, "keep float32 weights, gradients and optimizer in main memory (FSDP2's CPU offload)")
    max_gap: float | None = flag(None, "largest mean gap of sampler to trainer; default 0.001, in bf16 0.1", "(0, inf)")
    eval_data: tuple[str, ...] = flag(("held-out",), f"to evaluate on: held-out (of the training set), {SETS}")
    eval_every: int = flag(20, "steps between evaluations; 0: at the start and the end alone", "[0, inf)", tiny=0)
    eval_n: int = flag(4, "samples per problem, for AMC and AIME 16 at least; one more is greedy", "[1, inf)")
    eval_temperature: float = flag(1.0, "their sampling temperature", "(0, 2]")
    eval_top_p: float = flag(1.0, "their sampling nucleus", "(0, 1]")
    eval_problems: int = flag(64, "size of held-out (at most a tenth) and of sums; 0: neither", "[0, inf)", tiny=100)
    baseline_steps: int = flag(0, "first train so many steps without pruning, to compare with", "[0, inf)", tiny=8)
    checkpoint_every: int = flag(20, "steps between checkpoints; the last step always makes one", "[1, inf)")
    keep_checkpoints: int = flag(2, "newest checkpoints to keep", "[1, inf)")
    log_rollouts: str = flag("sample", "in rollouts.jsonl; sample: each step's first group", ("sample", "all", "none"))
    tracker: str = flag("none", "metrics go to metrics.jsonl, and to this", ("none", "tensorboard", "wandb"))


@dataclass
class TtsArgs(SamplingArgs):
    """Everything that the scores of `tts.py` depend on; saved with them."""

    head: str = flag("", "quality_head.safetensors (default: the one in the checkpoint, if there is one)")
    data: str = flag("sums", SETS)
    n: int = flag(32, "candidates per problem", "[1, inf)")
    temperature: float = flag(1.0, "sampling temperature", "[0, 2]")
    top_p: float = flag(1.0, "sampling nucleus", "(0, 1]")
    early_stop: bool = flag(False, "sample again; --keep-ratio of the candidates go on after --detect-length")
    trained_on: str = flag("", "training set (as --dataset of arrol.py): count the problems that are in it")
    gpu_memory_utilization: float = flag(0.9, "share of the GPU that vLLM may use", "(0, 1)")


EMBEDDED = {spec.name: spec.metadata["tiny"] for spec in fields(Args) if spec.metadata["tiny"] is not None}
FROM_RUN = "max_prompt max_length instruction thinking temperature detect_length max_num_seqs kv_cache_gb".split()


def parse(argv: list[str]) -> Args:
    """`Args` from a command line; on bad input prints one sentence and exits with status 2. Creates nothing."""
    given = command_line(argv, Args, "arrol.py", "RLVR with online rollout pruning (ARRoL).")
    printed = {"balance": 0.5} if given.get("tilt") == "printed" else {}
    a = Args(**({} if "model" in given else EMBEDDED) | printed | given)
    if folder := a.resume:
        saved = saved_flags(Path(folder))
        for name in ("model", "output", "prune", "head_width", "head_inputs"):
            if given.get(name, saved[name]) != saved[name]:
                fail(f"--{name.replace('_', '-')} {given[name]}: the run in {folder} has {saved[name]}; begin another")
        a = Args(**saved | given | {"output": folder})
    a.output = a.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{a.prune}"
    unreachable = a.prune != "none" and a.keep_ratio < 1 and not a.p_min <= a.keep_ratio <= a.p_max
    rules = [
        ("keep_ratio", unreachable, f"must lie between --p-min {a.p_min} and --p-max {a.p_max}, or be 1"),
        ("overlong_cache", a.algo == "dapo" and a.overlong_cache > a.max_length, "must not exceed --max-length"),
        ("beta", a.algo == "dapo" and a.beta > 0, "DAPO has no KL term; use --algo grpo or --beta 0"),
        ("tracker", a.tracker != "none" and not importlib.util.find_spec(a.tracker), f"pip install {a.tracker} first"),
        ("output", not folder and Path(a.output, "args.json").exists(), "a run is in it; --resume it, or name another"),
    ]
    check(a, a.prune != "none", rules)
    return a


def parse_tts(argv: list[str]) -> TtsArgs:
    """`TtsArgs`, likewise. Of a checkpoint of `arrol.py`, the flags of its run are the defaults."""
    given = {"model": str(TINY)} | command_line(argv, TtsArgs, "tts.py", "Test-time scaling: sample, judge, vote.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fail("it knows one process only; start it without torchrun")
    model = Path(given["model"])
    run, folder = (EMBEDDED, TINY / "head") if model == TINY else ({}, model)
    head = folder / "quality_head.safetensors"
    if (model / "model" / "config.json").is_file():  # a checkpoint of arrol.py
        run = saved_flags(model.parent) if (model.parent / "args.json").is_file() else {}
        given["model"] = str(model / "model")
    defaults = {name: run[name] for name in FROM_RUN if name in run} | {"head": str(head) if head.is_file() else ""}
    a = TtsArgs(**defaults | given)
    a.output = a.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-tts"
    rules = [
        ("temperature", a.temperature == 0 and a.n > 1, "greedy samples are all alike: use --n 1, or a temperature"),
        ("head", bool(a.head) and not Path(a.head).is_file(), "there is no such file"),
        ("early_stop", a.early_stop and not a.head, "a quality head stops; name one by --head, or a checkpoint of one"),
        ("output", Path(a.output).is_file() or Path(a.output, "scores.json").exists(), "it is a file, or has results"),
    ]
    check(a, a.early_stop, rules)
    return a


def command_line(argv: list[str], settings: type, program: str, description: str) -> dict[str, object]:
    """The fields of the dataclass `settings` that `argv` sets, and no others: defaults depend on these."""
    parser = argparse.ArgumentParser(program, f"{program} [FLAGS]", description, allow_abbrev=False)
    parser.error = fail
    for spec in fields(settings):
        notes = {"in": spec.metadata["allowed"], "default": spec.default, "embedded model": spec.metadata["tiny"]}
        text = "; ".join([spec.metadata["help"], *(f"{k} {v}" for k, v in notes.items() if v not in ("", None))])
        kind = {"bool": {"action": argparse.BooleanOptionalAction}, "tuple[str, ...]": {"nargs": "*"}}
        options = kind.get(spec.type, {"type": TYPES[spec.type][0]})
        parser.add_argument("--" + spec.name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **options)
    return vars(parser.parse_args(argv))


def saved_flags(run: Path) -> dict[str, object]:
    """The flags of the run in a folder."""
    where, types = f"{run / 'args.json'}: ", {spec.name: TYPES[spec.type] for spec in fields(Args)}
    try:
        saved = {**json.loads(Path(run, "args.json").read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        fail(f"{where}no flags of a run can be read from it: {error}")
    if gone := [f"--{name.replace('_', '-')}" for name in saved if name not in types]:
        fail(f"{where}{', '.join(gone)}: no such flag, or one that is gone; delete it there to go on without")
    for name, value in saved.items():
        if type(value) not in types[name]:
            fail(f"{where}--{name.replace('_', '-')} {value}: it is of the wrong type")
    return vars(Args(**saved))


def check(args: SamplingArgs, detects: bool, rules: list[tuple[str, bool, str]]) -> None:
    """End the program at the first flag that is out of its bounds, or that breaks a rule on several flags."""
    model, late = Path(args.model), detects and args.detect_length >= args.max_length
    lacking = not (model / "config.json").is_file() or not [*model.glob("tokenizer*"), *model.glob("vocab*")]
    for name, broken, sentence in [
        *((spec.name, outside(args, spec), f"must be in {spec.metadata['allowed']}") for spec in fields(args)),
        ("model", args.model.startswith((".", "/")) and not model.is_dir(), "there is no such folder"),
        ("model", model.is_dir() and lacking, "the folder lacks config.json or a tokenizer; save both there"),
        ("detect_length", late, f"must be below --max-length {args.max_length}, or no rollout is ever scored"),
        *rules,
    ]:
        if broken:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {sentence}")


def outside(args: SamplingArgs, spec: Field) -> bool:
    """Whether a flag's value is none of its choices, or not within its interval, as NaN never is."""
    value, allowed = getattr(args, spec.name), spec.metadata["allowed"]
    if value is None or not isinstance(allowed, str) or not allowed:
        return isinstance(allowed, tuple) and value not in allowed
    low, high = (float(getattr(args, end, end)) for end in allowed[1:-1].split(", "))
    return not low <= value <= high or (allowed[0] == "(" and value == low) or (allowed[-1] == ")" and value == high)


def fail(sentence: str) -> NoReturn:
    """End the program with one sentence, once on a machine: all its ranks are given the same flags."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {sentence}", file=sys.stderr)
    sys.exit(2)
