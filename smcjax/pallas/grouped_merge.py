"""The second half of `grouped_attention_kernel.py`: from the segments of a line to its attention.

    O = Σ_s 2^(lse_s − L) O_s,   L = log2 Σ_s 2^(lse_s)         over the line's segments s, in their order

A block merges four rows of a line. A line has a segment for each share that has some of its chunks, so their number is
known on the device alone (`grouped_shares.py`): a few are asked for together.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.grouped_attention_kernel import Shape
from smcjax.pallas.grouped_shares import Tuning
from smcjax.pallas.products import MASKED, QUERIES, Ref
from smcjax.pallas.shared_merge import UNIT, units_of

FEW, MANY = 2, 4  # segments that are asked for together, where lines are many or few beside blocks


def merge(
    parts_ref: Ref,  # [lines + blocks, subs, 64, D] f16 GMEM
    lse_ref: Ref,  # [lines + blocks, subs, 64] f32 GMEM
    notes_ref: Ref,  # [lines, 2] int32 GMEM: the first block that has a part of a line, and its segments
    *refs: Ref,  # each branch's numbers of tasks [G, S] int32 GMEM, then outputs and log-sum-exps (`result_types`)
    tuning: Tuning,
    shape: Shape,
) -> None:
    """Merges a unit of four rows of a branch."""
    group, of_set, unit, branch = (lax.axis_index(name) for name in ("group", "set", "unit", "branch"))
    row, branches = unit * UNIT, len(shape.units)
    numbers, results = refs[:branches], refs[branches:]
    at_once = FEW if 2 * notes_ref.shape[0] > tuning.blocks else MANY  # a line has some blocks / lines + 2 at most

    def merge_branch(b: int) -> None:
        out_ref, sums_ref = results[2 * b : 2 * b + 2]
        tile = lax.div(row, QUERIES)
        line = ((group * shape.sets + of_set) * branches + b) * shape.lines + lax.div(tile, shape.together)
        # `note` has written nothing for a line without tasks.
        segments = jnp.where(numbers[b][group, of_set] > 0, notes_ref[line, 1], 0)
        place = jnp.where(segments > 0, line + notes_ref[line, 0], 0)
        # A tile's results are those of all warpgroups, if they have taken turns, or of its own.
        subs = [jnp.int32(sub) for sub in range(tuning.subs)]
        if shape.together > 1:
            subs = [lax.rem(tile, shape.together)]
        out, lse = _merged(parts_ref, lse_ref, place, segments, lax.rem(row, QUERIES), subs, at_once)
        if not by_pair(shape):
            sums_ref[group, of_set, pl.ds(row, UNIT)] = lse
            out_ref[group, of_set, pl.ds(row, UNIT)] = out
            return
        in_request = lax.rem(group, shape.groups) * shape.queries + lax.div(row, shape.group_heads)
        at = lax.div(group, shape.groups) * shape.of_request + in_request
        heads = pl.ds(of_set * shape.group_heads + lax.rem(row, shape.group_heads), UNIT)

        @pl.when(in_request < shape.of_request)
        def _store() -> None:
            sums_ref[at, heads] = lse
            out_ref[at, heads] = out

    for b in range(branches):
        pl.when(branch == b)(functools.partial(merge_branch, b))


def _merged(
    parts_ref: Ref,
    lse_ref: Ref,
    first: jax.Array,
    segments: jax.Array,
    row: jax.Array,
    subs: list[jax.Array],
    at_once: int,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [4, D] and log-sum-exps [4] of the rows from `row` on, of so many segments from place `first` on."""
    dim = parts_ref.shape[-1]
    layout = plgpu.Layout.TILED(Tiling(((UNIT, dim), (dim // 32,))), (-3,), (-2,), -1)
    rows = layout.reduce(1)

    def take(turn: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, mass, acc = so_far
        lse, values = [], []
        for i in range(at_once):
            number = turn * at_once + i
            there = jnp.where(number < segments, 0.0, 4 * MASKED)
            for sub in subs:
                where = (first + lax.min(number, segments - 1), sub, pl.ds(row, UNIT))
                values.append(plgpu.load(parts_ref.at[where], layout=layout, optimized=False))
                found = plgpu.load(lse_ref.at[where], layout=rows, optimized=False)
                lse.append(found + jnp.broadcast_to(there, found.shape))
        new_top = functools.reduce(jnp.maximum, lse, top)
        weights = [jnp.exp2(x - new_top) for x in lse]
        before = jnp.exp2(top - new_top)
        mass = functools.reduce(jnp.add, weights, mass * before)
        for weight, value in zip([before, *weights], [acc, *values], strict=True):
            scaled = lax.broadcast_in_dim(weight, (UNIT, dim), [0]) * value.astype(jnp.float32)
            acc = scaled if value is acc else acc + scaled
        return new_top, mass, acc

    nothing = (
        plgpu.layout_cast(jnp.full((UNIT,), 8 * MASKED, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((UNIT,), jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((UNIT, dim), jnp.float32), layout),
    )
    top, mass, acc = lax.fori_loop(0, lax.div(segments + (at_once - 1), at_once), take, nothing)
    some = jnp.where(mass > 0, mass, 1.0)
    lse = jnp.where(top > 1.5 * MASKED, (top + jnp.log2(some)) * math.log(2), -jnp.inf)
    return acc * lax.broadcast_in_dim(1 / some, (UNIT, dim), [0]), lse


def by_pair(shape: Shape) -> bool:
    """True where the rows that a block merges lie within the heads of one query."""
    return shape.group_heads % UNIT == 0


def result_types(shape: Shape, requests: int, dim: int) -> list[Any]:
    """Outputs and log-sum-exps of each branch: by query where a block's rows lie within one's heads, else by group.

    [R·M, S·G heads, D], or [G, S, units·4, D]; log-sum-exps without D. Each is an array of its own, which XLA need not
    cut.
    """
    lead: tuple[int, ...] = (requests * shape.of_request, shape.sets * shape.group_heads)
    if not by_pair(shape):
        lead = (requests * shape.groups, shape.sets, units_of(shape.rows) * UNIT)
    shapes = ((*lead, dim), lead) * len(shape.units)
    return [jax.ShapeDtypeStruct(one, jnp.float32) for one in shapes]
