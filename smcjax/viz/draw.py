"""A trace as a picture: the genealogy of the particles, their ESS and their weights, cycle by cycle.

Columns 0 … C of the genealogy are the populations after the start and after each cycle; an edge joins a particle to
the row that it was copied from (or simply was) one column earlier. What still has a descendant at the end is coloured.
"""

from __future__ import annotations

import dataclasses
import os
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import FixedLocator, MaxNLocator

from smcjax.viz.genealogy import DEAD, SHARED, descendants, families, finished_nodes, lineages
from smcjax.viz.picture import (
    ANSWER,
    BASE,
    FAINT,
    FAMILY,
    INK,
    LARGE,
    MUTED,
    PANEL,
    RULE,
    SMALL,
    TRUNK,
    styled,
    write_figure,
)
from smcjax.viz.trace_file import TraceFile


def normalise(log_weights: np.ndarray) -> np.ndarray:
    """Log weights less their LSE along the last axis; −inf stays, NaN and +inf are NaN and left out of the sum."""
    usable = np.where(np.isfinite(log_weights), log_weights.astype(np.float64), -np.inf)
    top = usable.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total = np.exp(usable - top).sum(axis=-1, keepdims=True)
    normalised = usable - top - np.log(np.where(total > 0, total, 1.0))
    return np.where(np.isnan(log_weights) | np.isposinf(log_weights), np.nan, normalised)


# ---------------------------------------------------------------------------------------------------- text


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def excerpt(text: str, columns: int, lines: int) -> list[str]:
    """`text` on at most `lines` lines of `columns` columns, white space collapsed, "…" where it is cut.

    Control characters and lone surrogates, which no SVG can hold, become "�".
    """
    words = " ".join(text.split())[: (columns + 1) * (lines + 1)]  # more than fits
    clean = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn") else c for c in words)
    wrapped = [""]
    for word in clean.split():
        line = f"{wrapped[-1]} {word}" if wrapped[-1] else word
        if _columns(line) <= columns:
            wrapped[-1] = line
        elif _columns(word) <= columns:
            wrapped.append(word)
        else:  # nowhere whole: it goes on here and breaks where the line ends
            wrapped[-1] += " " if wrapped[-1] else ""
            for character in word:
                if _columns(wrapped[-1] + character) > columns:
                    wrapped.append("")
                wrapped[-1] += character
    if len(wrapped) > lines:
        wrapped = wrapped[:lines]
        while _columns(wrapped[-1]) >= columns:
            wrapped[-1] = wrapped[-1][:-1]
        wrapped[-1] = wrapped[-1].rstrip() + "…"
    return [line.rstrip() for line in wrapped if line]


# ---------------------------------------------------------------------------------------------------- drawing

IMPOSSIBLE, UNKNOWN = "#F0A878", "#20262E"
WEIGHTS = LinearSegmentedColormap.from_list("weights", ["#EDF3F8", "#9CC5DF", "#2F7FB8", "#08305C"])
MAX_LABELLED_PARTICLES = 48  # particles whose final weights are written: of more, rows are lower than a line of text


