"""GPU memory of a run, per rank and phase, from the model's config and the flags: what does not fit is known at start.

    generate   vLLM awake: weights, KV cache and its own work; the trainer's shards stay beside it
    logprob    log-probs without gradient, vLLM asleep
    update     forward and backward of the largest micro-batch; gradients of earlier ones are there
    sync       vLLM's weights awake, the policy's parameters gathered one by one

Parameters are counted on torch's meta device. Bytes per token and copies of a logits chunk are those of `grpo.Policy` in
bfloat16 with one checkpoint per decoder layer, as `grpo.shard` sets it up; tests/test_memory.py holds them against what
PyTorch's allocator reports on a CPU. Assumed, not measured: CONTEXT, GRAPHS, USABLE, vLLM's work, FSDP2's buffers (read
from its source), and that attention runs in a flash kernel. Sizes are bytes, GB is 1e9 bytes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo import Policy
from support.args import Args

CHUNK_TOKENS: int = inspect.signature(Policy).parameters["chunk_tokens"].default
CONTEXT = 1_000_000_000  # CUDA context, cuBLAS and NCCL workspaces
GRAPHS = 1_000_000_000  # captured CUDA graphs: they stay while vLLM sleeps (vllm#45623)
USABLE = 0.95  # of the device; the rest is left to fragmentation, which expandable segments cannot mend beside sleep
BATCHED_TOKENS = 16_384  # vLLM's largest prefill step by default on 80 GB GPUs


@dataclass(frozen=True)
class Shape:
    """Numbers of parameters and widths. `root` is what FSDP gathers with the policy itself: embeddings, norm, lm_head."""

    parameters: int
    root: int
    layer: int
    head: int  # vocabulary x hidden
    hidden: int
    intermediate: int
    queries: int  # heads x head_dim
    keys: int  # key-value heads x head_dim
    layers: int
    vocabulary: int
    qk_norm: bool

    @property
    def kept(self) -> int:
        """Bytes per token that forward keeps for backward under checkpointing: each layer's input, bfloat16."""
        return 2 * self.hidden * self.layers

    @property
    def recomputed(self) -> int:
        """Bytes per token of one layer where its backward peaks: in the MLP, when its inner tensors meet their gradients.

        12 I is 3 tensors and 3 gradients of the MLP's width; 16 H two norms (one float32, two bfloat16 tensors each), 2 H the
        gradient of the layer's output; queries and attention's output take 2 bytes each, keys and values too. A norm of
        queries and keys adds a float32 and a bfloat16 tensor of theirs.
        """
        heads = 4 * (self.queries + self.keys) + 6 * (self.queries + self.keys) * self.qk_norm
        return 18 * self.hidden + 12 * self.intermediate + heads

    @property
    def forward(self) -> int:
        """Bytes per token of one layer without gradient, at its peak in the MLP."""
        return 8 * self.hidden + 6 * self.intermediate


def shape(config: PretrainedConfig) -> Shape:
    """Counted on a model without storage, tied weights once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        parameters=total,
        root=total - sum(layers),
        layer=max(layers),
        head=config.vocab_size * config.hidden_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        queries=config.num_attention_heads * head_dim,
        keys=config.num_key_value_heads * head_dim,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        qk_norm=any(".q_norm." in name for name, _ in model.named_parameters()),
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank. The parts, and each phase's peak: parts that do not meet at one moment are not added up.

    `activations` are those of the backward of a layer at the token budget, `logits` the float32 copies of one chunk's
    logits in backward, `kv_cache` what vLLM has left within its share (negative: not even its weights fit).
    """

    parameters: int  # a count
    weights: int  # vLLM's, bfloat16, whole on each rank
    masters: int  # float32, sharded; 0 with --offload, as are the next two
    gradients: int
    adam: int
    activations: int
    logits: int
    kv_cache: int
    kv_per_token: int
    host: int  # main memory per rank: vLLM's weights while it sleeps, and with --offload the states
    phases: dict[str, int]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit; over `max_length`, the rollouts of full length in flight."""
        return max(0, self.kv_cache // self.kv_per_token)


def estimate(model: PretrainedConfig | Shape, args: Args, ranks: int, device_bytes: int) -> Estimate:
    """What a run with `args` takes on each of `ranks` GPUs of `device_bytes`."""
    s = model if isinstance(model, Shape) else shape(model)
    masters, gradients, adam = (0 if args.offload else size * s.parameters // ranks for size in (4, 4, 8))
    reference = masters if args.beta > 0 else 0  # that of --beta is sharded like the masters, and offloaded with them
    resting = CONTEXT + masters + adam + reference
    weights, kv_per_token = 2 * s.parameters, 4 * s.layers * s.keys
    # Logits in bfloat16 and float32, log-probs, probabilities and noise: the five tensors of vLLM's sampler.
    work = max(BATCHED_TOKENS * s.forward, 18 * args.max_num_seqs * s.vocabulary)
    share = int(args.gpu_memory_utilization * device_bytes)
    tokens = max(args.token_budget, args.max_length)  # a longer row makes a micro-batch of its own
    logits = 5 * 4 * CHUNK_TOKENS * s.vocabulary
    # The largest parameter, gathered in float32 (one rank has it whole) and cast, or cast and in vLLM's copy; with --offload
    # only that copy is on the GPU.
    gathered = (2 if args.offload else 6 if ranks > 1 else 4) * s.head
    return Estimate(
        parameters=s.parameters,
        weights=weights,
        masters=masters,
        gradients=gradients,
        adam=adam,
        activations=tokens * (s.kept + s.recomputed),
        logits=logits,
        kv_cache=share - weights - GRAPHS - work,
        kv_per_token=kv_per_token,
        host=weights + ((20 if args.beta > 0 else 16) * s.parameters // ranks if args.offload else 0),
        phases={
            "generate": resting + share,
            "logprob": resting + GRAPHS + _logprob(s, tokens, ranks),
            "update": resting + gradients + GRAPHS + _update(s, tokens, logits, ranks, args.beta > 0),
            "sync": resting + GRAPHS + weights + gathered,
        },
    )


def _logprob(s: Shape, tokens: int, ranks: int) -> int:
    """Bytes of a pass without gradient at the worst of three moments, beside the root's bfloat16 copy."""
    # While the root is gathered, its buffer; one rank casts a parameter at a time.
    at_start = 2 * (s.root if ranks > 1 else s.head)
    # A layer's own copy, and the buffers of the last one and the next one.
    in_layer = tokens * s.forward + (6 if ranks > 1 else 2) * s.layer
    in_head = tokens * 4 * s.hidden + 3 * 4 * CHUNK_TOKENS * s.vocabulary
    return 2 * s.root + max(at_start, in_layer, in_head)


