"""Laws of the learner, on small random Qwen3 and Llama models in float32.

Public threads such as trl#5773 name faults that other trainers had; each test says in words what
went wrong there.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import grpo
from grpo import (
    Learner,
    LossConfig,
    NonFiniteGradients,
    Policy,
    Sample,
    SamplerGapError,
    frozen_logprobs,
    group_advantages,
    k3,
    micro_batches,
    overlong_penalty,
    pad,
    shard,
    token_objective,
)

VOCAB = 50
CPU = torch.device("cpu")
NO_LIMIT = 1e9


def make_model(kind: str = "qwen3", tied: bool = True, seed: int = 0, **changes: float) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, initializer_range=0.2) | changes
    return Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))


def make_samples(count: int, seed: int = 0, vocab: int = VOCAB) -> list[Sample]:
    """Rows of random ids, id 0 (the pad id) included, with made-up sampler log-probs."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
        response = [rng.randrange(vocab) for _ in range(rng.randint(1, 14))]
        sampler = [rng.uniform(-5, -3) for _ in response]
        samples.append(Sample(prompt, response, rng.choice([-1.3, -0.4, 0.6, 1.1]), sampler))
    return samples


def make_learner(policy: Policy, config: LossConfig | None = None, **changes: object) -> Learner:
    arguments = dict(lr=1e-3, warmup_steps=2, weight_decay=0.1, grad_clip=1e9, token_budget=60)
    return Learner(policy, config or LossConfig(), **(arguments | changes))


def weights(learner: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in learner.policy.parameters()]


def optimizer_state(learner: Learner) -> list[Tensor]:
    return [value.clone() for state in learner.optimizer.state.values() for value in state.values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def watch_gradients(learner: Learner) -> list[list[Tensor]]:
    """The list fills with the gradients that each optimizer step is given."""
    seen: list[list[Tensor]] = []

    def note(*_: object) -> None:
        grads = [p.grad for p in learner.policy.parameters()]
        seen.append([g.full_tensor() if isinstance(g, torch.distributed.tensor.DTensor) else g.clone() for g in grads])

    learner.optimizer.register_step_pre_hook(note)
    return seen


def dense_logprobs(
    model: PreTrainedModel, sample: Sample, temperature: float = 1.0, vocabulary: int = VOCAB
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies the plain way: one row, all logits, log_softmax."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logprobs = F.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1, :vocabulary] / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0], entropy


# Rewards to advantages


def test_advantages_of_ragged_groups_by_hand() -> None:
    """ruc-datalab/DeepAnalyze#116, XU-YIJIE/grpo-flat#2, mll-lab-nu/RAGEN#146: groups of 3, 1, 0
    and 5, not sorted; a group of one and one of equal rewards give exactly 0."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([0, 3, 0, 1, 3, 3, 3, 0, 3])
    mean, std = 0.4, math.sqrt((2 * 0.6**2 + 3 * 0.4**2) / 4)
    high, low = (1 - mean) / std, -mean / std
    expected = torch.tensor([0.57735, high, -1.1547, 0.0, low, low, high, 0.57735, low])
    advantages = group_advantages(rewards, groups)
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert advantages.dtype == torch.float32 and advantages[3] == 0

    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(group_advantages(rewards[order], groups[order]), advantages[order])


def test_without_division_groups_that_agree_weigh_less() -> None:
    """Dr. GRPO: 3 of 4 right and 1 of 2 right, in units of the reward."""
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    expected = torch.tensor([0.25, 0.25, 0.25, -0.75, 0.5, -0.5])
    assert torch.equal(group_advantages(rewards, groups, scale=False), expected)
    assert group_advantages(rewards, groups)[3] < -1.4


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    """ruc-datalab/DeepAnalyze#116: a lone survivor must not turn into NaN, nor a rounding error in
    the mean of float64 0.1s into a signal."""
    for dtype in (torch.float32, torch.float64):
        advantages = group_advantages(torch.full((count,), reward, dtype=dtype), torch.zeros(count, dtype=torch.int64))
        assert torch.equal(advantages, torch.zeros(count))


def test_the_same_prompt_twice_is_two_groups() -> None:
    """XU-YIJIE/grpo-flat#2: [1, 1, 0] and [0, 0, 0] of one prompt text, drawn twice in a batch,
    share no mean."""
    advantages = group_advantages(torch.tensor([1.0, 1, 0, 0, 0, 0]), torch.tensor([4, 4, 4, 9, 9, 9]))
    torch.testing.assert_close(advantages, torch.tensor([0.57735, 0.57735, -1.1547, 0, 0, 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("placeholder", [0.0, 1.0, math.nan])
def test_pruned_rows_have_no_part_in_the_baseline(placeholder: float) -> None:
    """verl#6452: survivors [1, 0, 0] of a group of four, whatever stands in the pruned row's
    place."""
    rewards, kept = torch.tensor([1.0, 0.0, placeholder, 0.0]), torch.tensor([True, True, False, True])
    advantages = group_advantages(rewards[kept], torch.zeros(4, dtype=torch.int64)[kept])
    torch.testing.assert_close(advantages, torch.tensor([1.1547, -0.57735, -0.57735]), atol=1e-5, rtol=0)


def test_no_survivors_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 4), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=20))
def test_advantages_equal_a_loop_over_groups(rows: list[tuple[int, float]]) -> None:
    """mll-lab-nu/RAGEN#146: no group size is special."""
    groups, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    expected = torch.zeros(len(rows))
    for group in groups.unique():
        members = rewards[groups == group]
        if len(members) > 1 and members.std() > 0:
            expected[groups == group] = (members - members.mean()) / (members.std() + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, groups), expected, atol=1e-5, rtol=1e-5)


def test_overlong_penalty_is_dapos() -> None:
    """DAPO's Eq. 13 with a longest response of 100 and a cache of 20."""
    penalty = overlong_penalty(torch.tensor([1, 80, 81, 90, 99, 100, 101]), 100, 20)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0]))
    for cache in (0, 101):
        with pytest.raises(ValueError, match="1..100"):
            overlong_penalty(torch.tensor([1]), 100, cache)


