"""Attention in plain XLA: over contiguous keys (the oracle), and over pages (the reference of the kernels).

    out[r, t, h] = Σ_s softmax_s( scale · q[r, t, h] · k[r, s, h']  where s is visible ) · v[r, s, h']

with h' = h // (H/Hkv), the key-value head that a group of query heads shares, and scale 1/√D unless a model has its
own. Scores and softmax in f32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.device import product_precision

LOWEST = -1e30  # a score of no weight; finite, so that a query that sees nothing gives no ∞ − ∞


def sees(
    slot: Int[Array, "*#shape"], position: Int[Array, "*#shape"], window: int | None, first: int = 0
) -> Bool[Array, "*shape"]:
    """True where a query at `position` sees `slot`: one of the last `window` up to its own, or any of them (None).

    Slots before `first` are seen by none.
    """
    before = slot <= position
    if window is not None:
        before &= slot > position - window
    return before & (slot >= first) if first else before


def divisor_of(scale: float | None, dim: int) -> float:
    """The number that scores are divided by: 1/`scale`, or √D."""
    return math.sqrt(dim) if scale is None else 1 / scale


def attention(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R S Hkv D"],
    v: Float[Array, "R S Hkv D"],
    visible: Bool[Array, "R T S"],
    *,
    scale: float | None = None,
) -> Float[Array, "R T H D"]:
    """Grouped-query attention over contiguous keys. A query that sees none gets the mean of all values."""
    rows, columns, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(rows, columns, kv_heads, heads // kv_heads, dim)
    precision = product_precision(q.dtype)
    scores = jnp.einsum("rthgd,rshd->rhgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores / divisor_of(scale, dim), LOWEST)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("rhgts,rshd->rthgd", weights.astype(v.dtype), v, precision=precision)
    return out.reshape(rows, columns, heads, dim)


def paged_attention_reference(
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

    `lengths` is how many slots of each row hold KV; what a query at or beyond it returns means nothing. Gathers each
    row's pages, padding included, and attends densely. Values from `lengths` on are zeroed, because a
    stale slot or the trash page may hold another request's NaN, and 0 · NaN is NaN.
    """
    rows, table_width = block_table.shape
    _, page_size, kv_heads, dim = key_pages.shape
    slots = table_width * page_size
    k = key_pages[block_table].reshape(rows, slots, kv_heads, dim)
    v = value_pages[block_table].reshape(rows, slots, kv_heads, dim)
    slot = jnp.arange(slots)[None]
    written = slot < lengths[:, None]
    v = jnp.where(written[:, :, None, None], v, 0)
    return attention(q, k, v, sees(slot[:, None], positions[:, :, None], window, first), scale=scale)
