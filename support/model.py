"""One model as transformers, vLLM and the trainer have it, and what keeps it from training, in a sentence.

Its checkpoint is read twice, by vLLM and by transformers for the trainer. Either makes up parameters
that it does not find, and drops those that it does not know. A forward that differs, or a sync that
vLLM takes in part, raises nothing and shows in log-probs alone. So all must agree on these before a
model is trained, the sampler after a sync of changed weights, or it may just have its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.core_model_loading import revert_weight_conversion

from engine import Engine, Sampling
from grpo import Policy, Sample, SamplerGapError, all_reduce, frozen_logprobs, pad
from grpo import shard as shard_policy
from support import data, distributed, memory
from support.args import Args, SamplingArgs, fail

# Parameters x tokens that a core takes through a step in a second: of 281M parameters, two made 16 tokens.
CORE_SPEED = 281e6 * 16 / 2
# What the proof compares: so many prompts, at most so much of each, and responses of so many tokens.
PROMPTS, PROMPT_TOKENS, SAMPLES, TOKENS = 2, 64, 4, 16
# Nats: between two orders of the same float32 sums.
ROUNDING = 1e-3
# SmolLM2-135M in bfloat16: with each 512th number negated, its log-probs are off by 0.35 nats, and by
# 0.033 for rounding, as before (0.028). With each eighth, rounding alone would take 0.68.
FLIPPED = 512


def load_tokenizer(args: SamplingArgs) -> tuple[Tokenizer, list[int], PreTrainedConfig]:
    """The model's tokenizer, the ids that end a response, and its config."""
    try:
        config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        fail(f"--model {args.model}: its config or tokenizer cannot be loaded: {str(error).splitlines()[0]}")
    try:
        generation_config = GenerationConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        # Many base models have none. One that cannot be read may hold ids that end a response.
        if isinstance(error, ValueError) or Path(args.model, "generation_config.json").is_file():
            fail(f"--model {args.model}: its generation_config.json cannot be loaded: {str(error).splitlines()[0]}")
        generation_config = None
    limit = getattr(config.get_text_config(), "max_position_embeddings", args.max_length)
    if args.max_length > limit:
        fail(f"--max-length {args.max_length}: the model has {limit} positions")
    return tokenizer, data.stop_token_ids(tokenizer, config, generation_config), config


def vocabulary(tokenizer: Tokenizer, stop_token_ids: list[int], config: PreTrainedConfig) -> int:
    """One more than the highest id that means something; rows of lm_head after that are padding."""
    return min(max(*tokenizer.get_vocab().values(), *stop_token_ids) + 1, config.get_text_config().vocab_size)


def working_dtype(device: torch.device) -> torch.dtype:
    """What weights are sampled with and saved in. A CPU without AVX512-BF16 emulates bfloat16, 10 times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def gap_limits(args: Args, device: torch.device) -> tuple[float, float]:
    """Largest |log-prob of sampler - of trainer|, in nats: of all tokens but one in 1,000, and on average."""
    exact = working_dtype(device) == torch.float32
    mean = args.max_gap if args.max_gap is not None else (0.001 if exact else 0.1)
    return (10 if exact else 50) * mean, mean


def refuse_untrainable(config: PreTrainedConfig, args: Args, device: torch.device) -> None:
    """End the program, before weights are downloaded, if the config tells that they cannot be trained."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Some models have one for each kind of layer.
    for scaling in [rope] if "rope_type" in rope else rope.values():
        original = scaling.get("original_max_position_embeddings") or text.max_position_embeddings
        if scaling["rope_type"] in ("longrope", "dynamic") and args.max_length > original:
            fault = f"its {scaling['rope_type']} positions depend on other rows of a batch beyond {original} tokens"
            fail(f"--max-length {args.max_length}: {fault}; take at most {original}")
    try:
        with torch.device("meta"):
            policy = Policy(AutoModelForCausalLM.from_config(config), args.temperature)
        if getattr(config, "quantization_config", None):
            problem = "its weights are quantized; name the model that they were made from"
        elif device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            problem = memory.first_misfit(memory.Shape(config), args, distributed.world_size(), total)
        else:
            problem = _misfit_on_cpu(sum(p.numel() for p in policy.parameters()), args)
    except ValueError as error:
        problem = str(error).splitlines()[0]
    if problem:
        fail(f"--model {args.model}: {problem}")