# Rows to micro-batches


@pytest.mark.parametrize(("rows", "batches"), [(0, 0), (1, 1), (7, 2), (13, 4)])
def test_any_number_of_survivors_is_split_whole(rows: int, batches: int) -> None:
    """EasyR1#44: nothing is trimmed to a multiple of anything; four rows fit here."""
    parts = micro_batches([10] * rows, 40)
    assert len(parts) == batches and sorted(sum(parts, [])) == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=25), st.integers(1, 100))
def test_micro_batches_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    parts = micro_batches(lengths, budget)
    assert sorted(sum(parts, [])) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget for part in parts)


def test_lengths_not_ids_say_what_is_padding() -> None:
    """trl#6357: responses [5, 6, 0] and [0], the pad id being 0: 3 tokens and 1 token count."""
    samples = [Sample([3], [5, 6, 0], 1.0, [0.0] * 3), Sample([3, 0], [0], 1.0, [0.0])]
    input_ids, prompt_lengths, lengths = pad(samples)
    assert input_ids.tolist() == [[3, 5, 6, 0], [3, 0, 0, 0]]
    assert prompt_lengths.tolist() == [1, 2] and lengths.tolist() == [4, 3]
    logprobs, _ = Policy(make_model(), 1.0)(input_ids, prompt_lengths, lengths)
    expected = torch.cat([dense_logprobs(make_model(), s)[0] for s in samples])
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("prompt", "response", "sampler"), [([], [1], [0.0]), ([1], [], []), ([1], [1, 2], [0.0])])
def test_malformed_sequences_are_refused(prompt: list[int], response: list[int], sampler: list[float]) -> None:
    with pytest.raises(ValueError):
        Sample(prompt, response, 1.0, sampler)


