"""Laws of the calibration (Sec. 4.1, 4.2, App. A.4) and faults that other calibrators had."""

from __future__ import annotations

import doctest
import io
import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import calibration
from calibration import (
    Calibrator,
    Settings,
    SystematicDraw,
    Tilt,
    bin_index,
    draw_bernoulli,
    posterior_table,
    solve_bias,
    survival_probability,
    tilt_group,
    tilt_printed,
    tilts,
)
from support.metrics import ece

quick = settings(max_examples=60, deadline=None, derandomize=True)
thousandths = st.integers(0, 1000).map(lambda n: Fraction(n, 1000))
unit = st.integers(0, 1000).map(lambda n: n / 1000)
PAPER = Settings(balance=0.5)  # lambda 1/2; kappa, rho and the bounds are the defaults
UNCLIPPED = replace(PAPER, p_min=0.0, p_max=1.0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_group(rows: Tensor | list[float] | list[Fraction]) -> Tensor:
    return torch.zeros(len(rows), dtype=torch.int64)


def sample(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores (count,), skewed to the low side, and labels that are right with probability score."""
    g = generator(seed)
    scores = torch.rand(count, generator=g).pow(2)
    return scores, torch.rand(count, generator=g) < scores


# --- bins ------------------------------------------------------------------------------------------------------------


def test_bin_edges() -> None:
    """Lightning-AI/torchmetrics#3510: a score of exactly 1 belongs to the last bin."""
    scores = torch.tensor([0.0, 1 / 128, 127 / 128, 1.0, torch.sigmoid(torch.tensor(40.0)).item(), -0.1, 1.1])
    assert bin_index(scores, 128).tolist() == [0, 1, 127, 127, 127, 0, 127]
    assert bin_index(torch.tensor([127 / 128, 1.0]).bfloat16(), 128).tolist() == [127, 127]
    with pytest.raises(ValueError, match="NaN"):
        bin_index(torch.tensor([0.5, math.nan]), 128)


@pytest.mark.parametrize("size", [0, 1, 5, 100, 300])
def test_counts_sum_to_the_window(size: int) -> None:
    """texttron/BrowseComp-Plus#18: no bin is skipped, at any size.

    The window holds the newest entries.
    """
    calibrator = Calibrator(bins=128, window=100)
    scores, labels = sample(size, seed=size)
    scores[:1] = 1.0
    for part in range(0, size, 7):
        calibrator.label(scores[part : part + 7], labels[part : part + 7])
    positives, negatives = calibrator.counts()
    assert (positives + negatives).sum() == min(size, 100)
    newest = bin_index(scores[-100:], 128)
    assert positives.equal(torch.bincount(newest[labels[-100:]], minlength=128))
    assert negatives.equal(torch.bincount(newest[~labels[-100:]], minlength=128))


# --- posterior -------------------------------------------------------------------------------------------------------


def bayes_by_counting(rows: list[tuple[int, int]], bins: int, alpha: Fraction) -> list[Fraction]:
    """Eq. 1 word for word, in exact fractions, from a list of (bin, label)."""
    prior = Fraction(sum(label for _, label in rows), len(rows))

    def likelihood(bin: int, label: int) -> Fraction:
        of_class = [b for b, y in rows if y == label]
        return (of_class.count(bin) + alpha) / (len(of_class) + alpha * bins)

    joint = [(prior * likelihood(b, 1), (1 - prior) * likelihood(b, 0)) for b in range(bins)]
    return [right / (right + wrong) for right, wrong in joint]


@quick
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=40),
    alpha=st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(3)]),
)
def test_posterior_is_bayes(rows: list[tuple[int, int]], alpha: Fraction) -> None:
    """Also when one class is missing (Project-MONAI/MONAI#8707): finite, and in [0, 1]."""
    bins, labels = torch.tensor(rows).T
    table = posterior_table(
        torch.bincount(bins[labels == 1], minlength=5), torch.bincount(bins[labels == 0], minlength=5), float(alpha)
    )
    exact = torch.tensor([float(q) for q in bayes_by_counting(rows, 5, alpha)], dtype=torch.float64)
    torch.testing.assert_close(table, exact, rtol=1e-12, atol=1e-12)


