"""`smcjax bench cycle|table`: the time of a decoding step against the memory roofline, on random weights.

`smcjax bench throughput|latency`: the engine under a stream of requests, on random weights. `smcjax bench engine`: what
it costs beside the cycles that it runs. `smcjax bench decoders`: accuracy and speed of exact decoders and SMC.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from smcjax.cli.options import DECODINGS, add_debug_option

if TYPE_CHECKING:
    from smcjax.bench.cycle import CycleResult, Models
    from smcjax.bench.engine import Overhead
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

LIMITS = {
    "requests": 4096,
    "context": 1 << 20,
    "contexts": 1 << 20,
    "requests_context": 1 << 20,
    "max_model_len": 1 << 20,
    "page_size": 64,
    "windows": 1000,
    "cycles": 100_000,
    "num_prompts": 1_000_000,
    "input_len": 1 << 20,
    "output_len": 1 << 20,
    "max_num_seqs": 4096,
    "num_problems": 1_000_000,
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its benchmarks."""
    parser = subparsers.add_parser("bench", help="measure", description=__doc__)
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="cycle|table|throughput|latency|engine|decoders", required=True
    )

    cycle = benchmarks.add_parser(
        "cycle", help="one decoding step of LLM.generate, against the roofline", description=__doc__
    )
    _add_common_options(cycle, windows=5, cycles=16)
    cycle.add_argument("--decoding", choices=DECODINGS, default="smc")
    cycle.add_argument("--requests", type=int, default=1, help="groups in one batch (1)")
    cycle.add_argument("--context", type=int, default=256, help="prompt tokens (256)")
    cycle.add_argument("--private", type=int, default=0, help="of them, tokens that no two particles share (0)")
    cycle.add_argument("--max-model-len", type=int, default=1024)
    cycle.add_argument("--synthetic-kv", action="store_true", help="random KV instead of the prompt's forward")
    cycle.add_argument(
        "--compare", action="store_true", help="this, the same in plain XLA, and the PyTorch peer, one after the other"
    )
    cycle.set_defaults(run=run_cycle)

    table = benchmarks.add_parser(
        "table", help="contexts, particles, draft lengths, batch sizes: one markdown table", description=__doc__
    )
    _add_common_options(table, windows=3, cycles=12)
    table.add_argument("--contexts", type=int, nargs="+", default=None, metavar="T", help="256 4096 16384 32768")
    table.add_argument("--requests", type=int, nargs="*", default=None, metavar="G", help="2 4 8 16 32")
    table.add_argument("--requests-context", type=int, default=1024, metavar="T", help="of several requests (1024)")
    table.set_defaults(run=run_table)

    throughput = benchmarks.add_parser("throughput", help="requests that come all at once", description=__doc__)
    _add_serving_options(throughput)
    throughput.set_defaults(run=run_serving, rates=[math.inf], plot=None)
    latency = benchmarks.add_parser("latency", help="requests that come at given rates", description=__doc__)
    _add_serving_options(latency)
    latency.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], metavar="R", help="a second: 1 2 4")
    latency.add_argument("--plot", metavar="FILE", help="latencies over load: .svg, .png or .pdf")
    latency.set_defaults(run=run_serving)

    engine = benchmarks.add_parser("engine", help="the engine's cycles against bare ones", description=__doc__)
    _add_models(engine)
    engine.add_argument("--decoding", choices=DECODINGS, default="smc")
    engine.add_argument(
        "--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="G", help="at once (1 2 4 8 16 32)"
    )
    engine.add_argument("--input-len", type=int, default=256, help="prompt tokens (256)")
    engine.add_argument("--cycles", type=int, default=32, help="timed cycles (32)")
    engine.add_argument("--json", action="store_true", help="one JSON line a row last")
    add_debug_option(engine)
    engine.set_defaults(run=run_engine)

    decoders = benchmarks.add_parser(
        "decoders", help="accuracy and speed of exact decoders and SMC, on the bundled pair", description=__doc__
    )
    decoders.add_argument("-n", "--num-problems", type=int, default=200, help="problems (200)")
    decoders.add_argument("--seed", type=int, default=7, help="of the problems and of all randomness (7)")
    decoders.add_argument("--temperature", type=float, default=0.7, help="0.7")
    decoders.add_argument("--particles", type=int, nargs="*", default=[2, 8], metavar="N", help="of SMC (2 8)")
    decoders.add_argument("--candidates", type=int, nargs="*", default=[8], metavar="N", help="of rejection (8)")
    decoders.add_argument("--gammas", type=int, nargs="+", default=[4], metavar="K", help="draft tokens (4)")
    decoders.add_argument("--max-num-seqs", type=int, default=16, help="requests at once (16)")
    decoders.add_argument("--max-model-len", type=int, default=320, help="prompt and answer at most (320)")
    decoders.add_argument("--plot", metavar="FILE", help="accuracy over speed: .svg, .png or .pdf")
    decoders.add_argument("--json", action="store_true", help="one JSON line a decoder last")
    add_debug_option(decoders)
    decoders.set_defaults(run=run_decoders)