# Log-probs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_chunked_equals_dense(kind: str, tied: bool) -> None:
    """trl#2709, trl#3029: chunks of 1, 7 and all tokens give the dense log-probs, entropies and
    gradients, at temperature 0.7."""
    samples, dense = make_samples(5), make_model(kind, tied)
    pairs = [dense_logprobs(dense, s, 0.7) for s in samples]
    logprobs, entropies = (torch.cat(values) for values in zip(*pairs))
    share = torch.linspace(-1, 1, len(logprobs)) / len(logprobs)
    (logprobs * share).sum().backward()
    for chunk in (1, 7, 1000):
        policy = Policy(make_model(kind, tied), 0.7, chunk)
        got, entropy = policy(*pad(samples))
        (got * share).sum().backward()
        torch.testing.assert_close(got, logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
        assert got.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
        for ours, theirs in zip(policy.model.parameters(), dense.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


class LargestFloat(TorchDispatchMode):
    """Notes the size of the largest floating-point tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.elements = max(self.elements, value.numel())
        return output


def test_logits_never_exist_as_a_whole() -> None:
    """trl#2709: forward and backward make nothing larger than a chunk of logits or the embedding
    itself, and what forward keeps for backward is less than the response tokens' logits."""
    vocab, chunk, hidden = 5000, 7, 16
    samples = make_samples(6, vocab=vocab)
    policy = Policy(make_model(vocab_size=vocab, hidden_size=hidden), 1.0, chunk)
    input_ids, *rest = pad(samples)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with LargestFloat() as largest:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs, _ = policy(input_ids, *rest)
        logprobs.sum().backward()
    assert chunk * vocab <= largest.elements <= max(chunk, hidden) * vocab < input_ids.numel() * vocab
    assert 0 < sum(kept) < len(logprobs) * vocab


class AttentionCalls(TorchFunctionMode):
    """Notes the mask and causal flag of every attention call."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.calls.append((kwargs["attn_mask"] is None, kwargs["is_causal"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_no_attention_mask_is_built(kind: str) -> None:
    """The fast causal kernel is the one that runs, in rows of unequal length."""
    with AttentionCalls() as attention:
        Policy(make_model(kind), 1.0)(*pad(make_samples(4)))
    assert attention.calls == [(True, True)] * 2


def test_neighbours_and_padding_do_not_matter() -> None:
    """trl#2708: a row of 5 alone and beside one of 12; and other ids in the padding."""
    policy = Policy(make_model(), 1.0)
    short, long = Sample([1, 2], [3, 4, 5], 1.0, [0.0] * 3), Sample([6] * 4, list(range(7, 15)), 1.0, [0.0] * 8)
    alone, _ = policy(*pad([short]))
    input_ids, prompt_lengths, lengths = pad([short, long])
    together, _ = policy(input_ids, prompt_lengths, lengths)
    torch.testing.assert_close(together[:3], alone, atol=1e-5, rtol=0)
    input_ids[0, 5:] = 33
    assert torch.equal(policy(input_ids, prompt_lengths, lengths)[0], together)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.5514), (0.5, -0.2395)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    """trl#3029: logits [1, 0, 0]; dividing log-probs instead would give -1.1 at temperature 0.5."""
    model = make_model("llama", tied=False, vocab_size=3)
    with torch.no_grad():
        state = model.model(torch.tensor([[1]])).last_hidden_state[0, 0]
        model.lm_head.weight.zero_()[0] = state / state.square().sum()
    logprobs, _ = Policy(model, temperature)(*pad([Sample([1], [0], 1.0, [0.0])]))
    assert logprobs.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_training_at_temperature_zero_is_refused(temperature: float) -> None:
    """miles#2686: a division by zero must not become an infinite log-prob."""
    with pytest.raises(ValueError, match="temperature above 0"):
        Policy(make_model(), temperature)


@pytest.mark.parametrize("tied", [True, False])
def test_ids_beyond_the_vocabulary_have_probability_zero(tied: bool) -> None:
    """vllm#13175, verl#1398: lm_head has 50 rows and the tokenizer 43 ids. Log-probs, entropies and
    gradients are those of a softmax over 43, and no row beyond gets a gradient as an output."""
    samples, model = make_samples(5, vocab=43), make_model(tied=tied)
    logprobs, entropies = (
        torch.cat(values) for values in zip(*(dense_logprobs(model, s, 0.7, vocabulary=43) for s in samples))
    )
    parameters, share = list(model.parameters()), torch.linspace(-1, 1, len(logprobs))
    expected = torch.autograd.grad((logprobs * share).sum(), parameters)
    own, entropy = Policy(model, 0.7, 7, vocabulary=43)(*pad(samples))
    torch.testing.assert_close(own, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
    for ours, theirs in zip(torch.autograd.grad((own * share).sum(), parameters), expected):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert model.lm_head.weight[43:].abs().sum() > 0 and (own - Policy(model, 0.7)(*pad(samples))[0]).min() > 1e-3


def test_a_sampled_id_beyond_the_vocabulary_is_a_gap() -> None:
    """A sampler that does not mask them has another distribution than the trainer."""
    learner = make_learner(Policy(make_model(), 1.0, vocabulary=43))
    for response in ([44], [3, 49, 2]):
        with pytest.raises(SamplerGapError, match="up to inf nats"):
            learner.update([Sample([1], response, 1.0, [-4.0] * len(response))], max_gap=100.0)


# Losses


def test_clip_branches() -> None:
    """minimind#775, by hand, with clip 0.2 / 0.28: the min is pessimistic, and the masks say where
    the gradient is cut off."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.25, 0.85])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, -2.0])
    logprobs = ratio.log().requires_grad_()
    loss, low, high = token_objective(logprobs, torch.zeros(6), advantages, 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, -0.5, 1.5, 0.8, -2.5, 1.7]))
    assert low.tolist() == [False, False, False, True, False, False]
    assert high.tolist() == [True, False, False, False, False, False]
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.where(low | high, 0.0, -ratio * advantages))


def test_k3_by_hand_and_bounded() -> None:
    """exp(d) - d - 1; far apart, value and gradient stay finite; and so does the ratio of the
    surrogate."""
    difference = torch.tensor([0.1, 0.0, 20.0, 100.0, -100.0, 1e4, -1e4])
    logprobs = torch.zeros(7, requires_grad=True)
    kl = k3(logprobs, difference)
    kl.sum().backward()
    assert kl[0].item() == pytest.approx(0.0051709, abs=1e-7) and kl[1] == 0 and kl[4].item() == pytest.approx(99)
    assert kl.isfinite().all() and logprobs.grad.isfinite().all()

    logprobs = difference.clone().requires_grad_()
    loss, _, _ = token_objective(logprobs, torch.zeros(7), -torch.ones(7), 0.2, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="grpo or dapo"):
        LossConfig(algo="ppo")  # type: ignore[arg-type]


# The optimizer step


def dense_loss(model: PreTrainedModel, reference: PreTrainedModel, samples: list[Sample], config: LossConfig) -> Tensor:
    """The first step's loss written out row by row; r = 1 in value, d log pi in gradient."""
    rows = []
    for s in samples:
        logprobs, _ = dense_logprobs(model, s)
        loss = -s.advantage * (logprobs - logprobs.detach()).exp()
        if config.tis_cap is not None:
            loss = loss * (logprobs.detach() - torch.tensor(s.sampler_logprobs)).exp().clamp(max=config.tis_cap)
        if config.beta > 0:
            difference = dense_logprobs(reference, s)[0].detach() - logprobs
            loss = loss + config.beta * (difference.exp() - difference - 1)
        rows.append(loss)
    return torch.cat(rows).mean() if config.algo == "dapo" else torch.stack([row.mean() for row in rows]).mean()


CONFIGS = [LossConfig("grpo"), LossConfig("dapo", clip_high=0.28), LossConfig("grpo", beta=0.3, tis_cap=1.5)]


@pytest.mark.parametrize("config", CONFIGS, ids=["grpo", "dapo", "grpo-kl-tis"])
def test_loss_and_gradients_do_not_depend_on_the_split(config: LossConfig) -> None:
    """trl#3021: every token budget and row order gives the loss and gradients of the whole batch,
    written out plainly."""
    samples, dense, other = make_samples(9), make_model(), make_model(seed=1)
    expected = dense_loss(dense, other, samples, config)
    expected.backward()
    for budget, order in ((1, 0), (30, 1), (50, 2), (10_000, 3)):
        reference = Policy(make_model(seed=1), 1.0) if config.beta > 0 else None
        learner = make_learner(Policy(make_model(), 1.0, 16), config, token_budget=budget, reference=reference)
        seen = watch_gradients(learner)
        metrics = learner.update(random.Random(order).sample(samples, 9), NO_LIMIT)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert ("kl" in metrics) == (config.beta > 0)
        for ours, parameter in zip(seen[0], dense.parameters()):
            torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("algo", "expected"), [("dapo", 0.1), ("grpo", 0.5)])
@pytest.mark.parametrize("budget", [1, 1000])
def test_one_token_against_nine(algo: str, expected: float, budget: int) -> None:
    """trl#3021: a token of loss 1 in one micro-batch and nine of loss 0 in the other: 0.1 over
    tokens, 0.5 over responses."""
    samples = [Sample([1], [2], -1.0, [0.0]), Sample([1], [3] * 9, 0.0, [0.0] * 9)]
    learner = make_learner(Policy(make_model(), 1.0), LossConfig(algo), token_budget=budget)
    assert learner.update(samples, NO_LIMIT)["loss"] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("algo", ["grpo", "dapo"])
@pytest.mark.parametrize("rewards", [[1.0], [0.0], [1.0, 1.0]])
def test_responses_without_signal_count_in_the_mean(algo: str, rewards: list[float]) -> None:
    """A group of one survivor counts as any group of equal rewards does: a response right and one
    wrong, of three tokens together, and a group without signal, of five tokens. Its responses have
    advantage 0 and shrink the others' gradient to 2 / 3 (2 / 4), its tokens to 3 / 8."""
    group = [Sample([1], [2, 3], 0.7, [-4.0] * 2), Sample([1], [4], -0.7, [-4.0])]
    advantages = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64)).tolist()
    lengths = [5] if len(rewards) == 1 else [2, 3]
    quiet = [Sample([5], [6] * n, a, [-4.0] * n) for n, a in zip(lengths, advantages)]
    gradients = []
    for samples in (group, group + quiet):
        learner = make_learner(Policy(make_model(), 1.0), LossConfig(algo))
        seen = watch_gradients(learner)
        learner.update(samples, NO_LIMIT)
        gradients.append(seen[0])
    share = 3 / 8 if algo == "dapo" else 2 / (2 + len(rewards))
    for alone, beside in zip(*gradients):
        torch.testing.assert_close(beside, alone * share, atol=1e-6, rtol=1e-5)


