"""Attention in plain XLA: over contiguous keys (the oracle), and over pages (the reference of the kernel).

    out[r, t, h] = Σ_s softmax_s( q[r, t, h] · k[r, s, h'] / √D  where s is visible ) · v[r, s, h']

with h' = h // (H/Hkv), the key-value head that a group of query heads shares. Scores and softmax in f32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.numerics import product_precision


def attention(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R S Hkv D"],
    v: Float[Array, "R S Hkv D"],
    visible: Bool[Array, "R T S"],
) -> Float[Array, "R T H D"]:
    """Grouped-query attention over contiguous keys. Every query must see at least one key."""
    rows, columns, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(rows, columns, kv_heads, heads // kv_heads, dim)
    precision = product_precision(q.dtype)
    scores = jnp.einsum("rthgd,rshd->rhgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores / math.sqrt(dim), -jnp.inf), axis=-1)
    out = jnp.einsum("rhgts,rshd->rthgd", weights.astype(v.dtype), v, precision=precision)
    return out.reshape(rows, columns, heads, dim)


def paged_attention_reference(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    block_table: Int[Array, "R M"],
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"],
) -> Float[Array, "R T H D"]:
    """The same over pages: query (r, t) sees slots 0…positions[r, t] of the M·B slots that row r's table names.

    `lengths` is how many slots of each row hold KV; what a query at or beyond it returns means nothing. Gathers each
    row's pages, padding included, and attends densely. Values from `lengths` on are zeroed, because a
    stale slot or the trash page may hold another request's NaN, and 0 · NaN is NaN.
    """
    rows, table_width = block_table.shape
    _, page_size, kv_heads, dim = key_pages.shape
    slots = table_width * page_size
    k = key_pages[block_table].reshape(rows, slots, kv_heads, dim)
    v = value_pages[block_table].reshape(rows, slots, kv_heads, dim)
    slot = jnp.arange(slots)
    written = slot < lengths[:, None]
    v = jnp.where(written[:, :, None, None], v, 0)
    return attention(q, k, v, slot <= positions[:, :, None])
