"""From quality scores to keep decisions: binned posterior, survival probability, bias, draw (Sec. 4.2, App. A.4).

The chain, for every rollout that reaches the detection length with the score s' = sigmoid(quality logit) in [0, 1]:

    b = min(B - 1, floor(B s'))                                   its bin                         `bin_index`
    q = P(Y = 1 | b), by Bayes from smoothed histograms           its posterior, Eq. 1            `posterior_table`
    tilt = a_g (q - mean of the group), or lambda (rho - q)       more or less likely than kappa  `tilts`
    p = clip(kappa + delta + tilt, p_min, p_max)                  its survival probability, Eq. 2 `survival_probability`
    delta such that E[p] = kappa over recent rollouts             the bias                        `solve_bias`
    keep with probability p                                       the draw                        `SystematicDraw`

Where this departs from the paper, or fills a gap:

1. The paper keeps two labelled buffers. Capped separately they would force the prior pi to the ratio of their sizes,
   so `Calibrator` keeps one window of (score, label). Then q(b) = c+_b / (c+_b + c-_b) up to smoothing, whatever share
   of a bin was pruned.
2. delta is solved over all scored rollouts, pruned ones included: survivors are a biased sample of what arrives.
3. Eq. 2 as printed falls with q whatever the group: where a group's mean posterior is below rho it moves the survivors
   further away from rho, against Lemma 4.1. `tilt_group` turns the slope with the group; `tilt_printed` is Eq. 2.
4. A rollout whose score is not a number is kept (p = 1) and enters no window.

Everything runs on the CPU in fp64, deterministically. Imports torch and the standard library only.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Tilt = Literal["group", "printed"]


def bin_index(scores: Tensor, bins: int) -> Tensor:
    """Bin b(s') = min(B - 1, floor(B s')) of each score (App. A.4).

    `scores` (any shape, float) are clamped to [0, 1] first: a sigmoid is exactly 1.0 in fp32 from a logit of about 17.
    Returns int64 of the same shape. Raises ValueError on NaN, which has no bin.

    >>> bin_index(torch.tensor([0.0, 0.49, 0.5, 1.0]), bins=4)
    tensor([0, 1, 2, 3])
    """
    if scores.isnan().any():
        raise ValueError("a score is NaN and has no bin")
    return (scores.double().clamp(0, 1) * bins).floor().long().clamp_max(bins - 1)


def posterior_table(positives: Tensor, negatives: Tensor, alpha: float) -> Tensor:
    """Posterior q(b) = P(Y = 1 | b) of each bin, by Bayes from Laplace-smoothed likelihoods (Eq. 1, App. A.4).

    `positives`, `negatives` (B,): counts c+ and c-, with sums N+ and N-. Returns (B,) fp64. The prior is
    pi = N+ / (N+ + N-). Raises ValueError unless alpha > 0.

    The smoothing makes a bin's odds (c+ + alpha) / (c- + alpha) times r = N+ (N- + alpha B) / (N- (N+ + alpha B)). So
    an empty bin has odds r: near the prior odds while N+ and N- are small beside alpha B, near 1 (q = 1/2) when they
    are large, always between the two. With one class only, q is that class everywhere; without labels it is 1/2.
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


def tilt_printed(q: Tensor, balance: float, positive_target: float) -> Tensor:
    """Eq. 2's tilt as printed: lambda (rho - q). `q` (N,); returns (N,) fp64, NaN where q is NaN.

    It favours likely-wrong rollouts in every group, so it balances only groups whose mean posterior is above rho.
    """
    return balance * (positive_target - q.double())