def test_one_step_needs_no_separate_pass() -> None:
    """With one step the policy is the one that sampled: ratio 1, nothing clipped, no log-prob
    pass."""
    metrics = make_learner(Policy(make_model(), 1.0)).update(make_samples(6), NO_LIMIT)
    assert metrics["logprob_s"] == 0 and metrics["clip_low"] == metrics["clip_high"] == 0
    assert metrics["optimizer_steps"] == 1 and metrics["update_s"] > 0 and metrics["grad_norm"] > 0


def test_old_logprobs_are_frozen_for_all_steps_of_a_batch() -> None:
    """minimind#775: in the second step the ratio has moved, and tokens are clipped; the gap is
    still that of the policy that sampled."""
    samples = make_samples(8)
    learner = make_learner(Policy(make_model(), 1.0), minibatches=2, lr=0.05)
    first, metrics = weights(learner), learner.update(samples, NO_LIMIT)
    assert metrics["optimizer_steps"] == 2 and metrics["logprob_s"] > 0 and not same(first, weights(learner))
    assert metrics["clip_low"] + metrics["clip_high"] > 0
    with torch.no_grad():
        pairs = [dense_logprobs(make_model(), s) for s in samples]
    logprobs, entropy = (torch.cat(values) for values in zip(*pairs))
    gap = (logprobs - torch.tensor(sum((s.sampler_logprobs for s in samples), []))).abs()
    assert metrics["gap_mean"] == pytest.approx(gap.mean().item(), abs=1e-5)
    assert metrics["gap_max"] == pytest.approx(gap.max().item(), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 13])
def test_any_number_of_survivors_in_four_steps(rows: int) -> None:
    """EasyR1#44: fewer rows than steps, or a number that four does not divide: each row is learnt
    from once."""
    samples = make_samples(rows)
    learner = make_learner(Policy(make_model(), 1.0), minibatches=4)
    plan, _ = learner._plan(samples, None)
    used = torch.cat([batch.sampler_logprobs[batch.weights > 0] for batch in sum(plan, [])])
    expected = torch.tensor(sum((s.sampler_logprobs for s in samples), []))
    assert torch.equal(used.sort().values, expected.sort().values)
    metrics = learner.update(samples, NO_LIMIT)
    assert metrics["optimizer_steps"] == min(rows, 4) and metrics["skipped"] == 4 - min(rows, 4)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("empty", [False, True])
def test_dead_groups_move_nothing(minibatches: int, empty: bool) -> None:
    """trl#3248, rasbt/reasoning-from-scratch#186: after a real step momentum is there; a batch
    without any signal, or without any row, then leaves weights and optimizer bitwise as they are,
    and training goes on."""
    learner = make_learner(Policy(make_model(), 1.0), minibatches=minibatches)
    learner.update(make_samples(6), NO_LIMIT)
    before, moments, lr = weights(learner), optimizer_state(learner), learner.scheduler.get_last_lr()
    rows = [] if empty else make_samples(6, 1)
    dead = [Sample(s.prompt_ids, s.response_ids, 0.0, s.sampler_logprobs) for s in rows]
    metrics = learner.update(dead, NO_LIMIT)
    assert metrics["skipped"] == minibatches and metrics["optimizer_steps"] == 0
    assert same(before, weights(learner)) and same(moments, optimizer_state(learner))
    assert lr == learner.scheduler.get_last_lr()
    # without any row there is no gap, which is not a gap of 0
    gaps = {"gap_mean", "gap_max"} if empty else set()
    assert {name for name, value in metrics.items() if not math.isfinite(value)} == gaps
    assert empty or metrics["gap_max"] > 0
    assert learner.update(make_samples(6), NO_LIMIT)["optimizer_steps"] == minibatches