def _misfit_on_cpu(parameters: int, args: Args) -> str | None:
    """What main memory cannot hold. If it can, a warning is printed of the time that a step takes."""
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    # 4 bytes in each rank's sampler; weights, gradients and Adam's moments once, with --beta the reference.
    per_parameter = 4 * ranks + (20 if args.beta > 0 else 16) * ranks / distributed.world_size()
    size, free = parameters * per_parameter / 2**30 + args.kv_cache_gb * ranks, _free_memory() / 2**30
    name = f"{parameters / 1e6:,.0f}M parameters"
    if size > free:
        needed = f"{name} and --kv-cache-gb {args.kv_cache_gb} take {size:.1f} GiB of main memory"
        return f"without a GPU, {needed}, and {free:.1f} GiB are free; take a smaller model, or a GPU"
    tokens = args.prompts * args.group_size * args.max_length
    if (minutes := tokens * parameters / (CORE_SPEED * cores) / 60) > 1:
        work = f"{name} and, if all rollouts reach --max-length, {tokens:,} tokens"
        distributed.print0(f"no GPU: {work} take some {minutes:,.0f} minutes a step on {cores} cores, roughly")
    return None


def _free_memory() -> int:
    """Bytes of main memory, within a container's limit."""
    free = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def engine_from(args: SamplingArgs, device: torch.device, vocabulary: int, tp: int = 1) -> contextlib.closing[Engine]:
    """The engine that the flags ask for, to be entered within the process group; what vLLM raises ends the program."""
    options = args.select("model detect_length max_num_seqs gpu_memory_utilization kv_cache_gb verbose")
    options |= {"max_model_len": args.max_length, "tensor_parallel": tp}
    try:
        return contextlib.closing(Engine(vocabulary=vocabulary, dtype=working_dtype(device), **options))
    except Exception as raised:  # whatever vLLM raises
        if args.verbose:
            raise
        error = f"{type(raised).__name__}: {raised}"
    flag = "gpu_memory_utilization" if device.type == "cuda" else "kv_cache_gb"
    room = f"--{flag.replace('_', '-')} {getattr(args, flag)}"
    for pattern, sentence in {
        "max seq len|cache blocks": f"{room}: no room for the keys and values of --max-length {args.max_length} tokens",
        "memory for kv|Free memory|out of memory|OutOfMemory": f"{room}: that much memory is not free",
        "max_num_seqs": f"--max-num-seqs {args.max_num_seqs}: more than vLLM takes in one of its steps",
        "max_model_len": f"--max-length {args.max_length}: more than vLLM allows this model",
        "tensor parallel": "--tp: this model cannot be cut into so many parts",
    }.items():
        if re.search(pattern, error):
            fail(sentence)
    # If the checkpoint is the cause, this ends the program.
    load(args.model)
    # Pydantic says it on its second line.
    reason = re.search(r"Value error, (.*?)(?:\. |\n|\[type|$)", error)
    fail(f"--model {args.model}: vLLM cannot run it: {reason[1] if reason else error.splitlines()[0]}")