@quick
@given(positives=st.integers(1, 5000), negatives=st.integers(1, 5000))
def test_empty_bin_lies_between_prior_and_half(positives: int, negatives: int) -> None:
    """Its odds are N+ (N- + alpha B) / (N- (N+ + alpha B))."""
    right, wrong = torch.zeros(128), torch.zeros(128)
    right[0], wrong[1] = positives, negatives
    q = posterior_table(right, wrong, 1.0)[2].item()
    low, high = sorted([positives / (positives + negatives), 0.5])
    assert low - 1e-12 <= q <= high + 1e-12
    assert q / (1 - q) == pytest.approx(positives * (negatives + 128) / (negatives * (positives + 128)), rel=1e-9)


def test_empty_bin_limits() -> None:
    """Prior 0.2: the empty bin is near it with few samples, and near 1/2 with many."""
    few = posterior_table(torch.tensor([1.0] + [0.0] * 127), torch.tensor([4.0] + [0.0] * 127), 1.0)[-1]
    many = posterior_table(torch.tensor([1e6] + [0.0] * 127), torch.tensor([4e6] + [0.0] * 127), 1.0)[-1]
    assert few.item() == pytest.approx(0.2, abs=0.01) and many.item() == pytest.approx(0.5, abs=0.001)
    assert posterior_table(torch.zeros(4), torch.zeros(4), 1.0).tolist() == [0.5] * 4
    with pytest.raises(ValueError, match="alpha"):
        posterior_table(torch.zeros(4), torch.ones(4), 0.0)


def test_one_window_keeps_the_prior() -> None:
    """A fifth of all rollouts is right, and so says the prior.

    Two buffers of the same cap would make it half and shift every posterior.
    """
    g = generator(1)
    truth = 0.1 + 0.2 * torch.rand(40_000, generator=g)
    labels = torch.rand(40_000, generator=g) < truth
    calibrator = Calibrator(bins=8, window=20_000)
    calibrator.label(truth, labels)
    error = calibrator.posterior(truth) - truth
    assert calibrator.prior == pytest.approx(0.2, abs=0.01)
    assert ece(calibrator.posterior(truth), labels) < 0.01 and error.abs().max() < 0.08  # half a bin is 1/16

    capped = [bin_index(truth[labels == right][-4_000:], 8) for right in (True, False)]
    shifted = posterior_table(*(torch.bincount(index, minlength=8) for index in capped), 1.0)[bin_index(truth, 8)]
    assert (shifted - truth).mean() > 0.25


@pytest.mark.parametrize("tilt", ["printed", "group"])
def test_labels_of_survivors_do_not_bias_the_posterior(tilt: Tilt) -> None:
    """Survival depends on a rollout through its bin (and group).

    So, with a sufficient score, q(b) stays what it was.
    """
    scores, labels = sample(60_000, seed=2)
    groups = torch.arange(60_000) // 16
    everyone = Calibrator(bins=8, window=60_000)
    everyone.label(scores, labels)
    q = everyone.posterior(scores)
    settings = Settings(tilt=tilt)
    p = survival_probability(tilts(q, groups, settings), 0.0, settings)
    keep = draw_bernoulli(p, generator(3))
    assert abs(labels[keep].double().mean() - labels.double().mean()) > 0.05  # the survivors are another population
    survivors = Calibrator(bins=8, window=60_000)
    survivors.label(scores[keep], labels[keep])
    in_bin = torch.bincount(bin_index(scores[keep], 8), minlength=8)
    centres = (torch.arange(8) + 0.5) / 8
    for q_kept, q_all, n in zip(survivors.posterior(centres), everyone.posterior(centres), in_bin):
        assert abs(q_kept - q_all) < 4 * (q_all * (1 - q_all) / n).sqrt()  # four standard errors


# --- Lemma 4.1 and the two tilts --------------------------------------------------------------------------------------


