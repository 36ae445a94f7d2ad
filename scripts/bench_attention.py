"""The paged attention kernels on a GPU: error, time, bytes of KV per second.

    python scripts/bench_attention.py            # three minutes on an H200; three tables last
    python scripts/bench_attention.py --tables 3

First the kernel that reads each row by itself, against plain XLA; then, at long contexts that the rows of one group
share, the kernels that read a shared page once, against it. Bytes there are those of distinct pages. Last, more queries
a row than the first kernel takes, as of a chunk of a prompt: the kernels of the second table against plain XLA. All
read the same pages: random data in the slots in use, NaN everywhere else. Calls rotate over several pools, so that
little stays in the L2; the median of several repetitions.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.device import HOPPER
from smcjax.pallas import (
    Sharing,
    paged_attention_mosaic,
    paged_attention_reference,
    plan_sharing,
    shared_attention_mosaic,
    uses_kernels,
)

CALLS = 48  # in one program
ENQUEUED = 8  # programs without waiting, so that the host is not in the figure
Inputs = tuple[jax.Array, list[jax.Array], list[jax.Array], jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """R rows of T new tokens each, `context` tokens long, a fraction `shared` of their pages the same ones.

    As a `tree`, the rows branch off one another at random places behind that, as after resampling.
    """

    name: str
    dim: int
    columns: int
    context: int
    rows: int = 8
    heads: int = 32
    kv_heads: int = 8
    page_size: int = 16
    table_width: int = 64
    shared: float = 0.0
    tree: bool = False
    of_a_group: int = 8  # rows

    @property
    def flops(self) -> int:
        """Counts the FLOPs of both products of all queries with all that their rows hold."""
        return 4 * self.rows * self.columns * self.heads * self.dim * self.context


SHAPES = [
    Shape("1B draft, 256", 64, 1, 256),
    Shape("1B draft head, 256", 64, 2, 256),
    Shape("8B verify, 256", 128, 9, 256),
    Shape("1B draft, 1,000", 64, 1, 1000),
    Shape("8B verify, 1,000", 128, 9, 1000),
    Shape("8B verify, 32k", 128, 9, 32_700, table_width=2048),
    Shape("8B verify, 32k, shared", 128, 9, 32_700, table_width=2048, shared=0.95),
    Shape("8B verify, 256 rows, 500", 128, 9, 500, rows=256),
]


WIDE_SHAPES = [
    Shape("8B verify, K=16, 256", 128, 17, 256, shared=0.9),
    Shape("8B verify, K=16, 1,000", 128, 17, 1000, shared=0.9),
    Shape("70B verify, K=8, 256", 128, 9, 256, heads=64, shared=0.9),
    *(
        Shape(f"{model} prompt, {context:,}", dim, 128, context, rows=1, of_a_group=1, table_width=width)
        for model, dim in (("1B", 64), ("8B", 128))
        for context, width in ((256, 64), (1000, 64), (4096, 272), (32_768, 2064))
    ),
    Shape("8B, 8 prompts, 256", 128, 128, 256, of_a_group=1),
    Shape("8B, 8 prompts, 4,096", 128, 128, 4096, of_a_group=1, table_width=272),
]


def shared_shapes() -> list[Shape]:
    """A common prompt and 64 tokens of each row's own; half private; a tree."""
    models = [("1B T=1", 64, 1), ("1B T=2", 64, 2), ("8B T=9", 128, 9)]
    cases = [
        ("256", 256 + 64, 256 / 320, False),
        ("4,096", 4096 + 64, 4096 / 4160, False),
        ("16,384", 16384 + 64, 16384 / 16448, False),
        ("32,768", 32768 + 64, 32768 / 32832, False),
        ("32,768, half private", 32768, 0.5, False),
        ("32,768, tree", 32768, 0.5, True),
    ]
    return [
        Shape(f"{model}, {case}", dim, columns, context, table_width=2304, shared=shared, tree=tree)
        for model, dim, columns in models
        for case, context, shared, tree in cases
    ]


