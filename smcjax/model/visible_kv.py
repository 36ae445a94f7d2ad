"""Keys and values that are visible to queries: of one sequence a row (`SequenceKV`), or of draft trees (`TreeKV`).

Queries of a sequence share all entries of their row. A query of a tree shares the committed entries and has its own
path's entries behind them. Both offer products with queries and weighted sums over all entries in order of position,
and attention masks by position, so a kind of attention is written once for sequences and trees.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.device import product_precision
from smcjax.kv import PageArray
from smcjax.model.view import TreeView
from smcjax.pallas.attention.reference import LOWEST, divisor_of


class VisibleKV(Protocol):
    """Keys or values [Hkv, D] of S entries, as each of T queries in each of R rows sees them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(R, S, Hkv, D)."""
        ...

    def products(self, q: Float[Array, "R T Hkv G D"]) -> Float[Array, "R T Hkv G S"]:
        """Products of queries with every entry, f32."""
        ...

    def sums(self, weights: Float[Array, "R T Hkv G S"]) -> Float[Array, "R T Hkv G D"]:
        """Weighted sums of entries. Weights are rounded to the entries' dtype first."""
        ...


class SequenceKV(NamedTuple):
    """Entries that all queries of a row share."""

    entries: Float[Array, "R S Hkv D"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entries.shape

    def products(self, q: Float[Array, "R T Hkv G D"]) -> Float[Array, "R T Hkv G S"]:
        precision = product_precision(q.dtype)
        terms = "rtkgd,rskd->rtkgs"
        return jnp.einsum(terms, q, self.entries, precision=precision, preferred_element_type=jnp.float32)

    def sums(self, weights: Float[Array, "R T Hkv G S"]) -> Float[Array, "R T Hkv G D"]:
        precision, weights = product_precision(self.entries.dtype), weights.astype(self.entries.dtype)
        return jnp.einsum("rtkgs,rskd->rtkgd", weights, self.entries, precision=precision)


class TreeKV(NamedTuple):
    """Committed entries, which pages hold, and behind them the entries that nodes of each query's path complete.

    All other numbers are 0. Those of nodes off the path are left out: they may be NaN, and 0 · NaN is NaN.
    """

    committed: Float[Array, "R S Hkv D"]  # 0 for entries not in pages
    path: Float[Array, "R T C Hkv D"]  # by depth; 0 without a node, or if it completes no entry or pages hold the entry
    depth: Int[Array, "R S"]  # of the node that completes each entry; −1: pages hold the entry
    entry: Int[Array, "R C"]  # that the node of each depth completes; −1: none, or pages hold it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.committed.shape

    def products(self, q: Float[Array, "R T Hkv G D"]) -> Float[Array, "R T Hkv G S"]:
        precision = product_precision(q.dtype)
        terms = "rtkgd,rtckd->rtkgc"
        own = jnp.einsum(terms, q, self.path, precision=precision, preferred_element_type=jnp.float32)
        depth = self.depth[:, None, None, None]
        own = jnp.take_along_axis(own, jnp.clip(depth, 0, own.shape[-1] - 1), axis=-1)
        return jnp.where(depth < 0, SequenceKV(self.committed).products(q), own)

    def sums(self, weights: Float[Array, "R T Hkv G S"]) -> Float[Array, "R T Hkv G D"]:
        dtype, entry = self.path.dtype, self.entry[:, None, None, None]
        of_path = jnp.where(entry < 0, 0, jnp.take_along_axis(weights, jnp.maximum(entry, 0), axis=-1))
        parts = (("rtkgs,rskd->rtkgd", weights, self.committed), ("rtkgc,rtckd->rtkgd", of_path, self.path))
        committed, own = (
            jnp.einsum(
                terms,
                weights.astype(dtype),
                entries,
                precision=product_precision(dtype),
                preferred_element_type=jnp.float32,
            )
            for terms, weights, entries in parts
        )
        return (committed + own).astype(dtype)


def tree_kv(
    view: TreeView,
    pages: Float[Array, "P entries Hkv D"],
    scratch: Float[Array, "R M Hkv D"],
    *,
    stride: int = 1,
    size: int = 1,
) -> TreeKV:
    """The entries of one array that are visible to the view's new nodes. `scratch` must hold these nodes already.

    `stride` and `size` are those of the array's `PageArray`.
    """
    array = PageArray(pages.shape[2], pages.shape[3], stride, size)
    table, page_size = view.block_table, view.page_size
    slots = table.shape[1] * page_size
    count = max(1, array.count(slots))
    ends = array.ends(count)
    if stride == size == 1:
        held = pages[table].reshape(table.shape[0], slots, *pages.shape[2:])
    else:
        home = jnp.minimum(ends, slots - 1)
        held = pages[table[:, home // page_size], home % page_size // stride]
    is_held = ends[None] < view.committed[:, None]
    depths = view.root[:, None] + jnp.arange(view.tree.depth + 1)[None]
    entry = array.ended_at(depths)
    entry = jnp.where((depths >= view.committed[:, None]) & (entry < count), entry, -1)
    # Beyond a node's own depth, `view.paths` repeats the node.
    on_path = jnp.arange(depths.shape[1])[None, None] <= (view.positions - view.root[:, None])[..., None]
    ends_one = on_path & (entry >= 0)[:, None]
    return TreeKV(
        committed=jnp.where(is_held[..., None, None], held, 0),
        path=jnp.where(ends_one[..., None, None], scratch[:, jnp.asarray(view.paths)], 0),
        depth=jnp.where(is_held, -1, jnp.maximum(ends[None] - view.root[:, None], 0)),
        entry=entry,
    )


def grouped(q: Float[Array, "R T H D"], kv_heads: int) -> Float[Array, "R T Hkv G D"]:
    """Groups query heads by the key-value head that they share."""
    rows, columns, heads, dim = q.shape
    return q.reshape(rows, columns, kv_heads, heads // kv_heads, dim)


def scaled_scores(
    q: Float[Array, "R T Hkv G D"], keys: VisibleKV, scale: float | None = None
) -> Float[Array, "R T Hkv G S"]:
    """Products of queries and keys times `scale` (None: 1/√D), f32."""
    return keys.products(q) / divisor_of(scale, q.shape[-1])


def masked_softmax(
    scores: Float[Array, "R T Hkv G S"], values: VisibleKV, visible: Bool[Array, "R T _ _ S"]
) -> tuple[Float[Array, "R T Hkv G S"], Float[Array, "R T Hkv G D"]]:
    """Attention weights in f32, and the weighted mean of values; both 0 for a query that sees no entry."""
    weights = jax.nn.softmax(jnp.where(visible, scores, LOWEST), axis=-1)
    weights = jnp.where(visible, weights, 0)
    return weights, values.sums(weights)
