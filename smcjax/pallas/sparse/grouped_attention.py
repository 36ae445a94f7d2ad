"""Attention to selected blocks of pages, read once a group of queries: tasks made on the device, and the reference.

    task = (unit, place, queries)       unit: u slots of a physical page; place: where it stands, in units

The queries of a group select sets of blocks of l' positions each. A task is a unit, u = min(B, l') slots, that some of
them have selected, with a bit for each query that has. A query attends to the slots of its own tasks between bounds of
its own, so the result is that of each query by itself, whatever the groups are.

Queries of one request may belong to rows with tables of their own: a page that several name stands at one place in
all of their sequences, so pages are compared there, and a page is a task of the queries that have it and select it.

Sets differ from layer to layer and from head to head, so tasks are found in every layer, without sorting and without
the host: bits of blocks, and a running count that says where each goes.

`smcjax.sparse.groups` makes the sets and bounds of sparse layers. The kernel is in
`grouped_attention_sm90.py`, which the package registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from smcjax.device import product_precision
from smcjax.pallas.attention.reference import LOWEST, divisor_of
from smcjax.pallas.dispatch import Op
from smcjax.pallas.mosaic.bitmask import WORD, packed, places_of
from smcjax.pallas.sparse.query_groups import QueryGroups

CHUNK = 64  # slots that kernels take at once


class Tasks(NamedTuple):
    """Units of pages that the groups of each request read, by set: S = Hkv.

    The first `number` of K tasks count, in the order of the sequence; the others name unit 0 and no query.
    """

    unit: Int[Array, "R g S K"]  # of the pool's P · B/u
    place: Int[Array, "R g S K"]
    queries: Int[Array, "R g S K words"]  # bit c % 32 of word c // 32: query c of the group
    number: Int[Array, "R g S"]


class Part(NamedTuple):
    """Attention to a part of what queries see. A query that sees nothing has output 0 and a log-sum-exp of −∞."""

    out: Float[Array, "R M H D"]  # f32
    lse: Float[Array, "R M H"]  # f32, the log of the sum of exp(score)
    unmerged: Any = None  # `grouped_merge.Unmerged`: the segments that a kernel has merged into this part, if one has


class Branch(NamedTuple):
    """One softmax of every query: the pages and tasks that it goes over, and each query's first and last slot."""

    key_pages: Float[Array, "P B Hkv D"]
    value_pages: Float[Array, "P B Hkv D"]
    tasks: Tasks
    low: Int[Array, "R M"]
    high: Int[Array, "R M"]


def unit_slots(page_size: int, block_size: int) -> int:
    """u, slots of a unit. Raises ValueError where neither of the two sizes divides the other."""
    if page_size % block_size and block_size % page_size:
        raise ValueError(
            f"page_size must be a multiple or a divisor of the block's {block_size} positions, got {page_size}."
        )
    return min(page_size, block_size)