def _update(s: Shape, tokens: int, logits: int, ranks: int, reference: bool) -> int:
    """Bytes of forward and backward at the worst of three moments. FSDP keeps the root's bfloat16 copy all through, and its
    gradients in bfloat16, whole, until the end."""
    gathered = 2 if ranks > 1 else 0  # bytes of a layer's buffer on its way in; one rank copies without
    # In lm_head: the final norm (6 H), the response states and their gradient (2 H each), and lm_head's gradient so far.
    in_head = tokens * (s.kept + 10 * s.hidden) + logits + 2 * s.head + gathered * s.layer
    # In the last layer: its weights, its gradients, those of a layer before on their way out (float32), beside lm_head's.
    in_layer = tokens * (s.kept + s.recomputed) + 2 * s.head + (8 + gathered) * s.layer
    # At the end, when the root's weights are gone: its gradients and their cast to float32, or the cast and its shard.
    at_end = max(4 * s.root, 2 * s.root + 4 * s.root // ranks)
    return 2 * s.root * (2 if reference else 1) + max(in_head, in_layer, at_end)


def first_misfit(model: PretrainedConfig | Shape, args: Args, ranks: int, device_bytes: int) -> str | None:
    """One sentence on the first phase that does not fit into `device_bytes` per rank, with the flags that would mend it, which
    are tried out here, or the number of ranks; None if all fits."""
    s = model if isinstance(model, Shape) else shape(model)
    problem = _problem(estimate(s, args, ranks, device_bytes), args, device_bytes)
    if problem is None:
        return None
    here = _remedy(s, args, [ranks], sorted({args.offload, True}), device_bytes)
    more = None
    if here is None or "--offload" in here:
        more = _remedy(s, args, [ranks << n for n in range(1, 7)], [args.offload], device_bytes)
    remedies = " or ".join(remedy for remedy in (here, more) if remedy)
    if not remedies:
        return f"{problem}; no flags help: take a smaller --model or a smaller --max-length"
    return f"{problem}; {remedies} would fit"


def _problem(found: Estimate, args: Args, device_bytes: int) -> str | None:
    usable = int(USABLE * device_bytes)
    for phase, needed in found.phases.items():
        if needed > usable:
            return (
                f"{phase} needs {needed / 1e9:.1f} GB of GPU memory and {usable / 1e9:.1f} GB can be used on each GPU"
            )
    if found.kv_tokens < args.max_length:
        needed = found.kv_per_token * args.max_length / 1e9
        return (
            f"generate needs {needed:.1f} GB of KV cache for one rollout of --max-length {args.max_length} and"
            f" {max(0, found.kv_cache) / 1e9:.1f} GB are left within --gpu-memory-utilization {args.gpu_memory_utilization}"
        )
    return None


def _remedy(s: Shape, args: Args, ranks: list[int], offload: list[bool], device_bytes: int) -> str | None:
    """The first that fits of these ranks and flags, with vLLM's share changed before the token budget, and as little as it
    takes; None if nothing does."""
    now = args.gpu_memory_utilization
    shares = [now, *sorted((n / 20 for n in range(1, 20)), key=lambda share: abs(share - now))]
    budgets = [args.token_budget >> n for n in range(20) if n == 0 or args.token_budget >> n >= args.max_length]
    for count, to_host, budget, share in itertools.product(ranks, offload, budgets, shares):
        changed = copy.copy(args)
        changed.offload, changed.token_budget, changed.gpu_memory_utilization = to_host, budget, share
        found = estimate(s, changed, count, device_bytes)
        # A cache for one rollout at a time would do for vLLM, and take days.
        roomy = found.kv_tokens >= args.group_size * args.max_length
        if roomy and _problem(found, changed, device_bytes) is None:
            parts = {
                f"{count} such GPUs (torchrun)": len(ranks) > 1,
                f"--offload ({found.host / 1e9:.0f} GB of main memory)": to_host != args.offload,
                f"--token-budget {budget}": budget != args.token_budget,
                f"--gpu-memory-utilization {share}": share != now,
            }
            return " with ".join(part for part, named in parts.items() if named)
    return None
