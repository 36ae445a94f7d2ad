"""The second half of `grouped_attention_kernel.py`: from the segments of a line to its attention.

    O = Σ_s 2^(lse_s − L) O_s,   L = log2 Σ_s 2^(lse_s)         over the line's segments s, in their order

A block merges four rows of a line. A line has a segment for each share that has some of its chunks, so their number is
known on the device alone (`grouped_shares.py`): a few are asked for together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.attention.shared_merge import UNIT, units_of
from smcjax.pallas.mosaic.compat import fa, pl, plgpu, store
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref
from smcjax.pallas.sparse.grouped_attention_kernel import Shape
from smcjax.pallas.sparse.grouped_shares import Tuning

FEW, MANY = 2, 4  # segments that are asked for together, where lines are many or few beside blocks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parts", "lse", "notes", "numbers"),
    meta_fields=("shape", "tuning"),
)
@dataclasses.dataclass(frozen=True)
class Segments:
    """Results of `grouped_attention_kernel.attend`, of all lines, in GMEM."""

    parts: Any  # [lines + blocks, subs, 64, D] f16
    lse: Any  # [lines + blocks, subs, 64] f32
    notes: Any  # [lines, 2] int32: the first block that has a part of a line, and its segments
    numbers: tuple[Any, ...]  # tasks of each branch [G, S] int32
    shape: Shape
    tuning: Tuning

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The operands that a kernel begins with, for which `of_refs` gives it these segments again."""
        return self.parts, self.lse, self.notes, *self.numbers

    @property
    def at_once(self) -> int:
        """Segments of a line to ask for together: a line has some blocks / lines + 2 at most."""
        return FEW if 2 * self.notes.shape[0] > self.tuning.blocks else MANY


@functools.partial(jax.tree_util.register_dataclass, data_fields=("segments",), meta_fields=("branch",))
@dataclasses.dataclass(frozen=True)
class Unmerged:
    """A `Part` before its segments are merged: those of one branch of a launch."""

    segments: Segments
    branch: int


def of_refs(refs: Sequence[Ref], shape: Shape, tuning: Tuning) -> tuple[Segments, Sequence[Ref]]:
    """Splits a kernel's references into the segments that they begin with and the others."""
    (parts, lse, notes, *numbers), others = refs[: 3 + len(shape.units)], refs[3 + len(shape.units) :]
    return Segments(parts, lse, notes, tuple(numbers), shape, tuning), others


class Place(NamedTuple):
    """The heads of a query that four rows of a group are, where `by_pair`."""

    query: jax.Array  # of all requests'
    head: jax.Array  # the first of four
    is_there: jax.Array  # false behind a request's last query


def merge(*refs: Ref, shape: Shape, tuning: Tuning) -> None:
    """Merges a unit of four rows of a branch. `refs`: the segments' arrays, then what `result_types` says."""
    group, of_set, unit, branch = (lax.axis_index(name) for name in ("group", "set", "unit", "branch"))
    # A block is one unit of one branch; the branch is known at run time, the code is written out for each.
    row, (segments, results) = unit * UNIT, of_refs(refs, shape, tuning)

    def merge_branch(b: int) -> None:
        out_ref, sums_ref = results[2 * b : 2 * b + 2]
        ((out, lse),) = merged(segments, group, of_set, row, [b])
        # Four rows that are heads of one query go straight to its place; otherwise rows stay by group, and XLA puts
        # them in order.
        if not by_pair(shape):
            store(sums_ref.at[group, of_set, pl.ds(row, UNIT)], lse)
            store(out_ref.at[group, of_set, pl.ds(row, UNIT)], out)
            return
        place = place_of(shape, group, of_set, row)

        @pl.when(place.is_there)
        def _store() -> None:
            store(sums_ref.at[place.query, pl.ds(place.head, UNIT)], lse)
            store(out_ref.at[place.query, pl.ds(place.head, UNIT)], out)

    for b in range(len(shape.units)):
        pl.when(branch == b)(functools.partial(merge_branch, b))


def place_of(shape: Shape, group: jax.Array, of_set: jax.Array, row: jax.Array) -> Place:
    """Where the results of four rows of a group and set go, from `row` on, in the groups' order of queries."""
    in_request = lax.rem(group, shape.groups) * shape.queries + lax.div(row, shape.group_heads)
    query = lax.div(group, shape.groups) * shape.of_request + in_request
    head = of_set * shape.group_heads + lax.rem(row, shape.group_heads)
    return Place(query, head, in_request < shape.of_request)


