"""Speed of exact decoders over an assumed acceptance rate, with SMC's beside it, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smcjax.viz.picture import INK, colour_of, label_right, new_figure, styled, write_figure

MARKERS = "o^vDPX*s"  # of exact decoders, by candidates
DASHES = ("--", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (2, 2)))  # of SMC, by particles


@styled
def draw_acceptance(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second: of exact decoders at their rates, of SMC and the target alone as level lines. One colour a K.

    `rows` are `smcjax.bench.acceptance.rows_of`; the suffix of `path` says the format.
    """
    title = finding(rows)
    figure = new_figure(9, 5.5, title)
    axes = figure.subplots()
    gammas: list[int] = []  # in the order in which they appear
    exact: list[int] = []
    smc: list[int] = []
    labels = []
    for row in rows:
        speeds, colour = row["tokens_per_second"], INK
        if row["gamma"]:
            colour = colour_of(_place(gammas, row["gamma"]))
        if not row["gamma"]:
            axes.axhline(speeds[0], linestyle=":", color=colour)
        elif row["acceptance"] is None:
            dashes = DASHES[_place(smc, row["n_particles"]) % len(DASHES)]
            axes.axhline(speeds[0], linestyle=dashes, color=colour)
        else:
            marker = MARKERS[_place(exact, row["n_particles"]) % len(MARKERS)]
            rates, speeds = zip(*sorted(zip(row["acceptance"], speeds, strict=True)), strict=True)
            axes.plot(rates, speeds, marker=marker, color=colour)
        labels.append((speeds[-1], row["decoder"], colour))
    axes.set_xlabel("assumed acceptance rate of a draft position")
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid()
    label_right(axes, labels)
    write_figure(figure, path, title)


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """The title: the acceptance from which an exact decoder is as fast as the fastest SMC, among the rates drawn."""
    level = [row for row in rows if row["gamma"] and row["acceptance"] is None]
    exact = [row for row in rows if row["acceptance"] is not None]
    if not exact:
        return "Tokens a second, without an exact decoder"
    if not level:
        fastest = max(exact, key=lambda row: max(row["tokens_per_second"]))
        return f"{fastest['decoder']} is the fastest, at most {max(fastest['tokens_per_second']):,.0f} tokens a second"
    smc = max(level, key=lambda row: row["tokens_per_second"][0])
    speed = smc["tokens_per_second"][0]
    reached = []
    for row in exact:
        rates, speeds = zip(*sorted(zip(row["acceptance"], row["tokens_per_second"], strict=True)), strict=True)
        if speeds[-1] >= speed:  # speeds grow with the rate
            reached.append((float(np.interp(speed, speeds, rates)), row["decoder"]))
    if not reached:
        highest = max(max(row["acceptance"]) for row in exact)
        return f"No exact decoder is as fast as {smc['decoder']} up to an acceptance of {highest:g}"
    rate, name = min(reached)
    return f"{name} is as fast as {smc['decoder']} from an acceptance of {rate:.2f} on"


def _place(seen: list[int], number: int) -> int:
    """Where `number` is in `seen`, to which it is added if new."""
    if number not in seen:
        seen.append(number)
    return seen.index(number)
