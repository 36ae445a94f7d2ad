"""Cycles over a target with Native Sparse Attention beside dense ones, on random weights: time, bytes, tokens/s.

    python scripts/bench_sparse.py verify      # one verification: query by query, merged, reuse; the share of routing
    python scripts/bench_sparse.py cycles      # end to end: the target alone and speculation, dense and sparse
    python scripts/bench_sparse.py spacing     # of the layers that select: 1 2 4 8 …
    python scripts/bench_sparse.py particles   # SMC, N = 8 and 32
    python scripts/bench_sparse.py cycles --tiny      # toy shapes on a CPU: that it runs

Shapes are those of Llama 3.1 8B and 3.2 1B, the target's attention dense or sparse with the paper's options and one
pair of keys and values (`smcjax.bench.shapes`). Cycles run through the engine's own programs on synthetic KV
(`smcjax.bench.cycle`). Weights are random, so times are measured and acceptance is *replayed*: `--profile FILE` gives
the fractions of cycles that reach each draft position as `smcjax profile` measured them of a trained pair, `--reached`
states them, and without either the probability of a draft is assumed, .8 (`--acceptance`). SMC's K + 1 tokens and the
target's one need none.

`unique` is the least that a cycle must read, weights and KV, and its time at the device's bandwidth as a fraction of
the measured one; `issued` counts what the mode reads by formula: a group's queries read compressed tokens and the
window once and, merged, the union of their blocks, where neighbours share the fraction `--overlap` of theirs (.75,
assumed: that of random weights says nothing). `--json` writes all lines, `--plot` draws tokens/s over contexts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from smcjax.bench.cycle import Bench, Case, CycleResult, Models, Rates, require_room
from smcjax.bench.table import synthetic_case
from smcjax.cli.bench_options import ON_CPU, ON_GPU
from smcjax.cli.options import check_output
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.decoding.groups import PairParams
from smcjax.decoding.ngram import NGram
from smcjax.engine.loading import make_decoder
from smcjax.engine.programs import Programs, enable_compilation_cache
from smcjax.engine.runner import Runner
from smcjax.model.config import ModelConfig
from smcjax.model.nsa import NSA
from smcjax.planner import Profile
from smcjax.sparse import SHARED, SparseVerification

DENSE, SPARSE = None, "nsa-shared"  # the target's attention


@dataclasses.dataclass(frozen=True)
class Line:
    """One row: its name, the target's attention, and the decoder; `verifies`: without a draft model's forwards."""

    name: str
    attention: str | None
    decoding: Decoding
    verifies: bool = False


def merged(queries: int, schedule: int | None = None) -> SparseVerification:
    """Groups of so many queries, 16 at most, that read the union of their blocks."""
    return SparseVerification("merged", min(queries, 16), schedule=schedule)


def verify_lines(gamma: int, layers: int) -> list[Line]:
    """Benchmark B: the verification alone. With a spacing of all layers only the first one routes."""
    queries = gamma + 1
    modes: dict[str, SparseVerification | None] = {
        "query by query": SparseVerification(),
        "merged": merged(queries),
        "merged, first layer selects": merged(queries, layers),
    }
    return [Line(name, SPARSE, Rejection(gamma, sparse=sparse), verifies=True) for name, sparse in modes.items()]


def cycle_lines(gamma: int, layers: int) -> list[Line]:
    """Benchmark C: end to end."""
    queries = gamma + 1
    return [
        Line("dense, target alone", DENSE, Autoregressive()),
        Line("dense, speculation", DENSE, Rejection(gamma)),
        Line("sparse, target alone", SPARSE, Autoregressive()),
        Line("sparse, speculation query by query", SPARSE, Rejection(gamma)),
        Line("sparse, merged", SPARSE, Rejection(gamma, sparse=merged(queries))),
        Line("sparse, merged, every other layer selects", SPARSE, Rejection(gamma, sparse=merged(queries, 2))),
    ]


def spacing_lines(gamma: int, layers: int) -> list[Line]:
    """Benchmark D: spacings 1, 2, 4, 8 and that of all layers."""
    spacings = sorted({min(spacing, layers) for spacing in (1, 2, 4, 8, layers)})
    return [
        Line(
            f"spacing {spacing}",
            SPARSE,
            Rejection(gamma, sparse=merged(gamma + 1, None if spacing == 1 else spacing)),
        )
        for spacing in spacings
    ]


def particle_lines(gamma: int, layers: int) -> list[Line]:
    """Benchmark F: populations."""
    lines = [Line("sparse, target alone", SPARSE, Autoregressive())]
    for count in (8, 32):
        lines += [
            Line(f"dense, N = {count}", DENSE, SMC(count, gamma)),
            Line(f"sparse, N = {count}, query by query", SPARSE, SMC(count, gamma)),
            Line(f"sparse, N = {count}, merged", SPARSE, SMC(count, gamma, sparse=merged(16))),
        ]
    return lines


BENCHMARKS: dict[str, Callable[[int, int], list[Line]]] = {
    "verify": verify_lines,
    "cycles": cycle_lines,
    "spacing": spacing_lines,
    "particles": particle_lines,
}


class VerifyBench(Bench):
    """A case whose drafts are looked up in the text, so that a cycle is the target's verification and the verdict."""

    def __init__(self, models: Models, case: Case, target_params: Any, draft_params: Any) -> None:
        super().__init__(models, case, target_params, draft_params)
        geometry = (case.max_model_len, case.page_size, case.implementation)
        decoder = make_decoder(case.decoding, models.target_config, NGram(), *geometry)
        self.runner = Runner(decoder, PairParams(target_params), case.num_pages, Programs())


