"""Figures of latencies, under the names of vLLM's serving benchmark."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (95, 99)


def throughputs(duration: float, completed: int, input_tokens: int, output_tokens: int) -> dict[str, float]:
    """Counts of requests that were answered within `duration` seconds, and how many of each that is a second."""
    return {
        "duration": duration,
        "completed": completed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": completed / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (output_tokens + input_tokens) / duration,
    }


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


def median_and_p99(figures: Mapping[str, Any], name: str) -> str:
    """A cell of a table: two of the figures of `latencies` under one name, in ms."""
    if figures[f"p99_{name}_ms"] is None:
        return "–"
    return f"{figures[f'median_{name}_ms']:,.0f}, {figures[f'p99_{name}_ms']:,.0f}"