def tilt_group(q: Tensor, groups: Tensor, keep_ratio: float, balance: float, positive_target: float) -> Tensor:
    """Tilt that moves each group's survivors towards rho from either side: a_g (q - mu_g).

    `q` (N,) posteriors, `groups` (N,) int64 arbitrary ids; returns (N,) fp64, NaN where q is NaN (such rows enter
    neither mean nor variance). mu_g and Var_g (population) are over the rows of group g, and
    a_g = clip(kappa (rho - mu_g) / Var_g, -lambda, lambda).

    Why: keep with p_i = kappa + a (q_i - mu). Then sum_i p_i q_i / sum_i p_i = mu + a Var / kappa is the expected
    positive ratio of the kept (ratio of expectations). Setting it to rho gives a; lambda bounds it. So the ratio goes
    towards rho and never past it while p is not clipped. For mu_g well above rho this is the paper's lambda (rho - q)
    up to a constant; below rho it is the mirror image, as Lemma 4.1 asks. The tilts of a group sum to 0, so the bias
    delta has only clipping to make up for. Equal posteriors, or a group of one, give 0.
    """
    q = q.double()
    usable = q.isfinite()
    known = torch.where(usable, q, 0.0)
    ids, row = torch.unique(groups, return_inverse=True)
    count = torch.bincount(row, usable.double(), len(ids)).clamp_min(1)
    mean = torch.bincount(row, known, len(ids)) / count
    deviation = torch.where(usable, q - mean[row], 0.0)
    variance = torch.bincount(row, deviation.square(), len(ids)) / count
    # 0/0 becomes 0 and x/0 becomes the bound: either way the deviations it multiplies are 0
    slope = keep_ratio * (positive_target - mean) / variance.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(usable, slope.clamp(-balance, balance)[row] * deviation, torch.nan)


def tilts(kind: Tilt, q: Tensor, groups: Tensor, keep_ratio: float, balance: float, positive_target: float) -> Tensor:
    """`tilt_group` or `tilt_printed`, by name; arguments as for the former. Raises ValueError for another name."""
    if kind == "group":
        return tilt_group(q, groups, keep_ratio, balance, positive_target)
    if kind == "printed":
        return tilt_printed(q, balance, positive_target)
    raise ValueError(f"tilt must be 'group' or 'printed', not {kind!r}")


def survival_probability(tilt: Tensor, bias: float, keep_ratio: float, p_min: float, p_max: float) -> Tensor:
    """Survival probability p = clip(kappa + delta + tilt, p_min, p_max) (Eq. 2).

    `tilt` (N,); returns (N,) fp64. A NaN tilt (a rollout that could not be scored) gives 1: never prune blindly.
    """
    p = (keep_ratio + bias + tilt.double()).clamp(p_min, p_max)
    return torch.where(p.isnan(), 1.0, p)


def solve_bias(tilt: Tensor, keep_ratio: float, p_min: float, p_max: float) -> float:
    """Bias delta for which the mean of `survival_probability` over `tilt` (N,) equals kappa, by bisection (App. A.4).

    Exact to 1e-9, clipped cases included. Raises ValueError if `tilt` is empty or not finite, or if kappa lies outside
    [p_min, p_max], where no bias can reach it (kappa = 1, no pruning, is the caller's case).
    """
    if not p_min <= keep_ratio <= p_max:
        raise ValueError(f"keep ratio {keep_ratio} is outside [p_min, p_max] = [{p_min}, {p_max}]: no bias reaches it")
    if not len(tilt) or not tilt.isfinite().all():
        raise ValueError("the bias needs at least one tilt, and all of them finite")
    tilt = tilt.double() + keep_ratio
    low, high = p_min - tilt.max().item(), p_max - tilt.min().item()  # every p is p_min, every p is p_max
    for _ in range(50):
        middle = (low + high) / 2
        if (tilt + middle).clamp(p_min, p_max).mean().item() < keep_ratio:
            low = middle
        else:
            high = middle
    return high


def draw_bernoulli(p: Tensor, generator: torch.Generator) -> Tensor:
    """Independent keep decisions, as in the paper. `p` (N,) survival probabilities; returns (N,) bool, True = keep."""
    return torch.rand(p.shape, generator=generator, dtype=torch.float64) < p


