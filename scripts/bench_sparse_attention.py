"""Attention of a sparse verification by query groups, per query, merged and shared: time against bytes.

    python scripts/bench_sparse_attention.py                     # a table last
    python scripts/bench_sparse_attention.py --contexts 65536 --queries 9 --sizes 2 4 9 --overlaps 0 0.5 0.75 0.9 1
    python scripts/bench_sparse_attention.py --contexts 65536 --queries 9 16 --requests 1 8
    python scripts/bench_sparse_attention.py --tiny              # interpreted on a CPU: that it runs

One layer of an 8B model (32 heads, 8 key-value heads of 128) with the paper's Native Sparse Attention over pages of
keys and values that selection and window share. M queries of one sequence stand at its end. Each selects n blocks a
key-value head, of which it shares a fraction ρ with its neighbour's; the first and the last two are in every set, so
that little ρ are not reached. *per query* reads every query's sets by themselves (groups of one), *merged* unions of
groups of C, *shared* the first query's set for its group. All branches go through one launch and its merge. Pages of
fewer than 8 compressed tokens (128 positions) leave out their branch, which the kernels then do not take.

`unique` are bytes of KV that some query reads, each once; `issued` those of all groups. Times are the device's, of all
kernels of a call, by JAX's profiler: a host that launches kernel by kernel would be the slower one. The time that
building the selection's tasks takes stands beside. Random data, different pools from call to call; each mode is
compared with the reference in float32 once. `--json` writes all of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_overlap import unique_slots
from jax.experimental.pallas import mosaic_gpu as plgpu
from profile_cycle import read_kernels

from smcjax.device import HOPPER, this_device
from smcjax.pallas import uses_kernels
from smcjax.pallas.sparse.grouped_attention import (
    Branch,
    Part,
    compressed_slots,
    group_tasks,
    grouped_branches_reference,
    span_tasks,
    unit_slots,
)
from smcjax.pallas.sparse.grouped_attention_sm90 import grouped_branches_mosaic
from smcjax.pallas.sparse.grouped_shares import Tuning
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse.nsa import NSA

MODES = ("per query", "merged", "shared")
LEAST_SLOTS = 8  # of a unit that the kernels take
TOLERANCE = 0.02  # relative to the largest value: bf16 weights, f16 shares


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer and of what its pages hold."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 128
    kernel_size: int = 32  # l
    kernel_stride: int = 16  # d
    block_size: int = 64  # l'
    num_blocks: int = 16  # n
    window: int = 512  # w
    forced: int = 3  # of n: the first block and the last two

    @property
    def kind(self) -> NSA:
        """The layer's attention."""
        sizes = {name: getattr(self, name) for name in ("kernel_size", "kernel_stride", "block_size", "num_blocks")}
        return NSA(**sizes, window=self.window, kv="shared")

    @property
    def slot(self) -> int:
        """Bytes of a slot's keys and values for one key-value head."""
        return 2 * 2 * self.dim

    @property
    def compressed_page(self) -> int:
        """Slots of a page of compressed tokens."""
        return self.page_size // self.kernel_stride

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches that are measured."""
        return ("slc", "win", "cmp") if self.compressed_page >= LEAST_SLOTS else ("slc", "win")


@dataclasses.dataclass(frozen=True)
class Case:
    """A verification of M `queries` at the end of `context` positions of each request, in groups of C = `size`."""

    context: int
    queries: int
    size: int
    overlap: float
    requests: int = 1


def neighbours(rng: np.random.Generator, free: np.ndarray, count: int, new: int, queries: int) -> Iterator[np.ndarray]:
    """Yields `count` of the `free` blocks for one query after the other, `new` of them not the one's before it."""
    chosen = rng.permutation(free)[:count]
    yield chosen
    for _ in range(queries - 1):
        others = rng.permutation(np.setdiff1d(free, chosen))[:new]
        chosen = np.concatenate([rng.permutation(chosen)[: len(chosen) - len(others)], others])
        yield chosen


def new_blocks(overlap: float, blocks: int, forced: int) -> int:
    """Blocks of a query's set that the one's before it has not; of `blocks` in all, `forced` are in every set."""
    return min(round((1 - overlap) * blocks), blocks - forced)


