"""Where the attention of a sparse layer's verification spends its time: launches and device time, kernel by kernel.

    python scripts/profile_sparse_layer.py                       # 65,536 positions, 9 queries, 1 and 8 requests
    python scripts/profile_sparse_layer.py --queries 16 --requests 1 --context 32768
    python scripts/profile_sparse_layer.py --rows 8 --groups 16 72 --requests 1 4   # of populations of 8 particles
    python scripts/profile_sparse_layer.py --tree 3 2 1 1 1 1 --groups 16      # of a draft tree
    python scripts/profile_sparse_layer.py --tiny                # on a CPU: that it runs

A program of four layers of an 8B model's attention (`bench_sparse_attention.Layer`), each with pages of its own, runs
as a verification has it: new keys and values, compressed tokens born, routing, tasks, attention, gates. Products of the
layer's weights are left out but for gates. Queries are alike, so that they select alike; pages hold random numbers.

The same program of plain XLA runs on the same pages, and what both select and compute is compared. Rows of a population
share all pages but their last `TAIL`. Of these and of trees compressed tokens are then left to XLA alone.
Times are JAX's profiler's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_sparse_attention import Layer
from profile_cycle import read_kernels

from smcjax.device import this_device
from smcjax.model.attention import Projection
from smcjax.model.config import Rope
from smcjax.model.decoder import rope_angles
from smcjax.model.view import BatchView, TreeView
from smcjax.pallas import implementations, uses_kernels
from smcjax.sparse import nsa
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from smcjax.trees import DraftTree

LAYERS, RUNS = 4, 3
TAIL = 3  # pages of a row's own, in populations
MOST_SETS = 0.95  # of XLA's sets that kernels must find: scores in bfloat16 differ in their last bits
ALIKE = 0.95  # of a query, what it has in common with the others of its request


class Verification:
    """Layers and their inputs at the end of `context` positions of each request."""

    def __init__(self, layer: Layer, context: int, queries: int, requests: int, of_request: int = 1) -> None:
        per_row, rows = context // layer.page_size, requests * of_request
        tail = min(TAIL, per_row)
        self.layer, self.pages = layer, requests * (per_row - tail + of_request * tail)
        self.number = 0  # of arrays drawn
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.dim
        self.kind = NSA(kv="shared", num_blocks=layer.num_blocks, window=layer.window)
        config = SimpleNamespace(hidden_size=heads * dim, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        shapes = self.kind.param_shapes(config, jnp.bfloat16)
        self.weights = {name: 0.02 * self.normal(*of.shape) for name, of in shapes.items()}
        common = self.normal(requests, 1, heads + 2 * kv_heads, dim).repeat(of_request, axis=0)
        own = self.normal(rows, queries, *common.shape[2:])
        self.qkv = ALIKE * common + (1 - ALIKE**2) ** 0.5 * own
        self.x = self.normal(rows, queries, heads * dim)
        pages = 1 + np.random.default_rng(1).permutation(self.pages)
        shared, own_pages = np.split(pages, [requests * (per_row - tail)])
        shared = shared.reshape(requests, -1).repeat(of_request, axis=0)
        table = np.concatenate([shared, own_pages.reshape(rows, tail)], axis=1)
        positions = context - queries + np.arange(queries) + np.zeros((rows, 1), int)
        written = np.take_along_axis(table, positions // layer.page_size, axis=1)
        ends = np.full(rows, context)
        arrays = [jnp.asarray(array, jnp.int32) for array in (positions, table, written, ends)]
        tokens, (at, named, written_to, lengths) = arrays[0], arrays
        rest = (written_to, lengths, lengths)
        self.view: Any = BatchView(tokens, at, named, *rest, rows=of_request, page_size=layer.page_size)

    def normal(self, *shape: int) -> jax.Array:
        self.number += 1
        return jax.random.normal(jax.random.key(self.number), shape, jnp.bfloat16)

    def caches(self) -> list[dict[str, jax.Array]]:
        """Pages of every layer, the same each time; compressed keys are large, so that some tokens stand out."""
        self.number = 100
        arrays = self.kind.cache(SimpleNamespace(num_kv_heads=self.layer.kv_heads, head_dim=self.layer.dim)).arrays
        slots = {name: self.layer.page_size // array.stride for name, array in arrays.items()}
        shape = (self.layer.kv_heads, self.layer.dim)
        return [
            {
                name: self.normal(1 + self.pages, slots[name], *shape) * (1 + (name == "compressed_keys"))
                for name in slots
            }
            for _ in range(LAYERS)
        ]

    def run(self, caches: list[dict[str, jax.Array]], qkv: jax.Array, x: jax.Array, weights: Any, view: Any) -> Any:
        """Pages, outputs and selections of all layers, one after the other."""
        angles = functools.partial(rope_angles, Rope(500_000.0), self.layer.dim)
        found = []
        for index, cache in enumerate(caches):
            qkv_of = qkv * (1 + index / 64)
            projection = Projection(
                qkv_of, *angles(view.positions), self.layer.kv_heads, None, None, x, weights, angles
            )
            found.append(self.attend(projection, cache, view))
        return tuple(map(list, zip(*found, strict=True)))

    def attend(self, projection: Projection, cache: dict[str, jax.Array], view: Any) -> tuple[Any, ...]:
        """A layer's pages, output and selection."""
        out, cache, chosen = self.kind(projection, cache, None, view)
        return cache, out, chosen.blocks


