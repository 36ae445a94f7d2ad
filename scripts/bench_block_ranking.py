"""Blocks selected from kept scores by the kernel of `sparse.block_ranking` and by XLA: 9 queries of an 8B model.

    python scripts/bench_block_ranking.py                              # 65,536 and 524,288 positions, 1 and 8 requests
    python scripts/bench_block_ranking.py --loads 8 16 32 --contexts 65536
    python scripts/bench_block_ranking.py --tiny                       # on a CPU: that XLA's half runs

Kept products are drawn at random. Times are JAX's profiler's, medians of a launch (XLA: of all its launches together).
One request's products fit the L2, from which they are read again and again, as behind the kernel that keeps them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from profile_cycle import read_kernels

from smcjax.device import this_device
from smcjax.pallas import implementations, uses_kernels
from smcjax.pallas.sparse import block_ranking
from smcjax.pallas.sparse.block_ranking import Kept, ranked_blocks
from smcjax.pallas.sparse.grouped_attention import compressed_slots
from smcjax.pallas.sparse.kept_scores import BYTES
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse.nsa import NSA

SETS, HEADS, QUERIES, ROWS, DIVISOR, RUNS = 8, 4, 9, 64, 128**0.5, 12
KIND, GROUPS = NSA(), QueryGroups(tuple(range(QUERIES)), QUERIES)


def drawn(requests: int, context: int) -> tuple[Kept, jax.Array]:
    """Kept scores and positions of the last queries of `context` positions."""
    slots = context // KIND.kernel_stride
    numbers = 2 * DIVISOR * jax.random.normal(jax.random.key(0), (requests, SETS, ROWS, slots))
    products = numbers.astype(jnp.float16)
    positions = jnp.tile(jnp.arange(context - QUERIES, context), (requests, 1))
    sizes = {"kernel_size": KIND.kernel_size, "kernel_stride": KIND.kernel_stride}
    low, high = compressed_slots(positions, **sizes)
    lse = jax.jit(lambda x: jax.nn.logsumexp(by_query(x), axis=-1))(products)
    return Kept(products, lse, low, high), positions


def by_query(products: jax.Array) -> jax.Array:
    """Scores [R, M, H, slots]."""
    of = products[:, :, : QUERIES * HEADS].reshape(products.shape[0], SETS, QUERIES, HEADS, -1)
    of = jnp.moveaxis(of, 1, 2).reshape(of.shape[0], QUERIES, SETS * HEADS, -1)
    return of.astype(jnp.float32) / DIVISOR


def ranks_by_xla(kept: Kept, positions: jax.Array) -> jax.Array:
    """The ranks of blocks as layers have them where no kernel ranks."""
    slot = jnp.arange(kept.products.shape[-1])
    seen = ((slot >= kept.low[..., None]) & (slot <= kept.high[..., None]))[:, :, None]
    weights = jnp.where(seen, jnp.exp(by_query(kept.products) - kept.lse[..., None]), 0)
    of_sets = weights.reshape(*weights.shape[:2], SETS, HEADS, -1).sum(axis=3)
    return KIND.ranked(KIND.by_blocks(of_sets, of_sets.shape[-1] * KIND.kernel_stride // KIND.block_size), positions)


def by_xla(kept: Kept, positions: jax.Array) -> jax.Array:
    with implementations("xla"):
        return KIND.select(ranks_by_xla(kept, positions), positions)


def by_kernel(kept: Kept, positions: jax.Array) -> jax.Array:
    ranking = KIND.ranking(kept.products.shape[-1] * KIND.kernel_stride // KIND.block_size)
    assert ranking is not None
    sizes = {"block_size": KIND.block_size, "heads": HEADS, "divisor": DIVISOR}
    return ranked_blocks(kept, positions, GROUPS, ranking, **sizes)


def microseconds(run: Callable[..., Any], *args: Any, only: str = "") -> float:
    """Time of a run on the device, of its launches with `only` in their names."""
    jax.block_until_ready(run(*args))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(RUNS):
                jax.block_until_ready(run(*args))
        times = [kernel.microseconds for kernel in read_kernels(Path(directory), {}) if only in kernel.name]
    return statistics.median(times) if only else sum(times) / RUNS


def main() -> int:
    """Compares, times and prints; returns 1 where a set is worse than XLA's by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[65_536, 524_288])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--loads", type=int, nargs="+", default=[block_ranking.LOADS], help="of four slots, at once")
    parser.add_argument("--tiny", action="store_true", help="a small shape, XLA alone")
    args = parser.parse_args()
    if args.tiny:
        print(by_xla(*drawn(1, 4096)).sum())
        return 0
    if not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one, or with --tiny.")
    print(this_device().kind or this_device().platform, "jax", jax.__version__)
    wrong = 0
    for context, requests in itertools.product(args.contexts, args.requests):
        kept, positions = drawn(requests, context)
        xla = jax.jit(by_xla)
        want, ranks = (np.asarray(x) for x in (xla(kept, positions), jax.jit(ranks_by_xla)(kept, positions)))
        read = requests * QUERIES * SETS * HEADS * kept.products.shape[-1] * BYTES
        print(
            f"\n{context} positions, {requests} requests: XLA {microseconds(xla, kept, positions):.1f} µs", flush=True
        )
        for loads in args.loads:
            block_ranking.LOADS = loads
            jax.clear_caches()
            kernel = jax.jit(functools.partial(by_kernel))
            got = np.asarray(kernel(kept, positions))
            least = np.min(ranks, axis=-1, where=got, initial=np.inf)
            worse = least < np.max(ranks, axis=-1, where=~got, initial=-np.inf) * (1 - 1e-6)
            worse |= got.sum(axis=-1) != KIND.num_blocks
            took = microseconds(kernel, kept, positions, only="ranked_blocks")
            same = (got == want).all(axis=-1).mean()
            print(
                f"  {loads} loads: {took:.2f} µs, {read / took / 4.8e6:.0%} of 4.8 TB/s; {same:.2%} of sets are XLA's,"
                f" {worse.sum()} worse",
                flush=True,
            )
            wrong += int(worse.sum())
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