def sets_of(case: Case, layer: Layer) -> np.ndarray:
    """[R, M, Hkv, blocks]: sets of n blocks, of which each query's has as many of the one's before it as ρ says."""
    rng, blocks = np.random.default_rng(0), case.context // layer.block_size
    n = min(layer.num_blocks, blocks)
    free = np.arange(1, max(1, blocks - 2))
    new = new_blocks(case.overlap, n, layer.forced)
    sets = np.zeros((1, case.queries, layer.kv_heads, blocks), bool)
    sets[..., [0, -2, -1]] = True
    for head in range(layer.kv_heads):
        for query, chosen in enumerate(neighbours(rng, free, n - layer.forced, new, case.queries)):
            sets[0, query, head, chosen] = True
    return sets.repeat(case.requests, axis=0)


class Inputs:
    """A case's arrays on the device."""

    def __init__(self, case: Case, layer: Layer, mode: str, pools: dict[str, list[tuple[jax.Array, jax.Array]]]):
        self.case, self.layer, self.pools = case, layer, pools
        self.groups = QueryGroups.of_rows(1, case.queries, "dfs", 1 if mode == "per query" else case.size)
        sets = sets_of(case, layer)
        if mode == "shared":
            sets = np.asarray(self.groups.by_first(jnp.asarray(sets)))
        pages = case.context // layer.page_size
        shape = (case.requests, case.queries)
        table = 1 + np.random.default_rng(1).permutation(case.requests * pages).reshape(case.requests, 1, pages)
        self.sets, self.table = jnp.asarray(sets), jnp.asarray(np.broadcast_to(table, (*shape, pages)), jnp.int32)
        positions = case.context - case.queries + np.arange(case.queries)
        self.positions = jnp.asarray(np.broadcast_to(positions, shape), jnp.int32)
        self.q = jax.random.normal(jax.random.key(9), (*shape, layer.heads, layer.dim), jnp.bfloat16)
        self.units = tuple(
            unit_slots(layer.page_size, layer.block_size) if name != "cmp" else min(64, layer.compressed_page)
            for name in layer.branches
        )

    def selection(self, sets: jax.Array, table: jax.Array) -> Any:
        """The selection's tasks, which every layer that ranks builds anew."""
        layer = self.layer
        sizes = {"page_size": layer.page_size, "block_size": layer.block_size, "most_blocks": layer.num_blocks}
        return group_tasks(sets, table, self.groups, **sizes)

    def branches(self) -> tuple[Branch, ...]:
        """All branches, with the first pools."""
        tasks = jax.jit(self._tasks)(self.sets, self.table)
        return tuple(Branch(*self.pools[name][0], *rest) for name, rest in zip(self.layer.branches, tasks, strict=True))

    def _tasks(self, sets: jax.Array, table: jax.Array) -> list[tuple[Any, jax.Array, jax.Array]]:
        """Tasks, first and last slots of each branch."""
        layer, case = self.layer, self.case
        found = []
        for name, unit in zip(layer.branches, self.units, strict=True):
            low, high, tasks = jnp.zeros_like(self.positions), self.positions, None
            span = {"unit": unit, "sets": layer.kv_heads, "page_size": layer.page_size}
            if name == "slc":
                tasks = self.selection(sets, table)
            elif name == "win":
                low = jnp.maximum(high - layer.window + 1, 0)
                tasks = span_tasks(
                    low, high, table, self.groups, most_slots=layer.window + self.groups.size - 1, **span
                )
            else:
                sizes = {"kernel_size": layer.kernel_size, "kernel_stride": layer.kernel_stride}
                low, high = compressed_slots(self.positions, **sizes)
                span["page_size"] = layer.compressed_page
                most = case.context // layer.kernel_stride
                tasks = span_tasks(low, high, table, self.groups, most_slots=most, **span)
            found.append((tasks, low, high))
        return found

    def unique_bytes(self) -> int:
        """Bytes of what some query reads; selection and window share their pages."""
        layer = self.layer
        of_heads, compressed = unique_slots(layer.kind, np.asarray(self.sets)[0], np.asarray(self.positions)[0])
        slots = int(of_heads.sum()) + (layer.kv_heads * compressed if "cmp" in layer.branches else 0)
        return self.case.requests * slots * layer.slot

    def issued_bytes(self, branches: tuple[Branch, ...]) -> int:
        """Bytes of all groups' tasks."""
        return sum(
            int(branch.tasks.number.sum()) * unit * self.layer.slot
            for branch, unit in zip(branches, self.units, strict=True)
        )