def tokens_per_round(decoding: Decoding, reached: Sequence[float]) -> float:
    """Tokens of a request a cycle: with rejection 1 and the fractions that reach each position, else the decoder's."""
    if not decoding.ragged:
        return float(decoding.tokens_per_cycle)
    return 1 + sum(reached[: decoding.speculation.gamma])


def replayed(args: argparse.Namespace) -> tuple[list[float], str]:
    """The fractions of cycles that reach each of K positions, and where they are from."""
    if args.profile is not None:
        known = [one for one in Profile.load(args.profile).strategies if isinstance(one.decoding, Rejection)]
        long = [one for one in known if len(one.reached) >= args.gamma and one.decoding.rows == 1]
        if not long:
            raise SystemExit(f"{args.profile} has no rejection of {args.gamma} drafts and one candidate; profile it.")
        return list(long[0].reached), f"replayed from {args.profile}, {long[0].decoding}"
    if args.reached is not None:
        return args.reached, "as given"
    fractions = [args.acceptance**position for position in range(1, args.gamma + 1)]
    return fractions, f"assumed, {args.acceptance:g} of each draft given those before it"


def issued_bytes(config: ModelConfig, decoding: Decoding, context: int, overlap: float) -> int:
    """Bytes of KV that a request's verification reads from pages, in all layers of the target.

    Dense rows of a request share what they read of its prompt. Of a sparse layer: see the file's docstring.
    """
    queries = decoding.rows * decoding.speculation.scored
    sparse = decoding.speculation.sparse
    total = 0.0
    for index in range(config.num_layers):
        layer = config.layer(index)
        pair = 2 * config.num_kv_heads * config.head_dim * config.itemsize
        kind = layer.attention
        if not isinstance(kind, NSA):
            total += pair * context
            continue
        born = max(0, (context - kind.kernel_size) // kind.kernel_stride + 1)
        window, blocks = min(kind.window, context), min(kind.num_blocks, -(-context // kind.block_size))
        size = 1 if sparse is None or not sparse.is_grouped else sparse.queries
        groups = -(-queries // size)
        union = blocks if sparse is not None and sparse.mode in SHARED else blocks * (1 + (size - 1) * (1 - overlap))
        union = min(union, -(-context // kind.block_size))
        total += pair * groups * (born + union * kind.block_size + window + (size if size > 1 else 0))
    return round(total)


def line_of(line: Line, result: CycleResult, config: ModelConfig, reached: Sequence[float], overlap: float) -> dict:
    """A measured row."""
    unique = (result.weight_bytes + result.kv_bytes) / result.bandwidth
    # What the draft's forwards read is unique as it is; the target's own least is replaced by what it issues.
    least = result.groups * sum(
        spec.bytes_of(config.layer(index).attention.least_read(result.context, 0), config.itemsize)
        for index, spec in enumerate(config.cache_specs)
    )
    issued = result.groups * issued_bytes(config, line.decoding, result.context, overlap)
    tokens = tokens_per_round(line.decoding, reached)
    return {
        "name": line.name,
        "attention": line.attention or "dense",
        "decoder": str(line.decoding),
        "context": result.context,
        "requests": result.groups,
        "ms": result.ms,
        "ms_windows": result.ms_windows,
        "tokens_per_round": tokens,
        "tokens_per_second": 1e3 * result.groups * tokens / result.ms,
        "unique_bytes": result.weight_bytes + result.kv_bytes,
        "issued_bytes": result.weight_bytes + max(result.kv_bytes, result.kv_bytes - least + issued),
        "unique_fraction": 1e3 * unique / result.ms,
        "issued_fraction": 1e3
        * (result.weight_bytes + max(result.kv_bytes, result.kv_bytes - least + issued))
        / result.bandwidth
        / result.ms,
        "device": result.device,
        "bandwidth": result.bandwidth,
    }


def measured(args: argparse.Namespace, shapes: tuple[str, str], reached: Sequence[float]) -> list[dict]:
    """All rows, of one attention after the other, so that one target's weights are there at a time."""
    found: list[dict] = []
    layers = Models(*shapes).target_config.num_layers
    lines = BENCHMARKS[args.benchmark](args.gamma, layers)
    for attention in dict.fromkeys(line.attention for line in lines):
        models = Models(*shapes, attention=attention)
        weights, draft = models.target_params("auto"), models.draft_params("auto")
        rates = Rates.measure(models.target_config.dtype)
        for context in args.contexts:
            for requests in args.requests:
                for line in [line for line in lines if line.attention == attention]:
                    case = synthetic_case(
                        line.decoding,
                        requests,
                        context,
                        page_size=args.page_size,
                        implementation="auto",
                        windows=args.windows,
                        cycles=args.cycles,
                    )
                    require_room(models, case)
                    bench = (VerifyBench if line.verifies else Bench)(models, case, weights, draft)
                    bench.compile()
                    result = bench.measure(rates)
                    if line.verifies:  # no draft model reads anything
                        result = _without_draft(result, bench)
                    found.append(line_of(line, result, models.target_config, reached, args.overlap))
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        del weights, draft
    return found


def _without_draft(result: CycleResult, bench: Bench) -> CycleResult:
    (verify,) = [phase for phase in bench._phases() if phase.name == "verify"]
    return dataclasses.replace(result, weight_bytes=verify.weight_bytes, kv_bytes=verify.kv_bytes)


def table(lines: Sequence[dict], first: str) -> str:
    """A row a line; speedups are over the row `first` of the same context and requests."""
    rows = [
        "| | T | requests | ms | tokens a round | tokens/s | × | unique, MB | of roofline | issued, MB | of roofline |",
        "|---" * 11 + "|",
    ]
    for line in lines:
        alike = [one for one in lines if (one["context"], one["requests"]) == (line["context"], line["requests"])]
        base = next(one for one in alike if one["name"] == first)
        cells = (
            line["name"],
            f"{line['context']:,}",
            str(line["requests"]),
            f"{line['ms']:.2f}",
            f"{line['tokens_per_round']:.2f}",
            f"{line['tokens_per_second']:,.0f}",
            f"{line['tokens_per_second'] / base['tokens_per_second']:.2f}",
            *(f"{line['unique_bytes'] / 1e6:,.0f}", f"{100 * line['unique_fraction']:.0f}%"),
            *(f"{line['issued_bytes'] / 1e6:,.0f}", f"{100 * line['issued_fraction']:.0f}%"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def routing(lines: Sequence[dict], layers: int) -> list[str]:
    """The share of a verification that routing takes, by the time that all layers but the first save without it."""
    said = []
    for line in lines:
        if line["name"] != "merged" or layers < 2:
            continue
        (other,) = [
            one
            for one in lines
            if one["name"].endswith("first layer selects")
            and (one["context"], one["requests"]) == (line["context"], line["requests"])
        ]
        share = (line["ms"] - other["ms"]) * layers / (layers - 1) / line["ms"]
        said.append(
            f"T = {line['context']:,}, {line['requests']} requests: routing {100 * share:.0f}% of a verification"
        )
    return said


def draw(lines: Sequence[dict], path: Path) -> None:
    """Tokens/s over contexts, a panel for each number of requests."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from smcjax.viz.picture import write_figure

    loads = sorted({line["requests"] for line in lines})
    figure = Figure(figsize=(5.5 * len(loads), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, load in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads, strict=True):
        for name in dict.fromkeys(line["name"] for line in lines):
            mine = [line for line in lines if line["name"] == name and line["requests"] == load]
            axes.plot(
                [one["context"] for one in mine], [one["tokens_per_second"] for one in mine], marker="o", label=name
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"tokens of context, {load} requests")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("tokens a second")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    write_figure(figure, path)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16_384, 32_768, 65_536], help="T")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--gamma", type=int, default=8, help="K")
    parser.add_argument("--page-size", type=int, default=64, help="B")
    parser.add_argument("--windows", type=int, default=5, help="of which times are the median")
    parser.add_argument("--cycles", type=int, default=12, help="of a window")
    parser.add_argument("--profile", help="of smcjax profile of a trained pair: acceptance is replayed from it")
    parser.add_argument("--reached", type=float, nargs="+", help="fractions of cycles that reach positions 1 … K")
    parser.add_argument("--acceptance", type=float, default=0.8, help="assumed without either (.8)")
    parser.add_argument(
        "--overlap", type=float, default=0.75, help="of neighbours' blocks, where bytes are issued (.75)"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="tokens/s over contexts: .svg, .png or .pdf")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, one short window, whose times say little")
    args = parser.parse_args(argv)
    if args.tiny:
        args.contexts, args.requests, args.windows, args.cycles = [256], [1], 1, 2
    elif jax.default_backend() == "cpu":
        parser.error("there is no GPU here; run it on one, or with --tiny.")
    if args.reached is not None and len(args.reached) < args.gamma:
        parser.error(f"--reached must have a fraction for each of {args.gamma} drafts, got {len(args.reached)}.")
    for path in filter(None, (args.json, args.plot)):
        check_output("--json" if path == args.json else "--plot", str(path))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes what was asked for."""
    args = arguments(argv)
    enable_compilation_cache()
    shapes = ON_CPU if args.tiny else ON_GPU
    reached, source = replayed(args)
    lines = measured(args, shapes, reached)
    layers = Models(*shapes).target_config.num_layers
    first = "sparse, target alone" if args.benchmark in ("cycles", "particles") else lines[0]["name"]
    print(f"{lines[0]['device']}, {lines[0]['bandwidth'] / 1e9:,.0f} GB/s; {shapes[1]} → {shapes[0]}, random weights")
    print(f"Acceptance is {source}: {', '.join(f'{x:.2f}' for x in reached[: args.gamma])}.\n")
    print(table(lines, first))
    if args.benchmark == "verify":
        print("\n" + "\n".join(routing(lines, layers)))
    if args.json:
        about = {"benchmark": args.benchmark, "jax": jax.__version__, "acceptance": source, "overlap": args.overlap}
        args.json.write_text(json.dumps(about | {"reached": list(reached), "lines": lines}, indent=1))
    if args.plot:
        draw(lines, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