@quick
@given(q=st.lists(thousandths, min_size=2, max_size=16), target=thousandths)
def test_lemma_4_1(q: list[Fraction], target: Fraction) -> None:
    """Lemma 4.1 with the condition that its proof leaves out.

    Removing j moves the mean by (mu - q_j) / (G - 1). When that is towards rho, the deviation
    shrinks if and only if the step does not jump past rho by as much as was missing:
    |q_j - mu| < 2 (G - 1) |mu - rho|. And the group tilt lowers the survival of exactly the
    rollouts that the lemma would remove.
    """
    mean = sum(q) / len(q)
    tilt = tilt_group(torch.tensor([float(x) for x in q]), one_group(q), replace(PAPER, positive_target=float(target)))
    for j, q_j in enumerate(q):
        if (mean - target) * (q_j - mean) <= 0:  # not one of those that the lemma removes
            assert tilt[j] > -1e-6
            continue
        without = (sum(q) - q_j) / (len(q) - 1)
        shrinks = abs(without - target) < abs(mean - target)
        assert shrinks == (abs(q_j - mean) < 2 * (len(q) - 1) * abs(mean - target))
        assert tilt[j] < 0


def test_lemma_4_1_needs_its_condition() -> None:
    """As printed it fails for q = (1, 0.4) and rho = 0.6, so that mu = 0.7.

    Without the 1 the mean is 0.4, twice as far away. The group tilt stops short of that: it lowers
    p of the 1 just so far that the expected ratio is rho.
    """
    q = torch.tensor([1.0, 0.4], dtype=torch.float64)
    assert abs(q[1] - 0.6) > abs(q.mean() - 0.6)
    p = 0.5 + tilt_group(q, one_group(q), Settings(positive_target=0.6, balance=1.0))
    assert p[0] < p[1] and ((p * q).sum() / p.sum()).item() == pytest.approx(0.6)


@quick
@given(q=st.lists(unit, min_size=2, max_size=16), target=unit, balance=st.sampled_from([0.1, 0.5]))
def test_group_tilt_moves_towards_the_target(q: list[float], target: float, balance: float) -> None:
    """The expected positive ratio of the kept goes towards rho and never past it.

    kappa = 1/2 and lambda <= 1/2, so that no p is clipped.
    """
    q_ = torch.tensor(q, dtype=torch.float64)
    settings = replace(UNCLIPPED, balance=balance, positive_target=target)
    p = survival_probability(tilt_group(q_, one_group(q), settings), 0.0, settings)
    before, after = q_.mean().item(), ((p * q_).sum() / p.sum()).item()
    assert p.mean().item() == pytest.approx(0.5, abs=1e-9)
    assert min(before, target) - 1e-9 <= after <= max(before, target) + 1e-9
    if abs(before - target) > 1e-3 and q_.var() > 1e-6:
        assert abs(after - target) < abs(before - target)


def test_group_tilt_reaches_the_target_when_unbounded() -> None:
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    tilt = tilt_group(q, one_group(q), Settings(balance=100.0, positive_target=0.28))
    p = 0.5 + tilt
    assert ((p * q).sum() / p.sum()).item() == pytest.approx(0.28)


@quick
@given(q=st.lists(unit, min_size=2, max_size=16), target=unit)
def test_printed_tilt_falls_with_q(q: list[float], target: float) -> None:
    """Eq. 2 as printed lowers the positive ratio in every group.

    That is away from rho where the mean is below it.
    """
    q_ = torch.tensor(q, dtype=torch.float64)
    settings = replace(UNCLIPPED, positive_target=target)
    tilt = tilt_printed(q_, settings)
    p = survival_probability(tilt, solve_bias(tilt, settings), settings)
    after = ((p * q_).sum() / p.sum()).item()
    assert after <= q_.mean().item() + 1e-9
    if q_.var() > 1e-6:
        assert after < q_.mean().item()


def test_group_tilt_is_the_printed_one_above_the_target() -> None:
    """Up to the bias, where lambda binds; and its mirror image below the target."""
    q = torch.tensor([0.7, 0.8, 0.9, 0.3, 0.2, 0.1], dtype=torch.float64)
    groups = torch.tensor([5, 5, 5, -2, -2, -2])
    tilt = tilt_group(q, groups, PAPER)
    torch.testing.assert_close(tilt[:3], 0.5 * (0.8 - q[:3]))
    torch.testing.assert_close(tilt[3:], 0.5 * (q[3:] - 0.2))