def pools_of(context: int, layer: Layer, count: int, requests: int = 1) -> dict[str, list[tuple[jax.Array, jax.Array]]]:
    """Keys and values by branch, `count` of each; every slot holds something."""
    pages = 1 + requests * context // layer.page_size

    @functools.partial(jax.jit, static_argnums=1)
    def pool(key: jax.Array, slots: int) -> jax.Array:
        return jax.random.normal(key, (pages, slots, layer.kv_heads, layer.dim), jnp.bfloat16)

    def pairs(seed: int, slots: int) -> list[tuple[jax.Array, jax.Array]]:
        keys = jax.random.split(jax.random.key(seed), (count, 2))
        return [(pool(one[0], slots), pool(one[1], slots)) for one in keys]

    tokens = pairs(0, layer.page_size)
    found = {"slc": tokens, "win": tokens}
    return found | ({"cmp": pairs(1, layer.compressed_page)} if "cmp" in layer.branches else {})


def compiled(run: Callable[..., Any], arguments: Sequence[Any], calls: int) -> Callable[[], Any]:
    """A program of `calls` calls of `run(i, *arguments)`, which returns the first one's result."""
    program = jax.jit(lambda *x: [run(i, *x) for i in range(calls)]).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))[0]


def measure(program: Callable[[], Any], calls: int, runs: int) -> tuple[Any, float]:
    """A program's result, and microseconds that the device works for one of its `calls`.

    A single run is not measured: then the time is the host's.
    """
    began = time.perf_counter()
    out = program()
    if runs == 1:
        return out, (time.perf_counter() - began) / calls * 1e6
    program()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(runs):
                program()
        kernels = list(read_kernels(Path(directory), {}))
    assert kernels, "the profiler has seen no kernel"
    return out, sum(kernel.microseconds for kernel in kernels) / (runs * calls)


def error(got: tuple[Part, ...], q: jax.Array, branches: tuple[Branch, ...], inputs: Inputs) -> jax.Array:
    """Largest difference of outputs from the reference in float32, relative to the largest of its branch."""
    exact = [
        branch._replace(
            key_pages=branch.key_pages.astype(jnp.float32), value_pages=branch.value_pages.astype(jnp.float32)
        )
        for branch in branches
    ]
    want = [
        grouped_branches_reference(q.astype(jnp.float32), (one,), inputs.groups, units=(unit,))[0]
        for one, unit in zip(exact, inputs.units, strict=True)
    ]
    each = [jnp.abs(a.out - b.out).max() / jnp.abs(b.out).max() for a, b in zip(got, want, strict=True)]
    return jnp.stack(each).max()


