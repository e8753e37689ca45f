"""Numbers that judge: pass@k, an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n - c, k) / C(n, k), exactly rounded.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n: fewer than k samples tell nothing of pass@k
    (openai/human-eval#35).

    >>> pass_at_k(10, 3, 5)
    0.9166666666666666
    """
    if not 0 <= c <= n:
        raise ValueError(f"of {n} samples {c} cannot be right")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def interval(
    values: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap of the mean: the middle `level` of the means of resampled `values`, one per problem.

    Problems are resampled, and the samples of one are not: what it says holds for other problems of the kind. Values
    that are all equal give an interval without width, which does not mean that the mean is known that well. Raises
    ValueError if there are no values or one is not finite.
    """
    data = np.asarray(values, np.float64)
    if not len(data) or not np.isfinite(data).all():
        raise ValueError("an interval needs values, all of them finite")
    rng, rows = np.random.default_rng(seed), max(1, 1_000_000 // len(data))  # 8 MB at a time
    means = [
        data[rng.integers(len(data), size=(min(rows, resamples - start), len(data)))].mean(1)
        for start in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
