"""Native Sparse Attention for verification: blocks that neighbouring queries select are read once for all of them.

    merged          each query attends to the blocks that it has selected: the result without groups, for any groups
    shared          each attends to the blocks of the first query of its group, as far as it sees them: approximate
    shared_forced   as shared, and to the blocks that it always selects: approximate

Where every group is one query all modes are exact. What approximate modes write to pages depends on the groups.

Selected blocks and windows are attended to in one launch, by tasks of `smcjax.pallas.sparse.grouped_attention`. A layer
that selects attends to compressed tokens before it, since their weights are what selects: by a kernel that reads them
once a group and keeps scores (`rows_routed`, `nodes_routed`), or as without groups (`NSA.route`). One that takes
another layer's blocks needs no weights, and has compressed tokens in the same launch, if a page holds eight or more of
them: units that kernels read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from smcjax.model.attention import HeadShape
from smcjax.model.view import BatchView, TreeView
from smcjax.pallas.attention.reference import divisor_of
from smcjax.pallas.sparse.block_ranking import Kept, Ranking, ranked_blocks, supports_ranking
from smcjax.pallas.sparse.grouped_attention import (
    Branch,
    Part,
    Tasks,
    compressed_slots,
    group_tasks,
    grouped_branches,
    grouped_scores,
    masked_attention,
    merged_parts,
    span_tasks,
    unit_slots,
)
from smcjax.pallas.sparse.grouped_attention_sm90 import supports
from smcjax.pallas.sparse.query_groups import QueryGroups

Pages = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # keys and values of the selection, then of the window
Pair = tuple[jax.Array, jax.Array]  # keys and values
MIN_UNIT, MAX_UNIT = 8, 64  # slots of a task that kernels take


class Blocks(Protocol):
    """The options of `smcjax.sparse.nsa.NSA` that say which positions are attended to one by one."""

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
    @property
    def kernel_size(self) -> int: ...
    @property
    def kernel_stride(self) -> int: ...
    def forced(self, block: Any, own: Any) -> Any: ...
    def ranking(self, blocks: int) -> Ranking | None: ...


class Chosen(NamedTuple):
    """A layer's choice of blocks, which later layers may take."""

    blocks: Bool[Array, "R T S blocks"]
    tasks: Tasks | None = None  # by which groups read the blocks; None: not made


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How the queries of a forward read together.

    Attributes:
        kind: the layer's attention.
        groups: of a request's queries: the columns of its rows one row after the other, or a forward's nodes.
        mode: one of `smcjax.sparse.verification.MODES` but "per_query".
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
        block, own = (
            jnp.arange(selected.shape[-1])[None, None, None],
            positions[:, :, None, None] // self.kind.block_size,
        )
        return first | (self.kind.forced(block, own) & (block <= own))

    @property
    def most_blocks(self) -> int:
        """Blocks that a query attends to at most."""
        kind = self.kind
        return kind.num_blocks + (kind.init_blocks + kind.local_blocks) * (self.mode == "shared_forced")

    def tasks(
        self,
        selected: Bool[Array, "R M S blocks"],
        positions: Int[Array, "R M"],
        table: Int[Array, "R M pages"],
        page_size: int,
    ) -> Tasks:
        """The tasks by which groups read the blocks that queries at `positions` have selected."""
        return group_tasks(
            self.sets(selected, positions),
            table,
            self.groups,
            page_size=page_size,
            block_size=self.kind.block_size,
            most_blocks=self.most_blocks,
            rows=self.rows,
        )

    def attend(
        self,
        q: Float[Array, "R M H D"],
        pages: Pages,
        compressed: Pair | None,
        table: Int[Array, "R M pages"],
        positions: Int[Array, "R M"],
        tasks: Tasks,
        high: Int[Array, "R M"],
        spread: int,
    ) -> tuple[Part, ...]:
        """Attends to selected blocks, to the window and, if `compressed` are there, to compressed tokens; up to `high`.

        `tasks` are those of the selection, `spread` is the distance at most of positions in a group whose queries have
        one table.
        """
        kind, page_size, sets = self.kind, pages[0].shape[1], tasks.unit.shape[2]
        unit, low = unit_slots(page_size, kind.block_size), jnp.maximum(positions - kind.window + 1, 0)
        slots, per_page, most = [(low, high)], [page_size], [kind.window + spread]
        units = [unit]
        pools: list[Pair] = [pages[2:]]
        if compressed is not None:
            of = {"kernel_size": kind.kernel_size, "kernel_stride": kind.kernel_stride}
            slots.append(compressed_slots(high, **of))
            per_page.append(page_size // kind.kernel_stride)
            most.append(table.shape[2] * per_page[1])
            units.append(math.gcd(per_page[1], MAX_UNIT))
            pools.append(compressed)
        spans = (
            Branch(
                *pool,
                span_tasks(
                    *bounds,
                    table,
                    self.groups,
                    page_size=size,
                    unit=of_unit,
                    sets=sets,
                    most_slots=most_slots,
                    rows=self.rows,
                ),
                *bounds,
            )
            for pool, bounds, size, of_unit, most_slots in zip(pools, slots, per_page, units, most, strict=True)
        )
        branches = (Branch(*pages[:2], tasks, jnp.zeros_like(high), high), *spans)
        return grouped_branches(q, branches, self.groups, units=(unit, *units))


def takes_compressed(kind: Blocks, page_size: int) -> bool:
    """True where a layer that does not select has compressed tokens in the launch of its other branches."""
    return page_size % (kind.kernel_stride * MIN_UNIT) == 0


def keeps_scores(
    kind: Blocks, *, size: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any
) -> bool:
    """True where a kernel attends to compressed tokens in pages for groups of `size` and keeps their scores."""
    if not (grouped_scores.has_kernel() and takes_compressed(kind, page_size)):
        return False
    per_page = page_size // kind.kernel_stride
    return supports(
        size=size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=per_page,
        unit=math.gcd(per_page, MAX_UNIT),
        dtype=dtype,
    )


def reads_by_kernels(kind: Blocks, config: HeadShape, size: int, page_size: int, dtype: Any) -> bool:
    """True where kernels rank the blocks of groups of `size` queries, and attend to all branches for them."""
    shape = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    unit = math.gcd(kind.block_size, page_size, MAX_UNIT)
    return keeps_scores(kind, size=size, **shape, page_size=page_size, dtype=dtype) and supports(
        size=size, **shape, page_size=page_size, unit=unit, dtype=dtype
    )


def routes_by_kernel(kind: Blocks, q: Float[Array, "R T H D"], compressed: Pair, view: BatchView | TreeView) -> bool:
    """True where a kernel attends to compressed tokens in pages and keeps what ranks blocks (`Weighed`)."""
    shape = {"num_heads": q.shape[2], "num_kv_heads": compressed[0].shape[2], "head_dim": q.shape[3]}
    return q.dtype == compressed[0].dtype == compressed[1].dtype and keeps_scores(
        kind, size=_groups(view).size, **shape, page_size=view.page_size, dtype=q.dtype
    )


class Weighed(NamedTuple):
    """Attention to compressed tokens, and what ranks blocks."""

    output: Float[Array, "R T H D"]  # f32
    weights: Float[Array, "R T H slots"]  # by slot of compressed tokens (`compressed_slots`), 0 for those not seen
    selected: Bool[Array, "R T S blocks"] | None = None  # by a kernel, where there is one


def _weighed(
    kind: Blocks,
    q: Float[Array, "R M H D"],
    compressed: Pair,
    table: Int[Array, "R M pages"],
    last: Int[Array, "R M"],
    groups: QueryGroups,
    rows: int,
) -> tuple[Part, Float[Array, "R M H slots"], Kept | None]:
    """Attends by groups to the compressed tokens in pages up to positions `last`, and weighs them by slot.

    Queries of a request have at most `rows` distinct tables. Weights are those of this part alone. Returns what kernels
    have kept beside them.
    """
    low, high = compressed_slots(last, kernel_size=kind.kernel_size, kernel_stride=kind.kernel_stride)
    _, per_page, kv_heads, _ = compressed[0].shape
    unit, slots = math.gcd(per_page, MAX_UNIT), table.shape[2] * per_page
    sizes = {"page_size": per_page, "unit": unit, "sets": kv_heads, "most_slots": slots}
    tasks = span_tasks(low, high, table, groups, rows=rows, **sizes)
    part, scores, products = grouped_scores(q, *compressed, tasks, groups, low, high, unit=unit, slots=slots)
    slot = jnp.arange(slots)[None, None]
    seen = (slot >= low[..., None]) & (slot <= high[..., None])
    weights = jnp.where(seen[:, :, None], jnp.exp(scores - part.lse[..., None]), 0)
    return part, weights, None if products is None else Kept(products, part.lse, low, high)


def rows_routed(
    kind: Blocks, q: Float[Array, "R T H D"], compressed: Pair, view: BatchView, last: Int[Array, "R T"]
) -> Weighed:
    """Attends by groups of all queries of a request to the compressed tokens that they see up to `last`.

    A page that its rows share is read once a group.
    """
    columns, groups = view.positions.shape[1], _groups(view)
    q, table, last, positions = (_by_request(view, x) for x in (q, _tables(view), last, view.positions))
    part, weights, kept = _weighed(kind, q, compressed, table, last, groups, view.rows)
    blocks = -(-table.shape[2] * view.page_size // kind.block_size)
    selected = None if kept is None else blocks_selected(kind, kept, positions, groups, blocks, q.shape[3])

    def by_row(x: jax.Array) -> jax.Array:
        return x.reshape(-1, columns, *x.shape[2:])

    return Weighed(by_row(part.out), by_row(weights), None if selected is None else by_row(selected))


def blocks_selected(
    kind: Blocks, kept: Kept, positions: Int[Array, "R M"], groups: QueryGroups, blocks: int, dim: int
) -> Bool[Array, "R M S blocks"] | None:
    """The blocks that queries at `positions` select of `blocks` by stored scores; None where no kernel finds them."""
    ranking, (_, sets, _, slots) = kind.ranking(blocks), kept.products.shape
    heads = kept.lse.shape[2] // sets
    if ranking is None or not supports_ranking(ranking, heads=heads, slots=slots):
        return None
    sizes = {"block_size": kind.block_size, "heads": heads, "divisor": divisor_of(None, dim)}
    return ranked_blocks(kept, positions, groups, ranking, **sizes)


def nodes_routed(kind: Blocks, q: Float[Array, "R T H D"], compressed: Pair, own: Pair, view: TreeView) -> Weighed:
    """Attends, by groups of a row's nodes, to compressed tokens in pages and to `own`, which their paths complete."""
    groups = _groups(view)
    last = jnp.minimum(view.positions, view.committed[:, None] - 1)
    part, weights, _ = _weighed(kind, q, compressed, _tables(view), last, groups, 1)

    at, drafted = _drafted(view)
    sets, stride = compressed[0].shape[2], kind.kernel_stride
    visible = drafted & _completes(kind, at)[:, None]
    visible = jnp.broadcast_to(visible[:, :, None], (*visible.shape[:2], sets, visible.shape[2]))
    on_path, of_nodes = masked_attention(q, *own, visible)
    whole = merged_parts(part, on_path)
    weights, of_nodes = (
        jnp.where(one.lse == -jnp.inf, 0, jnp.exp(one.lse - whole.lse))[..., None] * x
        for one, x in ((part, weights), (on_path, of_nodes))
    )
    slot, of_slot = jnp.arange(weights.shape[-1])[None, None, None], (at + 1) // stride - 1
    first = (view.committed + stride) // stride - 1  # of the first position that ends a stride and is not committed
    for later in range(view.tree.depth // stride + 1):
        its = jnp.where((of_slot == first[:, None] + later)[:, None, None], of_nodes, 0).sum(axis=-1)
        weights = jnp.where(slot == (first + later)[:, None, None, None], its[..., None], weights)
    return Weighed(whole.out, weights)


def _groups(view: BatchView | TreeView) -> QueryGroups:
    """A request's queries in groups."""
    assert view.sparse is not None
    of = (view.sparse.order, view.sparse.queries)
    if isinstance(view, TreeView):
        return QueryGroups.of_tree(view.tree, view.nodes, *of)
    return QueryGroups.of_rows(view.rows, view.positions.shape[1], *of)


def _tables(view: BatchView | TreeView) -> Int[Array, "R T pages"]:
    """Each query's own pages."""
    return jnp.broadcast_to(view.block_table[:, None], (*view.positions.shape, view.block_table.shape[1]))


def _by_request(view: BatchView, x: Shaped[Array, "R T *rest"]) -> Shaped[Array, "requests M *rest"]:
    """Numbers of queries by request: the columns of its rows, one row after the other."""
    rows, columns = x.shape[:2]
    return x.reshape(rows // view.rows, view.rows * columns, *x.shape[2:])


def _drafted(view: TreeView) -> tuple[Int[Array, "R nodes"], Bool[Array, "R T nodes"]]:
    """The tree's nodes' positions, and those nodes on each new node's path that pages do not hold."""
    on_path = np.zeros((len(view.nodes), view.tree.size), bool)
    np.put_along_axis(on_path, view.paths, True, axis=1)
    at = view.root[:, None] + jnp.asarray(view.tree.depths)[None]
    return at, jnp.asarray(on_path)[None] & (at >= view.committed[:, None])[:, None]


def _completes(kind: Blocks, at: Int[Array, "R nodes"]) -> Bool[Array, "R nodes"]:
    """True for positions that complete a compressed token."""
    return ((at + 1) % kind.kernel_stride == 0) & (at >= kind.kernel_size - 1)


def rows_by_groups(
    kind: Blocks,
    q: Float[Array, "R T H D"],
    pages: Pages,
    compressed: Pair | None,
    view: BatchView,
    chosen: Chosen,
    last: Int[Array, "R T"],
) -> tuple[tuple[Part, ...], Tasks]:
    """Attends by groups of all queries of a request, the columns of its rows, which see positions up to `last`.

    Returns the parts of the selection, of the window and, if `compressed` pages are given, of compressed tokens, and
    the selection's tasks, which a layer that takes the same blocks need not make again. The parts' requests are rows:
    R·T is R·M of the queries given.
    """
    assert view.sparse is not None
    columns, groups = view.positions.shape[1], _groups(view)
    grouped = Grouped(kind, groups, view.sparse.mode, view.rows)
    of_queries = (q, _tables(view), view.positions, chosen.blocks, last)
    q, table, positions, selected, high = (_by_request(view, x) for x in of_queries)
    tasks = chosen.tasks or grouped.tasks(selected, positions, table, view.page_size)
    return grouped.attend(q, pages, compressed, table, positions, tasks, high, min(groups.size, columns) - 1), tasks


def nodes_by_groups(
    kind: Blocks,
    q: Float[Array, "R T H D"],
    pages: Pages,
    own: Pages,
    compressed: tuple[Pair, Pair] | None,
    view: TreeView,
    chosen: Chosen,
) -> tuple[tuple[Part, ...], Tasks]:
    """Attends by groups of a row's nodes: to committed positions by tasks, then to the path.

    `own` are the nodes' in scratch; `compressed`, if given, those of compressed tokens in pages and in scratch. A node
    on the path counts for the selection where its position's block is selected. Returns what `rows_by_groups` does.
    """
    assert view.sparse is not None
    groups = _groups(view)
    grouped, positions = Grouped(kind, groups, view.sparse.mode, rows=1), view.positions
    high = jnp.minimum(positions, view.committed[:, None] - 1)

    at, drafted = _drafted(view)
    drafted = drafted[:, :, None]
    sets = grouped.sets(chosen.blocks, positions)
    block = jnp.broadcast_to((at // kind.block_size)[:, None, None], (*sets.shape[:3], at.shape[1]))
    on_path = drafted & jnp.take_along_axis(sets, jnp.minimum(block, sets.shape[-1] - 1), axis=-1)
    near = drafted & (at[:, None, None] > (positions - kind.window)[..., None, None])
    completed = drafted & _completes(kind, at)[:, None, None]

    in_pages, in_scratch = (None, ()) if compressed is None else (compressed[0], (compressed[1],))
    table = _tables(view)
    tasks = chosen.tasks or grouped.tasks(chosen.blocks, positions, table, view.page_size)
    parts = grouped.attend(q, pages, in_pages, table, positions, tasks, high, view.tree.depth)
    scratch: tuple[Pair, ...] = (own[:2], own[2:], *in_scratch)
    whole = tuple(
        merged_parts(part, masked_attention(q, *arrays, jnp.broadcast_to(visible, on_path.shape))[0])
        for part, arrays, visible in zip(parts, scratch, (on_path, near, completed), strict=False)
    )
    return whole, tasks
