"""Pictures of what `bench.py` measured.

    python -m studies.verification.plot verify.json -o studies/verification/images

Scan over γ and over α, verify-and-pack over the width of KV, a map of two launches against one, and time over bytes,
where a one-block kernel crosses the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smcjax.files import MIB, Unreadable, read_json
from smcjax.viz.picture import write_figure

Record = dict[str, Any]
WAYS = {"host": "host-visible", "device": "on the device", "program": "inside a program"}
COLOURS = {
    name: f"C{number}"
    for number, name in enumerate(
        ["op by op", "xla", "a thread a row", "ours", "torch", "two launches", "one launch", "one block"]
    )
}


def draw_all(results: dict[str, Any], directory: Path, suffix: str = ".svg") -> list[Path]:
    """Every picture that the results have data for; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Sequence[Record]], Figure | None]] = {
        "over_gamma": lambda r: _lines(r, "scan", "gamma", "drafted tokens γ", rows=32, alpha=0.9, dim=0),
        "over_alpha": lambda r: _lines(r, "scan", "alpha", "acceptance rate α", rows=32, gamma=128, dim=0),
        "over_width": lambda r: _lines(r, "verify", "dim", "width of KV D", rows=32, gamma=128, alpha=0.9),
        "pack_over_width": lambda r: _lines(r, "pack", "dim", "width of KV D", rows=32, gamma=128, alpha=0.9),
        "ratio": _ratio_map,
        "crossover": _crossover,
    }
    paths = []
    for name, draw in pictures.items():
        figure = draw(results["cases"])
        if figure is not None:
            path = directory / f"verify_{name}{suffix}"
            figure.suptitle(results["device"], fontsize="small")
            write_figure(figure, path)
            paths.append(path)
    return paths


def _figure(panels: int, width: float = 4.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width * panels, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _lines(records: Sequence[Record], kind: str, over: str, label: str, **at: Any) -> Figure | None:
    """A panel for each way to measure, a line for each method."""
    chosen = [r for r in records if all(r[k] == v for k, v in at.items()) and (over != "dim" or r["dim"])]
    chosen.sort(key=lambda r: r[over])
    ways = [way for way in WAYS if any(way in t for r in chosen for m, t in r["times"].items() if m.startswith(kind))]
    if not ways:
        return None
    figure, panels = _figure(len(ways))
    for panel, way in zip(panels, ways, strict=True):
        for name, colour in COLOURS.items():
            method = f"{kind}: {name}"
            points = [(r[over], r["times"][method][way]) for r in chosen if way in r["times"].get(method, {})]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
        if over == "dim" and way == "device" and kind == "verify":
            panel.plot([r["dim"] for r in chosen], [r["floor"] for r in chosen], "k:", label="bytes' floor")
        if over != "alpha":
            panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(label)
        panel.set_ylabel("µs")
        panel.set_title(f"{kind}, {WAYS[way]}", fontsize="medium")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="x-small")
    return figure


def _device(record: Record, name: str) -> float | None:
    return record["times"].get(f"verify: {name}", {}).get("device")


def _ratio_map(records: Sequence[Record], alpha: float = 0.9) -> Figure | None:
    """Two launches over one, on the device: above 1 fusing pays."""
    ratios = {
        (r["dim"], r["rows"], r["gamma"]): two / one
        for r in records
        if r["alpha"] == alpha and (one := _device(r, "one launch")) and (two := _device(r, "two launches"))
    }
    dims = [dim for dim in (128, 2048) if any(key[0] == dim for key in ratios)]
    if not dims:
        return None
    figure, panels = _figure(len(dims))
    rows = sorted({key[1] for key in ratios if key[0] in dims})
    gammas = sorted({key[2] for key in ratios if key[0] in dims})
    for panel, dim in zip(panels, dims, strict=True):
        values = [[ratios.get((dim, b, gamma), float("nan")) for gamma in gammas] for b in rows]
        picture = panel.imshow(values, cmap="RdBu", vmin=0.5, vmax=1.5, aspect="auto", origin="lower")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if value == value:
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small")
        panel.set_xticks(range(len(gammas)), gammas)
        panel.set_yticks(range(len(rows)), rows)
        panel.set_xlabel("γ")
        panel.set_ylabel("b")
        panel.set_title(f"two launches ÷ one, D = {dim}, α = {alpha}", fontsize="medium")
    figure.colorbar(picture, ax=list(panels))
    return figure


def _crossover(records: Sequence[Record]) -> Figure | None:
    """Time on the device over the bytes of KV that are accepted."""
    figure, (panel,) = _figure(1, width=6.0)
    drawn = False
    for name in ("one block", "one launch", "two launches", "xla"):
        points = sorted(
            (2 * r["accepted"] * r["dim"] / 1e6, t) for r in records if (t := _device(r, name)) and r["dim"]
        )
        if points:
            panel.plot(*zip(*points, strict=True), ".", color=COLOURS[name], label=name)
            drawn = True
    if not drawn:
        return None
    floors = sorted((2 * r["accepted"] * r["dim"] / 1e6, r["floor"]) for r in records if r["dim"])
    panel.plot(*zip(*floors, strict=True), "k_", label="bytes' floor", markersize=4)
    panel.axvline(5, color="grey", linestyle=":", label="the study's threshold")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("MB of KV accepted")
    panel.set_ylabel("µs on the device")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads results, writes pictures, prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what bench.py --output wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="a directory")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(arguments)
    try:
        results = read_json(args.results, 64 * MIB)
    except Unreadable as error:
        parser.error(f"{args.results} {error}; {error.mend}")
    for path in draw_all(results, args.output, f".{args.format}"):
        print(path)


if __name__ == "__main__":
    main()
