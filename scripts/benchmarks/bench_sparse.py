"""Cycles over a target with Native Sparse Attention beside dense ones, on random weights: time, bytes, tokens/s.

    python scripts/benchmarks/bench_sparse.py cycles     # the target alone and speculation, dense and sparse
    python scripts/benchmarks/bench_sparse.py verify     # one verification, the share of routing, and a tree
    python scripts/benchmarks/bench_sparse.py groups     # of queries that read together, C = 1 2 4 8 …
    python scripts/benchmarks/bench_sparse.py spacing    # of the layers that select: 1 2 4 8 …

`--replay-overlap .75 .9` adds sets of a stated overlap to random weights' own; `--tiny` runs toy shapes on a CPU;
`--target-shape llama-3.1-70b --quantization float8` has 70B fit one card of 141 GB.

Shapes are those of Llama 3.1 8B and 3.2 1B, the target's attention dense or sparse with the paper's options and one
pair of keys and values (`smcjax.bench.shapes`). Cycles run through the engine's own programs on synthetic KV
(`smcjax.bench.cycle`). Cases whose weights, KV and programs do not fit the device are left out, each with a sentence.

Who drafts is said by `--drafts`: "lookup" looks tokens up in the text, which costs next to nothing, so that a cycle is
the target's verification and the verdict, the bound of any draft; "head" is an EAGLE-3 head of the target's width for
32,000 token ids. Weights are random, so times are measured and acceptance is *replayed*: `--reached`
gives the fractions of cycles that reach each draft position, as `smcjax profile` measures them of a trained pair, and
without it the probability of a draft is assumed, .8 (`--acceptance`). A tree's are those of a chain of its depth, so
that its milliseconds alone mean something. The target's one token needs none. A row "as calibrated" has
layers that take others' blocks, in the proportion that `calibrate_reuse.py` found for the bundled target.

Every 16 positions complete a compressed token. Random weights accept next to nothing, so that a request gains a token a
cycle and, with K = 8, completes a compressed token in 9 of 16 cycles: in as many as where it gains 8.68, since a cycle
scores 9 positions in both. A window is a multiple of 16 cycles. Requests of a server are not all at the same one of 16
positions, so those of a batch are spread evenly over them: of eight, the first has T tokens, the last T − 14.

Random weights also select, by queries that are hardly alike, so that neighbours' sets are not either and a merged group
reads more than a trained model's would (`measure_block_overlap.py`). `--replay-overlap ρ …` puts a row beside each row
of sparse speculation whose sets are *replayed*: layers score and rank as they do, and read sets of which neighbours
have the fraction ρ alike, of all blocks of a set (`replayed_sets.py`). With it the sets
of one cycle behind the timed ones are counted, which a program of its own gives back where they are not replayed: the
table says `ρ`, the share of a set's blocks that the set of the query before has, and `union`, blocks of all sets of a
request's K + 1 queries over those of one.

A row "one by one" reads by groups of one query, by the kernel where there is one; "by XLA" gathers and masks. Bytes are
of weights and KV, each beside its time at the device's bandwidth as a fraction of the measured one:

    least    what a cycle must read whichever blocks are selected: of a request's queries those of one, which lie in the
             window where they can
    unique   what some query reads, each once: compressed tokens, the union of all its queries' blocks by the sets that
             were counted, and the window. Without counted sets it is `least`
    issued   what groups ask for, by formula: each group compressed tokens and the window once and, merged, the union of
             its blocks, by counted sets, or else by `--overlap`, the fraction of neighbours' sets (.75, assumed)

`--save` writes all lines as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from replayed_sets import Counted, watching
from sparse_cycle_bytes import issued_bytes, unique_bytes
from sparse_rows import ALONE, BENCHMARKS, DRAFTS, Line
from timed_rows import PERIOD, LineBench, head_config, random_head

from smcjax.bench.cycle import Case, Models, Rates
from smcjax.bench.record import save, this_machine
from smcjax.bench.shapes import SHAPES
from smcjax.bench.table import synthetic_case
from smcjax.cli.bench_options import ON_CPU, ON_GPU, add_save_option, check_files
from smcjax.decoders import Decoding
from smcjax.engine.load.loading import check_pages
from smcjax.engine.run.memory import device_memory
from smcjax.engine.run.programs import compile_together, enable_compilation_cache
from smcjax.markdown import table
from smcjax.quantization import QUANTIZATIONS

BYTES = ("least", "unique", "issued")  # of the file's docstring


def tokens_per_round(decoding: Decoding, reached: Sequence[float]) -> float:
    """Tokens of a request a cycle: with rejection 1 and the fractions that reach each position, else the decoder's."""
    if not decoding.ragged:
        return float(decoding.tokens_per_cycle)
    return 1 + sum(reached[: decoding.speculation.gamma])


