"""From quality scores to keep decisions (Sec. 4.2, App. A.4).

The chain, for each rollout that reaches L_detect with the score s' = sigmoid(quality logit):

    b = min(B - 1, floor(B s'))                 its bin                     `bin_index`
    q = P(Y = 1 | b), from smoothed histograms  its posterior (Eq. 1)       `posterior_table`
    t = a_g (q - μ_g), or λ (ρ - q)             its tilt: p above κ, below  `tilts`
    p = clip(κ + δ + t, p_min, p_max)           its survival (Eq. 2)        `survival_probability`
    δ such that E[p] = κ over recent rollouts   the bias                    `solve_bias`
    keep with probability p                     the draw                    `draw_bernoulli`

Where this departs from the paper, or fills a gap:
1. One window of (score, label). The paper keeps a buffer for each label; two full ones would force
   the prior π to the ratio of their sizes.
2. δ is solved over all scored rollouts, pruned ones included: survivors are a biased sample.
3. Eq. 2 as printed (`tilt_printed`) falls with q in every group. Where a group's mean posterior is
   below ρ, it moves the survivors away from ρ, against Lemma 4.1. `tilt_group` does not.
4. A rollout whose score is not a number is kept (p = 1) and enters no window.

Everything runs on the CPU in fp64. Imports torch and the standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Tilt = Literal["group", "printed"]


@dataclass(frozen=True)
class Settings:
    """The constants of Eq. 2. Raises ValueError where they make no sense. κ = 1: nothing is pruned."""

    keep_ratio: float = 0.5  # κ, expected share of scored rollouts that survive
    positive_target: float = 0.5  # ρ, share of right ones among the survivors to steer to
    balance: float = 2.0  # λ, strength of the steering; 0.5 in the paper, with "printed"
    p_min: float = 0.05
    p_max: float = 0.95
    tilt: Tilt = "group"  # `tilt_group` or `tilt_printed`

    def __post_init__(self) -> None:
        reachable = self.keep_ratio == 1 or self.p_min <= self.keep_ratio <= self.p_max
        if not (reachable and 0 <= self.p_min <= self.p_max <= 1):
            raise ValueError(f"no bias reaches a keep ratio outside [p_min, p_max], or those outside [0, 1]: {self}")
        if not (0 <= self.positive_target <= 1 and 0 <= self.balance < math.inf):
            raise ValueError(f"positive_target must lie in [0, 1] and balance in [0, inf): {self}")
        if self.tilt not in get_args(Tilt):
            raise ValueError(f"tilt must be one of {get_args(Tilt)}: {self}")


def bin_index(scores: Tensor, bins: int) -> Tensor:
    """Bin b(s') = min(B - 1, floor(B s')) of each score (App. A.4).

    `scores` (any shape, float) are clamped to [0, 1]: an fp32 sigmoid is exactly 1.0 from a logit
    of 17 on. Returns int64 of the same shape. Raises ValueError on NaN.
    """
    if scores.isnan().any():
        raise ValueError("a score is NaN and has no bin")
    return (scores.double().clamp(0, 1) * bins).floor().long().clamp_max(bins - 1)


def posterior_table(positives: Tensor, negatives: Tensor, alpha: float) -> Tensor:
    """Posterior q(b) of each bin by Bayes' rule, likelihoods smoothed by α (Eq. 1, App. A.4).

        q(b) = π P(b | 1) / (π P(b | 1) + (1 - π) P(b | 0))        π = N+ / (N+ + N-)
        P(b | 1) = (c+_b + α) / (N+ + α B)                         P(b | 0) alike, from c- and N-

    `positives`, `negatives` (B,): counts c+ and c-, with sums N+ and N-. Returns (B,) fp64. Raises
    ValueError unless α > 0. An empty bin has a posterior between the prior and 1/2.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, not {alpha}: a bin without samples would have the posterior 0/0")
    positives, negatives = positives.double(), negatives.double()
    total = positives.sum() + negatives.sum()
    if total == 0:
        return torch.full_like(positives, 0.5)
    prior, bins = positives.sum() / total, len(positives)
    joint_positive = prior * (positives + alpha) / (positives.sum() + alpha * bins)
    joint_negative = (1 - prior) * (negatives + alpha) / (negatives.sum() + alpha * bins)
    return joint_positive / (joint_positive + joint_negative)


def tilt_printed(q: Tensor, settings: Settings) -> Tensor:
    """Tilt λ (ρ - q), as printed in Eq. 2: right only for groups with a mean posterior above ρ."""
    return settings.balance * (settings.positive_target - q.double())


