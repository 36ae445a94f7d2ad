"""`smcjax viz`: draws a trace: genealogy, ESS and weights over the cycles, as one SVG or PNG."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("viz", help="draw a trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="a file that `smcjax generate --trace` wrote")
    parser.add_argument("-o", "--output", type=Path, help="an .svg or .png file (default: beside the trace, .svg)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads, draws, prints the path written."""
    from smcjax.viz.draw import draw
    from smcjax.viz.trace_file import load_trace

    trace = load_trace(args.trace)
    output = args.output or args.trace.with_suffix(".svg")
    if output.resolve() == args.trace.resolve():
        raise ValueError(f"--output must not be the trace itself, got {output}; name another file.")
    draw(trace, output)
    print(output)
    return 0
