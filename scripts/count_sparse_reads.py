"""KV bytes that the verification of a population reads in a sparse layer, counted by its tasks, over those that differ.

    python scripts/count_sparse_reads.py                       # SMC, N = 8, K = 8, at 65,536 positions
    python scripts/count_sparse_reads.py --rows 32 --groups 16 72 --order dfs
    python scripts/count_sparse_reads.py --measure --groups 16 72 1     # on a GPU: bytes by the memory's own counter

Without `--measure` no kernel runs: the layer makes its tasks as always (`smcjax.sparse.groups`), and units are
counted instead of read.
`issued` is what groups read, a task of a group and key-value head its unit once; `unique` are the slots that some query
sees, each once, whether the selection, the window or both read it. Rows of a request share a prompt's pages and have
the last `--tail` positions in pages of their own. Neighbours, column by column, select sets of which the fraction
`--overlap` is alike. Shapes are those of Llama 3.1 8B, with one pair of keys and values and the paper's options.

A group of more than 16 queries at four heads a key-value head is several tiles for the kernel, which read the same
units at about the same time: those after the first find them in the L2, if the device keeps them there. `loads` counts
every tile's.

With `--measure` the layer's launches run, and the memory's own counter says what it moves (`smcjax.bench.dram`,
`sparse_traffic`). `moved` is everything that is read and written; `other` the same where the tasks name few pages,
which the L2 holds, so all but KV. Their difference, `KV`, stands over `unique`. Compressed tokens are read with scores
kept and blocks ranked by them, as a layer that selects has it, and without scores; "layer" is the first of these and
the launch of selection and window.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_sparse_attention import Layer
from sparse_population import Population
from sparse_traffic import WAYS, measure

from smcjax.bench.dram import MemoryCounterError
from smcjax.pallas import uses_kernels
from smcjax.sparse.verification import SparseVerification


def main(argv: Sequence[str] | None = None) -> int:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=65_536, help="T, a multiple of 128")
    parser.add_argument("--rows", type=int, default=8, help="N")
    parser.add_argument("--gamma", type=int, default=8, help="K: each row has K + 1 queries")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16, 36, 72], help="C")
    parser.add_argument("--order", default="bfs", help="of queries: bfs or dfs")
    parser.add_argument("--tail", type=int, default=256, help="positions of a row's own before its new tokens")
    parser.add_argument("--overlap", type=float, default=0.75, help="of neighbours' sets")
    parser.add_argument("--measure", action="store_true", help="count what a GPU's memory moves")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="that are measured")
    parser.add_argument("--json", type=Path, help="write what is measured there")
    args = parser.parse_args(argv)
    if args.measure and not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one, or without --measure.")
    layer = Layer()
    population = Population(layer, args.context, args.rows, args.gamma + 1, args.tail, args.overlap)
    print(
        f"{args.rows} rows of {args.gamma + 1} queries, {args.context} positions, the last {args.tail} each row's own"
    )
    if args.measure:
        grouped = [SparseVerification("merged", size, args.order) for size in args.groups]
        try:
            measure(population, [(sparse, way) for sparse in grouped for way in args.ways], args.json)
        except MemoryCounterError as error:
            raise SystemExit(f"count_sparse_reads: {error}") from None
        return 0
    print("MB a layer; of each row by itself compressed tokens would be read as often as there are rows")
    print(f"{'C':>4} {'compressed':>11} {'selected':>9} {'window':>7} {'issued':>7} {'unique':>7}  ratio  loads")
    for size in args.groups:
        reads = population.reads(SparseVerification("merged", size, args.order))
        numbers = (reads.compressed, reads.selected, reads.window, reads.issued, reads.unique)
        mb = [layer.slot * number / 1e6 for number in numbers]
        ratio = reads.issued / reads.unique
        print(
            f"{size:4} {mb[0]:11.1f} {mb[1]:9.1f} {mb[2]:7.1f} {mb[3]:7.1f} {mb[4]:7.1f} {ratio:6.2f}"
            f" {ratio * reads.tiles:6.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