def test_dead_groups_still_feel_the_kl() -> None:
    """rasbt/reasoning-from-scratch#186: with beta > 0 a batch without reward signal has a gradient
    all the same."""
    reference = Policy(make_model(seed=1), 1.0)
    learner = make_learner(Policy(make_model(), 1.0), LossConfig(beta=0.1), reference=reference)
    before, frozen = weights(learner), [p.clone() for p in reference.parameters()]
    metrics = learner.update([Sample([1], [2, 3], 0.0, [-3.0, -3.0])], NO_LIMIT)
    assert metrics["optimizer_steps"] == 1 and metrics["kl"] > 0 and not same(before, weights(learner))
    assert same(frozen, list(reference.parameters())) and all(p.grad is None for p in reference.parameters())


GOOD = [Sample([1], [2, 3], 0.5, [-3.0, -3.0]), Sample([4], [5], -0.5, [-3.0])]


def broken_learner(how: str, **changes: object) -> tuple[Learner, list[Sample]]:
    """A learner that has taken a step, and a batch whose first row breaks the next in that way."""
    policy, config, reference = Policy(make_model(tied=False), 1.0), LossConfig(), None
    if how == "loss alone":
        # Its log-prob of id 49 is -inf, of which k3 is inf and k3's gradient 1.
        config, reference = LossConfig(beta=0.1), Policy(make_model(tied=False), 1.0, vocabulary=VOCAB - 1)
    learner = make_learner(policy, config, reference=reference, **changes)
    learner.update(GOOD, NO_LIMIT)
    weight = policy.model.model.layers[0].mlp.up_proj.weight
    value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "advantage": math.inf, "norm": 1e30}.get(how, 1.0)
    if how in ("inf", "-inf", "nan"):
        weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), value))
    if how == "forward":
        policy.model.model.norm.register_forward_hook(
            lambda _, __, states: states.index_fill(1, torch.tensor([0]), math.nan)
        )
    advantage = value if how in ("advantage", "norm") else 1.0
    return learner, [Sample([1], [49], advantage, [-3.0]), *GOOD]


BREAKS = ["inf", "-inf", "nan", "advantage", "norm", "loss alone", "forward"]


@pytest.mark.parametrize("grad_clip", [1.0, 1e9, math.inf])
@pytest.mark.parametrize("how", BREAKS)
def test_what_is_not_finite_changes_nothing(how: str, grad_clip: float) -> None:
    """A gradient with an infinity or NaN, finite ones whose norm overflows, a loss that is infinite
    where its gradient is not, and a forward that gives NaN, in one micro-batch of three: weights,
    moments, schedule as before, bit for bit; and no metric is a number that is none."""
    learner, samples = broken_learner(how, grad_clip=grad_clip, token_budget=1)
    before, moments, schedule = weights(learner), optimizer_state(learner), learner.scheduler.state_dict()
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: norms.append(clip(*given)) or norms[-1])
        metrics = learner.update(samples, max_gap=20.0)
    assert metrics["nonfinite"] == 1 and metrics["optimizer_steps"] == metrics["skipped"] == 0
    assert norms[0].isfinite() == (how == "loss alone")
    assert same(before, weights(learner)) and same(moments, optimizer_state(learner))
    assert schedule == learner.scheduler.state_dict()
    assert all(p.grad is None for p in learner.policy.parameters())
    assert all(math.isfinite(value) for value in metrics.values())


def test_an_overflowing_norm_is_of_finite_gradients() -> None:
    """What "norm" above means."""
    learner, samples = broken_learner("norm")
    policy = learner.policy
    (-1e30 * policy(*pad(samples[:1]))[0]).sum().backward()
    gradients = [p.grad for p in policy.parameters()]
    assert (
        all(g.isfinite().all() for g in gradients) and not torch.stack([g.norm() for g in gradients]).norm().isfinite()
    )


@pytest.mark.parametrize("how", ["advantage", "norm", "loss alone"])
def test_a_step_that_is_not_taken_leaves_no_trace_in_the_others(how: str) -> None:
    """Of two steps the second is not finite: the metrics and weights are those of the first
    alone."""
    learner, (bad, *good) = broken_learner(how, minibatches=2)
    alone, _ = broken_learner(how, minibatches=2)
    # Rows 0 and 2 are the first step; row 1 is the second, which is empty for the other learner.
    metrics = learner.update([good[0], bad, good[1]], NO_LIMIT)
    expected = alone.update(good, NO_LIMIT, rows=[0, 2])
    assert metrics["nonfinite"] == 1 and metrics["optimizer_steps"] == expected["optimizer_steps"] == 1
    assert same(weights(learner), weights(alone)) and same(optimizer_state(learner), optimizer_state(alone))
    assert learner.scheduler.state_dict() == alone.scheduler.state_dict()
    for name in {"loss", "grad_norm", "clip_low", "clip_high", "kl"} & expected.keys():
        assert metrics[name] == expected[name], name


def test_logits_that_are_not_finite_are_no_gap() -> None:
    """The trainer's own forward is at fault, and not the weight sync, in one token of several; the
    gap and the entropy are those of the other tokens."""
    learner, (_, *good) = broken_learner("forward")
    bad = Sample([1], [2, 3, 4], 1.0, [-3.0, -3.0, -3.0])
    metrics = learner.update([bad, *good], max_gap=20.0)
    assert metrics["nonfinite"] == 1 and 0 < metrics["gap_mean"] <= metrics["gap_max"] < 20.0
    assert 0 < metrics["entropy"] < math.log(VOCAB)


