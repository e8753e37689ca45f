"""Before a model is trained: transformers, trainer and sampler give the same log-probs.

A forward that is not the one `grpo.Policy` computes, or a weight sync that vLLM takes in part,
raises nothing: it shows in the log-probs alone. All three must agree on one set of weights, and the
sampler on changed ones too, after a sync, or it may just have the weights that it read itself.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine import Sampling
from grpo import Policy, Sample, SamplerGapError, all_reduce, frozen_logprobs, pad
from support.args import fail

# What is compared: so many prompts, at most so much of each, and responses of so many tokens.
PROMPTS, PROMPT_TOKENS, SAMPLES, TOKENS = 2, 64, 4, 16
# Nats: between two orders of the same float32 sums.
ROUNDING = 1e-3
# SmolLM2-135M in bfloat16: with each 512th number negated, its log-probs are off by 0.35 nats, and by
# 0.033 for rounding, as before (0.028). With each eighth, rounding alone would take 0.68.
FLIPPED = 512


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
        fail(
            f"--model {name}: of a {kind} the trainer's log-probs are not those of transformers' own forward:"
            f" they differ by up to {gap:.3g} nats"
        )


@torch.no_grad()
def sampler_follows(trainer: object) -> None:
    """Raise SamplerGapError if the sampler's log-probs are not the trainer's after a sync of changed weights.

    The next sync gives the sampler the weights back; the policy has them back here, bit for bit.
    """
    args, engine, policy, device = trainer.args, trainer.engine, trainer.policy, trainer.parts.device
    chosen = enumerate(trainer.parts.prompts[:PROMPTS])
    prompts = {number: prompt.token_ids[:PROMPT_TOKENS] for number, prompt in chosen}
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
        raise SamplerGapError(
            f"--model {args.model}: of a {type(policy.model).__name__} the sampler's log-probs are not the trainer's,"
            f" which are those of transformers' own forward: after a weight sync they differ by up to"
            f" {largest:.3g} nats, {mean:.3g} on average (the limits are {limits[0]:.3g} and {limits[1]:.3g})"
        )


@torch.no_grad()
def flip(policy: Policy) -> None:
    """Negate each `FLIPPED`-th number of every parameter, in place; twice is not at all.

    All parameters change, and no change in one can undo that in the next: they start apart.
    """
    for number, parameter in enumerate(policy.parameters()):
        shard: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        step = max(1, min(FLIPPED, shard.numel()))
        shard.view(-1)[number % step :: step].neg_()
