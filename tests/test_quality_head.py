"""The head and its training; faults that other reward heads had."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quality_head import MAX_MINIBATCHES, HeadTrainer, QualityHead
from support.metrics import auc

quick = settings(max_examples=60, deadline=None, derandomize=True)


def toy(count: int, seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """States (count, size) whose first coordinate separates labels 0 and 1."""
    states = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return states, (states[:, 0] > 0).float()


def parameters(head: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in head.parameters()])


# --- the head ---------------------------------------------------------------------------------------------------------


def test_any_float_in_fp32_out() -> None:
    """shibing624/MedicalGPT#456: 16-bit states, with and without autocast, give the fp32 logits."""
    head, states = QualityHead(64), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    exact = head(states)
    assert exact.shape == (3,) and exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert head(states).equal(exact)
        low = head(states.bfloat16())
    assert low.dtype == torch.float32 and low.equal(head(states.bfloat16()))
    torch.testing.assert_close(low, exact, rtol=0, atol=1e-2)
    torch.testing.assert_close(head(states.half()), exact, rtol=0, atol=1e-2)
    torch.testing.assert_close(head(states.double()), exact)
    assert head(states[:0]).shape == (0,)


def test_no_gradient_reaches_the_policy() -> None:
    """trl#299: the policy's gradients are bitwise the same with and without the head's loss."""
    grads = []
    for with_head in (False, True):
        policy = nn.Linear(8, 8, bias=False)
        nn.init.eye_(policy.weight)
        head = QualityHead(8)
        hidden = policy(torch.arange(24.0).view(3, 8))
        hidden.retain_grad()
        loss = hidden.square().sum()
        if with_head:
            quality = F.binary_cross_entropy_with_logits(head(hidden), torch.tensor([1.0, 0.0, 1.0]))
            quality.backward()
            assert hidden.grad is None and policy.weight.grad is None
            assert all(p.grad.abs().sum() > 0 for p in head.parameters())
            loss = loss + F.binary_cross_entropy_with_logits(head(hidden), torch.tensor([1.0, 0.0, 1.0]))
        loss.backward()
        grads.append(policy.weight.grad)
    assert grads[0].equal(grads[1])


def test_weights_depend_on_the_seed_alone() -> None:
    """vllm#8519: an engine that reseeds the process changes nothing.

    The head leaves the global generator alone.
    """
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = parameters(QualityHead(8, seed=5))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert parameters(QualityHead(8, seed=5)).equal(first) and not parameters(QualityHead(8, seed=6)).equal(first)


def test_without_logprobs_the_head_is_the_plain_mlp() -> None:
    """Bit for bit, from its seed on: a head of an older file scores as it did."""
    head, states = QualityHead(8, 4, seed=5), toy(20, seed=1, size=8)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 1))
    assert parameters(head).equal(parameters(plain)) and head(states).equal(plain(states)[:, 0])


@pytest.mark.parametrize("extras", [0, 2])
def test_states_of_another_width_are_refused(extras: int) -> None:
    head = QualityHead(8, 4, extras=extras)
    assert head(torch.zeros(3, 8 + extras)).shape == (3,)
    for width in (8 + 2 - extras, 9, 11):
        with pytest.raises(RuntimeError, match="split"):
            head(torch.zeros(3, width))


def test_logprobs_bypass_the_norm() -> None:
    """Scaling the state changes nothing, and no length is too long; a sum rounded above 0 is 0."""
    head, states = QualityHead(8, 4, extras=2), toy(3, seed=1, size=8)[0]
    long, short = torch.tensor([-20000.0, -0.3]), torch.tensor([-3.0, -0.3])
    seen = lambda states, pair: head(torch.cat([states, pair.expand(3, 2)], 1))  # noqa: E731
    torch.testing.assert_close(seen(100 * states, long), seen(states, long), atol=1e-4, rtol=0)
    assert (seen(states, long) - seen(states, short)).abs().min() > 1e-3
    assert seen(states, long).abs().max() < 10
    assert seen(states, torch.tensor([1e-7, 0.0])).equal(seen(states, torch.zeros(2)))


# --- its training -----------------------------------------------------------------------------------------------------


def test_recovers_from_one_class() -> None:
    """MedicalGPT#263: 50 rounds of right answers only, then balanced ones.

    Logits stay bounded and the head learns.
    """
    trainer = HeadTrainer(QualityHead(16), passes=1, batch_size=64, capacity=256)
    test_states, test_labels = toy(500, seed=1)
    for step in range(50):
        trainer.add(toy(32, seed=100 + step)[0], torch.ones(32))
        trainer.train()
    assert trainer.head(test_states).abs().max() < 50
    updates = 0
    for step in range(40):
        trainer.add(*toy(32, seed=200 + step))
        updates += int(trainer.train()["updates"])
    logits = trainer.head(test_states).detach()
    assert updates <= 200 and logits.abs().max() < 50 and auc(logits, test_labels) > 0.9