def test_group_tilt_degenerate_groups() -> None:
    """Equal posteriors, a singleton, a mean on the target, a NaN.

    All tilts are finite but the NaN row's, which is kept.
    """
    q = torch.tensor([0.3, 0.3, 0.9, 0.4, 0.6, 0.2, math.nan, 0.4], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 2, 2, 3, 3, 3])
    tilt = tilt_group(q, groups, PAPER)
    assert tilt[:5].abs().max() < 1e-12
    unbounded, without = (tilt_group(q[rows], groups[rows], Settings(balance=100.0)) for rows in (slice(None), [5, 7]))
    torch.testing.assert_close(unbounded[[5, 7]], without)
    assert tilt.isnan().tolist() == [False] * 6 + [True, False]
    p = survival_probability(tilt, 0.0, PAPER)
    assert p[6] == 1 and p.isfinite().all() and tilt_group(q[:0], groups[:0], PAPER).shape == (0,)


def test_group_tilt_ignores_row_order() -> None:
    q, groups = torch.rand(64, generator=generator(4)), torch.arange(64) // 16 * 1000
    order = torch.randperm(64, generator=generator(5))
    tilt = tilt_group(q, groups, PAPER)
    torch.testing.assert_close(tilt_group(q[order], groups[order], PAPER), tilt[order])


# --- bias ------------------------------------------------------------------------------------------------------------


@quick
@given(
    values=st.lists(st.floats(-3, 3), min_size=1, max_size=40),
    keep_ratio=st.sampled_from([0.05, 0.06, 0.25, 0.5, 0.75, 0.95]),
)
def test_mean_survival_is_the_keep_ratio(values: list[float], keep_ratio: float) -> None:
    """E[p] = kappa within 1e-6, also where most of the p's are clipped."""
    tilt, settings = torch.tensor(values, dtype=torch.float64), Settings(keep_ratio)
    p = survival_probability(tilt, solve_bias(tilt, settings), settings)
    assert abs(p.mean().item() - keep_ratio) < 1e-6 and p.min() >= 0.05 and p.max() <= 0.95


def test_a_keep_ratio_of_1_has_no_bias() -> None:
    """It means that nothing is pruned, and is no reason to keep all but 5%."""
    with pytest.raises(ValueError, match="no bias reaches"):
        solve_bias(torch.zeros(3), Settings(1.0))


@pytest.mark.parametrize(
    "odd",
    [
        *[{"keep_ratio": keep_ratio} for keep_ratio in (0.04, 0.96, math.nan)],
        {"p_min": -0.1},
        {"p_max": 1.1},
        {"p_min": 0.6, "p_max": 0.4},
        *[{"positive_target": target} for target in (-0.1, 1.1, math.nan)],
        *[{"balance": balance} for balance in (-1.0, math.inf, math.nan)],
        {"tilt": "other"},
    ],
)
def test_settings_refuse_what_cannot_work(odd: dict) -> None:
    """No bias reaches a keep ratio outside [p_min, p_max]; the sentence names the value."""
    with pytest.raises(ValueError, match=next(iter(odd))):
        Settings(**odd)


def test_settings_do_not_change() -> None:
    """The bias is cached by settings."""
    with pytest.raises(FrozenInstanceError):
        PAPER.keep_ratio = 0.4  # type: ignore[misc]


def test_bias_needs_tilts() -> None:
    for tilt in (torch.empty(0), torch.tensor([0.0, math.nan])):
        with pytest.raises(ValueError, match="at least one tilt"):
            solve_bias(tilt, PAPER)


@pytest.mark.parametrize("tilt", ["printed", "group"])
def test_bias_is_solved_over_all_scored_rollouts(tilt: Tilt) -> None:
    """The window of observed scores decides, not that of labelled ones, and new data moves it."""
    calibrator, settings = Calibrator(bins=16, window=320), Settings(0.4, tilt=tilt)
    calibrator.label(*sample(320, seed=6))
    assert not calibrator.ready
    with pytest.raises(ValueError):
        calibrator.bias(settings)
    for seed in (7, 8):
        arrivals, groups = torch.rand(320, generator=generator(seed)), torch.arange(320) // 16 + 100 * seed
        calibrator.observe(arrivals, groups)  # as many as the window holds
        bias, q = calibrator.bias(settings), calibrator.posterior(arrivals)
        tilted = tilt_group(q, groups, settings) if tilt == "group" else tilt_printed(q, settings)
        p = survival_probability(tilted, bias, settings)
        assert p.mean().item() == pytest.approx(0.4, abs=1e-6)
        assert calibrator.survival(q, groups, settings).equal(p)
    calibrator.label(*sample(320, seed=9))
    assert calibrator.bias(settings) != bias and calibrator.bias(replace(settings, balance=1.0)) != bias