@styled
def draw(trace: TraceFile, path: str | os.PathLike[str]) -> None:
    """Draws to `path`, an .svg or .png by its name. The same trace gives the same bytes.

    Raises ValueError for another ending and where the file cannot be written.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise ValueError(f"{path} is neither .svg nor .png; name the picture with one of these endings.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a script that the font lacks shows as boxes
        write_figure(_figure(trace), Path(path), _name(trace))


def _name(trace: TraceFile) -> str:
    """The picture's title, which browsers show and screen readers say."""
    prompt = excerpt(trace.prompt, 80, 1) if trace.prompt else []
    return f"Genealogy of {trace.n_particles} particles" + (f": {prompt[0]}" if prompt else "")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Places in inches, from the top."""

    width: float
    tree: float
    ess: float
    heat: float
    text: list[str]

    LEFT, RIGHT, GAP, SIDE = 0.72, 0.35, 0.24, 1.35
    TITLE, LEGEND, AXIS = 0.78, 0.42, 0.52

    @classmethod
    def of(cls, trace: TraceFile) -> _Layout:
        n, width = trace.n_particles, float(np.clip(3.4 + 0.42 * trace.cycles, 9.0, 17.0))
        text = [] if trace.texts is None else excerpt(trace.texts[trace.selected], int((width - 1.4) * 13.2), 5)
        return cls(width, float(np.clip(0.31 * n, 1.5, 8.5)), 0.85, float(np.clip(0.17 * n, 0.95, 4.2)), text)

    @property
    def text_height(self) -> float:
        return 0.46 + 0.185 * len(self.text) if self.text else 0.0

    @property
    def height(self) -> float:
        panels = self.tree + self.GAP + self.ess + self.GAP + self.heat
        return self.TITLE + self.LEGEND + panels + self.AXIS + (self.text_height + 0.22 if self.text else 0.05)

    def axes(self, figure: Figure, left: float, top: float, width: float, height: float, **kwargs: Any) -> Axes:
        place = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return figure.add_axes(place, **kwargs)


def _figure(trace: TraceFile) -> Figure:
    layout = _Layout.of(trace)
    figure = Figure(figsize=(layout.width, layout.height))
    FigureCanvasAgg(figure)
    wide = layout.width - layout.LEFT - layout.SIDE - layout.RIGHT - 0.2
    side = layout.LEFT + wide + 0.2
    top = layout.TITLE + layout.LEGEND
    tree = layout.axes(figure, layout.LEFT, top, wide, layout.tree)
    final = layout.axes(figure, side, top, layout.SIDE, layout.tree, sharey=tree)
    top += layout.tree + layout.GAP
    ess = layout.axes(figure, layout.LEFT, top, wide, layout.ess, sharex=tree)
    beside_ess = (side / layout.width, 1 - (top + layout.ess / 2) / layout.height)
    top += layout.ess + layout.GAP
    heat = layout.axes(figure, layout.LEFT, top, wide, layout.heat, sharex=tree)
    bar = layout.axes(figure, side, top, 0.13, layout.heat)
    top += layout.heat + layout.AXIS

    _title(figure, layout, trace)
    _tree(tree, trace)
    _final_weights(final, trace)
    _ess(ess, trace)
    if trace.cycles:
        finite = trace.ess[np.isfinite(trace.ess)]
        if len(finite):
            figure.text(*beside_ess, f"lowest {finite.min():.1f}\nmean {finite.mean():.1f}", va="center",
                        size=SMALL, color=MUTED, linespacing=1.5)  # fmt: skip
    _heat(heat, bar, trace)
    tree.set_xlim(-0.35, trace.cycles + 0.5)
    for axes in (tree, ess):
        axes.tick_params(axis="x", labelbottom=False, length=0)
        for t in np.flatnonzero(trace.resampled) + 1:
            axes.axvline(float(t), color=RULE, lw=0.6, ls=(0, (1.5, 2)), zorder=0)
    heat.xaxis.set_major_locator(_ticks(trace.cycles, 20, first=1))
    heat.set_xlabel("cycle")
    if layout.text:
        _answer(layout.axes(figure, layout.LEFT, top, layout.width - layout.LEFT - layout.RIGHT, layout.text_height),
                layout, trace)  # fmt: skip
    return figure


def _ticks(count: int, most: int, *, first: int) -> FixedLocator | MaxNLocator:
    """Every whole number where there is room, round ones otherwise."""
    if count <= most:
        return FixedLocator(range(first, first + count))
    return MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10])


def _title(figure: Figure, layout: _Layout, trace: TraceFile) -> None:
    across = layout.width - layout.LEFT - layout.RIGHT
    shown = excerpt(trace.prompt, int(across * 8.3), 1) if trace.prompt else []
    prompt = f"“{shown[0]}”" if shown else "A prompt of token ids" if trace.prompt is None else "“ ”"
    resamples = int(trace.resampled.sum())
    facts = [
        f"N = {trace.n_particles} particle{'s' * (trace.n_particles != 1)}",
        *([] if trace.gamma is None else [f"K = {trace.gamma} drafted a cycle"]),
        f"{trace.cycles} cycle{'s' * (trace.cycles != 1)}",
        f"{resamples} resample{'s' * (resamples != 1)}",
        f"log evidence {trace.log_evidence:.2f}".replace("-", "−").replace("inf", "∞").replace("nan", "unknown"),
    ]
    x = layout.LEFT / layout.width
    figure.text(x, 1 - 0.40 / layout.height, prompt, size=LARGE, weight="bold")
    figure.text(x, 1 - 0.66 / layout.height, "  ·  ".join(facts), size=BASE, color=MUTED)


def _colour(family: int) -> str:
    return {DEAD: FAINT, SHARED: TRUNK}.get(family) or FAMILY[family]


def _tree(axes: Axes, trace: TraceFile) -> None:
    cycles, n = trace.ancestors.shape
    heirs, family = descendants(trace.ancestors), families(trace.ancestors, len(FAMILY))
    finished = finished_nodes(trace)
    answer = lineages(trace.ancestors)[:, trace.selected]
    ended = [(t, j) for t in range(cycles + 1) for j in range(n)
             if finished[t, j] and (t == 0 or not finished[t - 1, trace.ancestors[t - 1, j]])]  # fmt: skip
    thin = float(np.clip(24 / n, 0.45, 1.0))  # many rows share the height

    def look(t: int, j: int) -> tuple[int, int, bool]:
        """(family, width level, dotted) of the edge into node (t, j): the node's; dotted out of an ended sequence."""
        level = min(int(heirs[t, j]).bit_length() - 1, 4) if heirs[t, j] else 0
        return int(family[t, j]), level, bool(finished[t - 1, trace.ancestors[t - 1, j]])

    looks: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {}
    for j in range(n):
        t = 1
        while t <= cycles:
            key = look(t, j)
            start, source = t, int(trace.ancestors[t - 1, j])
            # A straight run is one line: fewer points, and dots that stay regular.
            while source == j and t < cycles and trace.ancestors[t, j] == j and look(t + 1, j) == key:
                t += 1
            looks.setdefault(key, []).append((start - 1, source, t, j))
            t += 1
    for (kind, level, dotted), edges in sorted(looks.items()):
        width = 0.9 * thin if kind == DEAD else (1.3 + 0.75 * level) * thin
        _stroke(axes, edges, _colour(kind), width, dotted, zorder=2 + 0.1 * (kind != DEAD) + 0.01 * (kind >= 0))

    line = [(t - 1, int(answer[t - 1]), t, int(answer[t])) for t in range(1, cycles + 1)]
    going = [edge for edge in line if not finished[edge[0], edge[1]]]
    widest = (3.4 * thin + 0.6) if n > 1 else 2.4
    _stroke(axes, line, "white", widest + 2.2, False, zorder=3)
    _stroke(axes, going, ANSWER, widest, False, zorder=3.1)
    _stroke(axes, line[len(going) :], ANSWER, widest, True, zorder=3.1)

    if n * (cycles + 1) <= 500:
        for kind in np.unique(family):
            t, j = np.nonzero(family == kind)
            axes.plot(t, j, "o", ms=2.4 if kind == DEAD else 3.4, color=_colour(kind), zorder=2.5 + 0.1 * (kind >= 0))
        axes.plot(np.arange(cycles + 1), answer, "o", ms=4.6, color=ANSWER, zorder=3.2)
    for t, j in ended:
        colour = ANSWER if answer[t] == j else _colour(family[t, j])
        size = 7.0 * thin if answer[t] == j else 5.4 * thin
        axes.plot(
            t, j, "o", ms=max(size, 3.2), mfc="white", mec=colour, mew=1.5 * max(thin, 0.7), zorder=3.5, clip_on=False
        )
    marks = np.flatnonzero(trace.resampled) + 1
    dense = float(np.clip(60 / max(cycles, 1), 0.55, 1.0))
    axes.plot(marks, np.full(len(marks), 1.0), "v", ms=5.0 * dense, color=INK, mew=0, clip_on=False,
              transform=axes.get_xaxis_transform(), zorder=4)  # fmt: skip

    axes.set_ylim(n - 0.4, -0.75)
    axes.yaxis.set_major_locator(_ticks(n, 16, first=0))
    axes.set_ylabel("particle")
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)

    entries = [Line2D([], [], color=ANSWER, lw=3.2, label="the answer")]
    kinds = {key[0] for key in looks}
    if max(kinds, default=DEAD) >= 0:
        entries.append(Line2D([], [], color=FAMILY[0], lw=2, label="survives, a colour a family"))
    if SHARED in kinds:
        entries.append(Line2D([], [], color=TRUNK, lw=3, label="ancestor of several families"))
    if DEAD in kinds:
        entries.append(Line2D([], [], color=FAINT, lw=1.4, label="died out"))
    if ended:
        ring: Any = {"marker": "o", "mfc": "white", "mew": 1.5, "ms": 5.5}
        entries.append(Line2D([], [], color=TRUNK, lw=1.6, ls=(0, (1, 1.4)), label="ended", **ring))
    if len(marks):
        entries.append(Line2D([], [], color=INK, marker="v", ms=5, mew=0, lw=0, label="resampled"))
    axes.legend(handles=entries, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, borderaxespad=0,
                borderpad=0.7, handlelength=2.0, columnspacing=1.8, labelcolor=MUTED)  # fmt: skip


