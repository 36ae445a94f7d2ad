"""95% intervals for accuracies and for differences of accuracies on the same problems.

Outcomes are independent, or come in clusters: answers about one document are right or wrong together more often than
answers about two, so what counts is how clusters differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927): all p with |p̂ - p| ≤ z·√(p(1-p)/n).

    Unlike p̂ ± z·√(p̂(1-p̂)/n) it stays in [0, 1] and does not shrink to nothing at 0 or n successes.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes={successes}, n={n}: need 0 ≤ successes ≤ n and n ≥ 1")
    return _wilson(successes / n, n, Z_95)


def _wilson(p: float, n: float, z: float) -> tuple[float, float]:
    z2 = z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The formula gives exactly 0 and 1 at the ends; rounding does not.
    return (0.0 if p == 0 else centre - half, 1.0 if p == 1 else centre + half)


def paired_difference_interval(
    a: Sequence[bool] | np.ndarray, b: Sequence[bool] | np.ndarray
) -> tuple[float, float, float]:
    """(difference, low, high) of accuracy(a) - accuracy(b), for two methods judged on the same problems in order.

    Only problems on which the two disagree say anything. Agresti and Min's interval (2005): one half added to each
    cell of the 2x2 table, then the normal interval of the difference of dependent proportions; the difference itself is
    reported as observed.
    """
    a, b = np.asarray(a, bool), np.asarray(b, bool)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(f"a has shape {a.shape} and b {b.shape}: need two outcomes for each of the same problems")
    only_a, only_b = int((a & ~b).sum()) + 0.5, int((b & ~a).sum()) + 0.5
    n = a.size + 2
    centre = (only_a - only_b) / n
    half = Z_95 * math.sqrt(only_a + only_b - (only_a - only_b) ** 2 / n) / n
    return float(a.mean() - b.mean()), max(-1.0, centre - half), min(1.0, centre + half)


def clustered_interval(clusters: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Wilson's interval for a proportion of outcomes in clusters, with n divided by the design effect.

    That is the variance of the proportion, as the clusters differ, over what independent outcomes would have; at least
    1, and n for a cluster alone. Student's t for as many clusters stands for the normal quantile. Clusters of one
    outcome each: `wilson_interval`.
    """
    sizes, right = _sizes(clusters), _right(clusters)
    n, count = int(sizes.sum()), len(sizes)
    if n == count:
        return wilson_interval(int(right.sum()), n)
    p = float(right.sum() / n)
    effect = float(n) if count == 1 else 1.0
    if count > 1 and 0 < p < 1:
        effect = max(1.0, _variance(right, sizes) / (p * (1 - p) / n))
    return _wilson(p, n / effect, _student(count - 1))


def clustered_difference_interval(
    a: Sequence[Sequence[bool]], b: Sequence[Sequence[bool]]
) -> tuple[float, float, float]:
    """(difference, low, high) of accuracy(a) - accuracy(b), for two methods judged on the same clusters in order.

    Student's interval of the clusters' differences; (difference, -1, 1) for a cluster alone. Clusters of one outcome
    each: `paired_difference_interval`.
    """
    sizes = _sizes(a)
    if not np.array_equal(sizes, _sizes(b)):
        raise ValueError(f"a has clusters of {sizes.tolist()} and b of {_sizes(b).tolist()}: need the same problems")
    if sizes.sum() == len(sizes):
        return paired_difference_interval([one for (one,) in a], [one for (one,) in b])
    difference, low, high = _mean_interval(_right(a) - _right(b), sizes)
    return difference, max(-1.0, low), min(1.0, high)


def clustered_mean_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(mean, low, high) of numbers in clusters: Student's interval of the clusters' sums; infinite for one alone."""
    return _mean_interval(np.array([math.fsum(cluster) for cluster in clusters]), _sizes(clusters))


def _mean_interval(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    mean = float(sums.sum() / sizes.sum())
    half = _student(len(sizes) - 1) * math.sqrt(_variance(sums, sizes)) if len(sizes) > 1 else math.inf
    return mean, mean - half, mean + half


def _sizes(clusters: Sequence[Sequence[float]]) -> np.ndarray:
    if len(clusters) == 0 or any(len(cluster) == 0 for cluster in clusters):
        raise ValueError("clusters have no outcome: need at least one in each")
    return np.array([len(cluster) for cluster in clusters], float)


def _right(clusters: Sequence[Sequence[bool]]) -> np.ndarray:
    return np.array([sum(cluster) for cluster in clusters], float)


def _variance(sums: np.ndarray, sizes: np.ndarray) -> float:
    """Variance of Σ sums / Σ sizes, linearised, over clusters as independent draws."""
    rest = sums - sizes * sums.sum() / sizes.sum()
    return float(len(sizes) / (len(sizes) - 1) * (rest**2).sum() / sizes.sum() ** 2)


def _student(freedom: int) -> float:
    """97.5% quantile of Student's t, by Cornish and Fisher's expansion: within 1% from 4 degrees of freedom on."""
    z, f = Z_95, max(freedom, 1)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
