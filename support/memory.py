"""GPU memory of a run, per rank and phase, from config and flags: what does not fit is known at start.

    generate   vLLM awake: weights, KV cache and its own work; the trainer's shards stay beside it
    logprob    log-probs without gradient, vLLM asleep
    update     forward and backward of the largest micro-batch; gradients of earlier ones are there
    sync       vLLM's weights awake, the policy's parameters gathered one by one

Tests hold `grpo.Policy`'s share against PyTorch's allocator on a CPU. Assumed, not measured: the
constants, vLLM's work, FSDP2's buffers, attention in a flash kernel.
"""

from __future__ import annotations

import inspect

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from grpo import Policy
from support.args import Args

CHUNK_TOKENS: int = inspect.signature(Policy).parameters["chunk_tokens"].default
# CUDA context, cuBLAS and NCCL workspaces; captured CUDA graphs, which stay while vLLM sleeps (vllm#45623).
CONTEXT = GRAPHS = 1_000_000_000
USABLE = 0.95  # of the device; the rest is left to fragmentation
BATCHED_TOKENS = 16_384  # vLLM's largest prefill step by default on 80 GB GPUs
LESS = {"generate": "--gpu-memory-utilization", "logprob": "--token-budget", "update": "--token-budget"}


class Shape:
    """Of a model that `Policy` takes: parameters, counted without storage, and bytes per token in bfloat16."""

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
        text = config.get_text_config()
        self.hidden, self.vocabulary, heads = text.hidden_size, text.vocab_size, text.num_attention_heads
        keys = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or self.hidden // heads
        # Some have a width for each layer; of a mixture, the experts of one token count.
        widths = getattr(text, "intermediate_size", None) or 4 * self.hidden
        width = widths if isinstance(widths, int) else max(widths)
        experts = getattr(text, "num_experts_per_tok", None) or 1
        width = max(width, experts * (getattr(text, "moe_intermediate_size", None) or width))
        self.parameters = sum(p.numel() for p in model.parameters())
        # What FSDP gathers first: embeddings, norm, lm_head.
        self.root = self.parameters - sum(layers)
        self.layer, self.head = max(layers), self.vocabulary * self.hidden
        # Keys and values, and inputs, of all layers.
        self.kv, self.kept = 4 * len(layers) * keys * head_dim, 2 * len(layers) * self.hidden
        # One layer at its peak in the MLP, without gradient, and in backward: 3 tensors and 3 gradients
        # of the MLP's width; two norms of one float32 and two bfloat16 tensors each, the gradient of the
        # output; queries, keys, values and attention's output, with a norm 6 bytes more.
        normed = any(".q_norm." in name for name, _ in model.named_parameters())
        self.forward = 8 * self.hidden + 6 * width
        self.recomputed = 18 * self.hidden + 12 * width + (10 if normed else 4) * (heads + keys) * head_dim


class Estimate:
    """Bytes on each of `ranks` GPUs: the parts, and the peak of each phase, in which not all parts meet."""

    def __init__(self, s: Shape, args: Args, ranks: int, device_bytes: int) -> None:
        models, share = 2 if args.beta > 0 else 1, int(args.gpu_memory_utilization * device_bytes)
        # A row that is longer than the budget makes a micro-batch of its own.
        tokens, chunk = max(args.token_budget, args.max_length), 4 * CHUNK_TOKENS * s.vocabulary
        # vLLM's sampler: logits in bfloat16 and float32, log-probs, probabilities and noise.
        work = max(BATCHED_TOKENS * s.forward, 18 * args.max_num_seqs * s.vocabulary)
        self.weights = 2 * s.parameters
        self.masters, self.gradients, self.adam = (0 if args.offload else n * s.parameters // ranks for n in (4, 4, 8))
        self.activations, self.logits = tokens * (s.kept + s.recomputed), 5 * chunk
        # What vLLM has left within its share; negative if not even its weights fit.
        self.kv_cache = share - self.weights - GRAPHS - work
        self.kv_tokens = max(0, self.kv_cache // s.kv)
        # Main memory: vLLM's weights while it sleeps, and what is offloaded.
        self.host = self.weights + ((12 + 4 * models) * s.parameters // ranks if args.offload else 0)
        # FSDP gathers the root, and each layer, into a buffer; one rank casts parameter by parameter.
        buffer = 2 * s.layer if ranks > 1 else 0
        logprob = max(
            2 * (s.root if ranks > 1 else s.head),
            # A layer's own copy, and the buffers of the last one and the next one.
            tokens * s.forward + 2 * s.layer + 2 * buffer,
            tokens * 4 * s.hidden + 2 * chunk,
        )
        update = max(
            # lm_head: the final norm, the response states, their gradient, and lm_head's so far.
            tokens * (s.kept + 10 * s.hidden) + self.logits + 2 * s.head + buffer,
            # The last layer: weights and gradients, those of another on their way out in float32.
            self.activations + 2 * s.head + 8 * s.layer + buffer,
            # The root's gradients and their cast to float32, or the cast and its shard.
            max(4 * s.root, 2 * s.root + 4 * s.root // ranks),
        )
        # The largest parameter in float32 (one rank has it whole), cast, or cast and in vLLM's copy.
        gathered = (2 if args.offload else 6 if ranks > 1 else 4) * s.head
        resting = CONTEXT + models * self.masters + self.adam
        self.phases = {
            "generate": resting + share,
            "logprob": resting + GRAPHS + 2 * s.root + logprob,
            "update": resting + GRAPHS + self.gradients + models * 2 * s.root + update,
            "sync": resting + GRAPHS + self.weights + gathered,
        }


def first_misfit(s: Shape, args: Args, ranks: int, device_bytes: int) -> str | None:
    """One sentence on the first phase that does not fit, with the flags that make it take less; else None."""
    found, usable = Estimate(s, args, ranks, device_bytes), int(USABLE * device_bytes)
    for phase, needed in found.phases.items():
        if needed > usable:
            remedies = [f"lower {LESS[phase]}"] if phase in LESS else []
            remedies = ", ".join(remedies + ["add --offload"] * (not args.offload))
            sizes = f"{needed / 1e9:.1f} GB of GPU memory and {usable / 1e9:.1f} GB"
            return f"{phase} needs {sizes} can be used on each GPU; {remedies} or take more GPUs (torchrun)"
    if found.kv_tokens < args.max_length:
        needed, left = s.kv * args.max_length / 1e9, max(0, found.kv_cache) / 1e9
        cache = f"generate needs {needed:.1f} GB of KV cache for one rollout of --max-length {args.max_length}"
        share = f"--gpu-memory-utilization {args.gpu_memory_utilization}"
        return f"{cache} and {left:.1f} GB are left within {share}; raise this, or lower --max-length"
    return None
