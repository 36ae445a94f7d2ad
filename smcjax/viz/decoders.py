"""Accuracy against cost and speed of decoders, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smcjax.viz.picture import colour_of, label_right, log_ticks, new_figure, styled, write_figure

AXES = {"device_seconds_per_question": "device-seconds a question", "tokens_per_cycle": "tokens a cycle"}


@styled
def draw_frontier(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy with its interval over cost and over speed, exact decoders filled; the suffix of `path` says the format.

    `rows` are `smcjax.bench.decoders.compare`.
    """
    title = finding(rows)
    figure = new_figure(11, 4.5, title)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (field, label) in zip(panels, AXES.items(), strict=True):
        for number, row in enumerate(rows):
            accuracy = 100 * row["accuracy"]
            axes.errorbar(
                [row[field]],
                [accuracy],
                yerr=[[accuracy - 100 * row["ci_low"]], [100 * row["ci_high"] - accuracy]],
                fmt="o" if row["exact"] else "s",
                color=colour_of(number),
                fillstyle="full" if row["exact"] else "none",
                capsize=3,
            )
        axes.set_xlabel(label)
        axes.grid()
    panels[0].set_xscale("log")
    log_ticks(panels[0].xaxis)
    panels[0].set_ylabel("accuracy, % (filled: exact)")
    label_right(panels[1], [(100 * row["accuracy"], row["decoder"], colour_of(i)) for i, row in enumerate(rows)])
    write_figure(figure, path, title)


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """The title: the cheapest decoder whose accuracy is not found to be below the first one's, and what it costs."""
    first, *others = rows
    equal = [row for row in others if row["difference_high"] >= 0]
    if not equal:
        return f"No decoder is as accurate as {first['decoder']}"
    best = min(equal, key=lambda row: row["device_seconds_per_question"])
    cost = best["device_seconds_per_question"] / first["device_seconds_per_question"]
    named = f"{best['decoder']}: no less accurate than {first['decoder']}"
    return f"{named}, within noise, at {cost:.0%} of its device time"
