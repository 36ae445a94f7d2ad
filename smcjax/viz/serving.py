"""Latency over load as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smcjax.viz.picture import write_figure

NAMES = {"ttft": "first token a reader gets", "first_cycle": "first tokens drawn", "e2el": "whole request"}


def draw_latency(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Median and 99th percentile of each latency over the requests per second that were completed, to a file.

    `results` are `smcjax.bench.serving.figures`; the suffix of `path` says the format.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = [one["request_throughput"] for one in results]
    for number, (name, label) in enumerate(NAMES.items()):
        colour = f"C{number}"
        axes.plot(rates, [one[f"median_{name}_ms"] for one in results], "o-", color=colour, label=f"{label}, median")
        axes.plot(rates, [one[f"p99_{name}_ms"] for one in results], "x:", color=colour, label="p99")
    axes.set_xlabel("requests a second")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    write_figure(figure, path)
