"""Speed of exact decoders over an assumed acceptance rate, with SMC's beside it, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smcjax.viz.picture import write_figure

MARKERS = "o^vDPX*s"  # of exact decoders, by candidates
DASHES = ("--", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (2, 2)))  # of SMC, by particles


def draw_acceptance(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second: of exact decoders at their rates, of SMC and the target alone as level lines. One colour a K.

    `rows` are `smcjax.bench.acceptance.rows_of`; the suffix of `path` says the format.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    gammas: list[int] = []  # in the order in which they appear
    exact: list[int] = []
    smc: list[int] = []
    for row in rows:
        speeds, label = row["tokens_per_second"], row["decoder"]
        if not row["gamma"]:
            axes.axhline(speeds[0], linestyle=":", color="black", label=label)
            continue
        colour = f"C{_place(gammas, row['gamma']) % 10}"
        if row["acceptance"] is None:
            dashes = DASHES[_place(smc, row["n_particles"]) % len(DASHES)]
            axes.axhline(speeds[0], linestyle=dashes, color=colour, label=label)
            continue
        marker = MARKERS[_place(exact, row["n_particles"]) % len(MARKERS)]
        rates, speeds = zip(*sorted(zip(row["acceptance"], speeds, strict=True)), strict=True)
        axes.plot(rates, speeds, marker=marker, color=colour, label=label)
    axes.set_xlabel("assumed acceptance rate of a draft position")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    write_figure(figure, path)


def _place(seen: list[int], number: int) -> int:
    """Where `number` is in `seen`, to which it is added if new."""
    if number not in seen:
        seen.append(number)
    return seen.index(number)