def _add_serving_options(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    parser.add_argument("--decoding", choices=DECODINGS, default="smc")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests in all (32)")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens (256)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that run at once (8)")
    parser.add_argument("--no-overlap", action="store_true", help="read every cycle before the next is enqueued")
    parser.add_argument("--json", action="store_true", help="one JSON line a rate last")
    add_debug_option(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-shape", default="llama-3.1-8b", help="llama-3.1-8b; tiny-target on a CPU")
    parser.add_argument("--draft-shape", default="llama-3.2-1b", help="llama-3.2-1b; tiny-draft on a CPU")
    parser.add_argument("--quantization", help="int8: the target's weights (default: bfloat16)")
    parser.add_argument("--draft-quantization", help="int8: the draft's weights (default: bfloat16)")
    parser.add_argument("-N", "--n-particles", type=int, default=8, help="particles, or candidates of rejection (8)")
    parser.add_argument("-K", "--gamma", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--implementation",
        choices=("auto", "mosaic", "xla"),
        default="auto",
        help="xla: no GPU kernels; mosaic: kernels whatever the device (auto: on a Hopper GPU)",
    )


def _add_common_options(parser: argparse.ArgumentParser, *, windows: int, cycles: int) -> None:
    _add_models(parser)
    parser.add_argument(
        "--windows", type=int, default=windows, help=f"timed windows, each from a fresh prompt ({windows})"
    )
    parser.add_argument("--cycles", type=int, default=cycles, help=f"cycles a window ({cycles})")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the roofline; default: the datasheet's")
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    add_debug_option(parser)


def _check(args: argparse.Namespace) -> None:
    for name, most in LIMITS.items():
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not 1 <= value <= most:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} must be a whole number from 1 to {most}, got {value}.")
    if getattr(args, "bandwidth", None) is not None and not 0 < args.bandwidth <= 1e6:
        raise ValueError(f"--bandwidth must be above 0 and at most 1000000 GB/s, got {args.bandwidth}.")


def _decoding(args: argparse.Namespace) -> SMC | Rejection | None:
    """What to time; None is the target alone."""
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

    if args.decoding == "smc":
        return SMC(n_particles=args.n_particles, gamma=args.gamma)
    return Rejection(n_candidates=args.n_particles, gamma=args.gamma) if args.decoding == "rejection" else None


def _models(args: argparse.Namespace) -> Models:
    from smcjax.bench.cycle import Models

    models = Models(args.target_shape, args.draft_shape, args.quantization, args.draft_quantization)
    print(f"Making random weights: {args.target_shape}, {args.draft_shape} …", file=sys.stderr)
    return models


def run_cycle(args: argparse.Namespace) -> int:
    """Times, prints a table for people and, on request, one JSON line for programs."""
    from smcjax.bench.cycle import Case, bench_cycle

    _check(args)
    decoding = _decoding(args)
    case = Case(
        decoding,
        groups=args.requests,
        context=args.context,
        private=args.private,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        implementation=args.implementation,
        synthetic_kv=args.synthetic_kv,
        windows=args.windows,
        cycles_per_window=args.cycles,
    )
    if args.compare:
        return _compare(args)
    result = bench_cycle(_models(args), case, bandwidth=None if args.bandwidth is None else args.bandwidth * 1e9)
    print(table(result, args.target_shape, args.draft_shape))
    if args.json:
        print(json.dumps(dataclasses.asdict(result)))
    return 0


