"""Figures of latencies, under the names of vLLM's serving benchmark."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (95, 99)


def latencies(samples: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles of each name's seconds, in ms; None where there are none.

    Such are gaps between chunks where every answer came in one.
    """
    result: dict[str, float | None] = {}
    for name, seconds in samples.items():
        ms = 1e3 * np.array(seconds)
        numbers: dict[str, Callable[[], Any]] = {
            "mean": ms.mean,
            "median": functools.partial(np.median, ms),
            "std": ms.std,
        }
        numbers |= {f"p{p}": functools.partial(np.percentile, ms, p) for p in PERCENTILES}
        result |= {f"{of}_{name}_ms": float(number()) if seconds else None for of, number in numbers.items()}
    return result
