"""The method's object on synthetic states: keep rate, guards, learning, and a state that goes on where it stopped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from arrol import Pruner
from calibration import Settings
from engine import Decision, Rollout
from support.metrics import step_metrics

HIDDEN, GROUP_SIZE = 8, 16


def make_pruner(passes: int = 1, **changes: object) -> Pruner:
    """For 8-wide states, with few passes of the head over its buffer; `changes` to settings or options."""
    names = Settings.__dataclass_fields__
    settings = Settings(**{name: value for name, value in changes.items() if name in names})
    options = {name: value for name, value in changes.items() if name not in names}
    sizes = {"head_width": 16, "cold_start": 2, "bins": 32, "window": 2048}
    pruner = Pruner(HIDDEN, GROUP_SIZE, settings, **sizes | options)
    pruner.trainer.passes = passes
    return pruner


def arrivals(groups: int, size: int, seed: int) -> tuple[Tensor, list[int], list[float]]:
    """States, group ids and labels; dimension 0 tells right from wrong, and groups differ in how
    often they are right.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(groups).repeat_interleave(size)
    chance = torch.rand(groups, generator=generator)[group]
    labels = (torch.rand(len(group), generator=generator) < chance).float()
    states = torch.randn(len(group), HIDDEN, generator=generator)
    states[:, 0] += 3 * (2 * labels - 1)
    return states, (group + 1000 * seed).tolist(), labels.tolist()


def decide(pruner: Pruner, states: Tensor, ids: list[int]) -> list[Decision]:
    """Decisions on rollouts that arrive together, each group from its first sample on."""
    return pruner.decide(states, ids, [ids[:row].count(group) for row, group in enumerate(ids)])


