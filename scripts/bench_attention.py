"""The paged attention kernel against plain XLA on a GPU: error, time, bytes of KV per second.

    python scripts/bench_attention.py            # one minute on an H200; a table last

Both read the same pages: random data in the slots in use, NaN everywhere else. Calls rotate over several pools, so that
little stays in the L2; the median of several repetitions.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.pallas import paged_attention_mosaic, paged_attention_reference

CALLS = 48  # in one program
ENQUEUED = 8  # programs without waiting, so that the host is not in the figure
Inputs = tuple[jax.Array, list[jax.Array], list[jax.Array], jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """R rows of T new tokens each, `context` tokens long, a fraction `shared` of their pages the same ones."""

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


def make(shape: Shape) -> tuple[Inputs, int]:
    """Queries, pools, table, positions, lengths; and the bytes of KV that the rows read."""
    rng = np.random.default_rng(0)
    pages = -(-shape.context // shape.page_size)
    common = int(shape.shared * pages)
    own = pages - common
    count = 1 + common + shape.rows * own
    names = 1 + rng.permutation(count - 1)
    table = np.zeros((shape.rows, shape.table_width), np.int32)  # the poisoned trash page where nothing is
    table[:, :common] = names[:common]
    table[:, common:pages] = names[common:].reshape(shape.rows, own)
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


def measure(attend: Callable[..., jax.Array], inputs: Inputs, calls: int) -> tuple[jax.Array, float]:
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


def error(got: jax.Array, inputs: Inputs) -> float:
    """Largest difference from plain XLA in float32, relative to its largest value."""
    q, keys, values, table, positions, lengths = inputs

    def row(a: tuple[jax.Array, ...]) -> jax.Array:
        clean = (jnp.nan_to_num(x[0].astype(jnp.float32)) for x in (keys, values))
        return paged_attention_reference(a[0][None], *clean, *(x[None] for x in a[1:]))[0]

    want = jax.lax.map(row, (q.astype(jnp.float32), table, positions, lengths))
    return float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())


def main() -> None:
    """Prints the table."""
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
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


if __name__ == "__main__":
    main()