def replayed(args: argparse.Namespace) -> tuple[list[float], str]:
    """The fractions of cycles that reach each of K positions, and where they are from."""
    if args.reached is not None:
        return args.reached, "as given"
    fractions = [args.acceptance**position for position in range(1, args.gamma + 1)]
    return fractions, f"assumed, {args.acceptance:g} of each draft given those before it"


def line_of(
    bench: LineBench,
    ms: Sequence[float],
    rates: Rates,
    reached: Sequence[float],
    overlap: float,
    sets: Counted | None = None,
) -> dict:
    """A measured row, its bytes by counted `sets` where there are such."""
    case, config = bench.case, bench.models.target_config
    weights, kv = bench.bytes_read()
    # What the draft's forwards read is unique as it is; the target's own least is replaced by what it issues.
    least = case.groups * sum(
        spec.bytes_of(config.layer(index).attention.least_read(case.context, 0), config.itemsize)
        for index, spec in enumerate(config.cache_specs)
    )
    issued = issued_bytes(config, case.decoding, case.context, overlap, sets=sets)
    issued = weights + max(kv, kv - least + case.groups * issued)
    unique = weights + kv if sets is None else weights + kv - least + case.groups * unique_bytes(config, sets)
    tokens, middle = tokens_per_round(case.decoding, reached), statistics.median(ms)
    return {
        "name": bench.line.name,
        "attention": bench.line.attention or "dense",
        "draft": bench.line.draft,
        "decoder": str(case.decoding),
        "context": case.context,
        "requests": case.groups,
        "ms": middle,
        "scratch_bytes": bench.runner.programs.scratch_bytes,
        "ms_windows": list(ms),
        "tokens_per_round": tokens,
        "tokens_per_second": 1e3 * case.groups * tokens / middle,
        "replayed_overlap": bench.line.replayed,
        "sets": None if sets is None else about_sets(sets),
        "least_bytes": weights + kv,
        "unique_bytes": unique,
        "issued_bytes": issued,
        "least_fraction": 1e3 * (weights + kv) / rates.bandwidth / middle,
        "unique_fraction": 1e3 * unique / rates.bandwidth / middle,
        "issued_fraction": 1e3 * issued / rates.bandwidth / middle,
        "device": jax.devices()[0].device_kind,
        "bandwidth": rates.bandwidth,
    }


def about_sets(sets: Counted) -> dict[str, Any]:
    """Figures of a verification's sets, by distance those of queries 1 … K apart."""
    tally = sets.tally
    return {
        "overlap": tally.whole,
        "overlap_by_rank": tally.by_rank,
        "overlap_by_rank_by_chance": tally.by_chance,
        "union_over_one": tally.union_over_one,
        "union_blocks": sets.union(sets.selected.shape[2]),
    }


def same_sets(line: Line, case: Case) -> tuple[Any, ...]:
    """Names the rows whose sets are counted once: verifications of the same tokens, however they read."""
    return line.draft, line.replayed, case.decoding.speculation.scored, case.context, case.groups


def compiled(benches: Sequence[LineBench], skip: Callable[[LineBench, str], None]) -> list[LineBench]:
    """Compiles benches side by side and returns those whose programs fit the device; `skip` hears of the others."""
    try:
        compile_together([bench.wanted() for bench in benches])
        return list(benches)
    except (ValueError, jax.errors.JaxRuntimeError):
        fitting = []
        for bench in benches:  # what was compiled already comes from the cache
            try:
                bench.compile()
                fitting.append(bench)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                skip(bench, str(error).splitlines()[0])
        return fitting