def one_step(pruner: Pruner, step: int, groups: int = 16, size: int = 16) -> list[tuple[Rollout, float]]:
    """A training step of the pruner alone, arrivals in two parts as an engine delivers them;
    rollouts with their true labels.
    """
    states, ids, labels = arrivals(groups, size, step)
    samples = list(range(size)) * groups
    pruner.begin(step)
    decisions: list[Decision] = []
    for part in (slice(len(ids) // 2 + 3), slice(len(ids) // 2 + 3, None)):
        decisions += pruner.decide(states[part], ids[part], samples[part])
    rollouts = [rollout(*row) for row in zip(ids, states, decisions, labels, strict=True)]
    pruner.learn(rollouts)
    return list(zip(rollouts, labels, strict=True))


def rollout(group: int, state: Tensor, decision: Decision, reward: float | None) -> Rollout:
    """A rollout of 20 tokens as the engine leaves it; graded, if it was kept."""
    numbers = {"score": decision.score, "posterior": decision.posterior, "survival": decision.survival}
    fate = {"finish": "stop", "reward": reward} if decision.keep else {"finish": "pruned"}
    return Rollout(group, token_ids=[0] * 20, detect_state=state, last_state=state, **numbers, **fate)


@pytest.mark.parametrize("draw", ["bernoulli", "systematic"])
@pytest.mark.parametrize(
    "changes", [{}, {"tilt": "printed"}, {"rule": "random"}, {"keep_ratio": 0.25}, {"balance": 4.0}]
)
def test_keep_rate_over_30_steps(draw: str, changes: dict) -> None:
    """Within 3 points of kappa, clipped probabilities included; nothing is pruned in the cold start."""
    pruner = make_pruner(draw=draw, **changes)
    steps = [one_step(pruner, step) for step in range(1, 33)]
    kept = [[r.finish != "pruned" for r, _ in rollouts] for rollouts in steps]
    assert all(map(all, kept[:2])) and not any(map(all, kept[2:]))
    rate = sum(map(sum, kept[2:])) / sum(map(len, kept[2:]))
    assert abs(rate - pruner.settings.keep_ratio) < 0.03


def balance(pruner: Pruner) -> tuple[float, float]:
    """Mean distance of a group's positive ratio from 1/2, before and after pruning, over 20 steps
    after 10 of learning.
    """
    before = after = count = 0.0
    for step in range(1, 31):
        rollouts = one_step(pruner, step)
        for group in {r.group for r, _ in rollouts} if step > 10 else ():
            all_labels = [y for r, y in rollouts if r.group == group]
            kept = [y for r, y in rollouts if r.group == group and r.finish != "pruned"]
            before += abs(sum(all_labels) / len(all_labels) - 0.5)
            after += abs(sum(kept) / len(kept) - 0.5)
            count += 1
    return before / count, after / count


def test_survivors_are_more_balanced_than_what_arrived() -> None:
    before, after = balance(make_pruner(draw="systematic"))
    assert after < before - 0.03
    before, after = balance(make_pruner(draw="systematic", rule="random"))
    assert abs(after - before) < 0.02


def test_groups_keep_their_minimum() -> None:
    pruner = make_pruner(keep_ratio=0.05, p_min=0.01, min_survivors=3)
    for step in range(1, 6):
        rollouts = one_step(pruner, step)
        survivors = [
            sum(r.group == group and r.finish != "pruned" for r, _ in rollouts)
            for group in {r.group for r, _ in rollouts}
        ]
        assert min(survivors) >= 3
    assert max(survivors) < 10


def test_keep_ratio_1_keeps_all_and_draws_nothing_that_matters() -> None:
    pruner = make_pruner(keep_ratio=1.0)
    assert all(r.finish != "pruned" and r.survival == 1.0 for step in range(1, 6) for r, _ in one_step(pruner, step))


def test_a_state_that_is_not_a_number_is_kept_and_never_learnt_from() -> None:
    pruner = make_pruner()
    for step in range(1, 5):
        one_step(pruner, step)
    pruner.begin(5)
    states, ids, _ = arrivals(2, 16, 5)
    states[3] = float("nan")
    decisions = decide(pruner, states, ids)
    assert decisions[3].keep and not all(d.keep for d in decisions)
    metrics = pruner.learn([rollout(ids[3], states[3], decisions[3], 1.0)])
    assert metrics["scores_rejected"] == 1 and all(p.isfinite().all() for p in pruner.head.parameters())


def test_the_head_learns_and_is_judged_on_what_it_has_not_seen() -> None:
    pruner = make_pruner(passes=20)
    one_step(pruner, 1)
    pruner.begin(2)
    states, ids, labels = arrivals(16, 16, 2)
    rollouts = [rollout(*row) for row in zip(ids, states, decide(pruner, states, ids), labels, strict=True)]
    metrics = step_metrics(rollouts, 10)
    assert metrics["head_auc"] > 0.95 and metrics["head_auc_within"] > 0.9
    assert metrics["head_accuracy"] > metrics["head_base_rate"]


def test_unjudged_rollouts_teach_nothing() -> None:
    """miles#2800: a grader's time-out is no negative label."""
    pruner = make_pruner()
    states, ids, _ = arrivals(1, 4, 1)
    pruner.begin(1)
    rewards = [1.0, None, 0.0, 1.0]
    pruner.learn([rollout(*row) for row in zip(ids, states, decide(pruner, states, ids), rewards, strict=True)])
    # Each of the three gives its state at L_detect and its last one.
    assert pruner.trainer.count == 6 and pruner.calibrator.prior == pytest.approx(2 / 3)


def test_a_restored_pruner_decides_as_the_one_that_was_saved(tmp_path) -> None:
    """transformers#40500: all of it must come back, the head's generator too, under weights_only."""
    straight, first = make_pruner(), make_pruner()
    for step in range(1, 5):
        one_step(straight, step)
        one_step(first, step)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second, state = make_pruner(), torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(state)
    counts = torch.stack(second.finished.counts())
    assert counts.sum() > 500 and counts.equal(torch.stack(first.finished.counts()))
    for step in range(5, 8):
        expected, got = one_step(straight, step), one_step(second, step)
        assert [(r.finish, r.score, r.survival) for r, _ in expected] == [
            (r.finish, r.score, r.survival) for r, _ in got
        ]
    assert all(torch.equal(a, b) for a, b in zip(straight.head.parameters(), second.head.parameters()))
    # A checkpoint from before finished answers were counted.
    older = make_pruner()
    older.load_state_dict({name: part for name, part in state.items() if name != "finished"})
    assert older.calibrator.ready and not torch.stack(older.finished.counts()).any()


def test_seeds_differ_although_the_engine_reseeds_the_process() -> None:
    """vllm#8519: building an engine fixes torch's global stream; draws must come from the run's own."""

    def decisions(seed: int) -> list[bool]:
        torch.manual_seed(0)
        pruner = make_pruner(seed=seed)
        return [r.finish == "pruned" for step in range(1, 5) for r, _ in one_step(pruner, step)]

    assert decisions(1) != decisions(2) and decisions(1) == decisions(1)


@pytest.mark.parametrize("draw", ["bernoulli", "systematic"])
@pytest.mark.parametrize("changes", [{}, {"tilt": "printed"}, {"rule": "random"}, {"keep_ratio": 0.1, "p_min": 0.01}])
def test_a_group_is_decided_on_alike_whatever_else_is_sampled(draw: str, changes: dict) -> None:
    """So that it does not matter on which rank it is: alone, or among others that arrive before, after and between."""
    together, alone = make_pruner(draw=draw, **changes), make_pruner(draw=draw, **changes)
    for step in range(1, 5):
        one_step(together, step)
        one_step(alone, step)
    states, ids, _ = arrivals(8, 16, 5)
    together.begin(5)
    among = decide(together, states, ids)
    alone.begin(5)
    assert any(not decision.keep for decision in among)
    for group in reversed(sorted(set(ids))):
        mine = [row for row, other in enumerate(ids) if other == group]
        for row, decision in zip(mine, decide(alone, states[mine], [group] * 16)):
            assert decision.keep == among[row].keep and decision.survival == pytest.approx(
                among[row].survival, abs=1e-6
            )


def test_a_sample_has_its_own_draw() -> None:
    """Bernoulli: with p the same for all, who survives does not depend on who arrives first.

    No two groups or steps share draws.
    """
    pruner = make_pruner(rule="random", min_survivors=0)
    for step in range(1, 4):
        one_step(pruner, step)

    def kept(step: int, group: int, samples: list[int]) -> list[bool]:
        pruner.begin(step)
        return [d.keep for d in pruner.decide(torch.zeros(16, HIDDEN), [group] * 16, samples)]

    forwards = list(range(16))
    assert kept(4, 7, forwards[::-1]) == kept(4, 7, forwards)[::-1]
    assert len({tuple(kept(step, group, forwards)) for step in (4, 5) for group in range(20)}) == 40