# --- draws -----------------------------------------------------------------------------------------------------------


def test_draws_have_the_same_marginals() -> None:
    """20,000 draws of 12 rollouts in two groups, both ways.

    Each keep rate lies within 4.5 standard errors of p.
    """
    p = torch.linspace(0.05, 0.95, 12, dtype=torch.float64)
    groups = torch.tensor([0, 1] * 6)
    g, rounds = generator(10), 20_000
    bound = 4.5 * (p * (1 - p) / rounds).sqrt()
    bernoulli = draw_bernoulli(p.expand(rounds, -1), g).double().mean(0)
    systematic = torch.stack([SystematicDraw(g)(p, groups) for _ in range(rounds)]).double().mean(0)
    assert ((bernoulli - p).abs() < bound).all() and ((systematic - p).abs() < bound).all()


@quick
@given(p=st.lists(unit, min_size=1, max_size=16))
def test_systematic_marginals_are_exact(p: list[float]) -> None:
    """Integrated over u, the decisions are p.

    They change only where u + C_k is an integer, so that the pieces in between add up.
    """
    p_ = torch.tensor(p, dtype=torch.float64)
    group = torch.zeros(len(p), dtype=torch.int64)
    points = sorted({0.0, 1.0, *((-p_.cumsum(0)) % 1).tolist()})
    total = torch.zeros_like(p_)
    for left, right in zip(points, points[1:]):
        draw = SystematicDraw(generator())
        draw.carry[0] = (left + right) / 2
        total += (right - left) * draw(p_, group).double()
    torch.testing.assert_close(total, p_, rtol=0, atol=1e-9)


@quick
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), unit), min_size=1, max_size=60),
    seed=st.integers(0, 99),
    cut=st.integers(0, 60),
)
def test_systematic_survivors_stay_within_one(arrivals: list[tuple[int, float]], seed: int, cut: int) -> None:
    """In every group, after every arrival; and arrivals may be cut into calls anywhere."""
    groups, p_ = torch.tensor([g for g, _ in arrivals]), torch.tensor([p for _, p in arrivals], dtype=torch.float64)
    keep = SystematicDraw(generator(seed))(p_, groups)
    for group in groups.unique():
        mine = groups == group
        assert ((keep[mine].double() - p_[mine]).cumsum(0).abs() < 1 + 1e-9).all()
    draw = SystematicDraw(generator(seed))
    assert torch.cat([draw(p_[:cut], groups[:cut]), draw(p_[cut:], groups[cut:])]).equal(keep)


def test_draws_obey_certainty_and_their_generator() -> None:
    """p = 1 always keeps and p = 0 never.

    The global generator is neither used nor moved (vllm#8519).
    """
    p, groups = torch.tensor([1.0, 0.0] * 500), torch.arange(1000) // 10
    for draw in (lambda g, p: draw_bernoulli(p, g), lambda g, p: SystematicDraw(g)(p, groups)):
        before = torch.get_rng_state()
        assert draw(generator(11), p).equal(p.bool())
        half = torch.full((1000,), 0.5)
        assert draw(generator(12), half).equal(draw(generator(12), half))
        assert not draw(generator(12), half).equal(draw(generator(13), half))
        assert torch.get_rng_state().equal(before)
    lowest = SystematicDraw(generator())
    lowest.carry[0] = 0.0
    assert lowest(torch.tensor([1.0]), torch.tensor([0])).item()


# --- the calibrator ---------------------------------------------------------------------------------------------------


