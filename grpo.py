"""GRPO and DAPO on ragged groups: advantages, per-token log-probs, the losses and the optimizer step (Sec. 3).

Needs torch and transformers only, and knows nothing of pruning: whoever calls it passes the survivors. To use it
elsewhere, copy the file. Where it departs from the textbook:

1. The ratio is pi_theta / pi_old, the policy that sampled (Sec. 3 prints pi_ref in the denominator, a slip).
2. Groups are ragged, since pruning makes them so: statistics go by group id, never by reshaping to (groups, G).
3. One normaliser per optimizer step, over all its micro-batches and ranks; never a mean of means (trl#3021).
4. Rows are right-padded and no attention mask is passed: causal attention never looks right, the default positions
   are the true ones, and attention keeps its fast kernel. What is padding follows from lengths, never from an id.
5. Logits exist for one chunk of response tokens at a time, never as (batch, tokens, vocabulary).
6. An optimizer step that has no gradient (all advantages 0, no KL) is not taken: AdamW's momentum and weight decay
   would move the weights all the same.
7. No update on samples that came from other weights: the log-probs of sampler and trainer are compared first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

MAX_NONFINITE = 3  # optimizer steps in a row
MAX_LOG_RATIO = 20.0  # bounds every exp below, before it is taken: after it, 0 * inf would make NaN gradients


@dataclass
class Sequence:
    """One surviving rollout; `sampler_logprobs` are of its response ids, after temperature, as the sampler had them."""

    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float
    sampler_logprobs: list[float]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise ValueError("a sequence needs at least one prompt id and one response id")
        if len(self.sampler_logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.sampler_logprobs)} log-probs for {len(self.response_ids)} response ids")

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class NonFiniteGradients(RuntimeError):
    """Gradients that are not finite, in too many optimizer steps in a row: the run has broken, and skipping does not mend it."""


class SamplerGapError(RuntimeError):
    """The sampler's log-probs of its own samples are not the trainer's: the samples came from other weights."""


def group_advantages(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages A_i = (r_i - mean) / (std + eps) (Sec. 3), std unbiased.

    `rewards` (N,) float and `groups` (N,) int64 hold survivors only: a pruned sibling has no part in a mean. Group ids
    need be neither sorted nor dense. Returns (N,) float32; a group of one, or of equal rewards, gives exactly 0.

    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([7, 7, 9, 7]))
    tensor([ 1.1547, -0.5773,  0.0000, -0.5773])
    """
    _, group = groups.unique(return_inverse=True)
    values = rewards.float().double()  # sums of float32 values are exact here, and so is the mean of equal ones
    zeros = values.new_zeros(int(group.max()) + 1 if len(group) else 0)
    count = zeros.index_add(0, group, torch.ones_like(values))
    centred = values - (zeros.index_add(0, group, values) / count)[group]
    std = (zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (std[group] + eps)).float()


def overlong_penalty(lengths: Tensor, max_response: int, cache: int) -> Tensor:
    """DAPO's soft overlong punishment (its Eq. 13), to be added to the reward: 0 up to `max_response - cache` tokens,
    then linear down to -1 at `max_response` tokens. `lengths` (N,) response tokens; returns (N,) float32."""
    if not 1 <= cache <= max_response:
        raise ValueError(f"the overlong cache must lie in 1..{max_response} (the longest response), not {cache}")
    return ((max_response - cache - lengths) / cache).clamp(-1.0, 0.0).float()