@pytest.mark.parametrize("changes", [dict(lr=1e39), dict(lr=1e20, weight_decay=1e30)], ids=["lr", "decay"])
def test_a_step_that_leaves_weights_that_are_not_finite_ends_the_run(changes: dict) -> None:
    """Before anybody saves them or samples from them."""
    learner = make_learner(Policy(make_model(), 1.0), warmup_steps=0, **changes)
    with pytest.raises(NonFiniteGradients, match="left weights that are not finite"):
        learner.update(GOOD, NO_LIMIT)
    assert not all(w.isfinite().all() for w in weights(learner))


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run() -> None:
    """A good step in between starts the count anew; the weights stay those before the bad steps."""
    learner, bad = make_learner(Policy(make_model(), 1.0)), [Sample([1], [2, 3], math.inf, [-3.0, -3.0])]
    for samples in (bad, bad, make_samples(4), bad, bad):
        learner.update(samples, NO_LIMIT)
    before = weights(learner)
    with pytest.raises(NonFiniteGradients, match="3 optimizer steps in a row"):
        learner.update(bad, NO_LIMIT)
    assert same(before, weights(learner))


def sampled_by(policy: Policy, samples: list[Sample]) -> list[Sample]:
    """The same rows with the policy's own log-probs as the sampler's."""
    logprobs = [frozen_logprobs(policy, pad([s]))[0].tolist() for s in samples]
    return [Sample(s.prompt_ids, s.response_ids, s.advantage, own) for s, own in zip(samples, logprobs)]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_samples_of_other_weights_stop_the_run(minibatches: int) -> None:
    """A stale sampler is caught before any step; a faithful one shows a gap of rounding errors
    only."""
    learner = make_learner(Policy(make_model(), 1.0), minibatches=minibatches, lr=0.01)
    samples = sampled_by(learner.policy, make_samples(6))
    assert learner.update(samples, max_gap=1e-4)["gap_max"] < 1e-5
    before, moments = weights(learner), optimizer_state(learner)
    with pytest.raises(SamplerGapError, match=r"differ .* up to .* on average .* by more than 0\.0001.*weight sync"):
        learner.update(samples, max_gap=1e-4)
    with pytest.raises(SamplerGapError, match=r"on average \(limit 0\.0001\)"):
        learner.update(samples, NO_LIMIT, max_mean_gap=1e-4)
    with pytest.raises(SamplerGapError):  # the mean alone, as in bfloat16
        learner.update(samples, max_gap=100.0, max_mean_gap=1e-4)
    assert same(before, weights(learner)) and same(moments, optimizer_state(learner))
    assert all(p.grad is None for p in learner.policy.parameters())
    assert learner.update(sampled_by(learner.policy, samples), 1e-4, 1e-5)["optimizer_steps"] == minibatches


def test_a_sampler_that_was_asked_of_some_is_judged_by_them() -> None:
    """Nothing but the gap is other than with all of its log-probs; a sync is proven by one of a group."""
    samples = sampled_by(Policy(make_model(), 1.0), make_samples(8))
    some = [s if i % 4 == 0 else dataclasses.replace(s, sampler_logprobs=[]) for i, s in enumerate(samples)]
    learners = [make_learner(Policy(make_model(), 1.0)) for _ in range(2)]
    whole, partial = (learner.update(x, 1e-4) for learner, x in zip(learners, (samples, some)))
    same = set(whole) - {"gap_mean", "gap_max", "logprob_s", "update_s"}
    assert {name: whole[name] for name in same} == {name: partial[name] for name in same}
    assert 0 <= partial["gap_mean"] <= partial["gap_max"] <= whole["gap_max"] < 1e-5
    some[4] = dataclasses.replace(some[4], sampler_logprobs=[x - 1 for x in some[4].sampler_logprobs])
    with pytest.raises(SamplerGapError):
        learners[0].update(some, 1e-4)
    nobody = [dataclasses.replace(s, sampler_logprobs=[]) for s in samples]
    assert math.isnan(learners[0].update(nobody, 1e-4)["gap_mean"])


def test_importance_weights_need_all_logprobs() -> None:
    samples = make_samples(2)
    samples[1] = dataclasses.replace(samples[1], sampler_logprobs=[])
    learner = make_learner(Policy(make_model(), 1.0), LossConfig(tis_cap=2.0))
    with pytest.raises(ValueError, match="needs the sampler's log-probs of all samples"):
        learner.update(samples, NO_LIMIT)


def test_one_token_of_thousands_stops_no_run() -> None:
    """In bfloat16 single tokens are off by nats in a healthy run; a thousandth of them is judged."""
    learner = make_learner(Policy(make_model(), 1.0))
    samples = sampled_by(learner.policy, [Sample([1], [2, 3, 4, 5] * 10, 0.0, [0.0] * 40) for _ in range(50)])

    def off(tokens: int) -> list[Sample]:
        first = [x - 9.0 * (i < tokens) for i, x in enumerate(samples[0].sampler_logprobs)]
        return [dataclasses.replace(samples[0], sampler_logprobs=first), *samples[1:]]

    metrics = learner.update(off(2), max_gap=1.0)
    assert metrics["gap_max"] == pytest.approx(9.0, abs=1e-3)
    with pytest.raises(SamplerGapError, match="in 3 of 2,000 tokens by more than 1:"):
        learner.update(off(3), max_gap=1.0)
    with pytest.raises(SamplerGapError):
        learner.update(off(2), max_gap=1.0, max_mean_gap=0.001)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_is_a_gap(broken: float) -> None:
    """trl#3867: NaN compares false with every limit, and must not slip under one; dead groups are
    checked as well."""
    learner = make_learner(Policy(make_model(), 1.0))
    for advantage in (1.0, 0.0):
        with pytest.raises(SamplerGapError):
            learner.update([Sample([1], [2, 3], advantage, [-3.0, broken])], max_gap=100.0)