def test_scores_that_are_not_numbers() -> None:
    """Project-MONAI/MONAI#8707: counted, kept, and the windows stay as they were."""
    calibrator = Calibrator()
    scores, labels = sample(100, seed=14)
    calibrator.observe(scores, torch.arange(100) // 10)
    calibrator.label(scores, labels)
    before = calibrator.state_dict()
    bad = torch.tensor([math.nan, math.inf, -math.inf])
    calibrator.observe(bad, torch.tensor([1, 2, 3]))
    calibrator.label(bad, torch.ones(3))
    after = calibrator.state_dict()
    assert calibrator.rejected == after.pop("rejected") == 3 and all(after[name].equal(before[name]) for name in after)
    for tilt in ("printed", "group"):
        p = calibrator.survival(calibrator.posterior(bad), torch.zeros(3, dtype=torch.int64), Settings(tilt=tilt))
        assert draw_bernoulli(p, generator()).all() and SystematicDraw(generator())(p, torch.zeros(3)).all()


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("tilt", ["printed", "group"])
def test_one_class(label: int, tilt: Tilt) -> None:
    """Project-MONAI/MONAI#8707: only right or only wrong rollouts so far.

    q is that class, and p = kappa for all.
    """
    calibrator = Calibrator()
    scores = torch.rand(50, generator=generator(15))
    groups = torch.arange(50) // 16
    calibrator.observe(scores, groups)
    calibrator.label(scores, torch.full((50,), float(label)))
    q = calibrator.posterior(scores)
    assert q.tolist() == [label] * 50 and calibrator.prior == label
    p = calibrator.survival(q, groups, replace(PAPER, tilt=tilt))
    torch.testing.assert_close(p, torch.full_like(p, 0.5), rtol=0, atol=1e-6)


def test_empty_calibrator() -> None:
    """texttron/BrowseComp-Plus#18: not ready, and still no NaN."""
    calibrator = Calibrator()
    assert not calibrator.ready and calibrator.prior == 0.5
    assert calibrator.posterior(torch.tensor([0.0, 1.0])).tolist() == [0.5, 0.5]
    calibrator.observe(torch.empty(0), torch.empty(0))
    calibrator.label(torch.empty(0), torch.empty(0))
    assert not calibrator.ready


def test_labels_are_verdicts() -> None:
    """miles#2800: what no grader judged, or a shaped reward, is not a label."""
    for labels in (torch.tensor([0.5]), torch.tensor([-1.0]), torch.tensor([math.nan]), torch.ones(2)):
        with pytest.raises(ValueError):
            Calibrator().label(torch.tensor([0.5]), labels)
    with pytest.raises(ValueError):
        Calibrator().observe(torch.rand(2), torch.zeros(3))


def test_state_round_trip() -> None:
    """EasyR1#57, transformers#40500: the same decisions after torch.load(weights_only=True).

    Later data lands the same too.
    """
    scores, labels = sample(500, seed=16)
    groups = torch.arange(500) // 16
    first, second = Calibrator(window=300), Calibrator(window=300)
    first.observe(torch.cat([scores, torch.tensor([math.nan])]), torch.cat([groups, groups[-1:]]))
    first.label(scores[::2], labels[::2])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for calibrator in (first, second):
        calibrator.observe(scores[:50], groups[:50] + 1000)
        calibrator.label(scores[1::2], labels[1::2])
    assert first.posterior(scores).equal(second.posterior(scores)) and first.rejected == second.rejected == 1
    for tilt in ("printed", "group"):
        settings = replace(PAPER, tilt=tilt)
        assert first.bias(settings) == second.bias(settings)


def test_state_of_another_bin_count() -> None:
    """EFS-OpenSource/calibration-framework#19: saved with B = 16, loaded with B = 128, less window.

    It is as if the newest rows had been binned there.
    """
    scores, labels = sample(500, seed=17)
    saved, loaded, direct = Calibrator(bins=16), Calibrator(bins=128, window=200), Calibrator(bins=128, window=200)
    for calibrator in (saved, direct):
        calibrator.label(scores, labels)
        calibrator.observe(scores, torch.arange(500) // 16)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.posterior(scores).equal(direct.posterior(scores)) and loaded.counts()[0].shape == (128,)
    assert loaded.bias(PAPER) == direct.bias(PAPER)


def test_doctests_of_the_module() -> None:
    results = doctest.testmod(calibration)
    assert results.attempted > 0 and results.failed == 0