def merged(
    segments: Segments, group: jax.Array, of_set: jax.Array, row: jax.Array, branches: Sequence[int]
) -> list[tuple[jax.Array, jax.Array]]:
    """Outputs [4, D] and log-sum-exps [4] of some branches, of the rows from `row` on; all their loads side by side."""
    shape, dim = segments.shape, segments.parts.shape[-1]
    # Four rows lie within one tile of 64, and the tile within one line.
    tile, in_tile, at_once = lax.div(row, QUERIES), lax.rem(row, QUERIES), segments.at_once
    layout, rows = row_layout(dim), row_layout(dim).reduce(1)
    # A tile's results are those of all warpgroups, if they have taken turns, or of its own.
    subs = [jnp.int32(sub) for sub in range(segments.tuning.subs)]
    if shape.together > 1:
        subs = [lax.rem(tile, shape.together)]
    # The numbers of lines that `grouped_shares.py` gives.
    first_line = (group * shape.sets + of_set) * len(shape.units)
    lines = [(first_line + b) * shape.lines + lax.div(tile, shape.together) for b in branches]
    firsts, counts = ([segments.notes[line, i] for line in lines] for i in range(2))
    # Nothing has been noted of a line without tasks.
    tasks = [segments.numbers[b][group, of_set] for b in branches]
    counts = [jnp.where(number > 0, count, 0) for number, count in zip(tasks, counts, strict=True)]
    # Segments of a line lie at line + block for consecutive blocks, from the first one on.
    lines = [line + first for line, first in zip(lines, firsts, strict=True)]
    places = [jnp.where(count > 0, place, 0) for place, count in zip(lines, counts, strict=True)]
    # Where another branch's line has segments, something that has been written is read in the place of none.
    written = functools.reduce(lax.max, places)
    places = [jnp.where(count > 0, place, written) for place, count in zip(places, counts, strict=True)]

    def take(turn: jax.Array, so_far: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        found = []
        for place, count in zip(places, counts, strict=True):
            lse, values = [], []
            for i in range(at_once):
                # Behind the last segment the last one is loaded again, at a log-sum-exp so low that it weighs 0.
                number = turn * at_once + i
                there = jnp.where(number < count, 0.0, 4 * MASKED)
                for sub in subs:
                    where = (place + lax.max(lax.min(number, count - 1), 0), sub, pl.ds(in_tile, UNIT))
                    # [4, D] f16 a segment, a row for each warp; all loads of a turn are issued before the first is
                    # used.
                    values.append(plgpu.load(segments.parts.at[where], layout=layout, optimized=False))
                    one = plgpu.load(segments.lse.at[where], layout=rows, optimized=False)
                    lse.append(one + jnp.broadcast_to(there, one.shape))
            found.append((lse, values))
        return [_taken(*one, *state) for one, state in zip(found, so_far, strict=True)]

    # Below every log-sum-exp that may come, those of absent segments included.
    nothing = (
        plgpu.layout_cast(jnp.full((UNIT,), 8 * MASKED, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((UNIT,), jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((UNIT, dim), jnp.float32), layout),
    )
    # As many turns as the branch with the most segments needs.
    turns = lax.div(functools.reduce(lax.max, counts) + (at_once - 1), at_once)
    return [_result(*state) for state in lax.fori_loop(0, turns, take, [nothing] * len(branches))]


def _taken(
    lse: list[jax.Array], values: list[jax.Array], top: jax.Array, mass: jax.Array, acc: jax.Array
) -> tuple[jax.Array, ...]:
    """Takes some more segments into the softmax of four rows."""
    new_top = functools.reduce(jnp.maximum, lse, top)
    # In the order of segments, so that the same segments give the same bits.
    weights = [jnp.exp2(x - new_top) for x in lse]
    before = jnp.exp2(top - new_top)
    mass = functools.reduce(jnp.add, weights, mass * before)
    acc = lax.broadcast_in_dim(before, acc.shape, [0]) * acc
    for weight, value in zip(weights, values, strict=True):
        acc = acc + lax.broadcast_in_dim(weight, acc.shape, [0]) * value.astype(jnp.float32)
    return new_top, mass, acc


def _result(top: jax.Array, mass: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns output and log-sum-exp of rows: 0 and −∞ for a row that saw no slot."""
    # A row that saw nothing has 2 · `MASKED` from each segment. Natural logarithm for the caller.
    seen = top > 1.5 * MASKED
    lse = jnp.where(seen, (top + jnp.log2(jnp.where(seen, mass, 1.0))) * math.log(2), -jnp.inf)
    return acc * lax.broadcast_in_dim(jnp.where(seen, 1 / mass, 0.0), acc.shape, [0]), lse


def row_layout(dim: int) -> Any:
    """Registers of a warpgroup for four rows, each of a warp."""
    return plgpu.Layout.TILED(fa.Tiling(((UNIT, dim), (dim // 32,))), (-3,), (-2,), -1)


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