def load(name: str, dtype: torch.dtype | str = torch.float32) -> Model:
    """The model; ends the program unless the checkpoint has its parameters, and no others."""
    try:
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = AutoModelForCausalLM.from_pretrained(name, **options)
        folder, odd = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, local_files_only=True)), []
        for path in folder.glob("model*.safetensors"):
            with safe_open(path, "pt") as file:
                # Transformers just converts them. Integers and float8 mean nothing without their scales.
                odd += [k for k in file.keys() if file.get_slice(k).get_dtype() not in ("BF16", "F16", "F32", "F64")]
    except (ImportError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        fail(f"--model {name}: its weights cannot be loaded: {str(error).splitlines()[0]}")
    tied = model.config.get_text_config().tie_word_embeddings
    untied = tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    problems = {
        "missing": info["missing_keys"],
        "not known to the model": info["unexpected_keys"],
        "not of the shape in config.json": [name for name, *_ in info["mismatched_keys"]],
        "no floating-point numbers of 16 bits or more": odd,
        "not finite": [name for name, p in model.named_parameters() if not p.isfinite().all()],
        "not the embedding's, to which config.json ties it": ["lm_head.weight"] if untied else [],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            wrong = f"{', '.join(sorted(names)[:3])}{more}: {problem}"
            fail(f"--model {name}: its checkpoint is not that of a {type(model).__name__}: {wrong}")
    return model


def load_policy(args: Args, device: torch.device, vocabulary: int, frozen: bool = False) -> Policy:
    """The model under FSDP2, to be trained or as the frozen reference of `--beta`."""
    policy = Policy(load(args.model), args.temperature, vocabulary=vocabulary)
    if not frozen:
        forward_agrees(policy, args.model)
    checkpointing = device.type == "cuda" and not frozen
    return shard_policy(policy, device, checkpointing, offload=args.offload).requires_grad_(not frozen)


def full_weights(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of all ranks, named and cut as in a checkpoint: transformers fuses the experts of a layer."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield from revert_weight_conversion(model, {name: full.to(dtype)}).items()


@torch.no_grad()
def forward_agrees(policy: Policy, name: str) -> None:
    """End the program if `policy`, before FSDP, is not transformers' own forward of the model `name`.

    Rows differ in length: what stands beside a row must not change it.
    """
    kind, size = type(policy.model).__name__, policy.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(size, policy.vocabulary or size), (2, TOKENS), generator=generator)
    samples, expected = [], []
    for row in (ids[0, : TOKENS // 2], ids[1]):
        samples.append(Sample(row[:4].tolist(), row[4:].tolist(), 0.0, [0.0] * (len(row) - 4)))
        logits = policy.model(input_ids=row[None], use_cache=False).logits[0, 3:-1, : policy.vocabulary]
        expected.append((logits.float() / policy.temperature).log_softmax(-1).gather(1, row[4:, None])[:, 0])
    try:
        gap = (policy(*pad(samples))[0] - torch.cat(expected)).abs().max().item()
    except (AttributeError, TypeError) as error:
        fail(f"--model {name}: the trainer cannot run a {kind}: {error}")
    if not gap <= ROUNDING:
        fail(f"--model {name}: of a {kind} the trainer's log-probs differ from transformers' by up to {gap:.3g} nats")


@torch.no_grad()
def sampler_follows(trainer: object) -> None:
    """Raise SamplerGapError if the sampler's log-probs are not the trainer's after a sync of changed weights.

    The next sync gives the sampler the weights back; the policy has them back here, bit for bit.
    """
    args, engine, policy, device = trainer.args, trainer.engine, trainer.policy, trainer.parts.device
    prompts = dict(enumerate(prompt.token_ids[:PROMPT_TOKENS] for prompt in trainer.parts.prompts[:PROMPTS]))
    sampling = Sampling(TOKENS, trainer.sampling.stop_token_ids, args.temperature)
    flip(policy)
    try:
        engine.wake(trainer.weights())
        with torch.random.fork_rng(devices=[]):
            rollouts = engine.generate(prompts, SAMPLES, sampling, seed=args.seed)
        engine.sleep()
        samples = [Sample(prompts[r.group], r.token_ids, 0.0, r.logprobs) for r in rollouts]
        logprobs = frozen_logprobs(policy, tuple(tensor.to(device) for tensor in pad(samples)))[0]
    finally:
        flip(policy)
    sampled = torch.tensor([value for s in samples for value in s.sampler_logprobs], device=device)
    # NaN would pass under any limit.
    gaps = (logprobs - sampled).abs().nan_to_num(nan=math.inf)
    largest, mean = all_reduce(torch.stack([gaps.max(), gaps.mean()]), dist.ReduceOp.MAX).tolist()
    limits = trainer.gap_limits
    if largest > limits[0] or mean > limits[1]:
        gap = f"{largest:.3g} nats, {mean:.3g} on average (the limits are {limits[0]:.3g} and {limits[1]:.3g})"
        fault = "the sampler's log-probs are not the trainer's and transformers' after a weight sync: off by up to"
        raise SamplerGapError(f"--model {args.model}: of a {type(policy.model).__name__} {fault} {gap}")


@torch.no_grad()
def flip(policy: Policy) -> None:
    """Negate each `FLIPPED`-th number of every parameter, in place; twice is not at all."""
    # They start apart: no change in one parameter can undo that in the next.
    for number, parameter in enumerate(policy.parameters()):
        shard: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        step = max(1, min(FLIPPED, shard.numel()))
        shard.view(-1)[number % step :: step].neg_()