class SystematicDraw:
    """Keep decisions with the same marginals as `draw_bernoulli`, but an almost fixed number of survivors per group.

    Each group gets one uniform u; with C_k the running sum of its p's in order of arrival, rollout k is kept when
    floor(C_k + u) > floor(C_{k-1} + u). Hence P(keep k) = p_k, and after every arrival the number kept so far differs
    from C_k by less than one. A group's rollouts may arrive over several calls; make one object per generation.

    >>> draw = SystematicDraw(torch.Generator().manual_seed(0))
    >>> draw(torch.full((8,), 0.5), torch.tensor([7, 7, 7, 7, 9, 9, 9, 9])).view(2, 4).sum(1)
    tensor([2, 2])
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.carry: dict[int, float] = {}  # group id -> fractional part of C_k + u

    def __call__(self, p: Tensor, groups: Tensor) -> Tensor:
        """`p` (N,) survival probabilities in [0, 1], `groups` (N,) int64, in order of arrival; returns (N,) bool."""
        keep = []
        for probability, group in zip(p.tolist(), groups.tolist(), strict=True):
            if group not in self.carry:
                self.carry[group] = torch.rand((), generator=self.generator, dtype=torch.float64).item()
            level = self.carry[group] + probability  # passes an integer exactly when the fractional part reaches 1
            keep.append(level >= 1)
            self.carry[group] = level - (level >= 1)
        return torch.tensor(keep, dtype=torch.bool)


class Calibrator:
    """Two sliding windows of the newest `window` entries, and what is estimated from them.

    Labelled: (score, label) of graded rollouts, for the posterior. Observed: (score, group) of every scored rollout,
    pruned ones included, for the bias. Both hold raw scores, so a state saved with another `bins` is binned anew.
    Scores are s' in [0, 1]; non-finite ones never enter a window, and `observe` counts them in `rejected`.

    `bins`: B = 128 is the paper's, and samples per bin are what limits q: for well-calibrated, uniform synthetic scores
    its error (RMSE) is 0.21, 0.14, 0.07 with windows of 256, 1024, 4096 at B = 128, and 0.13, 0.07, 0.04 at B = 32.
    """

    def __init__(self, bins: int = 128, alpha: float = 1.0, window: int = 4096) -> None:
        """Raises ValueError unless bins and window are at least 1 and alpha is positive."""
        if bins < 1 or window < 1 or not alpha > 0:
            raise ValueError(f"bins and window must be at least 1 and alpha positive, not {bins}, {window}, {alpha}")
        self.bins, self.alpha, self.window = bins, alpha, window
        self.rejected = 0
        self._observed_scores, self._observed_groups = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._labelled_scores, self._labels = torch.empty(0), torch.empty(0, dtype=torch.bool)
        self._table: Tensor | None = None
        self._biases: dict[tuple[str | float, ...], float] = {}

    def observe(self, scores: Tensor, groups: Tensor) -> None:
        """Takes every rollout scored at the detection length: `scores` (N,) float, `groups` (N,) int64.

        An id must not return for another group while it is in the window: number the groups of a run, not of a step.
        """
        scores, groups = _raw(scores), groups.detach().to("cpu", torch.int64)
        if scores.shape != groups.shape:
            raise ValueError(f"{tuple(scores.shape)} scores but {tuple(groups.shape)} groups")
        finite = scores.isfinite()
        self.rejected += int((~finite).sum())
        self._observed_scores = torch.cat([self._observed_scores, scores[finite]])[-self.window :].clone()
        self._observed_groups = torch.cat([self._observed_groups, groups[finite]])[-self.window :].clone()
        self._biases = {}

    def label(self, scores: Tensor, labels: Tensor) -> None:
        """Takes graded rollouts: `scores` (N,) float, `labels` (N,), each 0 or 1 (ValueError otherwise)."""
        scores, labels = _raw(scores), labels.detach().cpu()
        if scores.shape != labels.shape:
            raise ValueError(f"{tuple(scores.shape)} scores but {tuple(labels.shape)} labels")
        if not ((labels == 0) | (labels == 1)).all():
            raise ValueError("every label must be 0 or 1: leave out rollouts that were not judged, and shaped rewards")
        finite = scores.isfinite()
        self._labelled_scores = torch.cat([self._labelled_scores, scores[finite]])[-self.window :].clone()
        self._labels = torch.cat([self._labels, labels[finite].bool()])[-self.window :].clone()
        self._table, self._biases = None, {}

    @property
    def ready(self) -> bool:
        """Whether both windows hold something, so that q and delta mean something."""
        return len(self._labels) > 0 and len(self._observed_scores) > 0

    @property
    def prior(self) -> float:
        """Positive ratio pi of the labelled window (of survivors, once pruning is on); 1/2 while it is empty."""
        return self._labels.double().mean().item() if len(self._labels) else 0.5

    def counts(self) -> tuple[Tensor, Tensor]:
        """Histograms c+ and c- of the labelled window, each (B,) int64; together they sum to its size."""
        index = bin_index(self._labelled_scores, self.bins)
        return (
            torch.bincount(index[self._labels], minlength=self.bins),
            torch.bincount(index[~self._labels], minlength=self.bins),
        )

    def posterior(self, scores: Tensor) -> Tensor:
        """Posterior q (N,) fp64 of `scores` (N,) (Eq. 1); NaN where a score is not finite."""
        if self._table is None:
            self._table = posterior_table(*self.counts(), self.alpha)
        scores = _raw(scores)
        finite = scores.isfinite()
        return torch.where(finite, self._table[bin_index(torch.where(finite, scores, 0.0), self.bins)], torch.nan)

    def bias(
        self, tilt: Tilt, keep_ratio: float, balance: float, positive_target: float, p_min: float, p_max: float
    ) -> float:
        """Bias delta for `tilt` over the observed window with the current posteriors; solved once per new data.

        `tilt`: "group" for `tilt_group`, "printed" for `tilt_printed`. Raises ValueError as `solve_bias` does, so also
        while nothing has been observed.
        """
        key = (tilt, keep_ratio, balance, positive_target, p_min, p_max)
        if key not in self._biases:
            q = self.posterior(self._observed_scores)
            observed = tilts(tilt, q, self._observed_groups, keep_ratio, balance, positive_target)
            self._biases[key] = solve_bias(observed, keep_ratio, p_min, p_max)
        return self._biases[key]

    def survival(
        self,
        q: Tensor,
        groups: Tensor,
        tilt: Tilt,
        keep_ratio: float,
        balance: float,
        positive_target: float,
        p_min: float,
        p_max: float,
    ) -> Tensor:
        """Survival probabilities p (N,) fp64 of posteriors `q` (N,) in `groups` (N,): `tilts`, with the window's `bias` (Eq. 2)."""
        bias = self.bias(tilt, keep_ratio, balance, positive_target, p_min, p_max)
        tilted = tilts(tilt, q, groups, keep_ratio, balance, positive_target)
        return survival_probability(tilted, bias, keep_ratio, p_min, p_max)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Both windows, oldest first, and the count of rejected scores: tensors and an int, fit for weights_only."""
        return {
            "observed_scores": self._observed_scores,
            "observed_groups": self._observed_groups,
            "labelled_scores": self._labelled_scores,
            "labels": self._labels,
            "rejected": self.rejected,
        }

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Restores `state_dict`. Another `bins` or `alpha` re-bins; a smaller `window` keeps the newest entries."""
        rejected = int(state["rejected"])
        self._observed_scores, self._observed_groups = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._labelled_scores, self._labels = torch.empty(0), torch.empty(0, dtype=torch.bool)
        self.observe(state["observed_scores"], state["observed_groups"])
        self.label(state["labelled_scores"], state["labels"])
        self.rejected = rejected


def ece(q: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Expected calibration error: mean over rows of |mean q - positive ratio| of the row's bin of q.

    `q` (N,) posteriors in [0, 1], `labels` (N,) 0/1. Rows with a NaN q are left out; NaN if none remains. Only
    honest for labels that the posterior has not seen yet: compare the q of the decision with the label that came later.
    """
    q, labels = q[~q.isnan()], labels[~q.isnan()]
    if not len(q):
        return math.nan
    gap = torch.bincount(bin_index(q, bins), q.double() - labels.double(), bins)
    return gap.abs().sum().item() / len(q)


def _raw(scores: Tensor) -> Tensor:
    """Scores as the windows store them: one precision for all, or a look-up could land in another bin."""
    return scores.detach().to("cpu", torch.float32)