def prepared(case: Case, layer: Layer, mode: str, pools: Any, args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Compiles what a line of the table needs; the result measures it."""
    inputs = Inputs(case, layer, mode, pools)
    branches = inputs.branches()
    interpret = plgpu.InterpretGPUParams() if args.tiny else None
    tuning = Tuning(blocks=4, stages=2) if args.tiny else None
    _, _, tasks, low, high = zip(*branches, strict=True)
    queries = [inputs.q * (1 + i / 64) for i in range(args.calls)]  # another's each, lest XLA make one call of all

    def attend(i: int, queries: Any, pools: Any, tasks: Any, low: Any, high: Any) -> tuple[Part, ...]:
        read = tuple(
            Branch(*pools[name][i % len(pools[name])], *rest)
            for name, *rest in zip(layer.branches, tasks, low, high, strict=True)
        )
        options: dict[str, Any] = {"units": inputs.units, "tuning": tuning, "interpret": interpret}
        parts = grouped_branches_mosaic(queries[i], read, inputs.groups, **options)
        return tuple(part._replace(unmerged=None) for part in parts)  # results that nobody reads would be copied

    def build(i: int, sets: jax.Array, table: jax.Array) -> Any:
        return inputs.selection(jnp.roll(sets, i, axis=1), table)

    attention = compiled(attend, (queries, pools, tasks, low, high), args.calls)
    building = compiled(build, (inputs.sets, inputs.table), args.calls)
    shapes = jax.eval_shape(functools.partial(attend, 0), queries, pools, tasks, low, high)
    difference = jax.jit(functools.partial(error, inputs=inputs)).lower(shapes, inputs.q, branches).compile()

    def measured() -> dict[str, Any]:
        """One line of the table."""
        got, kernel = measure(attention, args.calls, args.runs)
        _, tasks_take = measure(building, args.calls, args.runs)
        unique, issued = inputs.unique_bytes(), inputs.issued_bytes(branches)
        bandwidth = this_device().bandwidth or HOPPER.bandwidth
        return {
            **dataclasses.asdict(case),
            "mode": mode,
            "us": kernel,
            "tasks_us": tasks_take,
            "unique_bytes": unique,
            "issued_bytes": issued,
            "unique_fraction": unique / bandwidth / kernel * 1e6,
            "issued_fraction": issued / bandwidth / kernel * 1e6,
            "error": float(difference(got, inputs.q, branches)),
        }

    return measured


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32_768, 65_536], help="T")
    parser.add_argument("--queries", type=int, nargs="+", default=[5, 9, 16, 40], help="M")
    parser.add_argument("--requests", type=int, nargs="+", default=[1], help="R, which share no page")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16], help="C, of which M is the most")
    parser.add_argument("--overlaps", type=float, nargs="+", default=[0.75], help="fractions of neighbours' sets")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="the first is the others' measure")
    parser.add_argument("--page-size", type=int, default=128, help="B, positions")
    parser.add_argument("--calls", type=int, default=4, help="in a program")
    parser.add_argument("--runs", type=int, default=3, help="of the program, whose kernels' times are added up")
    parser.add_argument("--threads", type=int, default=4, help="that compile lines beside each other (4)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--tiny", action="store_true", help="a small shape, interpreted once, whose times say nothing")
    args = parser.parse_args(argv)
    if not args.tiny and not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one, or with --tiny.")
    if args.tiny:
        args.contexts, args.queries, args.sizes, args.calls, args.runs = [256], [2], [2], 1, 1
    if args.page_size % 16 or any(context % max(64, args.page_size) for context in args.contexts):
        parser.error(f"--page-size must be a multiple of 16 and divide --contexts, as 64 must; got {args.page_size}.")
    return args


def lines_of(context: int, requests: int, args: argparse.Namespace) -> list[tuple[str, Case]]:
    """The modes and cases of a context, in the table's order."""
    lines = []
    for queries, overlap in itertools.product(args.queries, args.overlaps):
        sizes = sorted({min(size, queries) for size in args.sizes})
        cases = [Case(context, queries, size, overlap, requests) for size in sizes]
        lines.append(("per query", dataclasses.replace(cases[0], size=1)))
        lines += [(mode, case) for case in cases for mode in MODES[1:]]
    return [line for line in lines if line[0] in args.modes]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 where a result differs from the reference."""
    args = arguments(argv)
    small = {"heads": 2, "kv_heads": 1, "dim": 64, "num_blocks": 4, "window": 32} if args.tiny else {}
    layer, found = Layer(page_size=args.page_size, **small), []
    device = this_device().kind or this_device().platform
    for context, requests in itertools.product(args.contexts, args.requests):
        pools = pools_of(context, layer, 1 if args.tiny else 2 if requests > 1 else 4, requests)
        lines = lines_of(context, requests, args)
        with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
            work = [pool.submit(prepared, case, layer, mode, pools, args) for mode, case in lines]
        alone: dict[tuple[int, float], float] = {}
        for one in work:
            line = one.result()()
            first = alone.setdefault((line["queries"], line["overlap"]), line["us"])
            found.append(line | {"speedup": first / line["us"]})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if args.json:
        about = {
            "device": device,
            "jax": jax.__version__,
            "layer": dataclasses.asdict(layer),
            "branches": layer.branches,
        }
        args.json.write_text(json.dumps(about | {"lines": found}, indent=1))
    print(f"{device}, jax {jax.__version__}, pages of {layer.page_size}, branches {', '.join(layer.branches)}\n")
    columns = f"{'µs':>8} {'×':>5} {'unique':>7} {'issued':>7} {'tasks, µs':>9}  error"
    print(f"{'T':>6} {'R':>2} {'M':>3} {'C':>3} {'ρ':>5} {'mode':<10} {columns}")
    for line in found:
        print(
            f"{line['context']:6d} {line['requests']:2d}"
            f" {line['queries']:3d} {line['size']:3d} {line['overlap']:5.2f} {line['mode']:<10}"
            f" {line['us']:8.1f} {line['speedup']:5.2f} {line['unique_fraction']:7.1%} {line['issued_fraction']:7.1%}"
            f" {line['tasks_us']:9.1f}  {line['error']:.1e}"
        )
    wrong = [line for line in found if not line["error"] <= TOLERANCE]
    print(
        f"\n{len(found) - len(wrong)} of {len(found)} agree with the reference to {TOLERANCE:.0%} of the largest value."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