def micro_batches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Partition the rows so that rows x longest row <= `token_budget` in each part; a longer row gets its own part.

    Longest first: memory peaks in the first part, and neighbours of like length waste little padding.

    >>> micro_batches([3, 9, 4, 2], token_budget=8)
    [[1], [2, 0], [3]]
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= token_budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def pad(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded `input_ids` (B, T), `prompt_lengths` (B,) and `lengths` (B,) of prompt + response, all int64.

    The pad id is 0 and means nothing: lengths alone say what is padding.
    """
    lengths = [len(s) for s in sequences]
    rows = [s.prompt_ids + s.response_ids + [0] * (max(lengths) - len(s)) for s in sequences]
    return torch.tensor(rows), torch.tensor([len(s.prompt_ids) for s in sequences]), torch.tensor(lengths)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs of response tokens at the sampling temperature.

    For models laid out as `model.model` (with `.layers`) and `model.lm_head`, the logits being lm_head(last state) and
    no more, as in Qwen and Llama. It is FSDP's root, so that embeddings, final norm and lm_head are gathered together.
    Dropout is off: the policy that is trained has to be the one that sampled.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int = 1024) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"training needs a temperature above 0, not {temperature}")
        self.model = model.eval()
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, input_ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`pad`'s tensors in; (R,) log-probs of the response tokens and (R,) entropies (nats, without gradient) of the
        distributions that they came from, float32, out. R = sum(lengths - prompt_lengths), rows in order."""
        states = self.model.model(input_ids=input_ids, attention_mask=None, use_cache=False).last_hidden_state
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        response = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])  # (B, T)
        targets = input_ids[response]  # (R,)
        states = states[:, :-1][response[:, 1:]]  # (R, H): token t comes from the state at t - 1
        chunks = [
            checkpoint(self._token_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(states.split(self.chunk_tokens), targets.split(self.chunk_tokens))
        ]
        logprobs, entropy = zip(*chunks)
        return torch.cat(logprobs), torch.cat(entropy)

    def _token_logprobs(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(C, H) and (C,) to (C,) and (C,). Checkpointed: the (C, V) logits are not kept, backward makes them again."""
        logits = self.model.lm_head(states).float() / self.temperature
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        with torch.no_grad():
            entropy = normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)
        return logprobs, entropy


def shard(policy: Policy, device: torch.device, gradient_checkpointing: bool = False, offload: bool = False) -> Policy:
    """Put `policy` on `device` under FSDP2, at any number of ranks, one included. Needs a process group.

    Master weights, gradients and optimizer state are float32; on a GPU the passes run in bfloat16. Each decoder layer
    is gathered by itself, so that one layer's bfloat16 copy is alive at a time. `gradient_checkpointing` keeps only the
    inputs of layers and computes the rest again in backward. `offload` keeps all three, and the optimizer's work, in main
    memory. Returns `policy`, changed in place.
    """
    policy.to(dtype=torch.float32)  # fully_shard moves it, layer by layer: no rank ever holds all of it on a GPU
    layers = policy.model.model.layers
    if gradient_checkpointing:
        policy.model.gradient_checkpointing_enable()
        for layer in layers:
            layer.training = True  # transformers asks for training mode here; dropout inside the layer stays off
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    on_gpu = device.type == "cuda"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    place = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    for module in [*layers, policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=place)
    return policy


def compute_device(policy: nn.Module) -> torch.device:
    """Where the passes of `policy` run: of an offloaded one, not where its parameters are."""
    parameter = next(policy.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


@torch.no_grad()
def frozen_logprobs(policy: Policy, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`policy(*inputs)` without a graph."""
    output = policy(*inputs)
    if isinstance(policy, FSDPModule):
        policy.reshard()  # the root stays gathered for a backward: a copy that goes stale when weights are set next
    return output


def token_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate of Sec. 3, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi_theta/pi_old.

    All (R,). Returns the loss per token and two bool masks: tokens whose gradient the lower bound cuts off (A < 0) and
    those where the upper one does (A > 0). The min is pessimistic: with A < 0 a large ratio is not clipped.
    """
    ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss, (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(pi_theta || pi_ref) per token: exp(d) - d - 1 with d = log pi_ref - log pi_theta."""
    difference = (ref_logprobs - logprobs).float().clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference


@dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    `algo` is the aggregation: "grpo" takes the mean over each response's tokens, then over responses; "dapo" the mean
    over all tokens. `beta` weighs the KL to the reference. `tis_cap` C multiplies each token's policy loss by
    min(pi_old / pi_sampler, C), without gradient (truncated importance sampling); None turns it off.
    """

    algo: Literal["grpo", "dapo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    tis_cap: float | None = None

    def __post_init__(self) -> None:
        if self.algo not in ("grpo", "dapo"):
            raise ValueError(f"algo must be grpo or dapo, not {self.algo!r}")


def world_size() -> int:
    """Ranks that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    """`values` combined over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(values, op)
    return values


@dataclass
class MicroBatch:
    """Rows that pass through the model together; the last four are (R,), one value per response token, rows in order.

    `weights` is a token's share in the loss: 1 / (tokens of the optimizer step), or 1 / (its responses x tokens of this
    one); 0 in the dummy row that a rank without work of its own computes to keep step with the others.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    advantages: Tensor
    sampler_logprobs: Tensor
    weights: Tensor
    old_logprobs: Tensor | None = None  # set once, by the first pass, before any optimizer step


class Tally:
    """Sums over the response tokens of one update, kept on the device and added over ranks when read."""

    NAMES = ("tokens", "gap", "entropy", "trained", "loss", "kl", "clip_low", "clip_high")

    def __init__(self, device: torch.device) -> None:
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self.NAMES}
        self.gap_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, batch: MicroBatch, **values: Tensor) -> None:
        """Add up each of `values` (R,), dummy tokens left out."""
        for name, value in values.items():
            self.sums[name] += value.detach().double().where(batch.weights > 0, 0.0).sum()

    def measure(self, batch: MicroBatch, entropy: Tensor) -> None:
        """Note what the log-probs of the policy that sampled tell: its entropy and its gap to the sampler."""
        gap = (batch.old_logprobs - batch.sampler_logprobs).abs().double().where(batch.weights > 0, 0.0)
        gap = gap.nan_to_num(nan=torch.inf)  # a NaN would pass under any limit
        self.gap_max = torch.maximum(self.gap_max, gap.max())
        self.add(batch, tokens=torch.ones_like(gap), gap=gap, entropy=entropy)

    def read(self) -> dict[str, float]:
        """All sums, and the largest gap as `gap_max`, over all ranks."""
        sums = all_reduce(torch.stack(list(self.sums.values())), dist.ReduceOp.SUM).tolist()
        return dict(zip(self.NAMES, sums), gap_max=all_reduce(self.gap_max.clone(), dist.ReduceOp.MAX).item())


