"""Times SMC's cycle under a control beside the one without, at given shapes, and turns tokens a cycle into tokens/s.

    python scripts/bench_control.py --json cycles.json
    python scripts/bench_control.py --cycles cycles.json --measured found.npz --plot frontier.svg

The first times cycles on random weights. First N = K = 8: without a control, with the program that can reject under
controls 0 (which rejects nothing, so that rows grow alike), 1 and 0.1, by turns, a window each, as clocks fall when a
device warms up; with --early-ends those too. What a control adds is the median over rounds of the quotient to the
first. Then for each K the target alone, exact decoders and SMC with and without a control. JSON is written after each
part, so that an interrupted run leaves something.

The second joins these times with what `measure_populations.py` found of real pairs, in one file or several: tokens/s of
one request that such a pair would have, were a cycle of its own as long, and the plot sets them over how likely the
target finds the answers. Random weights reject nearly everything, but a
cycle's time depends on shapes, not on what is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure_populations import LONG, long_rows, read, tokens_per_cycle
from measuring import Interval, by_prompt

from smcjax.bench.cycle import Bench, require_pair, require_room
from smcjax.bench.models import Models
from smcjax.bench.shapes import SHAPES
from smcjax.bench.table import synthetic_case
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.engine.run.programs import compile_together, enable_compilation_cache
from smcjax.markdown import table
from smcjax.tasks.intervals import clustered_mean


@dataclasses.dataclass(frozen=True)
class Variant:
    """A decoder, and the control that its request brings (None: the decoder's)."""

    decoding: Decoding
    control: float | None = None

    @property
    def name(self) -> str:
        """The decoder, and the control of its request."""
        if self.control is None:
            return str(self.decoding)
        assert isinstance(self.decoding, SMC)
        early = ", early end" if self.decoding.early_end else ""
        shape = f"SMC, N={self.decoding.n_particles}, K={self.decoding.gamma}"
        return f"{shape}, control {self.control:g}{early}"


@dataclasses.dataclass(frozen=True)
class Timed:
    """A cycle's time: the median over windows, and how much of the first variant's of the same part it is."""

    part: str
    decoder: str
    rows: int
    gamma: int
    control: float | None  # of SMC
    early_end: bool
    ms: float
    ms_windows: list[float]
    over_first: float  # the median over rounds of the quotient of two windows that followed each other


def smc_variants(n: int, gamma: int, controls: Sequence[float], *, early: bool) -> list[Variant]:
    """SMC without a control, then one program that can reject, under each control; with `early` also early ends."""
    plain, rejecting = SMC(n, gamma), SMC(n, gamma, control=1.0)
    found = [Variant(plain), *(Variant(rejecting, control) for control in controls)]
    if early:
        found.append(Variant(dataclasses.replace(plain, early_end=True)))
        found.append(Variant(dataclasses.replace(rejecting, early_end=True), controls[-1]))
    return found


def parts(args: argparse.Namespace) -> list[tuple[str, list[Variant], int, int]]:
    """Name, variants, windows and cycles of each part, what is wanted most first."""
    n, gamma = args.overhead
    compared = smc_variants(n, gamma, (0.0, 1.0, 0.1), early=False)
    found = [(f"control, N={n}, K={gamma}", compared, args.windows, 32)]
    for drafts in args.gammas:
        variants = [Variant(Autoregressive())]
        variants += [Variant(Rejection(drafts, n_candidates=many)) for many in args.candidates]
        variants += [one for many in args.particles for one in smc_variants(many, drafts, (0.1,), early=False)]
        found.append((f"all, K={drafts}", variants, 5, 16))
    if args.early_ends:
        found.append((f"early ends, N={n}, K={gamma}", smc_variants(n, gamma, (0.1,), early=True), args.windows, 32))
    return found


def measure(
    models: Models, params: tuple[Any, Any], part: str, variants: Sequence[Variant], windows: int, cycles: int
) -> list[Timed]:
    """Compiles the programs of all variants side by side, then times the variants by turns."""
    benches: dict[Decoding, Bench] = {}
    for variant in variants:
        case = synthetic_case(
            variant.decoding, 1, 256, page_size=16, implementation="auto", windows=windows, cycles=cycles
        )
        require_pair(models, case)
        require_room(models, case)
        if variant.decoding not in benches:
            benches[variant.decoding] = Bench(models, case, params[0], params[1] if variant.decoding.drafts else None)
    began = time.perf_counter()
    compile_together([bench.wanted() for bench in benches.values()])
    print(f"{part}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    rounds: list[list[float]] = []
    for number in range(windows + 1):
        times = []
        for variant in variants:
            bench = benches[variant.decoding]
            bench.batch.control[:] = -1 if variant.control is None else variant.control
            try:
                times.append(bench.time_window())
            except RuntimeError as error:
                print(f"{variant.name}, round {number}: {error}; {ended(bench)}", file=sys.stderr, flush=True)
                times.append(math.nan)
        if number:  # the first round warms up
            rounds.append(times)
    found = []
    for variant, own in zip(variants, zip(*rounds, strict=True), strict=True):
        decoding = variant.decoding
        control = variant.control
        if isinstance(decoding, SMC) and control is None:
            control = decoding.rejection_control
        found.append(
            Timed(
                part=part,
                decoder=variant.name,
                rows=decoding.rows,
                gamma=decoding.speculation.gamma,
                control=control,
                early_end=isinstance(decoding, SMC) and decoding.early_end is True,
                ms=statistics.median(own),
                ms_windows=list(own),
                over_first=statistics.median(ms / times[0] for ms, times in zip(own, rounds, strict=True)),
            )
        )
    return found


def ended(bench: Bench) -> str:
    """Says what the weights were in the cycle in which a request ended that should not have."""
    try:
        bench.start()
        for cycle in range(64):
            info, _ = bench.runner.step(bench.runner.program)
            if np.asarray(info.done).any():
                return f"in cycle {cycle} log weights were {np.asarray(getattr(info, 'log_weight', None))}"
        return "not so when tried again"
    finally:
        bench.runner.discard()


def markdown(rows: Sequence[Timed]) -> str:
    """The table of times."""
    cells = [
        (
            row.decoder,
            f"{row.ms:.2f} ({min(row.ms_windows):.2f} to {max(row.ms_windows):.2f})",
            f"{100 * (row.over_first - 1):+.1f}%",
        )
        for row in rows
    ]
    return table(("decoder", "ms a cycle (windows)", "over the first"), cells)


def cycle_time(times: Sequence[dict[str, Any]], run: dict[str, Any]) -> float | None:
    """Milliseconds of a cycle of a run's shape, which any control above 0 has the same; None where it was not timed."""
    smc, exact = run["name"].startswith("SMC"), run["name"].startswith("rejection")
    controlled = smc and not run["name"].endswith("control 0")
    for one in times:
        same = (one["rows"], one["gamma"], one["early_end"]) == (run["n"], run["gamma"], False)
        same &= one["part"].startswith("all")
        is_smc = one["decoder"].startswith("SMC")
        if same and ((smc and is_smc and (one["control"] > 0) == controlled) or (exact and not is_smc)):
            return float(one["ms"])
    return None


@dataclasses.dataclass(frozen=True)
class Point:
    """A decoder on a pair: tokens/s, and the cells of `LONG` that say how good its answers are."""

    pair: str
    speed: float
    gamma: int
    cells: tuple[str, ...]
    log_p: Interval  # a token, minus the target's own
    distance: Interval  # at most, of the whole answer's law


EXACT: Interval = (0.0, 0.0, 0.0)


def distance_of(run: dict[str, Any]) -> Interval:
    """The bound of `measure_populations` on total variation, 0 for exact decoders."""
    if run["name"].startswith("rejection"):
        return EXACT
    return clustered_mean(by_prompt(np.maximum(1 - np.exp(run["log_evidence"]), 0), run["prompts"]))


def points(times: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> list[Point]:
    """Points of every pair, the target alone first: tokens a cycle over the time of a cycle of the same shape."""
    alone = next(one["ms"] for one in times if one["gamma"] == 0)
    target = next(run for run in runs if run["name"] == "target alone")
    its = by_prompt(target["log_probability"], target["prompts"])
    found = []
    for pair in dict.fromkeys(run["pair"] for run in runs):
        own = [run for run in runs if run["pair"] == pair and run is not target and not run["short"]]
        cells: tuple[str, ...] = ("target alone", "1.00", "–", "–", "+0.000")
        found.append(Point(pair, 1e3 / alone, 0, cells, EXACT, EXACT))
        for run, cells in zip(own, long_rows(own, target), strict=True):
            if (ms := cycle_time(times, run)) is not None:
                of_prompts = by_prompt(run["log_probability"], run["prompts"]) - its
                speed = 1e3 * tokens_per_cycle(run) / ms
                found.append(Point(pair, speed, run["gamma"], cells, clustered_mean(of_prompts), distance_of(run)))
    return found


def frontier(found: Sequence[Point]) -> str:
    """A table for each pair, fastest first."""
    lines = []
    for pair in dict.fromkeys(point.pair for point in found):
        own = sorted((point for point in found if point.pair == pair), key=lambda point: -point.speed)
        rows = [
            (f"{one.speed:,.0f}", f"{one.cells[0]}, K={one.gamma}" if one.gamma else one.cells[0], *one.cells[1:])
            for one in own
        ]
        lines.append(f"{pair}\n\n{table(('tokens/s', *LONG), rows)}")
    return "\n\n".join(lines)


def draw(found: Sequence[Point], titles: Sequence[str], path: Path) -> None:
    """A column for each pair, over tokens/s: log p a token, and the bound on the distance to the target's law.

    SMC's controls are joined; exact decoders, whose distance is 0, stand beside.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from smcjax.viz.picture import write_figure

    pairs = list(dict.fromkeys(point.pair for point in found))
    figure = Figure(figsize=(4 * len(pairs), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(pairs), squeeze=False, sharex=True, sharey="row")
    for column, pair, title in zip(panels.T, pairs, [*titles, *pairs[len(titles) :]], strict=True):
        own = sorted((point for point in found if point.pair == pair), key=lambda point: point.speed)
        for name, marker, line, starts in (
            ("SMC, by its control", "o", "-", "SMC"),
            ("exact", "s", "none", ("rejection", "target")),
        ):
            mine = [point for point in own if point.cells[0].startswith(starts)]
            speeds = [one.speed for one in mine]
            for axes, figures in zip(
                column, ([one.log_p for one in mine], [one.distance for one in mine]), strict=True
            ):
                middle, low, high = zip(*figures, strict=True)
                ends = [
                    [m - x for m, x in zip(middle, low, strict=True)],
                    [x - m for m, x in zip(middle, high, strict=True)],
                ]
                axes.errorbar(speeds, middle, ends, marker=marker, linestyle=line, capsize=2, label=name)
            for number, one in enumerate(mine):
                said = one.cells[0].rsplit("control ", 1)[-1].removeprefix("rejection, ")
                away = (6, 4) if marker == "o" else (-8, 8 + 11 * number)
                at = (one.speed, one.distance[0])
                column[1].annotate(said, at, away, textcoords="offset points", fontsize="x-small")
        column[0].set_title(title, fontsize="medium")
        column[1].set_xlabel("tokens a second")
        column[1].set_xlim(left=0)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("log p a token,\nminus the target's own")
    panels[1, 0].set_ylabel("distance to the target's law ≤")
    panels[0, 0].legend(loc="lower left", fontsize="small")
    write_figure(figure, path)


def main() -> None:
    """Times, or joins times and tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = jax.default_backend() == "gpu"
    shapes = ("llama-3.1-8b", "llama-3.2-1b") if on_gpu else ("tiny-target", "tiny-draft")
    parser.add_argument("--target-shape", choices=SHAPES, default=shapes[0], help=f"({shapes[0]})")
    parser.add_argument("--draft-shape", choices=SHAPES, default=shapes[1], help=f"({shapes[1]})")
    parser.add_argument("--overhead", type=int, nargs=2, default=(8, 8), metavar=("N", "K"), help="(8 8)")
    parser.add_argument("--windows", type=int, default=7, help="of what is compared at N and K (7)")
    parser.add_argument("--early-ends", action="store_true", help="what these add, too")
    parser.add_argument("--gammas", type=int, nargs="*", default=[4, 8], help="of all decoders (4 8)")
    parser.add_argument("--particles", type=int, nargs="+", default=[8, 4, 16], help="(8 4 16)")
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 8, 4], help="(1 8 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the times")
    parser.add_argument("--cycles", type=Path, metavar="FILE", help="times to join with --measured")
    parser.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help="what measure_populations.py found")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the joined figures there: .svg, .png or .pdf")
    parser.add_argument("--titles", nargs="+", default=[], help="of the plot's pairs, in their order")
    args = parser.parse_args()
    if args.cycles is not None:
        if args.measured is None:
            parser.error("--cycles needs --measured, a file of measure_populations.py; give both.")
        times = json.loads(args.cycles.read_text())["rows"]
        found = [point for path in args.measured for point in points(times, read(path))]
        print(frontier(found))
        if args.plot is not None:
            draw(found, args.titles, args.plot)
        return
    enable_compilation_cache()
    models = Models(args.target_shape, args.draft_shape)
    params = models.target_params("auto"), models.draft_params("auto")
    device = jax.devices()[0].device_kind
    print(f"{device}: {models.draft} → {models.target}, one request of 256 tokens", flush=True)
    rows: list[Timed] = []
    for part, variants, windows, cycles in parts(args):
        own = measure(models, params, part, variants, windows, cycles)
        rows += own
        print(f"\n{part}\n\n{markdown(own)}", flush=True)
        if args.json is not None:
            report = {"device": device, "rows": [dataclasses.asdict(row) for row in rows]}
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
