"""Pictures of what `bench.py` measured.

    python -m studies.verification.plot verify.json -o studies/verification/images

Scan over γ and over α, with what 95 of 100 calls do not exceed; a map of the scan with a thread a row against a warp a
row; packing over the width of KV; a map of two launches against one; and time over bytes, where a one-block kernel
crosses the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from smcjax.files import MIB, Unreadable, read_json
from smcjax.viz.picture import BASE, INK, colour_of, label_right, log_ticks, new_figure, styled, write_figure

Record = dict[str, Any]
WAYS = {"host": "host-visible", "device": "on the device", "program": "inside a program"}
BESIDE = "verify: two launches"  # beside which one block is seen
AXES = {"rows": "b", "alpha": "α", "gamma": "γ", "dim": "D"}
METHODS = ("op by op", "xla", "a thread a row", "ours", "torch", "two launches", "one launch", "one block")
COLOURS = {name: colour_of(at) for at, name in enumerate((*METHODS, "a block a row", "the same after a wait"))}


@styled
def draw_all(results: dict[str, Any], directory: Path, suffix: str = ".svg") -> list[Path]:
    """Every picture that the results have data for; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Sequence[Record]], Figure | None]] = {
        "over_gamma": lambda r: _lines(r, "scan", "gamma", "drafted tokens γ", rows=32, alpha=0.9, dim=0),
        "over_alpha": lambda r: _lines(r, "scan", "alpha", "acceptance rate α", rows=32, gamma=128, dim=0),
        "pack_over_width": lambda r: _lines(r, "pack", "dim", "width of KV D", rows=32, gamma=128, alpha=0.9),
        "scan_ratio": _scan_map,
        "ratio": _launches_map,
        "crossover": _crossover,
    }
    paths = []
    for name, draw in pictures.items():
        figure = draw(results["cases"])
        if figure is not None:
            path = directory / f"verify_{name}{suffix}"
            title = f"{figure.get_suptitle()} ({results['device']})"
            figure.suptitle(title)
            write_figure(figure, path, title)
            paths.append(path)
    return paths


def _figure(panels: int, title: str, width: float = 4.0) -> tuple[Figure, Any]:
    figure = new_figure(width * panels, 3.6, title)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _lines(records: Sequence[Record], kind: str, over: str, label: str, **at: Any) -> Figure | None:
    """A panel for each way to measure, a line for each method."""
    chosen = [r for r in records if all(r[k] == v for k, v in at.items()) and (over != "dim" or r["dim"])]
    chosen.sort(key=lambda r: r[over])
    ways = [way for way in WAYS if any(way in t for r in chosen for m, t in r["times"].items() if m.startswith(kind))]
    if not ways:
        return None
    figure, panels = _figure(len(ways), _slowest(chosen, kind, "device" if "device" in ways else ways[0], over))
    for panel, way in zip(panels, ways, strict=True):
        labels = []
        for name, colour in COLOURS.items():
            method = f"{kind}: {name}"
            points = [(r[over], r["times"][method]) for r in chosen if way in r["times"].get(method, {})]
            if points:
                at_x, times = [x for x, _ in points], [each[way] for _, each in points]
                above = [each.get(f"{way}, p95", each[way]) - each[way] for _, each in points]
                bars = [[0.0] * len(above), above]
                panel.errorbar(at_x, times, yerr=bars, fmt="o-", color=colour, markersize=4, capsize=2)
                labels.append((times[-1], name, colour))
        if over != "alpha":
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
        panel.set_yscale("log")
        log_ticks(panel.yaxis)
        panel.set_xlabel(label)
        panel.set_ylabel("µs")
        panel.set_title(f"{kind}, {WAYS[way]}", fontsize=BASE)
        panel.grid()
        label_right(panel, labels)
    return figure


def _slowest(records: Sequence[Record], kind: str, way: str, over: str) -> str:
    """The title: what the slowest method takes beside ours, at the last record that was measured in this way."""
    found = [(r[over], {m: t[way] for m, t in r["times"].items() if m.startswith(kind) and way in t}) for r in records]
    at, times = next((at, times) for at, times in reversed(found) if times)
    name = max(times, key=lambda method: times[method])
    ours = f", ours {times[f'{kind}: ours']:.3g}" if f"{kind}: ours" in times else ""
    where = f"{kind.capitalize()} {WAYS[way]} at {AXES[over]} = {at}"
    return f"{where}: {name.partition(': ')[2]} takes {times[name]:.3g} µs{ours}"


