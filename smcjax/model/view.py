"""The batch as a forward over pages sees it: new tokens, where their KV goes, and which pages each row reads.

Tokens of a `BatchView` follow each other and go to pages. Those of a `TreeView` are nodes of draft trees: what becomes
of them is not decided, so pages stay as they are, and the nodes' KV goes to *scratch*.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.kv import TRASH, Copies, LayerCache, page_of
from smcjax.sparse.verification import SparseVerification
from smcjax.trees import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchView:
    """T new tokens in each of R rows over their pages.

    One view made when a cycle begins serves `plan_attention`; the view of a step is `dataclasses.replace` of it with
    the step's tokens, positions and pages.

    Attributes:
        tokens: int32.
        positions: int32, places in the sequence. Ascending in a row.
        block_table: int32, each row's physical pages in order, `TRASH` from its last on.
        write_pages: int32, the physical page of each new token's KV: the one that `block_table` names for its position,
            or `TRASH` where nothing is written, because KV is there already or the token's output means nothing.
        lengths: int32, slots of a row that hold KV when the last forward of the plan's life is done; 0 for a row that
            reads nothing. `paged_hidden_states` reads what its own forward has, `written()`, instead.
        num_immutable: int32, slots of a row that hold KV before the first forward and that every query sees but for
            windows.
        copies: shared pages to copy before rows write to their copies (`smcjax.kv.make_room`); None for none.
        held: int32, `written()` of rows for which others of their group write; None: each row writes for itself.
        rows: N, consecutive rows that form a group and may share pages.
        sparse: how selected blocks are read, and which layers select; None: each query by itself, in every layer.
        page_size: B, slots of a page.
    """

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    block_table: Int[Array, "R M"]
    write_pages: Int[Array, "R T"]
    lengths: Int[Array, " R"]
    num_immutable: Int[Array, " R"]
    copies: Copies | None = None
    held: Int[Array, " R"] | None = None
    rows: int = dataclasses.field(default=1, metadata={"static": True})
    sparse: SparseVerification | None = dataclasses.field(default=None, metadata={"static": True})
    page_size: int = dataclasses.field(kw_only=True, metadata={"static": True})

    @property
    def slots(self) -> Int[Array, "R T"]:
        """The slot of its page that each new token's KV goes to."""
        return self.positions % self.page_size

    def written(self) -> Int[Array, " R"]:
        """Slots of each row that hold KV after this forward; 0 for a row that writes nothing, unless `held` says so."""
        if self.held is not None:
            return self.held
        return jnp.max(jnp.where(self.write_pages == TRASH, 0, self.positions + 1), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeView:
    """T new nodes of one tree in each of R rows, whose sequence is in pages as far as it is committed.

    A node stands at the *path position* `root` + its depth, which its siblings share, and sees what is committed and
    its path: its ancestors and itself. Scratch of a layer is like the layer's cache, a node in the place of pages and
    slots, [R, M, heads, D]: a node ends at most one entry of each array. A forward's ancestors are in scratch already
    or among its own nodes.

    Attributes:
        tokens: int32.
        root: int32, the position of node 0.
        committed: int32, positions of a row that pages hold: all before `root`, or with it one more. What pages hold
            is not read from scratch.
        block_table: int32, each row's physical pages in order, `TRASH` from its last on.
        tree: the tree.
        nodes: the nodes that the T columns are, a parent before its children.
        sparse: how selected blocks are read, as in `BatchView`.
        page_size: B, slots of a page.
    """

    tokens: Int[Array, "R T"]
    root: Int[Array, " R"]
    committed: Int[Array, " R"]
    block_table: Int[Array, "R pages"]
    tree: DraftTree = dataclasses.field(metadata={"static": True})
    nodes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    sparse: SparseVerification | None = dataclasses.field(default=None, metadata={"static": True})
    page_size: int = dataclasses.field(kw_only=True, metadata={"static": True})

    @property
    def positions(self) -> Int[Array, "R T"]:
        """The nodes' path positions."""
        return self.root[:, None] + jnp.asarray([self.tree.depths[node] for node in self.nodes], jnp.int32)[None]

    @property
    def paths(self) -> Int[np.ndarray, "T C"]:
        """Each new node's ancestor of every depth; from its own depth on the node itself."""
        return np.array([self.tree.paths[node] for node in self.nodes], np.int32)

    def put(self, scratch: LayerCache, new: LayerCache) -> LayerCache:
        """`scratch` with the new nodes' numbers [R, T, heads, D] in the arrays that `new` names."""
        nodes = jnp.asarray(self.nodes, jnp.int32)
        put = {name: scratch[name].at[:, nodes].set(x.astype(scratch[name].dtype)) for name, x in new.items()}
        return {**scratch, **put}

    def at(
        self, pages: Float[Array, "P B heads D"], scratch: Float[Array, "R M heads D"], positions: Int[Array, "R T N"]
    ) -> Float[Array, "R T N heads D"]:
        """Numbers of single positions as each new node sees them; any numbers for positions that it does not see."""
        rows, columns, _ = positions.shape
        page = page_of(self.block_table, positions.reshape(rows, -1), self.page_size).reshape(positions.shape)
        depth = jnp.clip(positions - self.root[:, None, None], 0, self.tree.depth)
        node = jnp.asarray(self.paths)[jnp.arange(columns)[:, None], depth]
        own = scratch[jnp.arange(rows)[:, None, None], node]
        is_committed = positions < self.committed[:, None, None]
        return jnp.where(is_committed[..., None, None], pages[page, positions % self.page_size], own)
