"""Pictures: their one style, their labels, and files that are there as a whole or not at all."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from smcjax.files import write_atomically

# Okabe and Ito's hues first, told apart under every common colour blindness, then others between them; vermilion is
# kept for the answer alone. Families lie apart, so that place tells them where hue does not.
FAMILY = (
    "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#6F5BA7",
    "#7B8C1C", "#8A5440", "#0A8088", "#A31F6B", "#3A46A8", "#7CC36A",
)  # fmt: skip
ANSWER, TRUNK, FAINT, RULE, INK, MUTED, PANEL = (
    "#D55E00", "#59636F", "#CDD3DA", "#AEB6C0", "#20262E", "#5F6873", "#F4F6F9",
)  # fmt: skip
SMALL, BASE, LARGE = 8.0, 9.0, 12.0
FONT = "DejaVu Sans"
FONTS = f"'{FONT}', Verdana, system-ui, sans-serif"  # of an SVG: where the first is missing, Verdana is as wide
STYLE: dict[str, Any] = {
    "font.family": [FONT],
    "font.size": BASE,
    "text.color": INK,
    "text.parse_math": False,  # a prompt may hold dollars
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": BASE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.titlesize": LARGE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.alpha": 0.3,
    "figure.titlesize": LARGE,
    "figure.titleweight": "bold",
    "svg.fonttype": "none",  # text stays text: small, searchable, in any script
    "svg.hashsalt": "smcjax",
}
# "default" first: the user's own matplotlibrc must not change a picture. A decorator of functions that draw.
styled = matplotlib.style.context(["default", STYLE])


def colour_of(number: int) -> str:
    """The colour of the line or point of this number."""
    return FAMILY[number % len(FAMILY)]


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of this size in inches, laid out by its contents, beneath its title."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, int(9 * width)))
    return figure


def log_ticks(axis: Axis) -> None:
    """Has a logarithmic axis say 1, 2, 5, 10 and so on, of what it spans now; of over three decades 1, 10 and so on."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def label_right(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Writes each (y, text, colour) right of the axes, at y or as near as the other labels let it be.

    Call it when the limits of the axes are final.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    placed = sorted((float(to_axes.transform((left, y))[1]), text, colour) for y, text, colour in labels)
    gap = min(0.05, 1 / max(1, len(placed)))
    heights: list[float] = []
    for height, _, _ in placed:
        heights.append(max(height, heights[-1] + gap) if heights else max(0.0, height))
    for number in reversed(range(len(heights))):  # what was pushed over the top comes down again
        above = heights[number + 1] - gap if number + 1 < len(heights) else 1.0
        heights[number] = min(heights[number], above)
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        axes.text(1.015, height, text, color=colour, size=SMALL, va="center", transform=axes.transAxes)


def write_figure(figure: Figure, path: Path, title: str | None = None) -> None:
    """Draws to `path`, whose ending says in which format; the same figure gives the same bytes of an SVG or PNG.

    `title` is what browsers show and screen readers say of an SVG. Raises ValueError where it cannot be written.
    """
    kind, drawn = path.suffix.lower().removeprefix("."), io.BytesIO()
    metadata = {"Date": None, **({} if title is None else {"Title": title})} if kind == "svg" else None
    figure.savefig(drawn, format=kind, dpi=160, metadata=metadata, facecolor="white")
    data = drawn.getvalue()
    write_atomically(path, data.replace(f"'{FONT}'".encode(), FONTS.encode()) if kind == "svg" else data)