def _device(record: Record, method: str) -> float | None:
    return record["times"].get(method, {}).get("device")


def _launches_map(records: Sequence[Record], alpha: float = 0.9) -> Figure | None:
    """Two launches over one, on the device: above 1 fusing pays."""
    chosen = [r for r in records if r["alpha"] == alpha and r["dim"] in (128, 2048)]
    methods = "verify: two launches", "verify: one launch"
    return _ratio_map(chosen, methods, ("dim", "rows", "gamma"), f"Two launches beside one, α = {alpha}")


def _scan_map(records: Sequence[Record]) -> Figure | None:
    """A thread a row beside a warp a row, on the device, a panel for each number of rows."""
    return _ratio_map(
        records,
        ("scan: a thread a row", "scan: ours"),
        ("rows", "alpha", "gamma"),
        "A thread a row beside a warp a row",
    )


def _ratio_map(
    records: Sequence[Record], methods: tuple[str, str], by: tuple[str, str, str], title: str
) -> Figure | None:
    """The times of two methods divided, by panel, line and column."""
    ratios = {
        tuple(r[key] for key in by): a / b
        for r in records
        if (a := _device(r, methods[0])) and (b := _device(r, methods[1]))
    }
    if not ratios:
        return None
    panels_of, lines, columns = (sorted({key[place] for key in ratios}) for place in range(3))
    largest = max(1.5, *(max(ratio, 1 / ratio) for ratio in ratios.values()))
    spread = f"{min(ratios.values()):.3g} to {max(ratios.values()):.3g}"
    figure, panels = _figure(len(panels_of), f"{title}: {spread} times its time")
    for panel, which in zip(panels, panels_of, strict=True):
        values = [[ratios.get((which, line, column), float("nan")) for column in columns] for line in lines]
        norm = LogNorm(1 / largest, largest)  # a ratio and its inverse are equally dark
        panel.imshow(values, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if value == value:
                    color = "white" if max(value, 1 / value) > largest**0.7 else "black"
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small", color=color)
        panel.set_xticks(range(len(columns)), columns)
        panel.set_yticks(range(len(lines)), [f"{line:.4g}" for line in lines])
        panel.set_xlabel(AXES[by[2]])
        panel.set_ylabel(AXES[by[1]])
        panel.set_title(f"{AXES[by[0]]} = {which}", fontsize=BASE)
    return figure


def _crossover(records: Sequence[Record]) -> Figure | None:
    """Time on the device over the bytes of KV that are accepted."""
    both = [a / b for r in records if (a := _device(r, "verify: one block")) and (b := _device(r, BESIDE))]
    most = f", at most {max(both):.3g} times {BESIDE.partition(': ')[2]}'s" if both else ""
    figure, (panel,) = _figure(1, f"One block's time grows with its bytes{most}", width=7.0)
    labels = []
    for name in ("one block", "one launch", "two launches", "xla"):
        mine = [(r, t) for r in records if (t := _device(r, f"verify: {name}")) and r["dim"]]
        points = sorted((2 * r["accepted"] * r["dim"] / 1e6, t) for r, t in mine)
        if points:
            panel.plot(*zip(*points, strict=True), ".", color=COLOURS[name])
            labels.append((points[-1][1], name, COLOURS[name]))
    if not labels:
        return None
    floors = sorted((2 * r["accepted"] * r["dim"] / 1e6, r["floor"]) for r in records if r["dim"])
    panel.plot(*zip(*floors, strict=True), "_", color=INK, markersize=4)
    panel.axvline(5, color=INK, linestyle=":")
    panel.set_xscale("log")
    panel.set_yscale("log")
    log_ticks(panel.xaxis)
    log_ticks(panel.yaxis)
    panel.set_xlabel("MB of KV accepted (dotted: the study's threshold)")
    panel.set_ylabel("µs on the device")
    panel.grid()
    label_right(panel, [*labels, (floors[-1][1], "bytes' floor", INK)])
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
