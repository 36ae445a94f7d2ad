"""`smcjax bench cycle`: the time of a decoding step against the memory roofline, on random weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from smcjax.cli.options import DECODINGS, add_debug_option

if TYPE_CHECKING:
    from smcjax.bench.cycle import CycleResult


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its benchmarks."""
    parser = subparsers.add_parser("bench", help="measure", description=__doc__)
    cycle = parser.add_subparsers(dest="benchmark", metavar="cycle", required=True).add_parser(
        "cycle", help="one decoding step of LLM.generate, against the roofline", description=__doc__
    )
    cycle.add_argument("--target-shape", default="llama-3.1-8b", help="llama-3.1-8b; tiny-target on a CPU")
    cycle.add_argument("--draft-shape", default="llama-3.2-1b", help="llama-3.2-1b; tiny-draft on a CPU")
    cycle.add_argument("--decoding", choices=DECODINGS, default="smc")
    cycle.add_argument("-N", "--n-particles", type=int, default=8)
    cycle.add_argument("-K", "--gamma", type=int, default=8)
    cycle.add_argument("--requests", type=int, default=1, help="groups in one batch (1)")
    cycle.add_argument("--context", type=int, default=256, help="prompt tokens (256)")
    cycle.add_argument("--max-model-len", type=int, default=1024)
    cycle.add_argument("--page-size", type=int, default=16)
    cycle.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: no GPU kernels")
    cycle.add_argument("--windows", type=int, default=5, help="timed windows, each from a fresh prompt (5)")
    cycle.add_argument("--cycles", type=int, default=16, help="cycles a window (16)")
    cycle.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the roofline; default: the datasheet's")
    cycle.add_argument("--json", action="store_true", help="one JSON line last")
    add_debug_option(cycle)
    cycle.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Times, prints a table for people and, on request, one JSON line for programs."""
    from smcjax.bench.cycle import bench_cycle
    from smcjax.smc import SMC

    limits = {"requests": 4096, "context": 1 << 20, "max_model_len": 1 << 20, "page_size": 64}
    for name, most in {**limits, "windows": 1000, "cycles": 100_000}.items():
        if not 1 <= getattr(args, name) <= most:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be a whole number from 1 to {most}, got {getattr(args, name)}.")
    if args.bandwidth is not None and not 0 < args.bandwidth <= 1e6:
        raise ValueError(f"--bandwidth must be above 0 and at most 1000000 GB/s, got {args.bandwidth}.")
    smc = SMC(n_particles=args.n_particles, gamma=args.gamma) if args.decoding == "smc" else None
    print(f"Making random weights: {args.target_shape}, {args.draft_shape} …", file=sys.stderr)
    result = bench_cycle(
        target=args.target_shape,
        draft=args.draft_shape,
        decoding=smc,
        groups=args.requests,
        context=args.context,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        implementation=args.implementation,
        windows=args.windows,
        cycles_per_window=args.cycles,
        bandwidth=None if args.bandwidth is None else args.bandwidth * 1e9,
    )
    print(table(result, args.target_shape, args.draft_shape))
    if args.json:
        print(json.dumps(dataclasses.asdict(result)))
    return 0


def table(result: CycleResult, target: str, draft: str) -> str:
    """The result for people."""
    what = f"N={result.n_particles} K={result.gamma}" if result.decoding == "smc" else "target only"
    models = f"{draft} → {target}" if result.decoding == "smc" else target
    rows = [
        ("device", f"{result.device}, {result.bandwidth / 1e12:.2f} TB/s, {result.flop_rate / 1e12:.0f} TFLOP/s"),
        ("models", f"{models}, random weights"),
        (
            "case",
            f"{what}, {result.groups} request(s), context {result.context}, page {result.page_size}, "
            + ("plain XLA" if result.implementation == "xla" else "kernels where they apply"),
        ),
        ("max_model_len", str(result.max_model_len)),
        ("weights a cycle", f"{result.weight_bytes / 1e9:.2f} GB → {result.weight_roofline_ms:.2f} ms"),
        ("KV a cycle", f"{result.kv_bytes / 1e9:.3f} GB; roofline with KV and FLOPs {result.roofline_ms:.2f} ms"),
        ("measured", f"{result.ms:.2f} ms a cycle (windows {', '.join(f'{ms:.2f}' for ms in result.ms_windows)})"),
        ("tokens/s", f"{result.tokens_per_second:,.0f}"),
        ("of the weight roofline", f"{100 * result.weight_roofline_fraction:.1f}%"),
        ("of the roofline", f"{100 * result.roofline_fraction:.1f}%"),
        ("compilation", f"{result.compile_seconds:.1f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
