"""Attention over paged keys and values in plain XLA whose cost follows the real lengths and windows; for CPUs.

    for each block of C slots, from the first that any row of the batch sees to the last:
        S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V

The dense reference (`smcjax.pallas.attention.reference`) gathers whole block tables, padding included. Here the range
of blocks is a traced value, so that a short sequence under a large `max_model_len` costs what a short sequence costs,
and a window what the window costs.

A block in which a row sees nothing leaves its sums exactly as they are: m stays, exp(m − m) = 1, and zeros are added.
So a row's result does not depend on how long the other rows of its batch are, nor on where their windows begin.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.device import product_precision
from smcjax.pallas.attention.reference import LOWEST, divisor_of, sees


def block_slots(rows: int) -> int:
    """C, slots that a block holds at most: for many rows small blocks, which cost a short batch less."""
    return 128 if rows == 1 else 64


def blockwise_paged_attention(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    block_table: Int[Array, "R M"],
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    window: int | None = None,
    scale: float | None = None,
    first: int = 0,
) -> Float[Array, "R T H D"]:
    """Attends from query (r, t) to slots `first`…positions[r, t], all or the last `window`, of row r's pages.

    The first `lengths[r]` slots hold KV, none where a row reads nothing. `positions` ascend in a row.

    A query at or beyond `lengths` returns numbers without a meaning; slots that hold no KV may hold anything.
    """
    rows, columns, heads, dim = q.shape
    _, page_size, kv_heads, _ = key_pages.shape
    group, table_width = heads // kv_heads, block_table.shape[1]
    pages = min(table_width, max(1, block_slots(rows) // page_size))  # of a block
    block_table = jnp.pad(block_table, ((0, 0), (0, -table_width % pages)))
    size = pages * page_size
    precision = product_precision(q.dtype)

    # The queries that share a key-value head are rows of one product: [R, Hkv, T·G, D].
    q = (q / divisor_of(scale, dim)).reshape(rows, columns, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(rows, kv_heads, columns * group, dim)
    position = jnp.repeat(positions, group, axis=1)[:, None, :, None]

    def gathered(pool: jax.Array, named: jax.Array) -> jax.Array:
        return pool[named].reshape(rows, size, kv_heads, dim).transpose(0, 2, 1, 3)

    def attend(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, top, mass = carry
        named = jax.lax.dynamic_slice_in_dim(block_table, index * pages, pages, axis=1)
        slot = index * size + jnp.arange(size)[None]
        keys, values = gathered(key_pages, named), gathered(value_pages, named)
        # A stale slot may hold another request's NaN, and 0 · NaN is NaN.
        values = jnp.where((slot < lengths[:, None])[:, None, :, None], values, 0)
        scores = jnp.einsum("rhqd,rhsd->rhqs", q, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(sees(slot[:, None, None], position, window, first), scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        kept, weights = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
        new = jnp.einsum("rhqs,rhsd->rhqd", weights.astype(values.dtype), values, precision=precision)
        return out * kept[..., None] + new.astype(jnp.float32), higher, mass * kept + jnp.sum(weights, axis=-1)

    of_query = (rows, kv_heads, columns * group)
    empty = (jnp.zeros((*of_query, dim), jnp.float32), jnp.full(of_query, LOWEST), jnp.zeros(of_query))
    ends = jnp.max(jnp.minimum(lengths, positions[:, -1] + 1))
    blocks, start = jnp.maximum(1, -(-ends // size)), jnp.int32(0)
    if window is not None:
        begins = jnp.min(jnp.where(lengths > 0, positions[:, 0] + 1 - window, ends))
        start = jnp.clip(begins // size, 0, blocks - 1)
    out, _, mass = jax.lax.fori_loop(start, blocks, attend, empty)
    out = (out / jnp.where(mass > 0, mass, 1.0)[..., None]).astype(value_pages.dtype)
    return out.reshape(rows, kv_heads, columns, group, dim).transpose(0, 2, 1, 3, 4).reshape(rows, columns, heads, dim)
