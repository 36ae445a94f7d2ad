"""The kernels of shared reads by other tunings, on a GPU: their device time, and their error.

    python scripts/tune_shared_attention.py                                   # as tuned, an H200, half a minute
    python scripts/tune_shared_attention.py --chunk 64 --tiles 3 --splits 9 7 --stages 3 --last-tiles 2
    python scripts/tune_shared_attention.py --columns 8 --tiles 3 --splits 11 5 --stages 2 --last-tiles 1

The verify of the 8B shapes: one group of 8 rows, of 9 tokens each unless told, on pages that they share but for the
last; one line for the tuning as it is and one for the one asked for. Where `--splits` is given the rest is too: see
`smcjax.pallas.attention.shared_tuning.Tuning`. Median device time of a launch of each kernel, from a profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
from bench_attention import Inputs, Shape, by_plan, error, make
from profile_cycle import read_kernels

from smcjax.pallas import find_tasks, shared_attention_mosaic, uses_kernels
from smcjax.pallas.attention.shared_tuning import Tuning, chunk_of, tiles_of

CONTEXTS = (4137, 16_425, 32_809)
CALLS, REPETITIONS = 16, 5
GROUP = 4  # query heads to a key-value head


def measure(
    inputs: Inputs, *, columns: int, chunk: int, tiles: int, tuning: Tuning | None
) -> tuple[list[float], float]:
    """Microseconds of attention and merge, and the error."""
    q, keys, values, table, positions, lengths = inputs
    plan = functools.partial(
        find_tasks,
        rows=q.shape[0],
        queries=columns * GROUP,
        page_size=keys[0].shape[1],
        chunk=chunk,
        tiles=tiles,
    )
    sharing = jax.jit(plan)(table, lengths, positions[:, 0])
    attend = by_plan if tuning is None else functools.partial(shared_attention_mosaic, tuning=tuning)

    @jax.jit
    def program(q, keys, values, *rest):  # type: ignore[no-untyped-def]
        at = [i % len(keys) for i in range(CALLS)]
        return [attend(q * (1 + i / 64), keys[k], values[k], sharing, *rest) for i, k in enumerate(at)]

    out = jax.block_until_ready(program(q, keys, values, positions, lengths))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(REPETITIONS):
                out = program(q, keys, values, positions, lengths)
            jax.block_until_ready(out)
        times = defaultdict(list)
        for kernel in read_kernels(Path(directory), {}):
            times[kernel.name].append(kernel.microseconds)
    medians = [statistics.median(some) for name, some in sorted(times.items()) if "shared_attention" in name]
    return medians, error(out[0], inputs)


def main() -> None:
    """Prints one line a tuning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=9, help="T, tokens of a row (9)")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--chunk", type=int, default=128, choices=(64, 128), help="slots of a chunk (128)")
    fields = {field.name: field for field in dataclasses.fields(Tuning)}
    for name in ("tiles", "subs", "stages", "last_tiles"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=fields[name].default)
    parser.add_argument("--splits", type=int, nargs="+", help="shares of each part")
    args = parser.parse_args()
    if not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one.")

    shapes = []
    for context in args.contexts:
        pages = -(-context // 16)
        name, shared = f"{context:,}", (pages - 1) / pages
        shapes.append(Shape(name, 128, args.columns, context, table_width=pages + 16, shared=shared))
    queries = 8 * args.columns * GROUP
    tunings: list[tuple[str, int | None, int, Tuning | None]] = [("as it is", None, tiles_of(queries), None)]
    if args.splits:
        chosen = Tuning(**{name: getattr(args, name) for name in fields if name != "splits"}, splits=tuple(args.splits))
        tunings.append(("as asked", args.chunk, args.tiles, chosen))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; µs of attention + merge (error)")
    print(f"{'slots':<10}", *(f"{shape.name:>22}" for shape in shapes))
    for name, chunk, tiles, tuning in tunings:
        cells = []
        for shape in shapes:
            inputs, _ = make(shape)
            slots = chunk or chunk_of(queries, shape.table_width * shape.page_size)
            times, off = measure(inputs, columns=args.columns, chunk=slots, tiles=tiles, tuning=tuning)
            cells.append(f"{' + '.join(f'{time:.1f}' for time in times[::-1])} ({off:.0e})")
        print(f"{name:<10}", *(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
