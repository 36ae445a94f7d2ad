"""Accuracy against cost and speed of decoders, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smcjax.viz.picture import write_figure

AXES = {"device_seconds_per_question": "device-seconds a question", "tokens_per_cycle": "tokens a cycle"}


def draw_frontier(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy with its interval over cost and over speed, exact decoders filled; the suffix of `path` says the format.

    `rows` are `smcjax.bench.decoders.compare`.
    """
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (field, label) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        for number, row in enumerate(rows):
            accuracy = 100 * row["accuracy"]
            ends = [[accuracy - 100 * row["ci_low"]], [100 * row["ci_high"] - accuracy]]
            axes.errorbar(
                [row[field]],
                [accuracy],
                yerr=ends,
                fmt="o" if row["exact"] else "s",
                color=f"C{number % 10}",
                markersize=6 + 3 * (number // 10),
                fillstyle="full" if row["exact"] else "none",
                capsize=3,
                label=row["decoder"],
            )
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_xscale("log")
    figure.axes[0].set_ylabel("accuracy, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    write_figure(figure, path)
