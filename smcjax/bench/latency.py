"""Figures of latencies, under the names of vLLM's serving benchmark."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (95, 99)


@dataclasses.dataclass
class Followed:
    """A request as its reader sees it; times in seconds since the first arrival."""

    began: float
    received: list[float] = dataclasses.field(default_factory=list)  # when each piece of the answer came
    ended: float = math.nan
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None  # why it failed, if it did


def arrivals(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Times from 0 on, of a Poisson process of `rate` a second; all 0 at infinity."""
    gaps = rng.exponential(1.0, count) / rate
    gaps[0] = 0.0
    return np.cumsum(gaps).tolist()


def figures_of(
    duration: float, answered: Sequence[Followed], others: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Any]:
    """Requests and tokens in `duration` seconds, and the latencies of answered requests beside those of `others`."""
    inputs, outputs = sum(one.input_tokens for one in answered), sum(one.output_tokens for one in answered)
    return {
        "duration": duration,
        "completed": len(answered),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (outputs + inputs) / duration,
        **latencies(
            {
                "ttft": [one.received[0] - one.began for one in answered],
                **(others or {}),
                "itl": [b - a for one in answered for a, b in itertools.pairwise(one.received)],
                "tpot": [
                    (one.ended - one.received[0]) / (one.output_tokens - 1) for one in answered if one.output_tokens > 1
                ],
                "e2el": [one.ended - one.began for one in answered],
            }
        ),
    }


def latencies(samples: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles of each name's seconds, in ms; None where there are none.

    Such are gaps between chunks where every answer came in one.
    """
    statistics: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    statistics |= {f"p{p}": functools.partial(np.percentile, q=p) for p in PERCENTILES}
    result: dict[str, float | None] = {}
    for name, seconds in samples.items():
        ms = 1e3 * np.array(seconds)
        result |= {f"{of}_{name}_ms": float(number(ms)) if seconds else None for of, number in statistics.items()}
    return result


def cells_of(figures: Mapping[str, Any], *names: str) -> list[str]:
    """Cells of a table: requests and tokens a second, then the median and 99th percentile under each name, in ms."""
    cells = [f"{figures['request_throughput']:.2f}", f"{figures['output_throughput']:,.0f}"]
    for name in names:
        median, p99 = figures[f"median_{name}_ms"], figures[f"p99_{name}_ms"]
        cells.append("–" if p99 is None else f"{median:,.0f}, {p99:,.0f}")
    return cells
