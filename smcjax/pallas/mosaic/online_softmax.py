"""Softmax of scores as chunks of them come, in the registers of one warpgroup, and masks of scores.

    m' = max(m, s),  p = 2^(s − m'),  Σ' = Σ·2^(m − m') + Σ p,  O' = O·2^(m − m') + p·V

with scores s in base 2, so times log2(e)/√D. A chunk that all of its rows see whole takes one bias a query, 0 or
`MASKED`; one of *pieces* (`attention/prefix_plan.py`), each with rows and an end of its own, a mask of every score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.tiles import clear_slots
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref, across, of_part


def row_layout() -> Any:
    """The layout of a value a query, as products leave their rows."""
    return plgpu.Layout.WGMMA.reduce(1)


class Softmax(NamedTuple):
    """Softmax of 64 queries over the scores so far."""

    acc: jax.Array  # [64, D] f32: O
    m: jax.Array  # [64] f32
    mass: jax.Array  # [64] f32: Σ


def nothing_yet(dim: int) -> Softmax:
    """The softmax before the first chunk. m lies between masked scores and others: masked ones weigh 0 at once."""
    return Softmax(
        plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((QUERIES,), MASKED / 2, jnp.float32), row_layout()),
        plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), row_layout()),
    )


def advance(
    so_far: Softmax,
    scores: jax.Array,
    exp2: Callable[[jax.Array], jax.Array],
    *,
    scale: float = 1.0,
    bias: jax.Array | None = None,
) -> tuple[Softmax, jax.Array]:
    """Takes in scores, times `scale` and plus a query's `bias`; returns all but p·V, and p in bf16."""
    acc, m, mass = so_far
    top = scores.max(axis=1)
    if scale != 1.0:
        top = top * scale
        scores = scores * scale
    if bias is not None:
        top = top + bias
    new_m = jnp.maximum(m, top)
    p = exp2(scores + across(-new_m if bias is None else bias - new_m, scores.shape))
    alpha = jnp.exp2(m - new_m)
    return Softmax(acc * across(alpha, acc.shape), new_m, mass * alpha + p.sum(axis=1)), p.astype(jnp.bfloat16)


def result(softmax: Softmax, empty: float) -> tuple[jax.Array, jax.Array]:
    """O/Σ, and log2 of Σ exp: `empty` for queries that saw nothing."""
    seen = softmax.mass > 0
    mass = jnp.where(seen, softmax.mass, 1.0)
    return softmax.acc * across(1 / mass, softmax.acc.shape), jnp.where(seen, softmax.m + jnp.log2(mass), empty)


class Piece(NamedTuple):
    """One of the pieces of a chunk."""

    first: jax.Array  # its first slot in the rows that read it
    members: jax.Array  # these rows, a bit each


def visible_ends(pieces: Sequence[Piece], width: int, sees: jax.Array, row: jax.Array) -> list[jax.Array]:
    """The places in the chunk at which the visible part of each piece ends, for a query.

    Pieces are `width` slots. Query i is of row `row[i]` and sees `sees[i]` slots of it.
    """
    starts = ((part * width, *one) for part, one in enumerate(pieces))
    return [jnp.where(((members >> row) & 1) != 0, sees - first + start, 0) for start, first, members in starts]


def masked(scores: jax.Array, visible: Sequence[jax.Array], width: int, scale: float = 1.0) -> jax.Array:
    """The scores of the slots that their query sees, elsewhere what times `scale` is `MASKED`."""
    slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(
        slot < of_part(slot, [across(end, scores.shape) for end in visible], width), scores, MASKED / scale
    )


def between(
    scores: jax.Array, first: Sequence[jax.Array], last: Sequence[jax.Array], width: int, scale: float = 1.0
) -> jax.Array:
    """The scores of places first[p] … last[p] of a query in piece p of `width` slots, elsewhere as `masked` has it."""
    slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    low, high = (of_part(slot, [across(x, scores.shape) for x in bounds], width) for bounds in (first, last))
    return jnp.where((slot >= low) & (slot <= high), scores, MASKED / scale)


def clean(values: Ref, pieces: Sequence[Piece], width: int, lengths: Sequence[jax.Array], *, interpret: bool) -> None:
    """Zeros in the slots of a chunk of pieces of which no row holds anything: 0 · NaN is NaN.

    Pieces are `width` slots. Row r holds `lengths[r]`.
    """
    firsts, members = zip(*pieces, strict=True)
    clear_slots(values, firsts, members, lengths, width, interpret=interpret)
    plgpu.commit_smem()