def test_bfloat16_weights_are_refused_and_float32_ones_move() -> None:
    """AReaL#1292: at lr 1e-6, 100 steps of gradient 1 move a weight of 0.02 by 1e-4; in bfloat16
    each step would be lost."""
    with pytest.raises(ValueError, match="float32"):
        make_learner(Policy(make_model().bfloat16(), 1.0))
    learner = make_learner(Policy(make_model(), 1.0), lr=1e-6, weight_decay=0.0, warmup_steps=0)
    parameters = list(learner.policy.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(0.02)
    for _ in range(100):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        learner.optimizer.step()
    moved = torch.cat([(0.02 - p.detach()).flatten() for p in parameters])
    assert ((moved - 1e-4).abs() < 2e-6).double().mean() > 0.9


def test_warm_up_then_constant() -> None:
    learner = make_learner(Policy(make_model(), 1.0), lr=8.0e-6, warmup_steps=4)
    rates = [learner.update(make_samples(2), NO_LIMIT)["lr"] for _ in range(6)]
    assert rates == pytest.approx([2e-6, 4e-6, 6e-6, 8e-6, 8e-6, 8e-6])


def test_the_first_step_is_adamws_first() -> None:
    """Bias correction counts from 1: without decay, any sizeable gradient moves its weight by
    lr."""
    learner = make_learner(Policy(make_model(), 1.0), weight_decay=0.0, warmup_steps=0, lr=1e-3)
    seen, before = watch_gradients(learner), weights(learner)
    learner.update(make_samples(6), NO_LIMIT)
    for old, new, gradient in zip(before, weights(learner), seen[0]):
        moved = (old - new)[gradient.abs() > 1e-4]
        torch.testing.assert_close(moved, 1e-3 * gradient[gradient.abs() > 1e-4].sign(), atol=1e-6, rtol=0)


def test_kl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        make_learner(Policy(make_model(), 1.0), LossConfig(beta=0.1))


# Checkpoints


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_learner_takes_the_same_steps(steps: int, tied: bool, tmp_path: Path) -> None:
    """EasyR1#57, transformers#40500: bitwise, also from before the first step; and the file loads
    with weights_only."""
    straight = make_learner(Policy(make_model(tied=tied), 1.0), warmup_steps=5)
    assert same(weights(straight), list(make_model(tied=tied).parameters()))
    for step in range(steps):
        straight.update(make_samples(5, step), NO_LIMIT)
    torch.save(straight.state_dict(), tmp_path / "learner.pt")
    resumed = make_learner(Policy(make_model(tied=tied, seed=3), 1.0), warmup_steps=5)
    resumed.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    for step in range(steps, steps + 2):
        metrics = [learner.update(make_samples(5, step), NO_LIMIT) for learner in (straight, resumed)]
        assert all(metrics[0][name] == metrics[1][name] for name in ("loss", "grad_norm", "lr"))
    assert same(weights(straight), weights(resumed)) and same(optimizer_state(straight), optimizer_state(resumed))


def test_flags_that_are_changed_at_a_resume_count() -> None:
    """The optimizer's state comes back, its learning rate, betas and weight decay are the new
    ones."""
    saved = make_learner(Policy(make_model(), 1.0), lr=1e-3, warmup_steps=4)
    saved.update(make_samples(5), NO_LIMIT)
    resumed = make_learner(Policy(make_model(), 1.0), lr=1e-5, warmup_steps=4, weight_decay=0.0)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.update(make_samples(5), NO_LIMIT)["lr"] == pytest.approx(1e-5 * 2 / 4)
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.0]
    assert next(iter(resumed.optimizer.state.values()))["step"] == 2


def test_a_checkpoint_of_another_model_is_refused() -> None:
    other = make_learner(Policy(make_model(num_hidden_layers=1), 1.0))
    with pytest.raises(Exception, match="layers.1"):
        make_learner(Policy(make_model(), 1.0)).load_state_dict(other.state_dict())


# FSDP


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def full(parameters: Iterator[Tensor]) -> list[Tensor]:
    return [p.detach().full_tensor() for p in parameters]


@pytest.mark.parametrize("option", [None, "gradient_checkpointing", "offload"])
@pytest.mark.parametrize("tied", [True, False])
def test_one_rank_of_fsdp_equals_the_plain_module(one_rank: None, tied: bool, option: str | None) -> None:
    plain = make_learner(Policy(make_model(tied=tied), 1.0, 16), minibatches=2, grad_clip=0.1)
    policy = shard(Policy(make_model(tied=tied), 1.0, 16), CPU, **({option: True} if option else {}))
    sharded = make_learner(policy, minibatches=2, grad_clip=0.1)
    for step in range(3):
        left, right = (learner.update(make_samples(7, step), NO_LIMIT) for learner in (plain, sharded))
        for name in ("loss", "grad_norm", "entropy", "gap_max"):
            assert left[name] == pytest.approx(right[name], abs=1e-6)
    assert left["grad_norm"] > 0.1
    for ours, theirs in zip(weights(plain), full(policy.parameters())):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_gradient_checkpointing_repeats_layers_without_dropout(one_rank: None) -> None:
    """The layers run again in backward, and dropout stays off, or old and new log-probs would be of
    two networks."""
    policy = shard(Policy(make_model("llama", attention_dropout=0.5), 1.0), CPU, gradient_checkpointing=True)
    runs: list[int] = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    first, _ = policy(*pad(make_samples(3)))
    first.sum().backward()
    assert len(runs) == 2
    assert torch.equal(policy(*pad(make_samples(3)))[0], first)


