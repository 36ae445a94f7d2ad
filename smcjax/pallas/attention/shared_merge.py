"""The second half of `prefix_shared.py`: from what blocks have found in their shares of the tasks to the attention.

    O = Σ_s w_s O_s,   w_s = 2^(lse_s − max lse) / Σ_s 2^(lse_s − max lse)

over the shares s, in their order. (Blocks of the first kernel that wait for each other and merge themselves, a launch
less, take as long: dev/LOG.md.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.attention.shared_tuning import Tuning
from smcjax.pallas.mosaic.compat import fa, pl, plgpu, store
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref

UNIT = 4  # queries that a warpgroup merges at once, each warp one


def units_of(queries: int) -> int:
    """Units of a group's `queries` for one key-value head."""
    return -(-queries // UNIT)


def merge_unit(
    out_ref: Ref,  # `result_type`
    parts_ref: Ref,  # [G, shares, subs, Hkv, tiles of a block, 64, D] f16 GMEM
    lse_ref: Ref,  # [G, shares, subs, Hkv, tiles of a block, 64] f32 GMEM
    unit: jax.Array,
    *,
    group: jax.Array,
    head: jax.Array,
    tuning: Tuning,
) -> None:
    """Merges the attention of queries 4·unit … 4·unit + 3 of a group and key-value head, and stores it."""
    total = _merged(parts_ref, lse_ref, unit, group=group, head=head, tuning=tuning).astype(out_ref.dtype)
    # Four queries that are heads of one (row, column) pair go straight to the pair's place.
    if len(out_ref.shape) == 3:
        kv_heads = parts_ref.shape[3]
        of_a_pair = out_ref.shape[1] // kv_heads // UNIT  # units
        pair = group * (out_ref.shape[0] // parts_ref.shape[0]) + lax.div(unit, of_a_pair)
        store(out_ref.at[pair, pl.ds((head * of_a_pair + lax.rem(unit, of_a_pair)) * UNIT, UNIT)], total)
    else:
        store(out_ref.at[group, head, pl.ds(unit * UNIT, UNIT)], total)


def _merged(
    parts_ref: Ref, lse_ref: Ref, unit: jax.Array, *, group: jax.Array, head: jax.Array, tuning: Tuning
) -> Float[Array, "4 D"]:
    """Loads and merges what all shares found for queries 4·unit … 4·unit + 3."""
    dim = parts_ref.shape[-1]
    # [4, D] in the registers of a warpgroup, a query for each warp.
    layout = plgpu.Layout.TILED(fa.Tiling(((UNIT, dim), (dim // 32,))), (-3,), (-2,), -1)
    first_query = unit * UNIT
    tile, place = lax.div(first_query, QUERIES), lax.rem(first_query, QUERIES)
    # Which part of the queries, and which tile of it: the shares of that part are `first` … `first` + `splits` − 1.
    part, lane = lax.div(tile, tuning.tiles), lax.rem(tile, tuning.tiles)
    before, first, splits = 0, jnp.int32(0), jnp.int32(tuning.splits[0])
    for p in range(1, len(tuning.splits)):
        before += tuning.splits[p - 1]
        first = jnp.where(part >= p, before, first)
        splits = jnp.where(part >= p, tuning.splits[p], splits)
    queries = pl.ds(place, UNIT)
    lse, values = [], []
    # Written out over the largest number of shares, so all loads are issued before the first is used. Parts with fewer
    # shares load their last one again, at a log-sum-exp so low that it weighs 0.
    for s in range(max(tuning.splits)):
        share = first + lax.min(jnp.int32(s), splits - 1)
        for sub in range(tuning.subs):
            where = (group, share, sub, head, lane, queries)
            values.append(plgpu.load(parts_ref.at[where], layout=layout, optimized=False))
            found = plgpu.load(lse_ref.at[where], layout=layout.reduce(1), optimized=False)
            lse.append(found + jnp.broadcast_to(jnp.where(s < splits, 0.0, 4 * MASKED), found.shape))
    # Log-sum-exps are finite (a share that saw nothing has 2 · `MASKED`), so there is no ∞ − ∞.
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp2(x - top) for x in lse]
    mass = functools.reduce(jnp.add, weights)
    terms = [
        lax.broadcast_in_dim(weight / mass, (UNIT, dim), [0]) * value.astype(jnp.float32)
        for weight, value in zip(weights, values, strict=True)
    ]
    # In the order of shares, so that results have the same bits run after run.
    return functools.reduce(jnp.add, terms)


def result_type(*, groups: int, kv_heads: int, group_heads: int, pairs: int, dim: int, dtype: Any) -> Any:
    """The shape and dtype of the array that units are merged into.

    [R·T, H, D] where a unit lies within the heads of a (row, column) pair, else [G, Hkv, queries, D].
    """
    if group_heads % UNIT == 0:
        return jax.ShapeDtypeStruct((groups * pairs, kv_heads * group_heads, dim), dtype)
    return jax.ShapeDtypeStruct((groups, kv_heads, units_of(pairs * group_heads) * UNIT, dim), dtype)


def by_pair(result: jax.Array, *, pairs: int, heads: int) -> Float[Array, "RT H D"]:
    """The merged result as [R·T, H, D]."""
    if result.ndim == 3:
        return result
    groups, kv_heads, _, dim = result.shape
    found = result[:, :, : pairs * heads // kv_heads].reshape(groups, kv_heads, pairs, -1, dim)
    return found.transpose(0, 2, 1, 3, 4).reshape(groups * pairs, heads, dim)
