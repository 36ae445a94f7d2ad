"""Native Sparse Attention for verification: blocks that neighbouring queries select are read once for all of them.

    merged          each query attends to the blocks that it has selected: the result without groups, for any groups
    shared          each attends to the blocks of the first query of its group, as far as it sees them: approximate
    shared_forced   as shared, and to the blocks that it always selects: approximate

Where every group is one query all modes are exact. What approximate modes write to pages depends on the groups.
Compressed tokens are attended to as without groups, all by all, and their weights select blocks (`NSA.route`); here
selected blocks and windows are attended to, by tasks of `smcjax.pallas.grouped_attention`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

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

Pages = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # keys and values of the selection, then of the window
Outputs = tuple[Float[Array, "R M H D"], Float[Array, "R M H D"]]  # of the selection and of the window, f32


class Blocks(Protocol):
    """The options of `smcjax.model.nsa.NSA` that say which positions are attended to one by one."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def init_blocks(self) -> int: ...
    @property
    def local_blocks(self) -> int: ...
    @property
    def window(self) -> int: ...
    def forced(self, block: Any, own: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How the queries of a forward read together.

    Attributes:
        kind: the layer's attention.
        groups: of a request's queries: the columns of its rows one row after the other, or a forward's nodes.
        mode: one of `smcjax.sparse.MODES` but "per_query".
        rows: distinct tables that the queries of a request have at most.
    """

    kind: Blocks
    groups: QueryGroups
    mode: str
    rows: int

    def sets(self, selected: Bool[Array, "R M S blocks"], positions: Int[Array, "R M"]) -> Bool[Array, "R M S blocks"]:
        """The blocks that queries at `positions` attend to, of those that each has selected."""
        if self.mode == "merged":
            return selected
        first = self.groups.by_first(selected)
        if self.mode == "shared":
            return first
        block, own = jnp.arange(selected.shape[-1]), positions[:, :, None, None] // self.kind.block_size
        return first | (self.kind.forced(block, own) & (block <= own))

    @property
    def most_blocks(self) -> int:
        """Blocks that a query attends to at most."""
        kind = self.kind
        return kind.num_blocks + (kind.init_blocks + kind.local_blocks) * (self.mode == "shared_forced")

    def read(
        self,
        q: Float[Array, "R M H D"],
        pages: tuple[jax.Array, jax.Array],
        table: Int[Array, "R M pages"],
        sets: Bool[Array, "R M S blocks"],
        low: Int[Array, "R M"],
        high: Int[Array, "R M"],
        most_blocks: int,
    ) -> Part:
        """Attends to the positions low … high of sets of blocks in pages of keys and values."""
        page_size, block_size = pages[0].shape[1], self.kind.block_size
        tasks = group_tasks(
            sets,
            table,
            self.groups,
            page_size=page_size,
            block_size=block_size,
            most_blocks=most_blocks,
            rows=self.rows,
        )
        unit = unit_slots(page_size, block_size)
        return grouped_attention(q, *pages, tasks, self.groups, low, high, unit=unit)

    def read_window(
        self,
        q: Float[Array, "R M H D"],
        pages: tuple[jax.Array, jax.Array],
        table: Int[Array, "R M pages"],
        low: Int[Array, "R M"],
        high: Int[Array, "R M"],
    ) -> Part:
        """Attends to the positions low … high, at most the window's, through tasks that all heads have alike."""
        size, kv_heads = self.kind.block_size, pages[0].shape[2]
        block = jnp.arange(-(-table.shape[2] * pages[0].shape[1] // size))
        inside = (block >= low[..., None] // size) & (block <= high[..., None] // size)
        sets = jnp.broadcast_to(inside[:, :, None], (*low.shape, kv_heads, len(block)))
        return self.read(q, pages, table, sets, low, high, (self.kind.window - 1 + size - 1) // size + 1)


def rows_by_groups(
    kind: Blocks,
    q: Float[Array, "R T H D"],
    pages: Pages,
    view: BatchView,
    selected: Bool[Array, "R T S blocks"],
    last: Int[Array, "R T"],
) -> Outputs:
    """Attends to selected blocks and to the window by groups of all queries of a request: the columns of its rows.

    Queries see positions up to `last`. Returns outputs whose requests are rows: R·T is R·M of the queries given.
    """
    assert view.sparse is not None
    rows, columns = view.positions.shape
    groups = QueryGroups.of_rows(view.rows, columns, view.sparse.order, view.sparse.queries)
    grouped = Grouped(kind, groups, view.sparse.mode, view.rows)

    def by_request(x: jax.Array) -> jax.Array:
        return x.reshape(rows // view.rows, view.rows * columns, *x.shape[2:])

    q, positions, high, selected = map(by_request, (q, view.positions, last, selected))
    table = by_request(jnp.broadcast_to(view.block_table[:, None], (rows, columns, view.block_table.shape[1])))
    sets = grouped.sets(selected, positions)
    slc = grouped.read(q, pages[:2], table, sets, jnp.zeros_like(high), high, grouped.most_blocks)
    win = grouped.read_window(q, pages[2:], table, jnp.maximum(positions - kind.window + 1, 0), high)
    return slc.out, win.out


def nodes_by_groups(
    kind: Blocks,
    q: Float[Array, "R T H D"],
    pages: Pages,
    own: Pages,
    view: TreeView,
    selected: Bool[Array, "R T S blocks"],
) -> Outputs:
    """Attends to selected blocks and to the window by groups of a row's nodes: committed ones by tasks, then the path.

    `own` are the nodes' in scratch. A node on the path counts for the selection where its position's block is selected.
    """
    assert view.sparse is not None
    groups = QueryGroups.of_tree(view.tree, view.nodes, view.sparse.order, view.sparse.queries)
    grouped, positions = Grouped(kind, groups, view.sparse.mode, rows=1), view.positions
    sets = grouped.sets(selected, positions)
    table = jnp.broadcast_to(view.block_table[:, None], (*positions.shape, view.block_table.shape[1]))
    high, low = jnp.minimum(positions, view.committed[:, None] - 1), jnp.maximum(positions - kind.window + 1, 0)

    on_path = np.zeros((len(view.nodes), view.tree.size), bool)
    np.put_along_axis(on_path, view.paths, True, axis=1)
    at = view.root[:, None] + jnp.asarray(view.tree.depths)  # [R, nodes]
    drafted = (jnp.asarray(on_path) & (at >= view.committed[:, None])[:, None])[:, :, None]
    block = jnp.broadcast_to((at // kind.block_size)[:, None, None], (*sets.shape[:3], at.shape[1]))
    chosen = drafted & jnp.take_along_axis(sets, jnp.minimum(block, sets.shape[-1] - 1), axis=-1)
    near = drafted & (at[:, None, None] >= low[..., None, None])
    near = jnp.broadcast_to(near, (*positions.shape, own[2].shape[2], at.shape[1]))

    slc = merged_parts(
        grouped.read(q, pages[:2], table, sets, jnp.zeros_like(low), high, grouped.most_blocks),
        masked_attention(q, *own[:2], chosen),
    )
    win = merged_parts(grouped.read_window(q, pages[2:], table, low, high), masked_attention(q, *own[2:], near))
    return slc.out, win.out
