"""95% intervals for accuracies and for differences of accuracies on the same problems."""

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
    p, z2 = successes / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The formula gives exactly 0 and 1 at the ends; rounding does not.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


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