def _compare(args: argparse.Namespace) -> int:
    """All implementations on one case; this process leaves the device alone."""
    from smcjax.bench.compare import contenders, markdown

    if args.decoding == "rejection":
        raise ValueError("--compare has no peer for --decoding rejection; leave one of them out.")
    both = [
        *("--target-shape", args.target_shape, "--draft-shape", args.draft_shape, "--decoding", args.decoding),
        *("--n-particles", str(args.n_particles), "--gamma", str(args.gamma), "--requests", str(args.requests)),
        *("--context", str(args.context), "--max-model-len", str(args.max_model_len)),
        *("--windows", str(args.windows), "--cycles", str(args.cycles)),
        *(() if args.bandwidth is None else ("--bandwidth", str(args.bandwidth))),
    ]
    own = ["--page-size", str(args.page_size), "--private", str(args.private)]
    own += ["--synthetic-kv"] if args.synthetic_kv else []
    own += [] if args.quantization is None else ["--quantization", args.quantization]
    own += [] if args.draft_quantization is None else ["--draft-quantization", args.draft_quantization]
    ran = contenders([*both, *own], both)
    print(markdown(ran))
    if args.json:
        print(json.dumps({each.name: each.result for each in ran}))
    return 1 if ran[0].result is None or ran[1].result is None else 0


def run_table(args: argparse.Namespace) -> int:
    """Times all cases and prints one markdown table."""
    from smcjax.bench.table import CONTEXTS, REQUESTS, markdown, run_cases, standard_cases

    _check(args)
    cases = standard_cases(
        n_particles=args.n_particles,
        gamma=args.gamma,
        contexts=CONTEXTS if args.contexts is None else args.contexts,
        requests=REQUESTS if args.requests is None else args.requests,
        requests_context=args.requests_context,
        page_size=args.page_size,
        implementation=args.implementation,
        windows=args.windows,
        cycles=args.cycles,
    )
    bandwidth = None if args.bandwidth is None else args.bandwidth * 1e9
    results = run_cases(
        _models(args), cases, bandwidth=bandwidth, on_result=lambda line: print(line, file=sys.stderr, flush=True)
    )
    first = results[0]
    print(
        f"{first.device}, {first.bandwidth / 1e12:.2f} TB/s, {first.flop_rate / 1e12:.0f} TFLOP/s; "
        f"{_models_named(first, args.draft_shape, args.target_shape)}, random weights, synthetic KV, "
        f"page {first.page_size}, {_implementation(first)}\n"
    )
    print(markdown(results))
    if args.json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    return 0


def run_serving(args: argparse.Namespace) -> int:
    """Plays requests against the engine, rate by rate; a table, a plot and JSON lines on request."""
    from pathlib import Path

    from tqdm import tqdm

    from smcjax.bench.serving import Load, figures, make_engine, make_requests, markdown, serve

    _check(args)
    for rate in args.rates:
        if not rate > 0:
            raise ValueError(f"--rates must be above 0, got {rate}.")
    _check_plot(args)
    decoding = _decoding(args)
    load = Load(
        decoding,
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        max_num_seqs=args.max_num_seqs,
        page_size=args.page_size,
        implementation=args.implementation,
        overlap=False if args.no_overlap else None,
    )
    models = _models(args)
    engine = make_engine(models, load)
    results = []
    for rate in args.rates:
        at_rate = dataclasses.replace(load, request_rate=rate)
        with tqdm(total=load.num_prompts, desc=f"{rate:g} requests/s", dynamic_ncols=True) as bar:
            results.append(figures(at_rate, serve(engine, make_requests(models, at_rate), bar.update)))
    print(markdown(results))
    if args.plot is not None:
        from smcjax.viz.serving import draw_latency

        draw_latency(results, Path(args.plot))
    if args.json:
        for result in results:
            print(json.dumps(result))
    return 0