def group_tasks(
    selected: Bool[Array, "R M S blocks"],
    table: Int[Array, "R M pages"],
    groups: QueryGroups,
    *,
    page_size: int,
    block_size: int,
    most_blocks: int,
    rows: int = 1,
) -> Tasks:
    """Returns the tasks of queries that select these blocks of `block_size` positions, of pages that `table` names.

    Args:
        selected: the blocks of each query and set, at most `most_blocks` of them.
        table: each query's own pages in order.
        groups: how the M queries of a request are grouped.
        page_size: B.
        block_size: l'.
        most_blocks: n, which bounds the tasks: K = min(C·n·l'/u, rows·units).
        rows: distinct tables that the queries of a request have at most.
    """
    unit = unit_slots(page_size, block_size)
    most = groups.size * most_blocks * (block_size // unit)
    return _tasks(selected, table, groups, most, parts=block_size // unit, in_page=page_size // unit, rows=rows)


def _tasks(
    selected: Bool[Array, "R M S blocks"],
    table: Int[Array, "R M pages"],
    groups: QueryGroups,
    most: int,
    *,
    parts: int,  # units of a block
    in_page: int,  # units of a page
    rows: int,
    once: bool = False,  # for all layers
) -> Tasks:
    """At most `most` tasks of each group and set."""
    units = min(selected.shape[-1] * parts, table.shape[2] * in_page)
    width = min(most, rows * units)
    # What layers have in common XLA computes once, but for kernels.
    find = tasks_of_blocks.reference if once else tasks_of_blocks
    if rows == 1:  # any query's table is all queries'
        pages, members = table[:, :1, :, None], None
    else:
        pages, members = _shared_pages(groups.split(table), groups.present, rows)
    return find(selected, pages, members, groups, width=width, parts=parts, in_page=in_page)


def _shared_pages(
    tables: Int[Array, "R g C pages"], present: Bool[np.ndarray, "g C"], rows: int
) -> tuple[Int[Array, "R g pages N"], Shaped[Array, "R g pages N words"]]:
    """The pages that stand at each place in the tables of a group's queries, at most `rows`, and the queries of each.

    Pages come in the order of their first queries; behind the last, page 0 of no query.
    """
    size = tables.shape[2]
    at = jnp.moveaxis(tables, 2, 3)  # [R, g, pages, C]
    same = (at[..., :, None] == at[..., None, :]) & present[None, :, None, None]
    leads = ~jnp.any(same & np.tri(size, k=-1, dtype=bool)[None, None, None], axis=-1) & present[None, :, None]
    number = jnp.sum(jnp.where(np.tri(size, dtype=bool)[None, None, None], leads[..., None, :], False), axis=-1) - 1
    of_page = leads[..., None, :] & (
        number[..., None, :] == np.arange(min(rows, size))[None, None, None, :, None]
    )  # [R, g, pages, N, C]
    members = jnp.any(of_page[..., None] & same[..., None, :, :], axis=-2)
    return jnp.sum(jnp.where(of_page, at[..., None, :], 0), axis=-1), packed(members)


def _tasks_at(
    place: Int[Array, "R g S K"],
    page: Int[Array, "R g S K"],
    queries: Shaped[Array, "R g S K words"],
    number: Int[Array, "R g S"],
    in_page: int,
) -> Tasks:
    """The first `number` of these tasks; the others name nothing."""
    there = jnp.arange(place.shape[3])[None, None, None] < number[..., None]
    return Tasks(
        unit=jnp.where(there, page * in_page + place % in_page, 0).astype(jnp.int32),
        place=jnp.where(there, place, 0).astype(jnp.int32),
        queries=jax.lax.bitcast_convert_type(jnp.where(there[..., None], queries, 0), jnp.int32),
        number=number,
    )


def tasks_of_blocks_reference(
    selected: Bool[Array, "R M S blocks"],
    pages: Int[Array, "R _ pages N"],
    members: Shaped[Array, "R g pages N words"] | None,
    groups: QueryGroups,
    *,
    width: int,
    parts: int,
    in_page: int,
) -> Tasks:
    """Returns the tasks of groups, K = `width` at most: of a place first those of its first page.

    Args:
        selected: the blocks of each query and set.
        pages: those that stand at each place of a group's tables, or of a request's.
        members: the queries of a group whose page each is, a bit each, uint32; None: all, and N = 1.
        groups: how the M queries of a request are grouped.
        width: K, of which the first tasks count.
        parts: units of a block.
        in_page: units of a page.
    """
    units, most = min(selected.shape[3] * parts, pages.shape[2] * in_page), pages.shape[3]
    of_unit = np.arange(units)
    chosen = packed(jnp.moveaxis(groups.split(selected) & groups.present[None, ..., None, None], 2, 4))
    wanted = chosen[:, :, :, of_unit // parts, None]  # [R, g, S, units, N, words]
    if members is not None:
        wanted = wanted & members[:, :, None, of_unit // in_page]
    leads = jnp.any(wanted != 0, axis=-1)
    entry, number = places_of(leads.reshape(*leads.shape[:3], -1), width)
    place, of_page = entry // most, entry % most
    request, group, of_set, _ = np.ogrid[: place.shape[0], : place.shape[1], : place.shape[2], :1]
    page = pages[request, jnp.minimum(group, pages.shape[1] - 1), place // in_page, of_page]
    return _tasks_at(place, page, wanted[request, group, of_set, place, of_page], number, in_page)


tasks_of_blocks = Op(tasks_of_blocks_reference)


def span_tasks(
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    table: Int[Array, "R M pages"],
    groups: QueryGroups,
    *,
    page_size: int,
    unit: int,
    sets: int,
    most_slots: int,
    rows: int = 1,
) -> Tasks:
    """Returns the tasks of queries that read all slots low … high, both included, in all sets.

    They depend on positions and tables alone, so that one plan serves all layers: a window's, or compressed tokens'.

    Args:
        low: each query's first slot.
        high: its last one.
        table: each query's own pages in order.
        groups: how the M queries of a request are grouped.
        page_size: slots of a page, a multiple of `unit`.
        unit: u, slots of a task.
        sets: S.
        most_slots: from the first to the last slot that the queries of a group see which have one table: of a window
            of w slots and consecutive queries w + C − 1.
        rows: distinct tables that the queries of a request have at most.
    """
    most = min(rows, groups.size) * ((most_slots + unit - 2) // unit + 1)
    if rows == 1:
        found = _one_run(low, high, table, groups, most, unit=unit, in_page=page_size // unit)
    else:
        first = jnp.arange(table.shape[2] * page_size // unit)[None, None] * unit
        inside = _meets(first, unit, low[..., None], high[..., None])
        shape = {"parts": 1, "in_page": page_size // unit, "rows": rows}
        found = _tasks(inside[:, :, None], table, groups, most, **shape, once=True)
    return Tasks(*(jnp.repeat(x, sets, axis=2) for x in found))


def _meets(first: jax.Array, unit: int, low: jax.Array, high: jax.Array) -> jax.Array:
    """True for units of which a slot, from their `first` on, lies between `low` and `high`, both included."""
    return (first + (unit - 1) >= low) & (first <= high)


def _one_run(
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    table: Int[Array, "R M pages"],
    groups: QueryGroups,
    most: int,
    *,
    unit: int,
    in_page: int,
) -> Tasks:
    """Returns the units of each group from the first to the last that its queries see, who have one table.

    They are at most `most`. `_tasks` finds the same by counting flags, which takes XLA nine launches; where tasks
    follow one another few will do. A unit between them that no query sees is a task too.
    """
    units = table.shape[2] * in_page
    width = min(most, units)
    low, high = groups.split(low), jnp.minimum(groups.split(high), units * unit - 1)
    sees = groups.present[None] & (low <= high)  # [R, g, C]
    begin = jnp.min(jnp.where(sees, low // unit, units), axis=2)
    end = jnp.max(jnp.where(sees, high // unit + 1, 0), axis=2)
    number = jnp.clip(end - begin, 0, width)
    place = jnp.minimum(begin[..., None] + jnp.arange(width)[None, None], units - 1)  # [R, g, K]
    page = table[np.arange(len(table))[:, None, None], 0, place // in_page]
    inside = sees[:, :, None] & _meets(place[..., None] * unit, unit, low[:, :, None], high[:, :, None])
    place, page, queries, number = (x[:, :, None] for x in (place, page, packed(inside), number))
    return _tasks_at(place, page, queries, number, in_page)


def compressed_slots(
    positions: Int[Array, "R M"], *, kernel_size: int, kernel_stride: int
) -> tuple[Int[Array, "R M"], Int[Array, "R M"]]:
    """The first and last slot of compressed tokens that queries at `positions` see, for `span_tasks`.

    Token i stands for l = `kernel_size` positions from i·d on, d = `kernel_stride`, and has the slot of its last one: a
    page of B positions, a multiple of d, has B/d slots. The first l/d − 1 slots of a sequence belong to no token.
    """
    low = jnp.full_like(positions, kernel_size // kernel_stride - 1)
    return low, (positions + 1) // kernel_stride - 1


def grouped_attention_reference(
    q: Float[Array, "R M H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    tasks: Tasks,
    groups: QueryGroups,
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    *,
    unit: int,
    scale: float | None = None,
) -> Part:
    """Attends from each query to the slots low … high, both included, of the tasks that are its own.

    Slots that no query of their group sees may hold anything. Gathers every task, and masks.
    """
    return _attended(q, key_pages, value_pages, tasks, groups, low, high, unit, scale)[0]


def _attended(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    tasks: Tasks,
    groups: QueryGroups,
    low: jax.Array,
    high: jax.Array,
    unit: int,
    scale: float | None,
) -> tuple[Part, Float[Array, "R g S C heads _"]]:
    """The part, and the scores of each group's queries with the slots of all of its tasks, K·u; heads are H/S."""
    sets, dim = tasks.unit.shape[2], q.shape[3]
    slot = tasks.place[..., None] * unit + jnp.arange(unit)[None, None, None, None]  # [R, g, S, K, u]
    low, high = (groups.split(x)[:, :, None, :, None, None] for x in (low, high))
    own = jnp.moveaxis(_has_part(tasks, groups.size), -1, 3)[..., None]
    visible = own & (slot[:, :, :, None] >= low) & (slot[:, :, :, None] <= high)
    visible = visible.reshape(*visible.shape[:4], -1)  # [R, g, S, C, K·u]

    q = groups.split(q)  # [R, g, C, H, D]
    q = jnp.moveaxis(q.reshape(*q.shape[:3], sets, -1, dim), 2, 3)  # [R, g, S, C, H/S, D]
    keys, values = (_gathered(pool, tasks.unit, unit) for pool in (key_pages, value_pages))
    precision = product_precision(q.dtype)
    scores = jnp.einsum("rxscgd,rxskd->rxscgk", q, keys, precision=precision, preferred_element_type=jnp.float32)
    values, scores = jnp.where(jnp.any(visible, axis=3)[..., None], values, 0), scores / divisor_of(scale, dim)
    weights, lse = softmax_of(scores, visible[..., None, :])
    out = jnp.einsum(
        "rxscgk,rxskd->rxscgd",
        weights.astype(values.dtype),
        values,
        precision=product_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
    out, lse = (groups.join(jnp.moveaxis(x, 3, 2)) for x in (out, lse))
    return Part(out.reshape(*out.shape[:2], -1, dim), lse.reshape(*lse.shape[:2], -1)), scores


def _has_part(tasks: Tasks, size: int) -> Bool[Array, "R g S K C"]:
    """True for the queries of a group of `size` that have a part in a task."""
    query, words = np.arange(size), tasks.queries.shape[-1]
    return tasks.queries[..., np.minimum(query // WORD, words - 1)] >> (query % WORD)[None, None, None, None] & 1 == 1


def _gathered(pool: Float[Array, "P B Hkv D"], units: Int[Array, "R g S K"], unit: int) -> Float[Array, "R g S _ D"]:
    """The slots of tasks' units, K·u."""
    pages, page_size, kv_heads, dim = pool.shape
    in_units = pool.reshape(pages * page_size // unit, unit, kv_heads, dim)
    found = in_units[units[..., None], np.arange(unit), np.arange(kv_heads)[:, None, None]]
    return found.reshape(*found.shape[:3], -1, dim)


def grouped_branches_reference(
    q: Float[Array, "R M H D"],
    branches: tuple[Branch, ...],
    groups: QueryGroups,
    *,
    units: tuple[int, ...],
    scale: float | None = None,
) -> tuple[Part, ...]:
    """`grouped_attention` of the same queries to each branch, of tasks of `units` slots: a softmax for each."""
    return tuple(
        grouped_attention_reference(
            q, *branch[:2], branch.tasks, groups, branch.low, branch.high, unit=unit, scale=scale
        )
        for branch, unit in zip(branches, units, strict=True)
    )


def grouped_scores_reference(
    q: Float[Array, "R M H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    tasks: Tasks,
    groups: QueryGroups,
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    *,
    unit: int,
    slots: int,
    scale: float | None = None,
) -> tuple[Part, Float[Array, "R M H slots"], Float[Array, "groups S rows slots"] | None]:
    """Attends as `grouped_attention` and keeps the scores by slot of each query's sequence, of which there are `slots`.

    A query's score is that of its own task, if other tasks of its group stand at the same place. Scores of slots that
    a query does not see may be anything. Kernels also return q · k as they have kept it, by group and set: see
    `smcjax.pallas.sparse.block_ranking.Kept`.
    """
    part, scores = _attended(q, key_pages, value_pages, tasks, groups, low, high, unit, scale)
    scores = jnp.moveaxis(scores, 3, 2)  # [R, g, C, S, H/S, K·u]
    own = jnp.moveaxis(_has_part(tasks, groups.size), -1, 2)[..., None]  # [R, g, C, S, K, 1]
    slot = tasks.place[:, :, None, ..., None] * unit + jnp.arange(unit)[None, None, None, None, None]
    slot = jnp.where(own, slot, slots).reshape(*own.shape[:4], -1)  # behind the last: nowhere
    of_head = (x[..., None] for x in np.ogrid[tuple(map(slice, scores.shape[:5]))])
    kept = jnp.zeros((*scores.shape[:5], slots)).at[*of_head, slot[..., None, :]].set(scores, mode="drop")
    return part, groups.join(kept.reshape(*kept.shape[:3], -1, slots)), None


grouped_scores = Op(grouped_scores_reference)
grouped_attention = Op(grouped_attention_reference)
grouped_branches = Op(grouped_branches_reference)


def masked_attention(
    q: Float[Array, "R M H D"],
    keys: Float[Array, "R S Hkv D"],
    values: Float[Array, "R S Hkv D"],
    visible: Bool[Array, "R M Hkv S"],
    *,
    scale: float | None = None,
) -> tuple[Part, Float[Array, "R M H S"]]:
    """Attends to few entries that lie in no page: nodes of a draft tree, visible by query and set.

    What a query does not see may be NaN: values are masked for each. Returns the weights, f32, beside the part.
    """
    rows, queries, heads, dim = q.shape
    kv_heads = keys.shape[2]
    q = q.reshape(rows, queries, kv_heads, heads // kv_heads, dim)
    precision = product_precision(q.dtype)
    scores = jnp.einsum("rmxgd,rsxd->rmxgs", q, keys, precision=precision, preferred_element_type=jnp.float32)
    weights, lse = softmax_of(scores / divisor_of(scale, dim), visible[:, :, :, None])
    values = jnp.where(visible[..., None], jnp.moveaxis(values, 1, 2)[:, None], 0)
    out = jnp.einsum(
        "rmxgs,rmxsd->rmxgd",
        weights.astype(values.dtype),
        values,
        precision=product_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
    part = Part(out.reshape(rows, queries, heads, dim), lse.reshape(rows, queries, heads))
    return part, weights.reshape(rows, queries, heads, -1)


def softmax_of(
    scores: Float[Array, "*batch entries"], visible: Bool[Array, "*_ entries"]
) -> tuple[Float[Array, "*batch entries"], Float[Array, "*batch"]]:
    """Weights and the log of their sum before it was made 1; all 0 and −∞ where nothing is visible."""
    scores = jnp.where(visible, scores, LOWEST)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(mass > 0, top + jnp.log(jnp.where(mass > 0, mass, 1)), -jnp.inf)
    return weights / jnp.where(mass > 0, mass, 1), lse[..., 0]


def merged_parts(one: Part, other: Part) -> Part:
    """Attention to what either part has seen, of one branch: nothing may be in both."""
    lse = jnp.logaddexp(one.lse, other.lse)
    of = [jnp.where(part.lse == -jnp.inf, 0, jnp.exp(part.lse - lse))[..., None] * part.out for part in (one, other)]
    return Part(of[0] + of[1], lse)
