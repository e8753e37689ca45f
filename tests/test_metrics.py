"""AUC, calibration error, pass@k and intervals; faults that other metrics had."""

from __future__ import annotations

import doctest
import itertools
import math
import statistics
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import metrics
from support.metrics import auc, ece, head_metrics, interval, pass_at_k, within_group_auc

quick = settings(max_examples=60, deadline=None, derandomize=True)
rows = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=30)

# --- the head ---------------------------------------------------------------------------------------------------------


def pairwise(data: list[tuple[int, int, int]]) -> float:
    """AUC within groups by looking at every pair."""
    wins = [(a > b) + (a == b) / 2 for a, y, g in data for b, z, h in data if y == 1 and z == 0 and g == h]
    return sum(wins) / len(wins) if wins else math.nan


@quick
@given(data=rows)
def test_auc_counts_pairs(data: list[tuple[int, int, int]]) -> None:
    scores, labels, groups = torch.tensor(data).T
    groups = groups * 1000 - 7  # ids are arbitrary
    assert within_group_auc(scores / 5, labels, groups) == pytest.approx(pairwise(data), nan_ok=True)
    assert auc(scores / 5, labels) == pytest.approx(pairwise([(s, y, 0) for s, y, _ in data]), nan_ok=True)


def test_easy_prompts_are_not_good_rollouts() -> None:
    """A head that knows only which prompt is easy: good over all, useless within groups."""
    groups = torch.arange(8) // 4
    labels = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1])
    scores = torch.tensor([0.8] * 4 + [0.3] * 4)
    expected = {"auc": 0.75, "auc_within": 0.5, "accuracy": 0.75, "base_rate": 0.5}
    assert head_metrics(scores, labels, groups) == pytest.approx(expected)


def test_metrics_of_odd_input() -> None:
    """MedicalGPT#263: one class or nothing at all raise no exception."""
    one = head_metrics(torch.tensor([0.2, 0.9]), torch.ones(2), torch.zeros(2, dtype=torch.int64))
    assert math.isnan(one["auc"]) and one["base_rate"] == 1 and one["accuracy"] == 0.5
    empty = head_metrics(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert all(math.isnan(value) for value in empty.values())
    mostly_wrong = head_metrics(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([1, 0, 0, 0]), torch.zeros(4))
    assert mostly_wrong["base_rate"] == 0.75 and mostly_wrong["accuracy"] == 1


# --- the posterior ----------------------------------------------------------------------------------------------------


def test_ece() -> None:
    """Two bins by hand.

    3 rows at 0.2 with one right (gap 0.4/3 each), one row at 0.9 that is wrong (gap 0.9).
    """
    q, labels = torch.tensor([0.2, 0.2, 0.2, 0.9]), torch.tensor([1, 0, 0, 0])
    assert ece(q, labels, bins=2) == pytest.approx((abs(0.6 - 1) + 0.9) / 4)
    unscored = torch.tensor([math.nan])
    assert ece(torch.cat([unscored, q]), torch.tensor([1, 1, 0, 0, 0]), bins=2) == ece(q, labels, bins=2)
    generator = torch.Generator().manual_seed(18)
    scores = torch.rand(20_000, generator=generator).pow(2)
    right = torch.rand(20_000, generator=generator) < scores
    assert ece(scores, right) < 0.015 < 0.3 < ece(1 - scores, right)
    assert math.isnan(ece(q[:0], labels[:0]))


# --- pass@k and intervals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, c, k, expected", [(4, 1, 4, 1), (200, 1, 1, 0.005), (16, 4, 8, 25 / 26), (10, 3, 5, 11 / 12), (5, 2, 3, 0.9)]
)
def test_pass_at_k_is_the_closed_form(n: int, c: int, k: int, expected: float) -> None:
    """verl#7240: a bootstrap with replacement gives 0.684 where 1 of 4 is right and k = 4."""
    assert pass_at_k(n, c, k) == expected


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = [min(subset) < c for subset in itertools.combinations(range(n), k)]
            assert pass_at_k(n, c, k) == float(Fraction(sum(hits), len(hits)))
    assert pass_at_k(4000, 2, 2000) == 1 - (2000 * 1999) / (4000 * 3999)  # C(4000, 2000) is no float


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (0, 0, 1), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_of_too_few_samples_is_an_error(n: int, c: int, k: int) -> None:
    """openai/human-eval#35: with k > n and none right it gave 1."""
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_the_interval_is_made_of_binomial_quantiles() -> None:
    """The mean of n resampled zeros and ones is Binomial(n, share of ones) / n.

    For 100, P(<= 39) < 0.025 < P(<= 40).
    """
    values = [0.0, 1.0] * 50
    assert interval(values) == (0.4, 0.6) == interval(values, seed=1)
    assert interval([0.3]) == (0.3, 0.3) and interval(values[:9], seed=4) == interval(values[:9], seed=4)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = [
        low <= 1.0 <= high
        for low, high in (interval(rng.exponential(size=80), seed=i, resamples=400) for i in range(300))
    ]
    assert 0.90 < statistics.mean(held) < 0.97  # a percentile interval of a skewed sample is a little too short


def test_the_interval_of_many_problems_fits_in_memory() -> None:
    values = np.zeros(100_000)
    tracemalloc.start()
    interval(values, resamples=50)
    assert tracemalloc.get_traced_memory()[1] < 30e6  # all at once: 80 MB
    tracemalloc.stop()


def test_doctests_of_the_module() -> None:
    results = doctest.testmod(metrics)
    assert results.attempted > 0 and results.failed == 0