def tilt_group(q: Tensor, groups: Tensor, settings: Settings) -> Tensor:
    """Tilt a_g (q - μ_g), a_g = clip(κ (ρ - μ_g) / Var_g, -λ, λ): towards ρ from both sides.

    `q` (N,) posteriors, `groups` (N,) int64, any ids. μ_g and Var_g: q's mean and population
    variance in group g. Returns (N,) fp64, NaN where q is NaN; such rows enter no mean.

    Why: survivors of p_i = κ + a (q_i - μ) have the expected positive ratio Σ p_i q_i / Σ p_i =
    μ + a Var / κ. Setting it to ρ gives a; λ bounds it. While no p is clipped, the ratio moves
    towards ρ, as Lemma 4.1 asks, and never past it. The tilts of a group sum to 0.
    """
    q = q.double()
    usable = q.isfinite()
    known = torch.where(usable, q, 0.0)
    ids, row = torch.unique(groups, return_inverse=True)
    count = torch.bincount(row, usable.double(), len(ids)).clamp_min(1)
    mean = torch.bincount(row, known, len(ids)) / count
    deviation = torch.where(usable, q - mean[row], 0.0)
    variance = torch.bincount(row, deviation.square(), len(ids)) / count
    # a variance of 0 comes with deviations of 0, so any finite slope will do
    tiny = torch.finfo(torch.float64).tiny
    slope = settings.keep_ratio * (settings.positive_target - mean) / variance.clamp_min(tiny)
    return torch.where(usable, slope.clamp(-settings.balance, settings.balance)[row] * deviation, torch.nan)


def tilts(q: Tensor, groups: Tensor, settings: Settings) -> Tensor:
    """`tilt_group` or `tilt_printed`, as `settings.tilt` says."""
    return tilt_group(q, groups, settings) if settings.tilt == "group" else tilt_printed(q, settings)


def survival_probability(tilt: Tensor, bias: float, settings: Settings) -> Tensor:
    """p = clip(κ + δ + tilt, p_min, p_max) (N,) fp64 (Eq. 2). A NaN tilt has p = 1: kept."""
    p = (settings.keep_ratio + bias + tilt.double()).clamp(settings.p_min, settings.p_max)
    return torch.where(p.isnan(), 1.0, p)


def solve_bias(tilt: Tensor, settings: Settings) -> float:
    """Bias δ for which the survival probabilities of `tilt` (N,) average κ, by bisection (A.4).

    Exact to 1e-9, clipped p included. Raises ValueError if `tilt` is empty or not finite, and at
    κ = 1, which no bias reaches.
    """
    if not len(tilt) or not tilt.isfinite().all():
        raise ValueError("the bias needs at least one tilt, and all of them finite")
    p_min, p_max = settings.p_min, settings.p_max
    if settings.keep_ratio > p_max:
        raise ValueError("no bias reaches a keep ratio of 1: nothing is pruned then")
    tilt = tilt.double() + settings.keep_ratio
    low, high = p_min - tilt.max().item(), p_max - tilt.min().item()  # every p is p_min, every p is p_max
    for _ in range(50):
        middle = (low + high) / 2
        if (tilt + middle).clamp(p_min, p_max).mean().item() < settings.keep_ratio:
            low = middle
        else:
            high = middle
    return high


def draw_bernoulli(p: Tensor, generator: torch.Generator) -> Tensor:
    """Independent keep decisions, as in the paper. `p` (N,); returns (N,) bool, True = keep."""
    return torch.rand(p.shape, generator=generator, dtype=torch.float64) < p