def test_a_pass_without_gradient_leaves_no_stale_copy(one_rank: None) -> None:
    """After it, weights that are set are the ones the next pass computes with, and parameters read
    as shards."""
    policy = shard(Policy(make_model(), 1.0), CPU)
    inputs = pad(make_samples(3))
    before, _ = frozen_logprobs(policy, inputs)
    assert all(isinstance(p, dist.tensor.DTensor) for p in policy.parameters())
    with torch.no_grad():
        policy.model.model.embed_tokens.weight.mul_(0.5)
    after, _ = frozen_logprobs(policy, inputs)
    scaled = make_model()
    with torch.no_grad():
        scaled.model.embed_tokens.weight.mul_(0.5)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, Policy(scaled, 1.0)(*inputs)[0], atol=1e-5, rtol=0)


def test_sharded_checkpoint_resumes_bitwise(one_rank: None, tmp_path: Path) -> None:
    """EasyR1#57: through torch.distributed.checkpoint."""
    straight = make_learner(shard(Policy(make_model(), 1.0), CPU))
    straight.update(make_samples(5), NO_LIMIT)
    dcp.save({"learner": straight}, checkpoint_id=tmp_path / "saved")
    resumed = make_learner(shard(Policy(make_model(seed=3), 1.0), CPU))
    dcp.load({"learner": resumed}, checkpoint_id=tmp_path / "saved")
    rates = [learner.update(make_samples(5, 1), NO_LIMIT)["lr"] for learner in (straight, resumed)]
    assert rates[0] == rates[1] == 1e-3
    assert same(full(straight.policy.parameters()), full(resumed.policy.parameters()))


SHARES = ((5, 1), (3, 0))


def broken_on_rank_1(learner: Learner, how: str, rank: int) -> bool:
    """Whether a step is refused on this rank, and weights stay, when only rank 1's share breaks
    it."""
    learner.minibatches, reference, before = 1, learner.reference, full(learner.policy.parameters())
    samples = [Sample([1], [49], math.inf if how == "advantage" and rank == 1 else 1.0, [-3.0])]
    if how == "loss alone":
        learner.reference = shard(Policy(make_model(), 1.0, vocabulary=VOCAB - 1 + (rank == 0)), CPU)
    if how == "weights":
        state = learner.optimizer.state[next(learner.policy.parameters())]
        state["exp_avg"].to_local().fill_(math.inf if rank == 1 else 0.0)
        with pytest.raises(NonFiniteGradients, match="left weights"):
            learner.update(samples, NO_LIMIT)
        return True
    metrics = learner.update(samples, NO_LIMIT)
    learner.reference = reference
    return metrics["nonfinite"] == 1 and same(before, full(learner.policy.parameters()))


def two_ranks(rank: int, folder: str) -> None:
    """One rank of `test_two_ranks_equal_one_process`; leaves what it saw in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case, shares in enumerate(SHARES):
        rows = make_samples(sum(shares), seed=case)
        mine = rows[: shares[0]] if rank == 0 else rows[shares[0] :]
        reference = shard(Policy(make_model(seed=1), 1.0), CPU)
        policy = shard(Policy(make_model(), 1.0), CPU, gradient_checkpointing=case == 1)
        config = LossConfig("dapo" if case else "grpo", beta=0.1)
        learner = make_learner(policy, config, reference=reference, token_budget=30)
        seen = watch_gradients(learner)
        metrics = learner.update(mine, NO_LIMIT)
        learner.minibatches = 4  # more steps than some rank has rows
        later = learner.update(mine, NO_LIMIT)
        try:
            learner.update([Sample([1], [2], 1.0, [-99.0])] if rank == 0 else [], max_gap=10.0)
            stopped = False
        except SamplerGapError:
            stopped = True
        result = {"gradients": seen[0], "metrics": metrics, "later": later, "stopped": stopped}
        result["broken"] = [broken_on_rank_1(learner, how, rank) for how in ("advantage", "loss alone", "weights")]
        torch.save(result, f"{folder}/{case}-{rank}.pt")
    try:
        make_learner(Policy(make_model(), 1.0))
    except ValueError:
        torch.save(True, f"{folder}/refused-{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """verl#6176: shares of 5 and 1, and of 3 and 0 rows: nobody hangs, gradients and metrics are
    those of one process; a gap that one rank sees stops both, and what is not finite on one is not
    taken by either."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=two_ranks, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    stuck = [process for process in ranks if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck and [process.exitcode for process in ranks] == [0, 0]
    for case, shares in enumerate(SHARES):
        config, reference = LossConfig("dapo" if case else "grpo", beta=0.1), Policy(make_model(seed=1), 1.0)
        learner = make_learner(Policy(make_model(), 1.0), config, reference=reference)
        seen = watch_gradients(learner)
        expected = learner.update(make_samples(sum(shares), seed=case), NO_LIMIT)
        results = [torch.load(tmp_path / f"{case}-{rank}.pt") for rank in range(2)]
        for result in results:
            assert result["stopped"] and result["broken"] == [True] * 3
            for ours, single in zip(result["gradients"], seen[0]):
                torch.testing.assert_close(ours, single, atol=1e-6, rtol=1e-5)
            for name in expected.keys() - {"logprob_s", "update_s"}:
                assert result["metrics"][name] == pytest.approx(expected[name], abs=1e-6), name
            assert result["later"]["optimizer_steps"] == min(4, shares[0])
        assert results[0]["later"]["loss"] == results[1]["later"]["loss"]
    assert all((tmp_path / f"refused-{rank}.pt").exists() for rank in range(2))


def test_doctests_of_the_module() -> None:
    import doctest

    assert doctest.testmod(grpo).failed == 0