def measured(args: argparse.Namespace, shapes: tuple[str, str], reached: Sequence[float]) -> tuple[list[dict], list]:
    """All rows, of one attention after the other, so that one target's weights are there at a time; and those left out.

    Rows of one context and load are timed one after the other.
    """
    found: list[dict] = []
    skipped: list[dict] = []
    began = time.perf_counter()

    def skip(bench: LineBench, why: str) -> None:
        one = {"name": bench.line.name, "context": bench.case.context, "requests": bench.case.groups, "why": why}
        skipped.append(one)
        print(f"left out: {json.dumps(one)}", file=sys.stderr, flush=True)

    lines = lines_asked(args, Models(*shapes).target_config.num_layers)
    for attention in dict.fromkeys(line.attention for line in lines):
        models = Models(*shapes, quantization=args.quantization, attention=attention)
        mine = [line for line in lines if line.attention == attention]
        weights = models.target_params("auto")
        drafts: dict[str, Any] = {}
        if any(line.draft == "head" for line in mine):
            drafts["head"] = random_head(head_config(models.target_config), weights)
        rates = Rates.measure(models.target_config.dtype)
        benches: list[LineBench] = []
        counted: dict[Any, Counted | None] = {}
        for context in args.contexts:
            for requests in args.requests:
                for line in mine:
                    case = synthetic_case(
                        line.decoding,
                        requests,
                        context,
                        page_size=args.page_size,
                        implementation="auto",
                        windows=args.windows,
                        cycles=args.windows * args.cycles,
                    )
                    check_pages(models.target_config, case.page_size)
                    counts = bool(args.replay_overlap) and line.has_neighbours
                    counts = counts and same_sets(line, case) not in counted
                    bench = LineBench(line, models, case, weights, drafts, counts=counts)
                    if bench.held_bytes > device_memory():
                        skip(
                            bench, f"weights and KV take {bench.held_bytes / 1e9:.1f} GB of {device_memory() / 1e9:.1f}"
                        )
                    else:
                        benches.append(bench)
                        if counts:
                            counted[same_sets(line, case)] = None  # once it is timed, its sets
        benches = compiled(benches, skip)
        room = device_memory() / 1e9
        print(
            f"{time.perf_counter() - began:.0f} s: {len(benches)} rows compiled, {room:.0f} GB",
            file=sys.stderr,
            flush=True,
        )
        while benches:
            bench = benches.pop(0)
            try:
                ms = bench.windows_ms(args.windows, args.cycles)
            except (RuntimeError, jax.errors.JaxRuntimeError) as error:
                skip(bench, str(error).splitlines()[0])
                continue
            which = same_sets(bench.line, bench.case)
            if bench.counts:
                counted[which] = bench.sets
            found.append(line_of(bench, ms, rates, reached, args.overlap, counted.get(which)))
            used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
            print(
                f"{time.perf_counter() - began:.0f} s, {used:.0f} GB at most: {json.dumps(found[-1])}", file=sys.stderr
            )
            if args.save:
                write(args, reached, found, skipped)
        del weights, drafts, bench
    return found, skipped


def lines_asked(args: argparse.Namespace, layers: int) -> list[Line]:
    """The benchmark's rows, with replayed sets too, whose names `--only` and `--without` let through."""
    lines = BENCHMARKS[args.benchmark](args.gamma, layers, args.drafts)
    lines = [one for line in lines for one in line.with_sets(args.replay_overlap)]
    lines = [line for line in lines if not args.only or any(part in line.name for part in args.only)]
    return [line for line in lines if not any(part in line.name for part in args.without)]


def write(args: argparse.Namespace, reached: Sequence[float], lines: list[dict], skipped: list[dict]) -> None:
    """Writes all figures so far."""
    about = {"benchmark": args.benchmark, "acceptance": args.source, "overlap": args.overlap, "reached": list(reached)}
    save(args.save, [about | line for line in [*lines, *skipped]], this_machine())


def markdown(lines: Sequence[dict], first: str) -> str:
    """A row a line; speedups are over the row `first` of the same context and requests."""
    heads = ["", "T", "requests", "ms", "tokens a round", "tokens/s", "×", "ρ", "union"]
    heads += [head for name in BYTES for head in (f"{name}, MB", "of roofline")]
    rows = []
    for line in lines:
        alike = [one for one in lines if (one["context"], one["requests"]) == (line["context"], line["requests"])]
        base = next((one for one in alike if one["name"] == first), None)
        sets = line["sets"]
        cells: tuple[str, ...] = (
            line["name"],
            f"{line['context']:,}",
            str(line["requests"]),
            f"{line['ms']:.2f}",
            f"{line['tokens_per_round']:.2f}",
            f"{line['tokens_per_second']:,.0f}",
            "–" if base is None else f"{line['tokens_per_second'] / base['tokens_per_second']:.2f}",
            *(("–", "–") if sets is None else (f"{sets['overlap'][0]:.2f}", f"{sets['union_over_one']:.2f}")),
        )
        for name in BYTES:
            cells += f"{line[f'{name}_bytes'] / 1e6:,.0f}", f"{100 * line[f'{name}_fraction']:.0f}%"
        rows.append(cells)
    return table(heads, rows)