@pytest.mark.parametrize("told", ["sum", "mean"])
def test_learns_what_only_the_logprobs_tell(told: str) -> None:
    """Among states that tell nothing, with sums of 100 to 1,000 tokens."""

    def sample(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        mean = -0.1 - 0.4 * torch.rand(count, generator=generator)
        length = 100 + 900 * torch.rand(count, generator=generator)
        known = mean if told == "mean" else mean * length
        states = torch.column_stack([toy(count, seed)[0], mean * length, mean])
        return states, (known > known.median()).float()

    auc_of = {}
    for extras in (0, 2):
        trainer = HeadTrainer(QualityHead(16, extras=extras))
        for step in range(15):
            states, labels = sample(400, step)
            trainer.add(states[:, : 16 + extras], labels)
            trainer.train()
        states, labels = sample(1000, 99)
        auc_of[extras] = auc(trainer.head(states[:, : 16 + extras]).detach(), labels)
    assert auc_of[2] > 0.9 and abs(auc_of[0] - 0.5) < 0.06


def test_train_bounds_its_work() -> None:
    trainer = HeadTrainer(QualityHead(4, width=4), passes=3, batch_size=10, capacity=200)
    report = trainer.train()
    assert math.isnan(report["loss"]) and report["n"] == report["updates"] == 0
    trainer.add(*toy(21, seed=2, size=4))
    report = trainer.train()
    assert report["n"] == 21 and report["updates"] == 3 * 3  # 21 rows in three equal pieces, three times
    trainer.add(*toy(500, seed=3, size=4))
    report = trainer.train()
    assert report["n"] == 200 and report["updates"] == MAX_MINIBATCHES


@quick
@given(sizes=st.lists(st.integers(0, 13), max_size=8))
def test_buffer_keeps_the_newest(sizes: list[int]) -> None:
    trainer = HeadTrainer(QualityHead(2, width=2), capacity=10)
    states = torch.arange(2.0 * sum(sizes)).view(-1, 2)
    labels = torch.arange(sum(sizes)) % 2
    start = 0
    for size in sizes:
        assert trainer.add(states[start : start + size], labels[start : start + size]) == min(size, 10)
        start += size
    state = trainer.state_dict()
    assert state["states"].equal(states[-10:]) and state["labels"].equal(labels[-10:].float())


def test_buffer_refuses_what_is_not_a_sample() -> None:
    """Non-finite states are left out: one would turn every weight to NaN.

    Labels are verdicts (miles#2800).
    """
    trainer = HeadTrainer(QualityHead(4), capacity=8)
    states, labels = toy(4, seed=4, size=4)
    states[1, 2], states[3, 0] = math.nan, math.inf
    assert trainer.add(states, labels) == 2 and math.isfinite(trainer.train()["loss"])
    assert parameters(trainer.head).isfinite().all()
    for bad in (torch.tensor([0.5] * 4), torch.tensor([math.nan] * 4), torch.ones(3)):
        with pytest.raises(ValueError):
            trainer.add(toy(4, seed=5, size=4)[0], bad)


@pytest.mark.parametrize("capacity", [64, 300])
def test_resume_is_exact(capacity: int) -> None:
    """EasyR1#57, transformers#40500: six rounds straight equal three, a file, and three.

    The file is read with weights_only; the ring is full, or not.
    """

    def rounds(trainer: HeadTrainer, steps: range) -> None:
        for step in steps:
            trainer.add(*toy(30, seed=step))
            trainer.train()

    straight, first = (HeadTrainer(QualityHead(16), batch_size=16, capacity=capacity, seed=3) for _ in range(2))
    rounds(straight, range(6))
    rounds(first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    torch.manual_seed(99)
    second = HeadTrainer(QualityHead(16, seed=8), batch_size=16, capacity=capacity, seed=4)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    rounds(second, range(3, 6))
    assert parameters(second.head).equal(parameters(straight.head))
    assert second.state_dict()["states"].equal(straight.state_dict()["states"])
    assert second.generator.get_state().equal(straight.generator.get_state())


def test_resume_keeps_the_new_flags_and_refuses_damage() -> None:
    """lr comes from the constructor, not from the file.

    A damaged generator is an error, not a warning.
    """
    trainer = HeadTrainer(QualityHead(16), lr=1e-3, capacity=100)
    trainer.add(*toy(90, seed=6))
    trainer.train()
    smaller = HeadTrainer(QualityHead(16), lr=0.5, weight_decay=0.3, capacity=40)
    smaller.load_state_dict(trainer.state_dict())
    group = smaller.optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group["weight_decay"] == 0.3
    assert smaller.state_dict()["states"].equal(trainer.state_dict()["states"][-40:])
    with pytest.raises((RuntimeError, TypeError)):
        smaller.load_state_dict({**trainer.state_dict(), "generator": torch.zeros(3, dtype=torch.uint8)})
