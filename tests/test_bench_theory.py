"""What bench/theory.py claims, at points that can be worked out by hand (Sec. 4.1, App. A.4); and
what bench/head.py counts by itself.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bench.head import halves, spreads, threshold_accuracy, with_logprob
from bench.tables import table
from bench.theory import (
    TARGET,
    TwoBuffers,
    bound,
    draw,
    oracle_ratio,
    population,
    positive_ratio,
    prune_one,
    survival,
    survivors,
    truth_table,
    windows,
)

TRUTH = truth_table(128, np.random.default_rng(0))


def test_bound_at_a_point() -> None:
    """q* = (1, 1, 0): dropping a 1 leaves exactly rho = 1/2; delta = 2 / e^4 makes the root 1. With
    rho = 1: dropping the 0.
    """
    latent = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert bound(latent, 0.25, delta=2 / math.exp(4)).tolist() == pytest.approx([0 + 2 * 0.25 + 1])
    assert bound(latent, 0.0, target=0.0, delta=2 / math.exp(4)).tolist() == pytest.approx([0.5 + 1])
    assert prune_one(latent).tolist() == [[False, True, True]]
    assert prune_one(latent, target=1.0).tolist() == [[True, True, False]]


def test_bound_holds() -> None:
    """Theorem 4.2, on groups whose labels are independent given q*: it fails in at most a share
    delta of them.
    """
    _, latent, labels = population(2000, 16, np.random.default_rng(1))
    noisy = (latent + torch.empty_like(latent).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(1))).clamp(
        0, 1
    )
    off = (positive_ratio(labels, prune_one(noisy)) - TARGET).abs()
    for delta in (0.5, 0.05):
        assert (off > bound(latent, 0.05, delta=delta)).double().mean() <= delta


def test_oracle() -> None:
    """Of 4 with one right, two survivors can be balanced; with none right they cannot; it never
    takes more than there are.
    """
    labels = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert oracle_ratio(labels, 2).tolist() == [0.5, 0.0, 1.0, 0.5]
    assert oracle_ratio(labels, 4).tolist() == [0.25, 0.0, 1.0, 0.75]


def test_a_group_keeps_its_minimum() -> None:
    """As in training: the first to be dropped are, until two are left."""
    p = torch.zeros(3, 5, dtype=torch.float64)
    assert draw(p, "bernoulli", torch.Generator()).tolist() == [[False] * 3 + [True] * 2] * 3


def test_bias_over_survivors_keeps_too_few() -> None:
    """Survivors were drawn with weight p: kappa = E[p^2] / E[p], so that E[p] = kappa - Var(p) /
    E[p] under Eq. 2 as printed.
    """
    ours, theirs = (windows(name, "printed", 0.5, 0, TRUTH) for name in ("ours", "survivors only"))
    assert ours["keep rate"] == pytest.approx(0.5, abs=0.015)
    assert theirs["keep rate"] < 0.475
    assert theirs["keep rate"] == pytest.approx(theirs["theory of it"], abs=0.015)
    group = windows("survivors only", "group", 0.5, 0, TRUTH)
    assert group["keep rate"] == pytest.approx(0.5, abs=0.015)  # its tilts sum to 0, whoever is left of a group


def test_prior_of_survivors_is_off_and_q_is_not() -> None:
    """Eq. 2 as printed prefers the likely wrong: pi falls by Cov(p, q*) / E[p]. q errs by a
    fraction of that.
    """
    ours = windows("ours", "printed", 0.5, 0, TRUTH)
    assert ours["π − P(Y = 1)"] == pytest.approx(ours["theory of π"], abs=0.02)
    assert ours["π − P(Y = 1)"] < -0.05
    assert abs(ours["mean error of q"]) < 0.03


def test_two_capped_buffers_force_the_prior() -> None:
    """However rare right ones are, two full buffers say 1/2 (what App. A.4 implies if each is
    capped by itself).
    """
    calibrator = TwoBuffers(bins=4, window=8)
    for _ in range(20):
        calibrator.label(torch.full((10,), 0.5), torch.tensor([1] + [0] * 9))
    assert calibrator.prior == 0.5
    assert sum(count.sum().item() for count in calibrator.counts()) == 8
    wrong = windows("two capped buffers", "group", 0.5, 0, TRUTH)["mean error of q"]
    assert wrong > 0.05  # a third is right in this world, so that q is too high


def test_survivors_vary_by_less_than_one() -> None:
    """Systematic: floor or ceiling of the sum of p, so a variance of at most 1/4; Bernoulli: the
    sum of p (1 - p).
    """
    rows = survivors(0, groups=20, repeats=60)
    for size in (4, 16, 64):
        assert rows[f"{size}, systematic"]["variance"] < 1
        assert rows[f"{size}, systematic"]["theory"] <= 0.25
        assert rows[f"{size}, bernoulli"]["variance"] == pytest.approx(rows[f"{size}, bernoulli"]["theory"], rel=0.2)


def test_printed_tilt_moves_hard_groups_away_from_balance() -> None:
    """Eq. 2 as printed against Lemma 4.1: where the success rate is below rho, it lowers the
    expected ratio, and so rho (1 - rho).
    """
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6]], dtype=torch.float64)  # means 0.25 and 0.75
    printed, group = (survival(q, tilt, 0.5) for tilt in ("printed", "group"))
    ratio = {"printed": (printed * q).sum(1) / printed.sum(1), "group": (group * q).sum(1) / group.sum(1)}
    assert ratio["printed"][0] < 0.25 and ratio["printed"][1] < 0.75
    assert 0.25 < ratio["group"][0] < 0.5 < ratio["group"][1] < 0.75


def test_halves_share_no_problem() -> None:
    """A head judged on problems that it was trained on would know their difficulty."""
    groups = torch.tensor([5, 5, 9, 9, 9, 2, 7, 7])
    for train, test in halves(groups, seed=3):
        assert (train ^ test).all()
        assert set(groups[train].tolist()).isdisjoint(groups[test].tolist())
        assert len(groups[train].unique()) == 2


def test_threshold_is_chosen_on_old_rows() -> None:
    """The best cut of the old rows lies below 0.4, with one mistake; of the new rows two of three
    are then right.
    """
    values, labels = torch.tensor([0.1, 0.2, 0.4, 0.5, 0.9]), torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0])
    assert threshold_accuracy(
        values, labels, torch.tensor([0.3, 0.45, 0.6]), torch.tensor([1.0, 1.0, 1.0])
    ) == pytest.approx(2 / 3)
    assert threshold_accuracy(values, 0 * labels, values, 0 * labels) == 1.0  # none right: nothing is called right
    assert math.isnan(threshold_accuracy(values, labels, values[:0], labels[:0]))


def test_what_is_undefined_is_in_no_mean() -> None:
    """A half whose judged problems are all alike has no AUC within problems: a dash where none has."""
    rows = spreads({"head": [{"auc": 0.5, "within": math.nan}, {"auc": 0.7, "within": math.nan}]})
    assert table("signal", rows | {"log-prob": {"within": rows["head"]["auc"]}}).splitlines()[2:] == [
        "| head | 0.600 ± 0.141 | – |",
        "| log-prob | – | 0.600 ± 0.141 |",
    ]


def test_logprob_is_scaled_by_training_rows_alone() -> None:
    states, logprob = torch.tensor([[1.0, -1.0], [3.0, -3.0], [9.0, 9.0]]), torch.tensor([-1.0, -3.0, -100.0])
    train = torch.tensor([True, True, False])
    column = with_logprob(states, logprob, train)[:, 2]
    assert column[:2].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert column[:2].std().item() == pytest.approx(states[:2].std().item())
