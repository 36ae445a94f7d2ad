"""Native Sparse Attention for verification: blocks that neighbouring queries select are read once for all of them.

    merged          each query attends to the blocks that it has selected: the result of `NSA`, for any groups
    shared          each attends to the blocks of the first query of its group, as far as it sees them: approximate
    shared_forced   as shared, and to the blocks that it always selects: approximate

Where every group is one query all modes are exact. What approximate modes write to pages depends on the groups.
Compressed tokens are attended to as without groups, all by all, and their weights select blocks.

A layer may take the blocks that each query has selected in an earlier one (`selecting_layers`). That is another model,
but what it says of a token is still a function of the token's path alone.

The forwards here are the plain reference of verification by groups, one layer at a time; decoders call `NSA` itself
until a kernel reads groups (`smcjax.pallas.grouped_attention`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax.kv import LayerCache
from smcjax.model.attention import Projection
from smcjax.model.nsa import NSA, Branches
from smcjax.model.view import BatchView, TreeView
from smcjax.pallas.grouped_attention import (
    Part,
    group_tasks,
    grouped_attention,
    masked_attention,
    merged_parts,
    unit_slots,
)
from smcjax.pallas.query_groups import QueryGroups

MODES = ("merged", "shared", "shared_forced")


def selecting_layers(refresh: Sequence[bool]) -> tuple[int, ...]:
    """For each layer the one whose blocks it takes: itself where it is to refresh, else the nearest before that is.

    Raises ValueError where the first layer has none to take.
    """
    if not refresh or not refresh[0]:
        raise ValueError(f"refresh must begin with True, because no layer is before the first, got {tuple(refresh)}.")
    found: list[int] = []
    for layer, is_refreshed in enumerate(refresh):
        found.append(layer if is_refreshed else found[-1])
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How the queries of a verification read together.

    Raises ValueError for an unknown mode.

    Attributes:
        groups: of a request's queries: the columns of its rows one row after the other, or a forward's nodes.
        mode: one of `MODES`.
    """

    groups: QueryGroups
    mode: str = "merged"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}.")

    def sets(
        self, kind: NSA, selected: Bool[Array, "R M S blocks"], positions: Int[Array, "R M"]
    ) -> Bool[Array, "R M S blocks"]:
        """The blocks that queries at `positions` attend to, of those that each has selected."""
        if self.mode == "merged":
            return selected
        first = self.groups.by_first(selected)
        if self.mode == "shared":
            return first
        block, own = jnp.arange(selected.shape[-1]), positions[:, :, None, None] // kind.block_size
        return first | (kind.forced(block, own) & (block <= own))

    def most_blocks(self, kind: NSA) -> int:
        """Blocks that a query attends to at most."""
        return kind.num_blocks + (kind.init_blocks + kind.local_blocks) * (self.mode == "shared_forced")

    def read(
        self,
        kind: NSA,
        q: Float[Array, "R M H D"],
        pages: tuple[jax.Array, jax.Array],
        table: Int[Array, "R M pages"],
        sets: Bool[Array, "R M S blocks"],
        low: Int[Array, "R M"],
        high: Int[Array, "R M"],
        *,
        most_blocks: int,
        rows: int,
    ) -> Part:
        """Attends to the positions low … high of sets of blocks in pages of keys and values."""
        page_size = pages[0].shape[1]
        tasks = group_tasks(
            sets,
            table,
            self.groups,
            page_size=page_size,
            block_size=kind.block_size,
            most_blocks=most_blocks,
            rows=rows,
        )
        unit = unit_slots(page_size, kind.block_size)
        return grouped_attention(q, *pages, tasks, self.groups, low, high, unit=unit)

    def read_window(
        self,
        kind: NSA,
        q: Float[Array, "R M H D"],
        pages: tuple[jax.Array, jax.Array],
        table: Int[Array, "R M pages"],
        low: Int[Array, "R M"],
        high: Int[Array, "R M"],
        *,
        rows: int,
    ) -> Part:
        """Attends to the positions low … high, at most the window's, through tasks that all heads have alike."""
        size, kv_heads = kind.block_size, pages[0].shape[2]
        block = jnp.arange(-(-table.shape[2] * pages[0].shape[1] // size))
        inside = (block >= low[..., None] // size) & (block <= high[..., None] // size)
        sets = jnp.broadcast_to(inside[:, :, None], (*low.shape, kv_heads, len(block)))
        most = (kind.window - 1 + size - 1) // size + 1
        return self.read(kind, q, pages, table, sets, low, high, most_blocks=most, rows=rows)


def grouped_branches(
    kind: NSA,
    projection: Projection,
    cache: LayerCache,
    view: BatchView,
    grouped: Grouped,
    earlier: Bool[Array, "R T S blocks"] | None = None,
) -> tuple[Branches, LayerCache]:
    """`NSA.paged_branches` by groups of all queries of a request, the columns of its `view.rows` rows.

    With `earlier`, the blocks that a layer before this one has selected, those are taken. Returns the parts, with the
    blocks that each query has selected by itself, and the layer's pages.
    """
    cache, last = kind.written(projection, cache, view), kind.last(view)
    rows, columns = view.positions.shape
    routed = kind.route(projection, kind.read(cache, view), view.positions, last, earlier)

    def by_request(x: jax.Array) -> jax.Array:
        return x.reshape(rows // view.rows, view.rows * columns, *x.shape[2:])

    q, positions, high = map(by_request, (projection.heads()[0], view.positions, last))
    table = by_request(jnp.broadcast_to(view.block_table[:, None], (rows, columns, view.block_table.shape[1])))
    keys, values, window_keys, window_values = kind.pairs(cache)
    sets = grouped.sets(kind, by_request(routed.selected), positions)
    most = grouped.most_blocks(kind)
    low = jnp.zeros_like(high)
    slc = grouped.read(kind, q, (keys, values), table, sets, low, high, most_blocks=most, rows=view.rows)
    low = jnp.maximum(positions - kind.window + 1, 0)
    win = grouped.read_window(kind, q, (window_keys, window_values), table, low, high, rows=view.rows)
    outputs = (part.out.reshape(routed.output.shape).astype(routed.output.dtype) for part in (slc, win))
    return kind.put_together(projection, routed, *outputs), cache


def grouped_tree_branches(
    kind: NSA,
    projection: Projection,
    cache: LayerCache,
    scratch: LayerCache,
    view: TreeView,
    grouped: Grouped,
    earlier: Bool[Array, "R T S blocks"] | None = None,
) -> tuple[Branches, LayerCache]:
    """`NSA.tree_branches` by groups of a row's nodes: what is committed by tasks, then each node's path.

    With `earlier`, the blocks that a layer before this one has selected, those are taken. A node on the path counts
    for the selection where its position's block is selected. Returns the parts, with the blocks that each node has
    selected by itself, and the layer's scratch.
    """
    scratch = kind.tree_written(projection, cache, scratch, view)
    positions, q = view.positions, projection.heads()[0]
    routed = kind.route(projection, kind.read_paths(cache, scratch, view), positions, positions, earlier)
    sets = grouped.sets(kind, routed.selected, positions)
    table = jnp.broadcast_to(view.block_table[:, None], (*positions.shape, view.block_table.shape[1]))
    high, low = jnp.minimum(positions, view.committed[:, None] - 1), jnp.maximum(positions - kind.window + 1, 0)

    on_path = np.zeros((len(view.nodes), view.tree.size), bool)
    np.put_along_axis(on_path, view.paths, True, axis=1)
    at = view.root[:, None] + jnp.asarray(view.tree.depths)  # [R, nodes]
    drafted = (jnp.asarray(on_path) & (at >= view.committed[:, None])[:, None])[:, :, None]
    block = jnp.broadcast_to((at // kind.block_size)[:, None, None], (*sets.shape[:3], at.shape[1]))
    chosen = drafted & jnp.take_along_axis(sets, jnp.minimum(block, sets.shape[-1] - 1), axis=-1)
    near = drafted & (at[:, None, None] >= low[..., None, None])

    pages, own = kind.pairs(cache), kind.pairs(scratch)
    zero = jnp.zeros_like(low)
    slc = merged_parts(
        grouped.read(kind, q, pages[:2], table, sets, zero, high, most_blocks=grouped.most_blocks(kind), rows=1),
        masked_attention(q, *own[:2], chosen),
    )
    win = merged_parts(
        grouped.read_window(kind, q, pages[2:], table, low, high, rows=1),
        masked_attention(q, *own[2:], jnp.broadcast_to(near, (*positions.shape, own[2].shape[2], at.shape[1]))),
    )
    outputs = (part.out.reshape(routed.output.shape).astype(routed.output.dtype) for part in (slc, win))
    return kind.put_together(projection, routed, *outputs), scratch
