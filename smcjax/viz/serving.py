"""Latency over load as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smcjax.viz.picture import colour_of, label_right, log_ticks, new_figure, styled, write_figure

NAMES = {"ttft": "first token a reader gets", "first_cycle": "first tokens drawn", "e2el": "whole request"}


@styled
def draw_latency(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Median and 99th percentile of each latency over the requests per second that were completed, to a file.

    `results` are `smcjax.bench.serving.figures`; the suffix of `path` says the format.
    """
    title = finding(results)
    figure = new_figure(8, 4.5, title)
    axes = figure.subplots()
    results = sorted(results, key=lambda one: one["request_throughput"])
    rates = [one["request_throughput"] for one in results]
    labels = []
    for number, (name, label) in enumerate(NAMES.items()):
        for statistic, line in (("median", "o-"), ("p99", "x:")):
            values = [one[f"{statistic}_{name}_ms"] for one in results]
            axes.plot(rates, values, line, color=colour_of(number))
            labels.append((values[-1], f"{label}, {statistic}", colour_of(number)))
    axes.set_xlabel("requests a second")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    log_ticks(axes.yaxis)
    axes.grid()
    label_right(axes, labels)
    write_figure(figure, path, title)


def finding(results: Sequence[dict[str, Any]]) -> str:
    """The title: what the highest load adds to whole requests, by their 99th percentile."""
    least, most = (pick(results, key=lambda one: one["request_throughput"]) for pick in (min, max))
    low, high = least["p99_e2el_ms"], most["p99_e2el_ms"]
    rate = f"{most['request_throughput']:.3g} requests a second"
    if len(results) == 1:
        return f"99% of requests end within {high:,.0f} ms at {rate}"
    return f"99% of requests end within {high:,.0f} ms at {rate}, {low:,.0f} ms at {least['request_throughput']:.3g}"