def _stroke(
    axes: Axes, edges: list[tuple[int, int, int, int]], colour: str, width: float, dotted: bool, zorder: float
) -> None:
    """All edges as one path: straight within a row, an S from row to row."""
    points: list[tuple[float, float]] = []
    codes: list[int] = []
    for x0, y0, x1, y1 in edges:
        if y0 == y1:
            points += [(x0, y0), (x1, y1)]
            codes += [int(Curve.MOVETO), int(Curve.LINETO)]
        else:
            middle = (x0 + x1) / 2
            points += [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]
            codes += [int(Curve.MOVETO)] + [int(Curve.CURVE4)] * 3
    if points:
        style: Any = (0, (1.0, 1.4)) if dotted else "-"
        axes.add_patch(PathPatch(Curve(points, codes), fill=False, ec=colour, lw=width, ls=style, zorder=zorder,
                                 capstyle="butt" if dotted else "round", joinstyle="round"))  # fmt: skip


def _final_weights(axes: Axes, trace: TraceFile) -> None:
    """Draws the final weights, from which the answer was drawn."""
    n, weights = trace.n_particles, np.exp(normalise(trace.final_log_weights))
    axes.tick_params(axis="both", length=0, labelleft=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("final weight", size=SMALL, loc="left", labelpad=2)  # below: the legend may reach over the top
    if not np.isfinite(weights).all() or weights.max() <= 0:
        axes.text(0, (n - 1) / 2, "no usable weight", size=SMALL, color=MUTED, va="center")
        return
    colours = [
        ANSWER if j == trace.selected else _colour(kind)
        for j, kind in enumerate(families(trace.ancestors, len(FAMILY))[-1])
    ]
    axes.barh(np.arange(n), weights, height=0.62, color=colours)
    axes.set_xlim(0, weights.max() * 1.6)
    if n <= MAX_LABELLED_PARTICLES:
        for j, weight in enumerate(weights):
            axes.text(weight + weights.max() * 0.06, j, f"{weight:.0%}" if weight >= 0.01 or weight == 0 else "<1%",
                      size=SMALL, va="center", color=ANSWER if j == trace.selected else MUTED)  # fmt: skip
    else:
        top = int(weights.argmax())
        axes.text(weights[top] * 1.06, top, f"{weights[top]:.0%}", size=SMALL, va="center", color=MUTED)


def _ess(axes: Axes, trace: TraceFile) -> None:
    n, x = trace.n_particles, np.arange(1, trace.cycles + 1)
    low, high = 1.0 - 0.06 * max(n - 1, 1), n + 0.08 * max(n - 1, 1)
    axes.fill_between(x, low, trace.ess, color="#DCE8F2", lw=0)
    axes.plot(x, trace.ess, color=FAMILY[0], lw=1.4, marker="o" if trace.cycles <= 60 else None, ms=3.2)
    axes.plot(x[trace.resampled], trace.ess[trace.resampled], "v", color=INK, mew=0,
              ms=5.5 if trace.cycles <= 60 else 3.5, zorder=3)  # fmt: skip
    axes.set_ylim(low, high)
    axes.set_yticks(sorted({1, (n + 1) // 2, n} if n > 3 else {1, n}))
    axes.set_ylabel("ESS")


def _heat(axes: Axes, bar: Axes, trace: TraceFile) -> None:
    n, cycles = trace.n_particles, trace.cycles
    axes.set_ylim(n - 0.5, -0.5)
    axes.yaxis.set_major_locator(_ticks(n, 10, first=0))
    axes.set_ylabel("particle")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    weights = normalise(trace.log_weights).T  # [N, C]
    finite = weights[np.isfinite(weights)]
    if not len(finite):
        bar.set_axis_off()
        message = "no usable weight" if cycles else "no cycle: every particle ended with its first token"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", size=BASE, color=MUTED)
        return
    # Equal weights sit in the palette's upper half; what is e⁻⁷ of them or less is as good as nothing.
    floor = -np.log(n) - 7.0
    lowest = float(np.clip(finite.min(), floor, -np.log(n) - 1.5))
    extent = (0.5, cycles + 0.5, n - 0.5, -0.5)
    image = axes.imshow(np.ma.masked_invalid(weights), cmap=WEIGHTS, vmin=lowest, vmax=0, aspect="auto",
                        interpolation="nearest", extent=extent)  # fmt: skip
    entries = []
    for holes, colour, label in ((np.isneginf(weights), IMPOSSIBLE, "−∞"), (np.isnan(weights), UNKNOWN, "NaN")):
        if holes.any():
            flat = LinearSegmentedColormap.from_list(label, [colour, colour])
            axes.imshow(
                np.ma.masked_array(holes, ~holes), cmap=flat, aspect="auto", interpolation="nearest", extent=extent
            )
            entries.append(Patch(color=colour, label=label))
    axes.figure.colorbar(image, cax=bar, extend="min" if finite.min() < lowest else "neither")
    bar.set_ylabel("log weight", size=SMALL)
    bar.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    bar.tick_params(length=2)
    bar.spines[:].set_visible(False)
    if entries:
        bar.legend(handles=entries, loc="upper left", bbox_to_anchor=(4.6, 1.0), frameon=False, borderaxespad=0,
                   handlelength=0.9, handleheight=0.9, labelcolor=MUTED)  # fmt: skip


def _answer(axes: Axes, layout: _Layout, trace: TraceFile) -> None:
    axes.set_facecolor(PANEL)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    tokens = f", {trace.lengths[-1, trace.selected]} tokens" if trace.cycles else ""
    down, inset = 1 / layout.text_height, 0.16 / (layout.width - layout.LEFT - layout.RIGHT)
    axes.axvline(0, color=ANSWER, lw=5)
    axes.text(inset, 1 - 0.12 * down, f"particle {trace.selected} answered{tokens}", size=SMALL, weight="bold",
              color=ANSWER, va="top", transform=axes.transAxes)  # fmt: skip
    axes.text(inset, 1 - 0.34 * down, "\n".join(layout.text), size=BASE, va="top", linespacing=1.4,
              transform=axes.transAxes)  # fmt: skip