class Nodes(Verification):
    """The nodes of a draft tree of each request, of which the deepest stand at its last position and bear tokens."""

    def __init__(self, layer: Layer, context: int, tree: DraftTree, requests: int) -> None:
        super().__init__(layer, context, tree.size, requests)
        root = jnp.full(requests, context - 1 - tree.depth, jnp.int32)
        table, nodes = self.view.block_table, tuple(range(tree.size))
        tokens = jnp.zeros((requests, tree.size), jnp.int32)
        self.view = TreeView(tokens, root, root, table, tree, nodes, page_size=layer.page_size)

    def attend(self, projection: Projection, cache: dict[str, jax.Array], view: Any) -> tuple[Any, ...]:
        shape = (*view.positions.shape, self.layer.kv_heads, self.layer.dim)
        scratch = {name: jnp.zeros(shape, jnp.bfloat16) for name in cache}
        out, _, chosen = self.kind.over_tree(projection, cache, scratch, view)
        return cache, out, chosen.blocks


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """How a layer is computed: by "kernels", with "routing by XLA" and the rest by kernels, or by plain "XLA"."""
    routes = nsa.routes_by_kernel
    nsa.routes_by_kernel = routes if name != "routing by XLA" else lambda *_: False
    try:
        with implementations("xla" if name == "XLA" else "auto"):
            yield
    finally:
        nsa.routes_by_kernel = routes


def profiled(verification: Verification, sparse: SparseVerification, name: str) -> tuple[Any, dict[str, Any]]:
    """Outputs and selections; and by kernel its launches and microseconds a layer."""
    view = dataclasses.replace(verification.view, sparse=sparse)
    rest, caches = (verification.qkv, verification.x, verification.weights, view), verification.caches()
    with way(name):
        program = jax.jit(verification.run, donate_argnums=0).lower(caches, *rest).compile()
    caches, outputs, selected = program(caches, *rest)
    jax.block_until_ready(outputs)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(RUNS):
                caches, *again = program(caches, *rest)
            jax.block_until_ready(again)
        kernels = list(read_kernels(Path(directory), {}))
    times: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.microseconds)
    per = RUNS * LAYERS
    return (outputs, selected), {name: (len(x) / per, sum(x) / per) for name, x in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles and prints; returns 1 where kernels compute something else than XLA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=65_536, help="T, a multiple of 128")
    parser.add_argument("--queries", type=int, nargs="+", default=[9], help="M")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="R")
    parser.add_argument("--tree", type=int, nargs="+", help="children per depth: nodes of a tree instead of queries")
    parser.add_argument("--rows", type=int, default=1, help="N, rows of a request that share pages")
    parser.add_argument(
        "--groups", type=int, nargs="+", help="C, queries that read together (all of a row, 16 at most)"
    )
    parser.add_argument("--most", type=int, default=20, help="rows to print")
    parser.add_argument("--tiny", action="store_true", help="a small shape, without kernels")
    args = parser.parse_args(argv)
    if not args.tiny and not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one, or with --tiny.")
    layer, wrong = Layer(), 0
    if args.tiny:
        layer, args.context, args.requests = Layer(heads=2, kv_heads=1, dim=64, num_blocks=4, window=32), 512, [1]
    print(this_device().kind or this_device().platform, "jax", jax.__version__)
    tree = None if args.tree is None else DraftTree.with_children(args.tree)
    for requests, queries in itertools.product(args.requests, args.queries if tree is None else [tree.size]):
        if tree is None:
            verification = Verification(layer, args.context, queries, requests, args.rows)
        else:
            verification = Nodes(layer, args.context, tree, requests)
        sizes = args.groups or [min(queries, 16)]
        by_xla, times = profiled(verification, SparseVerification("merged", sizes[0]), "XLA")
        said = f"{requests} requests of {args.rows} rows of {queries} queries"
        show(f"{said}, XLA", times, args.most)
        for size in sizes:
            sparse = SparseVerification("merged", size)
            for name in ("routing by XLA", "kernels")[args.rows == 1 and tree is None :]:
                found, times = profiled(verification, sparse, name)
                show(f"{said}, groups of {size}, {name}", times, args.most)
                wrong |= differ(found, by_xla)
    return wrong


def show(title: str, times: dict[str, Any], most: int) -> None:
    """Prints a layer's launches and microseconds, and the longest kernels."""
    launches, total = (sum(x) for x in zip(*times.values(), strict=True)) if times else (0, 0)
    print(f"\n{title}: {total:.1f} µs in {launches:.1f} launches a layer")
    for name, (count, microseconds) in sorted(times.items(), key=lambda item: -item[1][1])[:most]:
        print(f"{microseconds:10.2f} µs {count:6.2f}  {name[:80]}", flush=True)


def differ(found: Any, by_xla: Any) -> bool:
    """Prints what kernels and XLA have computed; true where they select other sets."""
    (outputs, sets), (others, their) = found, by_xla
    away = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(outputs, others, strict=True))
    alike = float(jnp.mean(jnp.stack([(a == b).all(axis=-1) for a, b in zip(sets, their, strict=True)])))
    union = float(jnp.mean(jnp.stack(sets).any(axis=2).sum(axis=-1)))
    print(f"{union:.1f} blocks a row and head; {alike:.1%} of sets are XLA's, outputs {away:.1e} of the largest away")
    return not alike >= MOST_SETS


if __name__ == "__main__":
    sys.exit(main())
