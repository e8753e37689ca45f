"""Numbers that judge: does the head tell right from wrong, is q calibrated, pass@k, an interval.

What is undefined, such as the AUC of one class, is NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from calibration import bin_index
from engine import Rollout

Metrics = dict[str, float]


def within_group_auc(scores: Tensor, labels: Tensor, groups: Tensor) -> float:
    """Share of (right, wrong) pairs of one group in which the right one scores higher.

    `scores` (N,) finite, `labels` (N,) 0/1, `groups` (N,) int64. Ties count half; pairs of all
    groups are pooled. A head that only knows which prompts are easy has a good AUC, and here 1/2.

    >>> within_group_auc(torch.tensor([0.9, 0.8, 0.2, 0.1]), torch.tensor([1, 1, 0, 0]), torch.tensor([0, 1, 0, 1]))
    1.0
    """
    wins = pairs = 0.0
    for group in groups.unique():
        right, wrong = (scores[(groups == group) & (labels == label)] for label in (1, 0))
        wrong = wrong.sort().values
        # Ties are among the one and not among the other.
        wins += sum(torch.searchsorted(wrong, right, right=ties).sum().item() for ties in (True, False)) / 2
        pairs += len(right) * len(wrong)
    return wins / pairs if pairs else math.nan


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve over all rows; ties count half."""
    return within_group_auc(scores, labels, torch.zeros_like(scores, dtype=torch.int64))


def head_metrics(scores: Tensor, labels: Tensor, groups: Tensor) -> dict[str, float]:
    """How well scores s' (N,) tell right from wrong: `labels` (N,) 0/1, `groups` (N,) int64.

    `auc`, `auc_within` groups, and `accuracy` at s' = 1/2 beside `base_rate`, that of the better
    constant guess.
    """
    scores, labels, groups = scores.detach().cpu().double(), labels.detach().cpu().double(), groups.detach().cpu()
    ratio = labels.mean().item()
    return {
        "auc": auc(scores, labels),
        "auc_within": within_group_auc(scores, labels, groups),
        "accuracy": ((scores > 0.5) == labels.bool()).double().mean().item(),
        "base_rate": max(ratio, 1 - ratio),
    }


def ece(q: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Expected calibration error: mean over rows of |mean q - positive ratio| in the row's bin.

    `q` (N,) posteriors in [0, 1], `labels` (N,) 0/1. NaN q are left out. Honest only for labels
    that came later than q: those in the window have shaped it.
    """
    q, labels = q[~q.isnan()], labels[~q.isnan()]
    if not len(q):
        return math.nan
    gap = torch.bincount(bin_index(q, bins), q.double() - labels.double(), bins)
    return gap.abs().sum().item() / len(q)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n - c, k) / C(n, k).

    Exactly rounded. Raises ValueError unless 0 <= c <= n and 1 <= k <= n (openai/human-eval#35).

    >>> pass_at_k(10, 3, 5)
    0.9166666666666666
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"there is no pass@{k} of {n} samples, {c} of them right")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def interval(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap of the mean: the middle 95% of the means of resampled `values`.

    One value per problem. Equal values give an interval of width 0, which proves nothing.
    """
    data = np.asarray(values, np.float64)
    # Ten at a time: all at once would not fit in memory, one by one is slow.
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=(10, len(data)))].mean(1) for _ in range(resamples // 10)]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def step_metrics(rollouts: list[Rollout], detect_length: int) -> Metrics:
    """What the graded rollouts of a step tell: see the glossary in docs/training.md.

    The head's numbers compare each score with the reward that came after it: it had not seen them.
    """
    metrics = rollout_metrics(rollouts, detect_length)
    verdicts = Counter(r.verdict for r in rollouts if r.verdict)
    for kind in ("right", "wrong", "no answer", "timeout", "bad gold"):
        metrics[f"verdict_{kind.replace(' ', '_')}"] = verdicts[kind]
    metrics["tokens_trained"] = sum(len(r.token_ids) for r in rollouts if r.advantage is not None)
    known = [r for r in rollouts if r.score is not None and r.reward is not None and math.isfinite(r.score)]
    if known:
        scores, rewards = torch.tensor([r.score for r in known]), torch.tensor([r.reward for r in known])
        quality = head_metrics(scores, rewards, torch.tensor([r.group for r in known]))
        metrics |= {f"head_{name}": value for name, value in quality.items()}
        metrics["ece"] = ece(torch.tensor([r.posterior for r in known]), rewards)
    return metrics


def rollout_metrics(rollouts: list[Rollout], detect_length: int) -> Metrics:
    """Sampling and pruning. What is said of pruned rollouts is estimated.

    Ratios and lengths are those of the scored survivors, each weighted by 1 / p (it stands for the
    1 / p that arrived).
    """
    judged = [r for r in rollouts if r.reward is not None]
    pruned = [r for r in rollouts if r.finish == "pruned"]
    scored = [(r, 1 / (r.survival or 1.0)) for r in judged if len(r.token_ids) > detect_length]
    short = [r.reward for r in judged if len(r.token_ids) <= detect_length]
    survived = sum(r.finish != "pruned" and len(r.token_ids) > detect_length for r in rollouts)
    arrived, weight = survived + len(pruned), sum(w for _, w in scored)
    positive_scored = _ratio(sum(w * r.reward for r, w in scored), weight)
    beyond = _ratio(sum(w * (len(r.token_ids) - detect_length) for r, w in scored), weight)
    # A group without a survivor is there, and empty.
    groups: dict[int, list[float]] = {r.group: [] for r in rollouts}
    for r in judged:
        groups[r.group].append(r.reward)
    alike = sum(len(set(rewards)) < 2 for rewards in groups.values())
    means = [sum(rewards) / len(rewards) for rewards in groups.values() if rewards]
    estimated = arrived if scored else 0
    return {
        "rollouts": len(rollouts),
        "scored": arrived,
        "pruned": len(pruned),
        "keep_ratio": _ratio(survived, arrived),
        "reward": _ratio(sum(short) + (estimated * positive_scored if scored else 0.0), len(short) + estimated),
        "positive_scored": positive_scored,
        "positive_kept": _ratio(sum(r.reward for r, _ in scored), len(scored)),
        "rho_mean": _ratio(sum(means), len(means)),
        "rho_variance": _ratio(sum(m * (1 - m) for m in means), len(means)),
        "zero_variance_after": _ratio(alike, len(groups)),
        "tokens_generated": sum(len(r.token_ids) for r in rollouts),
        "tokens_saved": beyond * len(pruned) if pruned else 0.0,
        "tokens_late": sum(r.late for r in rollouts),
        "tokens_kept": sum(len(r.token_ids) for r in rollouts if r.finish != "pruned"),
        "length_mean": _ratio(sum(len(r.token_ids) for r in judged), len(judged)),
        "truncated": _ratio(sum(r.finish == "length" for r in judged), len(judged)),
    }


def _ratio(part_sum: float, total: float) -> float:
    """part_sum / total, NaN where there is nothing."""
    return part_sum / total if total else math.nan