def run_engine(args: argparse.Namespace) -> int:
    """Times cycles bare and through the engine; a table, and JSON lines on request."""
    from smcjax.bench.engine import WARMUP, markdown, measure
    from smcjax.bench.serving import Load

    _check(args)
    decoding = _decoding(args)
    advance = 1 if decoding is None else decoding.tokens_per_cycle
    load = Load(
        decoding,
        input_len=args.input_len,
        output_len=(2 * WARMUP + args.cycles + 2) * advance,
        max_num_seqs=max(args.requests),
        page_size=args.page_size,
        implementation=args.implementation,
    )

    def heard(one: Overhead) -> None:
        print(f"{one.requests} requests: {one.engine_ms:.2f} ms a cycle", file=sys.stderr, flush=True)

    results = measure(_models(args), load, args.requests, cycles=args.cycles, on_result=heard)
    print(markdown(results))
    if args.json:
        for result in results:
            print(json.dumps(dataclasses.asdict(result)))
    return 0


def run_decoders(args: argparse.Namespace) -> int:
    """Answers the same problems with every decoder; a table, a plot and JSON lines on request."""
    from pathlib import Path

    from smcjax.bench.decoders import compare, contenders, markdown

    _check(args)
    _check_plot(args)

    def heard(row: dict[str, Any]) -> None:
        print(f"{row['decoder']}: {100 * row['accuracy']:.1f}%", file=sys.stderr, flush=True)

    rows = compare(
        contenders(args.particles, args.gammas, args.candidates),
        num_problems=args.num_problems,
        seed=args.seed,
        temperature=args.temperature,
        on_result=heard,
        max_num_seqs=min(args.max_num_seqs, args.num_problems),
        max_model_len=args.max_model_len,
    )
    print(markdown(rows))
    if args.plot is not None:
        from smcjax.viz.decoders import draw_frontier

        draw_frontier(rows, Path(args.plot))
    if args.json:
        for row in rows:
            print(json.dumps(row))
    return 0


def _check_plot(args: argparse.Namespace) -> None:
    if args.plot is not None and not args.plot.endswith((".svg", ".png", ".pdf")):
        raise ValueError(f"--plot must end in .svg, .png or .pdf, got {args.plot}.")


def _models_named(result: CycleResult, draft: str, target: str) -> str:
    target += f" ({result.quantization})" if result.quantization else ""
    draft += f" ({result.draft_quantization})" if result.draft_quantization else ""
    return target if result.decoding == "autoregressive" else f"{draft} → {target}"


def _implementation(result: CycleResult) -> str:
    return "plain XLA" if result.implementation == "xla" else "kernels where they apply"


def table(result: CycleResult, target: str, draft: str) -> str:
    """The result for people."""
    rejection = ", rejection" if result.decoding == "rejection" else ""
    what = f"N={result.n_particles} K={result.gamma}{rejection}" if result.gamma else "target only"
    private = f" ({result.private} private)" if result.private else ""
    kv = ", synthetic KV" if result.synthetic_kv else ""
    rows = [
        ("device", f"{result.device}, {result.bandwidth / 1e12:.2f} TB/s, {result.flop_rate / 1e12:.0f} TFLOP/s"),
        ("models", f"{_models_named(result, draft, target)}, random weights{kv}"),
        (
            "case",
            f"{what}, {result.groups} request(s), context {result.context}{private}, page {result.page_size}, "
            + _implementation(result),
        ),
        ("max_model_len", str(result.max_model_len)),
        (
            "memory",
            f"weights {result.held_weight_bytes / 2**30:.2f} GiB, KV {result.held_kv_bytes / 2**30:.2f} GiB, "
            f"scratch {result.scratch_bytes / 2**30:.2f} GiB",
        ),
        ("weights a cycle", f"{result.weight_bytes / 1e9:.2f} GB → {result.weight_roofline_ms:.2f} ms"),
        ("KV a cycle", f"{result.kv_bytes / 1e9:.3f} GB; roofline with KV and FLOPs {result.roofline_ms:.2f} ms"),
        ("measured", f"{result.ms:.2f} ms a cycle (windows {', '.join(f'{ms:.2f}' for ms in result.ms_windows)})"),
        (
            "tokens/s",
            f"{result.tokens_per_second:,.0f}" + (", if all drafts are accepted" if rejection else ""),
        ),
        ("of the weight roofline", f"{100 * result.weight_roofline_fraction:.1f}%"),
        ("of the roofline", f"{100 * result.roofline_fraction:.1f}%"),
        ("compilation", f"{result.compile_seconds:.1f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