def routing(lines: Sequence[dict], layers: int) -> list[str]:
    """The share of a verification that routing takes, by the time that all layers but the first save without it."""
    said = []
    for line in lines:
        if line["name"] != "merged" or layers < 2:
            continue
        others = [
            one
            for one in lines
            if one["name"].endswith("first layer selects")
            and (one["context"], one["requests"]) == (line["context"], line["requests"])
        ]
        if not others:
            continue
        (other,) = others
        share = (line["ms"] - other["ms"]) * layers / (layers - 1) / line["ms"]
        said.append(
            f"T = {line['context']:,}, {line['requests']} requests: routing {100 * share:.0f}% of a verification"
        )
    return said


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16_384, 32_768, 65_536], help="T")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--target-shape", choices=SHAPES, default=ON_GPU[0], help=f"of weights ({ON_GPU[0]})")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the target's weights (none)")
    parser.add_argument("--gamma", type=int, default=8, help="K")
    parser.add_argument("--page-size", type=int, default=128, help="B, of which kernels want 128 (128)")
    parser.add_argument(
        "--drafts", nargs="+", choices=DRAFTS, default=["lookup", "head"], help="of cycles (lookup head)"
    )
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="rows whose name has one of these in it")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORDS", help="and none of these")
    parser.add_argument("--windows", type=int, default=3, help="of which times are the median (3)")
    parser.add_argument("--cycles", type=int, default=PERIOD, help=f"of a window, a multiple of {PERIOD} ({PERIOD})")
    parser.add_argument("--reached", type=float, nargs="+", help="fractions of cycles that reach positions 1 … K")
    parser.add_argument("--acceptance", type=float, default=0.8, help="assumed without it (.8)")
    parser.add_argument(
        "--overlap", type=float, default=0.75, help="of neighbours' sets, where bytes are issued and none counted (.75)"
    )
    parser.add_argument(
        "--replay-overlap", type=float, nargs="+", default=[], metavar="ρ", help="rows with sets so much alike, too"
    )
    add_save_option(parser)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, one short window, whose times say little")
    args = parser.parse_args(argv)
    if args.tiny:
        args.contexts, args.requests, args.windows, args.cycles = [256], [1], 1, 2
    elif args.cycles < PERIOD or args.cycles % PERIOD:
        parser.error(f"--cycles must be a multiple of {PERIOD}, so that windows have equal births, got {args.cycles}.")
    elif jax.default_backend() == "cpu":
        parser.error("there is no GPU here; run it on one, or with --tiny.")
    if any(not 0 <= overlap <= 1 for overlap in args.replay_overlap):
        parser.error(f"--replay-overlap must be fractions from 0 to 1, got {args.replay_overlap}.")
    if args.reached is not None and len(args.reached) < args.gamma:
        parser.error(f"--reached must have a fraction for each of {args.gamma} drafts, got {len(args.reached)}.")
    check_files(args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes what was asked for."""
    args = arguments(argv)
    enable_compilation_cache()
    shapes = ON_CPU if args.tiny else (args.target_shape, ON_GPU[1])
    reached, args.source = replayed(args)
    with watching():
        lines, skipped = measured(args, shapes, reached)
    if not lines:
        raise SystemExit(f"no row fits this device: {skipped[0]['why'] if skipped else 'none was asked for'}.")
    layers = Models(*shapes).target_config.num_layers
    first = ALONE.name if args.benchmark == "cycles" else lines[0]["name"]
    print(f"{lines[0]['device']}, {lines[0]['bandwidth'] / 1e9:,.0f} GB/s; {shapes[1]} → {shapes[0]}, random weights")
    print(f"Acceptance is {args.source}: {', '.join(f'{x:.2f}' for x in reached[: args.gamma])}.\n")
    print(markdown(lines, first))
    for one in skipped:
        print(f"\nLeft out: {one['name']}, T = {one['context']:,}, {one['requests']} requests: {one['why']}")
    if args.benchmark == "verify":
        print("\n" + "\n".join(routing(lines, layers)))
    if args.save:
        write(args, reached, lines, skipped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