def make(shape: Shape) -> tuple[Inputs, int]:
    """Queries, pools, table, positions, lengths; and the bytes of KV that the rows read, each by itself."""
    rng = np.random.default_rng(0)
    pages = -(-shape.context // shape.page_size)
    common = round(shape.shared * pages)
    own = pages - common
    count = 1 + common + shape.rows * own
    names = 1 + rng.permutation(count - 1)
    table = np.zeros((shape.rows, shape.table_width), np.int32)  # the poisoned trash page where nothing is
    table[:, :common] = names[:common]
    table[:, common:pages] = names[common:].reshape(shape.rows, own)
    if shape.tree:
        for row in range(1, shape.rows):
            branch = rng.integers(common, pages)
            table[row, :branch] = table[rng.integers(row), :branch]
    used = np.zeros((count, shape.page_size), bool)
    slot = np.arange(shape.context)
    used[table[:, slot // shape.page_size], slot % shape.page_size] = True
    dims = (count, shape.page_size, shape.kv_heads, shape.dim)
    pools = int(np.clip((256 << 20) // (2 * np.prod(dims)), 1, 16))

    @jax.jit
    def pool(key: jax.Array) -> jax.Array:
        return jnp.where(used[:, :, None, None], jax.random.normal(key, dims, jnp.bfloat16), jnp.nan)

    keys = [pool(jax.random.key(i)) for i in range(pools)]
    values = [pool(jax.random.key(100 + i)) for i in range(pools)]
    q = jax.random.normal(jax.random.key(9), (shape.rows, shape.columns, shape.heads, shape.dim), jnp.bfloat16)
    positions = np.broadcast_to(shape.context - shape.columns + np.arange(shape.columns), (shape.rows, shape.columns))
    lengths = np.full(shape.rows, shape.context, np.int32)
    read = shape.rows * shape.context * shape.kv_heads * shape.dim * 4
    inputs = (q, keys, values, jnp.asarray(table), jnp.asarray(positions, jnp.int32), jnp.asarray(lengths))
    return inputs, read


def measure(attend: Callable[..., jax.Array], inputs: tuple[Any, ...], calls: int) -> tuple[jax.Array, float]:
    """First result, and microseconds a call."""

    @jax.jit
    def program(q: Any, keys: Any, values: Any, *rest: Any) -> list[jax.Array]:
        return [attend(q * (1 + i / 64), keys[i % len(keys)], values[i % len(values)], *rest) for i in range(calls)]

    times = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(ENQUEUED):
            out = program(*inputs)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - began)
    return out[0], statistics.median(times[3:]) / (ENQUEUED * calls) * 1e6


def unique_bytes(shape: Shape, inputs: Inputs) -> int:
    """Bytes of the distinct slots that hold KV of some row."""
    table, pages = np.asarray(inputs[3]), -(-shape.context // shape.page_size)
    in_last = shape.context - (pages - 1) * shape.page_size
    slots = np.unique(table[:, : pages - 1]).size * shape.page_size + np.unique(table[:, pages - 1]).size * in_last
    return slots * shape.kv_heads * shape.dim * 4


def planned(shape: Shape, inputs: Inputs) -> Sharing:
    """Returns the plan of the pages that rows share."""
    q, _, _, table, positions, lengths = inputs
    plan = functools.partial(
        plan_sharing,
        rows=shape.of_a_group,
        columns=shape.columns,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        page_size=shape.page_size,
        dtype=q.dtype,
    )
    sharing = jax.jit(plan)(table, lengths, positions[:, 0])
    assert sharing is not None
    return sharing


def by_plan(q: Any, keys: Any, values: Any, sharing: Any, positions: Any, lengths: Any) -> jax.Array:
    """`shared_attention_mosaic` of arguments by their places."""
    return shared_attention_mosaic(q, keys, values, sharing, positions, lengths)


def shared_reads() -> None:
    """The second table."""
    print("\nOne group of 8 rows: kernels that read each row by itself, and a shared page once")
    print(f"{'case':<30} {'a row, µs':>9} {'shared, µs':>10} {'GB/s':>6} {'of 4.8 TB/s':>11}  error")
    for shape in shared_shapes():
        inputs, _ = make(shape)
        q, keys, values, _, positions, lengths = inputs
        sharing = planned(shape, inputs)
        calls = 16 if shape.context > 8192 else CALLS
        _, alone = measure(paged_attention_mosaic, inputs, calls)
        got, shared = measure(by_plan, (q, keys, values, sharing, positions, lengths), calls)
        rate = unique_bytes(shape, inputs) / shared * 1e6
        print(
            f"{shape.name:<30} {alone:9.1f} {shared:10.1f} {rate / 1e9:6.0f} {rate / HOPPER.bandwidth:11.0%}"
            f"  {error(got, inputs):.1e}",
            flush=True,
        )


def many_queries() -> None:
    """The third table."""
    print("\nMore queries a row than one tile")
    print(f"{'case':<26} {'XLA, µs':>9} {'kernels, µs':>11} {'TFLOP/s':>8} {'GB/s':>6}  error")
    for shape in WIDE_SHAPES:
        inputs, _ = make(shape)
        q, keys, values, _, positions, lengths = inputs
        calls = 4 if shape.rows * shape.context > 4096 else 16
        _, xla = measure(paged_attention_reference, inputs, calls)
        got, kernel = measure(by_plan, (q, keys, values, planned(shape, inputs), positions, lengths), calls)
        print(
            f"{shape.name:<26} {xla:9.1f} {kernel:11.1f} {shape.flops / kernel / 1e6:8.0f}"
            f" {unique_bytes(shape, inputs) / kernel / 1e3:6.0f}  {error(got, inputs):.1e}",
            flush=True,
        )


def error(got: jax.Array, inputs: Inputs) -> float:
    """Largest difference from plain XLA in float32, relative to its largest value."""
    q, keys, values, table, positions, lengths = inputs

    def row(a: tuple[jax.Array, ...]) -> jax.Array:
        clean = (jnp.nan_to_num(x[0].astype(jnp.float32)) for x in (keys, values))
        return paged_attention_reference(a[0][None], *clean, *(x[None] for x in a[1:]))[0]

    want = jax.lax.map(row, (q.astype(jnp.float32), table, positions, lengths))
    return float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())


def rows_by_themselves() -> None:
    """The first table."""
    print(f"{'case':<26} {'XLA, µs':>9} {'kernel, µs':>11} {'GB/s':>6}  error")
    for shape in SHAPES:
        inputs, read = make(shape)
        calls = 4 if shape.context > 4096 or shape.rows > 64 else CALLS
        _, xla = measure(paged_attention_reference, inputs, calls)
        got, kernel = measure(paged_attention_mosaic, inputs, calls)
        print(
            f"{shape.name:<26} {xla:9.1f} {kernel:11.1f} {read / kernel / 1e3:6.0f}  {error(got, inputs):.1e}",
            flush=True,
        )


TABLES = (rows_by_themselves, shared_reads, many_queries)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(1, len(TABLES) + 1)
    parser.add_argument("--tables", type=int, nargs="+", choices=numbers, default=numbers, help="which (all)")
    args = parser.parse_args()
    if not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one.")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    for number in args.tables:
        TABLES[number - 1]()


if __name__ == "__main__":
    main()
