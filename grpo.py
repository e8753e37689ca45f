"""GRPO and DAPO on ragged groups: advantages, token log-probs, losses, optimizer step (Sec. 3).

Knows nothing of pruning: the caller passes the survivors. Where it departs from the textbook:

1. The ratio is pi_theta / pi_old, the policy that sampled. Sec. 3 prints pi_ref, a slip.
2. Groups are ragged: statistics go by group id, never by reshaping to (groups, G).
3. One normaliser per optimizer step, over micro-batches and ranks; no mean of means (trl#3021).
4. Rows are right-padded, without attention mask: causal attention never looks right.
5. A step without gradient is not taken: momentum and weight decay would move the weights.
6. No step on samples of other weights: log-probs of sampler and trainer are compared first.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import KW_ONLY, dataclass
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

MAX_NONFINITE = 3
# Bounds log-ratios before exp: after it, 0 * inf would make NaN gradients.
MAX_LOG_RATIO = 20.0


class NonFiniteGradients(RuntimeError):
    """Not finite: `MAX_NONFINITE` gradients in a row, or the weights that a step has left."""


class SamplerGapError(RuntimeError):
    """The sampler's log-probs are not the trainer's: the samples came from other weights."""


@dataclass
class Sample:
    """One survivor. `sampler_logprobs` of its response ids are the sampler's, after temperature; [] if
    it was not asked."""

    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float
    sampler_logprobs: list[float]

    def __post_init__(self) -> None:
        if not (self.prompt_ids and self.response_ids and len(self.sampler_logprobs) in (0, len(self.response_ids))):
            raise ValueError("a sample needs prompt ids, response ids, and a log-prob for each response id or for none")

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def group_advantages(rewards: Tensor, groups: Tensor, eps: float = 1e-6, scale: bool = True) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group of survivors, std unbiased (Sec. 3).

    scale: whether to divide; Dr. GRPO (arXiv 2503.20783) does not, since it favours groups that agree.

    `rewards` (N,), `groups` (N,) int64; returns (N,) float32, 0 for a lone or an equal reward.

    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([7, 7, 9, 7]))
    tensor([ 1.1547, -0.5773,  0.0000, -0.5773])
    """
    _, group = groups.unique(return_inverse=True)
    # In float64 the sum of float32 values is exact, and so is the mean of equal ones.
    values, count = rewards.float().double(), group.bincount()
    centred = values - (group.bincount(values) / count)[group]
    std = (group.bincount(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (std[group] + eps) if scale else centred).float()


def overlong_penalty(lengths: Tensor, max_response: int, cache: int) -> Tensor:
    """DAPO's Eq. 13, added to the reward: 0 up to `max_response - cache` response tokens, then down
    to -1 at `max_response`, linearly. `lengths` (N,); returns (N,) float32."""
    if not 1 <= cache <= max_response:
        raise ValueError(f"the overlong cache must lie in 1..{max_response} (the longest response), not {cache}")
    return ((max_response - cache - lengths) / cache).clamp(-1.0, 0.0).float()


def micro_batches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Row numbers in batches with rows x longest row <= `token_budget`; a longer row goes alone.

    >>> micro_batches([3, 9, 4, 2], token_budget=8)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    # Longest first: memory peaks at once, and rows of like length waste little padding.
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > token_budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def pad(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """`input_ids` (B, T), `prompt_lengths` (B,), `lengths` (B,), int64. Padding may equal an id."""
    lengths = [len(s) for s in samples]
    rows = [s.prompt_ids + s.response_ids + [0] * (max(lengths) - len(s)) for s in samples]
    return torch.tensor(rows), torch.tensor([len(s.prompt_ids) for s in samples]), torch.tensor(lengths)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs of response tokens at `temperature`.
    Ids from `vocabulary` on get probability 0: lm_head may have more rows than there are tokens.
    Dropout is off. Raises ValueError unless the layers are `model.model.layers`."""

    def __init__(
        self, model: PreTrainedModel, temperature: float, chunk_tokens: int = 1024, vocabulary: int | None = None
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"training needs a temperature above 0, not {temperature}")
        if not hasattr(getattr(model, "model", None), "layers"):
            raise ValueError(f"{type(model).__name__} cannot be trained: its layers are not model.model.layers")
        # PyTorch's own attention would leave out the cap that Gemma-2 puts on it.
        if getattr(model.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")
        self.model, self.temperature = model.eval(), temperature
        self.chunk_tokens, self.vocabulary = chunk_tokens, vocabulary
        # The model's own way from states to logits: its forward, whose backbone returns its input.
        head = copy.copy(model)
        head._modules = {name: module for name, module in model.named_children() if name != "model"}
        head.model = lambda inputs_embeds, **_: MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        self._head = head.forward

    def forward(self, input_ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """From `pad`'s tensors to log-probs of the response tokens and, without gradient, entropies
        of their distributions in nats: both (R,) float32, R = sum(lengths - prompt_lengths)."""
        states = self.model.model(input_ids=input_ids, attention_mask=None, use_cache=False).last_hidden_state
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        response = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])  # (B, T)
        targets = input_ids[response]  # (R,)
        states = states[:, :-1][response[:, 1:]]  # (R, H): token t comes from the state at t - 1
        chunks = zip(states.split(self.chunk_tokens), targets.split(self.chunk_tokens))
        outputs = [checkpoint(self._token_logprobs, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
        return tuple(torch.cat(values) for values in zip(*outputs))

    def _token_logprobs(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """States (C, H), targets (C,) to (C,), (C,). Backward makes the logits (C, V) again."""
        logits = self._head(inputs_embeds=states[None]).logits[0].float()
        # A pass over (C, V), forward and backward, for nothing: no division by 1, no padding of 0 ids.
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.vocabulary is not None and self.vocabulary < logits.shape[-1]:
            logits[:, self.vocabulary :] = -math.inf
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        with torch.no_grad():
            # Of probability 0 and logit -inf the product is 0. NaN logits make the normaliser NaN.
            products = (logits - normaliser[:, None]).exp_().mul_(logits).nan_to_num_(nan=0.0)
        return logprobs, normaliser.detach() - products.sum(-1)


def shard(policy: Policy, device: torch.device, gradient_checkpointing: bool = False, offload: bool = False) -> Policy:
    """`policy`, put on `device` under FSDP2, on one rank or more of a process group. Weights,
    gradients and moments are float32, with `offload` in main memory; a GPU computes in bfloat16.
    Layers are gathered one by one; `gradient_checkpointing` keeps their inputs only."""
    # Not .to(device): fully_shard moves layer by layer, so that no GPU ever holds all of it.
    policy.to(dtype=torch.float32)
    if gradient_checkpointing:
        policy.model.gradient_checkpointing_enable()
        for layer in policy.model.model.layers:
            # What transformers asks for; the modules inside, dropout too, stay in eval mode.
            layer.training = True
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    on_gpu = device.type == "cuda"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    offload_policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    for module in [*policy.model.model.layers, policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    return policy


@torch.no_grad()
def frozen_logprobs(policy: Policy, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`policy(*inputs)` without a graph; FSDP keeps no copy of the root, which could go stale."""
    output = policy(*inputs)
    if isinstance(policy, FSDPModule):
        policy.reshard()
    return output


def token_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi_theta / pi_old (Sec. 3), and where
    the lower bound (A < 0) or the upper (A > 0) cuts its gradient off (bool). All (R,)."""
    ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss, (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 of KL(pi_theta || pi_ref) per token: exp(d) - d - 1, d = log pi_ref - log pi_theta."""
    difference = (ref_logprobs - logprobs).float().clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference


@dataclass(frozen=True)
class LossConfig:
    """`algo` "grpo": the mean over each response, then over responses, also those of advantage 0 (a
    group of one or of equal rewards): else their number would scale the others; "dapo": over all
    tokens. `beta` weighs the KL to the reference; `tis_cap` C multiplies a token's policy loss by
    min(pi_old / pi_sampler, C), without gradient (truncated importance sampling)."""

    algo: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    tis_cap: float | None = None

    def __post_init__(self) -> None:
        if self.algo not in ("grpo", "dapo"):
            raise ValueError(f"algo must be grpo or dapo, not {self.algo!r}")


def all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """`values` combined over ranks, in place; one process needs no process group."""
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values


@dataclass
class MicroBatch:
    """Rows that pass through the model together. All but `inputs` are by response token, (R,).
    `weights` are shares in the loss, 0 in the dummy row of a rank that has no rows left;
    `sampler_logprobs` are inf where the sampler was not asked. `sampled` are log-probs and entropies
    by the policy that sampled, from the first pass."""

    inputs: tuple[Tensor, Tensor, Tensor]
    advantages: Tensor
    sampler_logprobs: Tensor
    weights: Tensor
    sampled: tuple[Tensor, Tensor] | None = None


def token_sums(mask: Tensor, *values: Tensor) -> Tensor:
    """The number of tokens in `mask` (R,), then each of `values` (R,) summed over them, float64."""
    return torch.stack([mask.sum().double(), *(v.detach().double().where(mask, 0.0).sum() for v in values)])


@dataclass(eq=False, repr=False)
class Learner:
    """AdamW on float32 master weights (ValueError for others), `minibatches` steps for each batch.
    Weight decay is on all parameters, as in verl. The learning rate rises over `warmup_steps`, from
    lr / warmup_steps, then stays. `token_budget` bounds rows x longest row of a micro-batch."""

    policy: Policy
    config: LossConfig
    _: KW_ONLY
    lr: float
    warmup_steps: int
    weight_decay: float
    grad_clip: float
    token_budget: int
    minibatches: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    reference: Policy | None = None

    def __post_init__(self) -> None:
        self.parameters = parameters = list(self.policy.parameters())
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        if any(p.dtype != torch.float32 for p in parameters):
            raise ValueError("master weights must be float32: bfloat16 rounds a step of 1e-6 away")
        if self.config.beta > 0 and self.reference is None:
            raise ValueError("beta > 0 needs a reference policy")
        if self.ranks > 1 and not isinstance(self.policy, FSDPModule):
            raise ValueError("with several ranks the policy must come from shard(): nothing else adds their gradients")
        # Of an offloaded policy, not where its parameters are.
        mesh = getattr(parameters[0], "device_mesh", None)
        self.device = torch.device(mesh.device_type) if mesh else parameters[0].device
        self.optimizer = torch.optim.AdamW(parameters, self.lr, self.betas, weight_decay=self.weight_decay, fused=True)
        # The moments are there from the start: a checkpoint may come before the first step.
        for p in parameters:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | moments
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / max(1, self.warmup_steps)))
        self.nonfinite_in_a_row = 0

    def update(
        self, samples: list[Sample], max_gap: float, max_mean_gap: float = math.inf, rows: list[int] | None = None
    ) -> dict[str, float]:
        """Learn from this rank's share of a batch. Sample i is for optimizer step `rows[i]` mod
        `minibatches`, `rows` being the numbers in the batch of all ranks (default: i). Raises
        NonFiniteGradients; and SamplerGapError, before any step, if the sampler's log-probs, where
        they are known, are off by over `max_gap` nats in more than a thousandth of the tokens, or
        by over `max_mean_gap` on average.

        Returns metrics of all ranks: entropy and gap are of the policy that sampled, the others of
        the steps taken, not those `skipped` without gradient or `nonfinite` in loss or gradient.
        """
        if self.config.tis_cap is not None and not all(s.sampler_logprobs for s in samples):
            raise ValueError("truncated importance sampling needs the sampler's log-probs of all samples")
        started, lr, gap = time.perf_counter(), self.scheduler.get_last_lr()[0], None
        plan, has_gradient = self._plan(samples, rows)
        batches = list(chain(*plan))
        # With one step the old log-probs are those of its own forward, and cost no pass.
        if self.minibatches > 1 or not any(has_gradient):
            for batch in batches:
                batch.sampled = frozen_logprobs(self.policy, batch.inputs)
            gap = self._check_gap(batches, max_gap, max_mean_gap)
        logprobs_done = time.perf_counter() if gap else started
        norms, sums = [], torch.zeros(5, dtype=torch.float64, device=self.device)
        for step in compress(plan, has_gradient):
            try:
                with_step = sum([self._backward(batch) for batch in step], sums)
                gap = gap or self._check_gap(batches, max_gap, max_mean_gap)
                if (norm := self._optimizer_step(with_step[1])) is not None:
                    norms, sums = [*norms, norm], with_step
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        tokens, loss, kl, clip_low, clip_high = all_reduce(sums).tolist()
        metrics = gap | {
            "loss": loss / max(1, len(norms)),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "clip_low": clip_low / max(1.0, tokens),
            "clip_high": clip_high / max(1.0, tokens),
            "lr": lr,
            "optimizer_steps": float(len(norms)),
            "skipped": float(has_gradient.count(False)),
            "nonfinite": float(has_gradient.count(True) - len(norms)),
            "logprob_s": logprobs_done - started,
            "update_s": time.perf_counter() - logprobs_done,
        }
        return metrics | ({"kl": kl / max(1.0, tokens)} if self.config.beta > 0 else {})

    def _plan(self, samples: list[Sample], rows: list[int] | None) -> tuple[list[list[MicroBatch]], list[bool]]:
        """The steps' micro-batches, as many on all ranks, and whether each has a gradient."""
        numbered = list(zip(range(len(samples)) if rows is None else rows, samples, strict=True))
        steps = [[s for row, s in numbered if row % self.minibatches == step] for step in range(self.minibatches)]
        split = [micro_batches([len(s) for s in step], self.token_budget) or [[]] for step in steps]
        counts = all_reduce(torch.tensor([len(b) for b in split], device=self.device), dist.ReduceOp.MAX).tolist()
        totals = [[len(s), sum(len(x.response_ids) for x in s), sum(x.advantage != 0 for x in s)] for s in steps]
        totals = all_reduce(torch.tensor(totals, device=self.device)).tolist()
        plan = [
            [self._micro_batch([step[i] for i in b], *total[:2]) for b in batches + [[]] * (count - len(batches))]
            for step, batches, count, total in zip(steps, split, counts, totals)
        ]
        return plan, [signal > 0 or (self.config.beta > 0 and responses > 0) for responses, _, signal in totals]

    def _micro_batch(self, samples: list[Sample], responses: int, tokens: int) -> MicroBatch:
        """`samples`, weighted by the step's responses or tokens of all ranks; none make a dummy."""
        dapo = self.config.algo == "dapo"
        share = 0.0 if not samples else 1 / tokens if dapo else 1 / responses
        samples = samples or [Sample([0], [0], 0.0, [0.0])]
        sizes = torch.tensor([len(s.response_ids) for s in samples])
        weights = (torch.full((len(samples),), share) / (1 if dapo else sizes)).repeat_interleave(sizes)
        advantages = torch.tensor([s.advantage for s in samples], dtype=torch.float32).repeat_interleave(sizes)
        known = [s.sampler_logprobs or [math.inf] * len(s.response_ids) for s in samples]
        sampler_logprobs = torch.tensor(list(chain(*known)), dtype=torch.float32)
        inputs = tuple(tensor.to(self.device) for tensor in pad(samples))
        return MicroBatch(inputs, *(t.to(self.device) for t in (advantages, sampler_logprobs, weights)))

    def _backward(self, batch: MicroBatch) -> Tensor:
        """Adds the gradient of `batch`; returns its tokens, and sums of loss, KL and clip masks."""
        logprobs, entropy = self.policy(*batch.inputs)
        batch.sampled = batch.sampled or (logprobs.detach(), entropy)
        old, config = batch.sampled[0], self.config
        loss, low, high = token_objective(logprobs, old, batch.advantages, config.clip_low, config.clip_high)
        if config.tis_cap is not None:
            loss = loss * (old - batch.sampler_logprobs).clamp(max=MAX_LOG_RATIO).exp().clamp(max=config.tis_cap)
        kl = torch.zeros_like(loss)
        if config.beta > 0:
            kl = k3(logprobs, frozen_logprobs(self.reference, batch.inputs)[0])
        loss = (loss + config.beta * kl) * batch.weights
        # FSDP averages over ranks.
        (loss.sum() * self.ranks).backward()
        return token_sums(batch.weights > 0, loss, kl, low, high)

    def _optimizer_step(self, loss: Tensor) -> float | None:
        """Returns the norm before clipping; None, and no step, if it or `loss` is not finite."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(loss)
        finite = self._finite([norm, loss])
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= MAX_NONFINITE:
            raise NonFiniteGradients(f"no finite gradient in {MAX_NONFINITE} optimizer steps in a row; none was taken")
        if not finite:
            return None
        self.optimizer.step()
        self.scheduler.step()
        if not self._finite(self.parameters):
            raise NonFiniteGradients("an optimizer step left weights that are not finite: a lower --lr may help")
        return norm.item()

    def _finite(self, tensors: list[Tensor]) -> bool:
        """Whether all elements are, on all ranks, told by their sums: a single fast pass."""
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        sums = torch.stack([t.detach().sum() for t in local]).to(self.device)
        return all_reduce((~sums.isfinite()).sum()).item() == 0

    def _check_gap(self, batches: list[MicroBatch], max_gap: float, max_mean_gap: float) -> dict[str, float]:
        """Entropy and gap of the policy that sampled, over all ranks; raises SamplerGapError."""
        # Where the trainer's own logits are not finite its loss tells, and not the gap.
        known = [(b.weights > 0) & b.sampled[1].isfinite() for b in batches]
        compared = [k & (b.sampler_logprobs != math.inf) for k, b in zip(known, batches)]
        gaps = torch.cat([(b.sampled[0] - b.sampler_logprobs)[c].abs().double() for b, c in zip(batches, compared)])
        # NaN is within no limit.
        beyond = (~(gaps <= max_gap)).sum().double()
        sums = sum(token_sums(k, b.sampled[1]) for k, b in zip(known, batches))
        sums = torch.stack([*sums, gaps.new_tensor(len(gaps)), gaps.sum(), beyond])
        tokens, entropy, count, gap, beyond = all_reduce(sums).tolist()
        gap_max = all_reduce(gaps.max() if len(gaps) else gaps.sum(), dist.ReduceOp.MAX).item()
        # Without tokens there is no gap, which is not a gap of 0.
        gap_mean, gap_max = (gap / count, gap_max) if count else (math.nan, math.nan)
        if count and not (beyond <= count / 1000 and gap_mean <= max_mean_gap):
            raise SamplerGapError(
                f"log-probs of sampler and trainer differ by up to {gap_max:.4g} nats, {gap_mean:.4g} on average (limit"
                f" {max_mean_gap:.4g}), in {beyond:,.0f} of {count:,.0f} tokens by more than {max_gap:.4g}: the last"
                " weight sync failed, or precision differs"
            )
        return {"entropy": entropy / max(1.0, tokens), "gap_mean": gap_mean, "gap_max": gap_max}

    def state_dict(self) -> dict[str, dict]:
        """For torch.distributed.checkpoint; under FSDP, DTensors with this rank's shards."""
        policy, optimizer = get_state_dict(self.policy, self.optimizer)
        return {"policy": policy, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Raises where names or shapes differ. Learning rate, betas and decay stay one's own."""
        weights, moments = state["policy"], state["optimizer"]
        set_state_dict(self.policy, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.optimizer.param_groups[0].update(initial_lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        self.scheduler = LambdaLR(self.optimizer, self.scheduler.lr_lambdas, state["scheduler"]["last_epoch"] - 1)