class SystematicDraw:
    """Keep decisions with the marginals of `draw_bernoulli`, and a nearly fixed number per group.

    Each group draws one uniform u. With C_k the sum of its first k p's, rollout k is kept when
    floor(C_k + u) > floor(C_{k-1} + u): the number kept differs from C_k by less than one. A
    group's rollouts may arrive over several calls; make one object per generation.

    >>> draw = SystematicDraw(torch.Generator().manual_seed(0))
    >>> draw(torch.full((8,), 0.5), torch.tensor([7, 7, 7, 7, 9, 9, 9, 9])).view(2, 4).sum(1)
    tensor([2, 2])
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.carry: dict[int, float] = {}  # group id -> fractional part of C_k + u

    def __call__(self, p: Tensor, groups: Tensor) -> Tensor:
        """`p` (N,) in [0, 1] and `groups` (N,) int64, in order of arrival; returns (N,) bool."""
        keep = []
        for probability, group in zip(p.tolist(), groups.tolist(), strict=True):
            if group not in self.carry:
                self.carry[group] = torch.rand((), generator=self.generator, dtype=torch.float64).item()
            level = self.carry[group] + probability  # passes an integer exactly when the fractional part reaches 1
            keep.append(level >= 1)
            self.carry[group] = level - (level >= 1)
        return torch.tensor(keep, dtype=torch.bool)


class Calibrator:
    """Two sliding windows of the newest `window` scores s' in [0, 1], and what they tell.

    Labelled: (score, label) of graded rollouts, for the posterior. Observed: (score, group) of all
    scored rollouts, pruned ones included, for the bias. Non-finite scores enter neither.

    bins: B; more need a longer window. On uniform, calibrated scores q has an RMSE of 0.21, 0.14,
    0.07 with windows of 256, 1024, 4096, and of 0.13, 0.07, 0.04 with B = 32. alpha: Laplace's α.
    """

    def __init__(self, bins: int = 128, alpha: float = 1.0, window: int = 4096) -> None:
        if bins < 1 or window < 1 or not alpha > 0:
            raise ValueError(f"bins and window must be at least 1 and alpha positive, not {bins}, {window}, {alpha}")
        self.bins, self.alpha, self.window = bins, alpha, window
        self._observed = [torch.empty(0), torch.empty(0, dtype=torch.int64)]  # scores, groups
        self._labelled = [torch.empty(0), torch.empty(0, dtype=torch.bool)]  # scores, labels
        self._table: Tensor | None = None
        self._biases: dict[Settings, float] = {}
        self.rejected = 0  # observed scores that were not finite

    def observe(self, scores: Tensor, groups: Tensor) -> None:
        """Add rollouts scored at L_detect: `scores` (N,), `groups` (N,) of ids unique in a run."""
        self._observed = self._newest(self._observed, scores, groups.detach().to("cpu", torch.int64))
        self.rejected += int((~scores.isfinite()).sum())
        self._biases = {}

    def label(self, scores: Tensor, labels: Tensor) -> None:
        """Add graded rollouts: `scores` (N,), `labels` (N,), 0 or 1 (else ValueError)."""
        if not ((labels == 0) | (labels == 1)).all():
            raise ValueError("every label must be 0 or 1: leave out rollouts that were not judged, and shaped rewards")
        self._labelled = self._newest(self._labelled, scores, labels.detach().cpu().bool())
        self._table, self._biases = None, {}

    def _newest(self, window: list[Tensor], scores: Tensor, values: Tensor) -> list[Tensor]:
        scores = scores.detach().to("cpu", torch.float32)
        if scores.shape != values.shape:
            raise ValueError(f"{tuple(scores.shape)} scores do not fit {tuple(values.shape)} groups or labels")
        rows = scores.isfinite()
        return [torch.cat(pair)[-self.window :].clone() for pair in zip(window, (scores[rows], values[rows]))]

    @property
    def ready(self) -> bool:
        """Whether both windows hold something, so that q and δ mean something."""
        return len(self._labelled[0]) > 0 and len(self._observed[0]) > 0

    @property
    def prior(self) -> float:
        """Positive ratio π of the labelled window; 1/2 while it is empty."""
        labels = self._labelled[1]
        return labels.double().mean().item() if len(labels) else 0.5

    def counts(self) -> tuple[Tensor, Tensor]:
        """Histograms c+ and c- of the labelled window, each (B,) int64."""
        scores, labels = self._labelled
        index, size = bin_index(scores, self.bins), self.bins
        return torch.bincount(index[labels], minlength=size), torch.bincount(index[~labels], minlength=size)

    def posterior(self, scores: Tensor) -> Tensor:
        """Posterior q (N,) fp64 of `scores` (N,) (Eq. 1); NaN where a score is not finite."""
        if self._table is None:
            self._table = posterior_table(*self.counts(), self.alpha)
        # fp32, as in the windows: a score must meet its own bin
        scores = scores.detach().to("cpu", torch.float32)
        return torch.where(scores.isfinite(), self._table[bin_index(scores.nan_to_num(), self.bins)], torch.nan)

    def bias(self, settings: Settings) -> float:
        """Bias δ over the observed window, cached until data comes. ValueError if that is empty."""
        if settings not in self._biases:
            scores, groups = self._observed
            self._biases[settings] = solve_bias(tilts(self.posterior(scores), groups, settings), settings)
        return self._biases[settings]

    def survival(self, q: Tensor, groups: Tensor, settings: Settings) -> Tensor:
        """Survival probabilities (N,) fp64 of posteriors `q` (N,) in `groups` (N,) (Eq. 2)."""
        return survival_probability(tilts(q, groups, settings), self.bias(settings), settings)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Both windows, oldest first, and `rejected`; loads under weights_only."""
        names = ("observed_scores", "observed_groups", "labelled_scores", "labels")
        return dict(zip(names, (*self._observed, *self._labelled))) | {"rejected": self.rejected}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Restore `state_dict`; a smaller `window` keeps the newest, other `bins` bin anew."""
        self.__init__(self.bins, self.alpha, self.window)
        self.observe(state["observed_scores"], state["observed_groups"])
        self.label(state["labelled_scores"], state["labels"])
        self.rejected = int(state["rejected"])