class Learner:
    """Turns batches of rollouts into AdamW steps on a policy with float32 master weights.

    Weight decay applies to all parameters, norms and embeddings included (as in verl). The learning rate rises linearly
    over `warmup_steps` optimizer steps (the first takes lr / warmup_steps, not 0), then stays. `token_budget` bounds
    rows x longest row of a micro-batch. `state_dict` and `load_state_dict` let torch.distributed.checkpoint handle it.
    Raises ValueError for weights that are not float32, for beta > 0 without a reference, and for several ranks without
    `shard`.
    """

    def __init__(
        self, policy: Policy, config: LossConfig, lr: float, warmup_steps: int, weight_decay: float,
        betas: tuple[float, float], grad_clip: float, token_budget: int, minibatches: int,
        reference: Policy | None = None,
    ) -> None:  # fmt: skip
        if any(p.dtype != torch.float32 for p in policy.parameters()):
            raise ValueError("master weights must be float32: bfloat16 rounds a step of 1e-6 away")
        if config.beta > 0 and reference is None:
            raise ValueError("beta > 0 needs a reference policy")
        if world_size() > 1 and not isinstance(policy, FSDPModule):
            raise ValueError("with several ranks the policy must come from shard(): nothing else adds their gradients")
        self.policy, self.reference, self.config = policy, reference, config
        self.grad_clip, self.token_budget, self.minibatches = grad_clip, token_budget, minibatches
        self.device, self.nonfinite_in_a_row = compute_device(policy), 0
        parameters = list(policy.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        # Creates the moments, by a step with zero gradients at lr 0. That step must not count, or a checkpoint from
        # before the first real one would not resume exactly.
        get_optimizer_state_dict(policy, self.optimizer)
        for state in self.optimizer.state.values():
            state["step"].zero_()
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))

    def update(
        self,
        sequences: list[Sequence],
        max_gap: float,
        max_mean_gap: float = float("inf"),
        rows: list[int] | None = None,
    ) -> dict[str, float]:
        """Learn from one batch of rollouts (this rank's share) in `minibatches` optimizer steps. Row i belongs to step
        i mod `minibatches`: rows sorted by prompt, by length or by arrival all spread evenly. `rows` are the sequences'
        numbers in the batch of all ranks, so that any number of ranks takes the same steps (default: from 0).

        With one step the old log-probs are the current ones and cost no pass; with more, a pass without gradient comes
        first. Raises SamplerGapError, with weights and optimizer untouched, if a token's log-prob differs by more than
        `max_gap` (nats) between sampler and trainer, or the tokens' on average by more than `max_mean_gap`: in bfloat16
        single tokens may differ much, and the mean is the sharper test. Steps without any gradient, or with one that
        is not finite, are skipped; `MAX_NONFINITE` of the latter in a row raise NonFiniteGradients.

        Returns, over all ranks, `loss` (mean over steps), `kl` (if beta > 0), `grad_norm` (before clipping),
        `clip_low` and `clip_high` (fractions of tokens), `entropy`, `gap_mean` and `gap_max` of the policy that
        sampled, `lr` (of the first step), `optimizer_steps`, `skipped` (steps without gradient) and `nonfinite`; and
        this rank's seconds, `logprob_s` and `update_s`.
        """
        started, tally, lr = time.perf_counter(), Tally(self.device), self.scheduler.get_last_lr()[0]
        plan, alive = self._plan(sequences, rows)
        separate_pass = self.minibatches > 1 or not any(alive)
        if separate_pass:
            for batch in chain.from_iterable(plan):
                batch.old_logprobs, entropy = frozen_logprobs(self.policy, batch.inputs)
                tally.measure(batch, entropy)
            self._check_gap(tally, max_gap, max_mean_gap)
        logprobs_done = time.perf_counter() if separate_pass else started
        limits = None if separate_pass else (max_gap, max_mean_gap)
        norms = []
        for batches, live in zip(plan, alive):
            if live:
                norms.append(self._step(batches, tally, limits))
                self.nonfinite_in_a_row = 0 if norms[-1] < float("inf") else self.nonfinite_in_a_row + 1
                if self.nonfinite_in_a_row >= MAX_NONFINITE:
                    raise NonFiniteGradients(
                        f"the gradient was not finite in {MAX_NONFINITE} optimizer steps in a row, none of which was"
                        " taken: the weights are those before them. A lower --lr from an earlier checkpoint may help."
                    )
        finite = [norm for norm in norms if norm < float("inf")]
        sums = tally.read()
        tokens, trained = max(1.0, sums["tokens"]), max(1.0, sums["trained"])
        metrics = {
            "loss": sums["loss"] / max(1, len(norms)),
            "grad_norm": sum(finite) / max(1, len(finite)),
            "clip_low": sums["clip_low"] / trained,
            "clip_high": sums["clip_high"] / trained,
            "entropy": sums["entropy"] / tokens,
            "gap_mean": sums["gap"] / tokens
            if sums["tokens"]
            else float("nan"),  # not 0, which would say that all is well
            "gap_max": sums["gap_max"] if sums["tokens"] else float("nan"),
            "lr": lr,
            "optimizer_steps": float(len(finite)),
            "skipped": float(len(plan) - len(norms)),
            "nonfinite": float(len(norms) - len(finite)),
            "logprob_s": logprobs_done - started,
            "update_s": time.perf_counter() - logprobs_done,
        }
        return metrics | ({"kl": sums["kl"] / trained} if self.config.beta > 0 else {})

    def _plan(
        self, sequences: list[Sequence], rows: list[int] | None = None
    ) -> tuple[list[list[MicroBatch]], list[bool]]:
        """Each optimizer step's micro-batches, as many on every rank, and whether the step has any gradient."""
        parts: list[list[Sequence]] = [[] for _ in range(self.minibatches)]
        for row, sequence in zip(range(len(sequences)) if rows is None else rows, sequences, strict=True):
            parts[row % self.minibatches].append(sequence)
        split = [micro_batches([len(s) for s in part], self.token_budget) for part in parts]
        counts = all_reduce(torch.tensor([len(b) for b in split], device=self.device), dist.ReduceOp.MAX).tolist()
        totals = torch.tensor(
            [[len(p), sum(len(s.response_ids) for s in p), sum(s.advantage != 0 for s in p)] for p in parts],
            device=self.device,
        )
        totals = all_reduce(totals, dist.ReduceOp.SUM).tolist()
        plan = [
            [self._micro_batch([part[i] for i in r], *total[:2]) for r in batches + [[]] * (count - len(batches))]
            for part, batches, count, total in zip(parts, split, counts, totals)
        ]
        return plan, [signal > 0 or (self.config.beta > 0 and responses > 0) for responses, _, signal in totals]

    def _micro_batch(self, rows: list[Sequence], responses: int, tokens: int) -> MicroBatch:
        """`rows` on the device, weighted by the step's global count of responses or tokens; no rows make a dummy."""
        share = 0.0 if not rows else 1 / tokens if self.config.algo == "dapo" else 1 / responses
        rows = rows or [Sequence([0], [0], 0.0, [0.0])]
        sizes = torch.tensor([len(s.response_ids) for s in rows])
        weights = torch.full((len(rows),), share) / (1 if self.config.algo == "dapo" else sizes)
        advantages = torch.tensor([s.advantage for s in rows], dtype=torch.float32).repeat_interleave(sizes)
        sampler = torch.tensor([value for s in rows for value in s.sampler_logprobs], dtype=torch.float32)
        inputs = tuple(tensor.to(self.device) for tensor in pad(rows))
        return MicroBatch(inputs, *(t.to(self.device) for t in (advantages, sampler, weights.repeat_interleave(sizes))))

    def _step(self, batches: list[MicroBatch], tally: Tally, max_gaps: tuple[float, float] | None) -> float:
        """One optimizer step on the sum of `batches`; checks the gap before it unless `max_gaps` is None. Returns the
        gradient's norm before clipping; if that is not finite, inf, and nothing is changed."""
        try:
            for batch in batches:
                logprobs, entropy = self.policy(*batch.inputs)
                if batch.old_logprobs is None:
                    batch.old_logprobs = logprobs.detach()
                    tally.measure(batch, entropy)
                (self._loss(batch, logprobs, tally) * world_size()).backward()  # FSDP averages over ranks
            if max_gaps is not None:
                self._check_gap(tally, *max_gaps)
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip)
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).nan_to_num(nan=torch.inf).item()
            if norm < float("inf"):
                self.optimizer.step()
                self.scheduler.step()
            return norm
        finally:
            self.optimizer.zero_grad(set_to_none=True)  # after errors too: no stale gradient may meet the next batch

    def _loss(self, batch: MicroBatch, logprobs: Tensor, tally: Tally) -> Tensor:
        """This micro-batch's share of the optimizer step's loss, a scalar."""
        config, old = self.config, batch.old_logprobs
        loss, low, high = token_objective(logprobs, old, batch.advantages, config.clip_low, config.clip_high)
        if config.tis_cap is not None:
            loss = loss * (old - batch.sampler_logprobs).clamp(max=MAX_LOG_RATIO).exp().clamp(max=config.tis_cap)
        if config.beta > 0:
            kl = k3(logprobs, frozen_logprobs(self.reference, batch.inputs)[0])
            tally.add(batch, kl=kl)
            loss = loss + config.beta * kl
        loss = loss * batch.weights
        tally.add(batch, trained=torch.ones_like(loss), loss=loss, clip_low=low, clip_high=high)
        return loss.sum()

    def _check_gap(self, tally: Tally, max_gap: float, max_mean_gap: float) -> None:
        sums = tally.read()
        if sums["gap_max"] > max_gap or sums["gap"] > max_mean_gap * sums["tokens"]:
            raise SamplerGapError(
                f"the sampler's log-probs of its samples differ from the trainer's by up to {sums['gap_max']:.4g} nats"
                f" and {sums['gap'] / sums['tokens']:.4g} on average ({sums['tokens']:.0f} tokens); the limits are"
                f" {max_gap:.4g} and {max_mean_gap:.4g}. The sampler runs other weights than the trainer: the last"
                " weight sync failed or missed a part (or temperature or precision differ). Nothing was updated."
            )

    def state_dict(self) -> dict[str, dict]:
        """Policy, optimizer and schedule; with FSDP, tensors are DTensors that hold this rank's shards."""
        policy, optimizer = get_state_dict(self.policy, self.optimizer)
        return {"policy": policy, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """The inverse of `state_dict`; raises where names or shapes differ. Learning rate, betas and weight decay stay the
        constructor's: whoever resumes with other ones means it."""
        groups, base_lrs = self.optimizer.param_groups, self.scheduler.base_lrs
        own = [{name: group[name] for name in ("betas", "weight_decay", "initial_lr")} for group in groups]
        policy, optimizer = state["policy"], state["optimizer"]
        set_state_dict(self.policy, self.optimizer, model_state_dict=policy, optim_state_dict=optimizer)
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": base_lrs})
        for group, settings, rise in zip(self.optimizer.param_groups, own, self.scheduler.lr_lambdas):
            group.update(settings, lr=settings["initial_lr"] * rise(self.scheduler.last_epoch))
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
