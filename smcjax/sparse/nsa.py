"""Native Sparse Attention (arXiv 2502.11089): compressed tokens, selected blocks and a window, weighed by gates.

    out = g_cmp · o_cmp + g_slc · o_slc + g_win · o_win        a query head, each branch with a softmax of its own

Compressed token i stands for positions i·d … i·d + l − 1 and is *complete* at the last: no earlier query sees it. A
query attends to all compressed tokens that it sees; their weights rank blocks of l' positions, of which the best n are
attended to token by token; a window of the last w positions stands beside.

In pages a compressed token lies in the page of its *last* position. Who shares that page shares all before it, so the
page's number says what it holds. A forward writes keys and values, then the compressed tokens that they complete, then
attends. A rejected draft's compressed tokens end beyond the sequence, where no query sees them before they are written
anew.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.checks import Rule, one_of, require, whole
from smcjax.kv import CacheSpec, LayerCache, PageArray
from smcjax.matmul import sum_over_neighbours
from smcjax.model.attention import (
    AttentionKind,
    HeadShape,
    OwnWeight,
    Projection,
    Selection,
    pair_write,
    write_pair,
)
from smcjax.model.view import BatchView, TreeView
from smcjax.model.visible_kv import SequenceKV, TreeKV, VisibleKV, grouped, masked_softmax, scaled_scores, tree_kv
from smcjax.pallas import copy_pages
from smcjax.pallas.attention.reference import sees
from smcjax.pallas.sparse.compress import compression_shapes
from smcjax.pallas.sparse.gates import Products
from smcjax.pallas.sparse.grouped_attention import Part
from smcjax.pallas.sparse.write_beside_gates import write_beside_gates
from smcjax.sparse.compression_update import COMPRESSED, Compressor
from smcjax.sparse.groups import (
    Chosen,
    nodes_by_groups,
    nodes_routed,
    routes_by_kernel,
    rows_by_groups,
    rows_routed,
    takes_compressed,
)
from smcjax.sparse.routing import Branches, Entries, Routed, Routing, compressed_of

BRANCHES = ("cmp", "slc", "win")  # everywhere in this order
KV = ("per_branch", "shared")
LEAST = {"kernel_size": 1, "kernel_stride": 1, "block_size": 1, "num_blocks": 1, "window": 1}
LEAST |= {"init_blocks": 0, "local_blocks": 0}
MOST = 1 << 20  # of each of them


@dataclasses.dataclass(frozen=True)
class NSA(AttentionKind, Compressor, Routing):
    """Native Sparse Attention. The defaults are the paper's; where it is silent, or public code disagrees, ours.

    Positions of a row's new tokens are consecutive, but for nodes of a tree. Raises ValueError for options that are
    unknown or contradict.

    Attributes:
        kernel_size: l = 32, positions that a compressed token stands for (paper, section 4.1).
        kernel_stride: d = 16, positions between compressed tokens (section 4.1).
        block_size: l' = 64, positions of a selected block (section 4.1).
        num_blocks: n = 16, blocks that a query selects, those that are always selected among them (section 4.1).
        window: w = 512, positions of the window (section 4.1), the query's own among them (ours; some code has w + 1).
        init_blocks: 1, first blocks that are always selected (section 4.1).
        local_blocks: 2, last blocks that are always selected, the query's own among them (section 4.1).
        kv: "per_branch", the paper's: keys and values of each branch's own (section 3.3.3), compressed by an MLP
            (section 3.3.1; its hidden size D is ours). Or "shared", as public code and the bundled recall pair have
            it: one pair for all branches, compressed by a linear map.
    """

    kernel_size: int = 32
    kernel_stride: int = 16
    block_size: int = 64
    num_blocks: int = 16
    window: int = 512
    init_blocks: int = 1
    local_blocks: int = 2
    kv: str = "per_branch"

    def __post_init__(self) -> None:
        sizes = {
            name: Rule(whole(least, MOST).holds, f"an integer from {least} to {MOST}") for name, least in LEAST.items()
        }
        require(vars(self), {**sizes, "kv": one_of(*KV)})
        for name in ("kernel_size", "block_size"):
            if getattr(self, name) % self.kernel_stride:
                raise ValueError(
                    f"{name} must be a multiple of kernel_stride = {self.kernel_stride}, got {getattr(self, name)}."
                )
        if self.num_blocks < self.init_blocks + self.local_blocks:
            raise ValueError(
                f"num_blocks must be at least init_blocks + local_blocks = {self.init_blocks + self.local_blocks}, "
                f"which are always selected, got {self.num_blocks}."
            )

    @property
    def kv_pairs(self) -> int:
        return 1 if self.kv == "shared" else len(BRANCHES)

    @property
    def selects(self) -> bool:
        return True

    def own_weights(self, config: HeadShape) -> dict[str, OwnWeight]:
        """Gates [H, 3, E] with a bias [H, 3], and what compresses keys and values."""
        heads, branches = config.num_heads, len(BRANCHES)
        compression = compression_shapes(self.phi, config.num_kv_heads, config.head_dim, self.kernel_size)
        return {
            "gate": OwnWeight((heads, branches, config.hidden_size), by_query_head=True, of_input=True),
            "gate_bias": OwnWeight((heads, branches), by_query_head=True),
            **{name: OwnWeight(shape) for name, shape in compression.items()},
        }

    def cache(self, config: HeadShape) -> CacheSpec:
        token = PageArray(config.num_kv_heads, config.head_dim)
        names = ["keys", "values"]
        if self.kv == "per_branch":
            names += ["window_keys", "window_values", "raw_keys", "raw_values"]
        compressed = self.compressed_array(token.heads, token.dim)
        return CacheSpec({**dict.fromkeys(names, token), **dict.fromkeys(COMPRESSED, compressed)}, self.block_size)

    def least_read(self, context: int, first: int = 0) -> dict[str, int]:
        """Entries that the last position reads, whichever blocks it selects: their fewest, each counted once.

        Of blocks that may be chosen, those count that add least. No compressed token becomes complete, so none of what
        it is made of is read.
        """
        start = max(0, context - self.window)
        array = self.compressed_array()
        shared = self.kv == "shared"  # what lies in the window is read already
        position = np.arange(first, start if shared else context)
        blocks = -(-context // self.block_size)
        added = np.bincount(position // self.block_size, minlength=blocks)
        forced = self.forced(np.arange(blocks), blocks - 1)
        free = min(self.num_blocks, blocks) - int(forced.sum())
        selected = int(added[forced].sum() + np.sort(added[~forced])[:free].sum())
        window = max(0, context - max(start, first))
        own = dict.fromkeys(("window_keys", "window_values"), window) if not shared else {}
        raw = dict.fromkeys(("keys", "values"), selected + window if shared else selected)
        return {**raw, **own, **dict.fromkeys(COMPRESSED, array.count(context) - array.count(first))}

    def dense(self, projection: Projection, positions: Int[Array, "R T"]) -> Float[Array, "R T H D"]:
        return self.dense_branches(projection, positions).gated()

    def dense_branches(self, projection: Projection, positions: Int[Array, "R T"]) -> Branches:
        """The parts of `dense`."""
        kv = Entries(*map(SequenceKV, self.entries_without_pages(projection)))
        return self._attend(projection, kv, positions, positions, self.route(projection, kv, positions, positions))

    def entries_without_pages(self, projection: Projection) -> Entries[jax.Array]:
        """The tokens' own keys and values, S = T, and the compressed tokens that they complete.

        Tokens stand at positions 0 … T − 1. Without any compressed token there is one that no query sees.
        """
        arrays, stride, parts = self._new_arrays(projection), self.kernel_stride, self.kernel_size // self.kernel_stride
        rows, length = projection.qkv.shape[:2]
        count = max(1, self.compressed_array().count(length))
        starts = jnp.arange(count)[None] * stride

        def covered(array: Float[Array, "R T Hkv D"]) -> Float[Array, "R N l Hkv D"]:
            """Slices, whose gradients are sums of few slices: a gather's would be a scatter."""
            whole = (count + parts - 1) * stride
            array = jnp.pad(array, [(0, 0), (0, max(0, whole - length)), (0, 0), (0, 0)])[:, :whole]
            array = array.reshape(rows, count + parts - 1, stride, *array.shape[2:])
            return jnp.concatenate([array[:, part : part + count] for part in range(parts)], axis=2)

        raw = {name: covered(arrays[self.source(name)]) for name in ("keys", "values")}
        keys, values = self.compressed(projection, raw, starts)
        compressed = (x.astype(projection.qkv.dtype) for x in (keys, values))
        return Entries(*self.pairs(arrays), *compressed)

    def __call__(
        self, projection: Projection, cache: LayerCache, plan: None, view: BatchView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        branches, cache = self.paged_branches(projection, cache, view, earlier)
        return branches.gated(), cache, branches.chosen

    def paged_branches(
        self,
        projection: Projection,
        cache: LayerCache,
        view: BatchView,
        earlier: Chosen | None = None,
    ) -> tuple[Branches, LayerCache]:
        """The parts of a forward over pages, with the blocks that each query has selected by itself; and the pages.

        With `earlier`, what a layer before this one has chosen, that is taken.
        """
        last, routed, selects = self.last(view), None, is_grouped(view) and earlier is None
        routes = selects and routes_by_kernel(self, projection.unrotated()[0], compressed_of(cache), view)
        # Elsewhere XLA weighs the branches: not all outputs are f32.
        gates = routes or self.takes_together(view, earlier)
        q, cache, products = self.written(projection, cache, view, gates=gates)
        pages = self.pairs(cache)
        if routes:
            routed = self.routed_by(rows_routed(self, q, compressed_of(cache), view, last), cache, view)
        elif not self.takes_together(view, earlier):
            kv = self.read(cache, view)
            routed = self.route(projection, kv, view.positions, last, earlier and earlier.blocks)
            if not is_grouped(view):
                return self._attend(projection, kv, view.positions, last, routed), cache
        chosen = _chosen(routed, earlier)
        compressed = compressed_of(cache) if routed is None else None
        parts, tasks = rows_by_groups(self, q, pages, compressed, view, chosen, last)
        branches = self._put_parts_together(projection, routed, parts, chosen, products)
        return branches._replace(tasks=tasks), cache

    def takes_together(self, view: BatchView | TreeView, earlier: Chosen | None) -> bool:
        """True where compressed tokens are read with the other branches: no weights of theirs are needed."""
        return is_grouped(view) and earlier is not None and takes_compressed(self, view.page_size)

    def last(self, view: BatchView) -> Int[Array, "R T"]:
        """The last positions that queries see: their own, or a row's last that is there."""
        return jnp.minimum(view.positions, view.lengths[:, None] - 1)

    def written(
        self, projection: Projection, cache: LayerCache, view: BatchView, *, gates: bool
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Products | None]:
        """The new tokens' queries, rotated; the layer's pages with the tokens and the compressed ones they complete.

        The third result are products for `gates` of kernels, where one makes them beside the queries; None: none are
        made yet. The view's copies are made first, unless they have been for all layers (`smcjax.model.paged`).
        """
        is_pair = self.kv == "shared"
        if view.copies is not None:
            others = {name: copy_pages(cache[name], view.copies) for name in (COMPRESSED if is_pair else cache)}
            cache = cache | others
        products = None
        if is_pair and gates:
            assert projection.weights is not None
            write = pair_write(projection, cache, view)
            (q, keys, values), products = write_beside_gates(projection.x, projection.weights["gate"], write)
            cache = {**cache, "keys": keys, "values": values}
        elif is_pair:
            q, cache = write_pair(projection, cache, view)
        else:
            q = projection.heads()[0]
            for name, x in self._new_arrays(projection).items():
                cache = cache | {name: cache[name].at[view.write_pages, view.slots].set(x.astype(cache[name].dtype))}
        return q, self.update_compressed(projection, cache, view), products

    def over_tree(
        self, projection: Projection, cache: LayerCache, scratch: LayerCache, view: TreeView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        branches, scratch = self.tree_branches(projection, cache, scratch, view, earlier)
        return branches.gated(), scratch, branches.chosen

    def tree_branches(
        self,
        projection: Projection,
        cache: LayerCache,
        scratch: LayerCache,
        view: TreeView,
        earlier: Chosen | None = None,
    ) -> tuple[Branches, LayerCache]:
        """The parts of a forward over nodes of a tree, and the layer's scratch; `earlier` as in `paged_branches`."""
        scratch, positions = self.tree_written(projection, cache, scratch, view), view.positions
        q, pages, own, routed = projection.heads()[0], self.pairs(cache), self.pairs(scratch), None
        if is_grouped(view) and earlier is None and routes_by_kernel(self, q, compressed_of(cache), view):
            routing = nodes_routed(self, q, compressed_of(cache), compressed_of(scratch), view)
            routed = self.routed_by(routing, cache, view)
        elif not self.takes_together(view, earlier):
            kv = self.read_paths(cache, scratch, view)
            routed = self.route(projection, kv, positions, positions, earlier and earlier.blocks)
            if not is_grouped(view):
                return self._attend(projection, kv, positions, positions, routed), scratch
        chosen = _chosen(routed, earlier)
        compressed = (compressed_of(cache), compressed_of(scratch)) if routed is None else None
        parts, tasks = nodes_by_groups(self, q, pages, own, compressed, view, chosen)
        return self._put_parts_together(projection, routed, parts, chosen)._replace(tasks=tasks), scratch

    def _put_parts_together(
        self,
        projection: Projection,
        routed: Routed | None,
        parts: tuple[Part, ...],
        chosen: Chosen,
        products: Products | None = None,
    ) -> Branches:
        """`put_together` of what groups have read: selection, window and, unless `routed`, compressed tokens."""
        slc, win, *cmp = parts
        if routed is None:
            routed = Routed(grouped(cmp[0].out, projection.num_kv_heads // self.kv_pairs), None, chosen.blocks)
        unmerged = (cmp[0].unmerged if cmp else None, slc.unmerged, win.unmerged)
        return self.put_together(projection, routed, slc.out, win.out, products, unmerged)

    def tree_written(
        self, projection: Projection, cache: LayerCache, scratch: LayerCache, view: TreeView
    ) -> LayerCache:
        """The layer's scratch with the new nodes, and with the compressed tokens that they complete.

        A node at the last position of a compressed token completes it, from committed positions and its path. Another
        node's number in scratch belongs to no node.
        """
        scratch = view.put(scratch, self._new_arrays(projection))
        starts = view.positions - (self.kernel_size - 1)
        covered = starts[..., None] + jnp.arange(self.kernel_size)[None, None]
        sources = {name: self.source(name) for name in ("keys", "values")}
        raw = {name: view.at(cache[source], scratch[source], covered) for name, source in sources.items()}
        made = self.compressed(projection, raw, starts)
        return view.put(scratch, dict(zip(COMPRESSED, made, strict=True)))

    def read_paths(self, cache: LayerCache, scratch: LayerCache, view: TreeView) -> Entries[TreeKV]:
        """Committed keys and values and each new node's path, in the order of positions."""
        entries = {"stride": self.kernel_stride, "size": self.kernel_size}
        tokens = (tree_kv(view, *arrays) for arrays in zip(self.pairs(cache), self.pairs(scratch), strict=True))
        compressed = (tree_kv(view, cache[name], scratch[name], **entries) for name in COMPRESSED)
        return Entries(*tokens, *compressed)

    def _new_arrays(self, projection: Projection) -> dict[str, Float[Array, "R T Hkv D"]]:
        """Keys and values of new tokens as pages hold them, by name."""
        _, keys, values = projection.heads()
        if self.kv == "shared":
            return {"keys": keys, "values": values}
        raw = projection.unrotated()[1]
        (_, slc, win), (raw_values, slc_values, win_values) = (jnp.split(x, 3, axis=2) for x in (keys, values))
        return {
            "keys": slc,
            "values": slc_values,
            "window_keys": win,
            "window_values": win_values,
            "raw_keys": jnp.split(raw, 3, axis=2)[0],
            "raw_values": raw_values,
        }

    def pairs(self, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Keys and values of the selection, then of the window."""
        own = "window_" if self.kv == "per_branch" else ""
        return arrays["keys"], arrays["values"], arrays[f"{own}keys"], arrays[f"{own}values"]

    def read(self, cache: LayerCache, view: BatchView) -> Entries[SequenceKV]:
        """Each row's pages in the order of positions; values that are not there yet are 0."""
        size, table = view.page_size, view.block_table
        rows, width = table.shape
        slots = jnp.arange(width * size)
        array = self.compressed_array()
        starts = jnp.arange(max(1, array.count(width * size))) * self.kernel_stride
        home, ends = jnp.minimum(self.home(starts), width * size - 1), array.ends(len(starts))
        found = {
            name: pages[table].reshape(rows, -1, *pages.shape[2:])
            for name, pages in cache.items()
            if "raw" not in name and "compressed" not in name
        }
        compressed = [cache[name][table[:, home // size], home % size // self.kernel_stride] for name in COMPRESSED]

        def there(values: jax.Array, last: jax.Array) -> jax.Array:
            return jnp.where((last[None] < view.lengths[:, None])[..., None, None], values, 0)

        keys, values, window_keys, window_values = self.pairs(found)
        tokens = (keys, there(values, slots), window_keys, there(window_values, slots))
        return Entries(*map(SequenceKV, (*tokens, compressed[0], there(compressed[1], ends))))

    def _attend[S: VisibleKV](
        self,
        projection: Projection,
        kv: Entries[S],
        positions: Int[Array, "R T"],
        last: Int[Array, "R T"],
        routed: Routed,
    ) -> Branches:
        """All branches of queries at `positions`, each by itself, which see keys up to `last`: their own, if there."""
        rotated, (_, length, kv_heads, _) = projection.heads()[0], kv.keys.shape
        slots, at, last = (
            jnp.arange(length)[None, None, None, None],
            *(x[:, :, None, None, None] for x in (positions, last)),
        )
        q, there = grouped(rotated, kv_heads), slots <= last
        chosen = jnp.repeat(routed.selected, self.block_size, axis=-1)[..., :length]
        chosen = chosen.reshape(*chosen.shape[:2], kv_heads, -1, length)
        _, slc = masked_softmax(scaled_scores(q, kv.keys), kv.values, chosen & there)
        _, win = masked_softmax(
            scaled_scores(q, kv.window_keys), kv.window_values, sees(slots, at, self.window) & there
        )
        return self.put_together(projection, routed, slc, win)

    def partition(self, devices: int, axis: str) -> NSA:
        """The kind where `devices` neighbours along a mesh axis divide a key-value head's query heads."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(NSA)}
        return self if devices == 1 else SharedNSA(**options, devices=devices, axis=axis)


@dataclasses.dataclass(frozen=True)
class SharedNSA(NSA):
    """Native Sparse Attention where devices divide the query heads that select together. Within `jax.shard_map`.

    Attributes:
        devices: neighbours along the axis that have some query heads of one key-value head each.
        axis: a mesh axis's name.
    """

    devices: int = 1
    axis: str = ""

    def ranking(self, blocks: int) -> None:
        """None: what ranks blocks is summed over devices before."""

    def sum_of_group(self, of_heads: jax.Array) -> jax.Array:
        """The sum over a key-value head's query heads, the same bits on each of their devices."""
        return sum_over_neighbours(self.axis, self.devices, of_heads)


def _chosen(routed: Routed | None, earlier: Chosen | None) -> Chosen:
    """Returns what a layer's queries read: the choice of a layer before, tasks and all, or the blocks of `routed`."""
    if earlier is not None:
        return earlier
    assert routed is not None
    return Chosen(routed.selected)


def is_grouped(view: BatchView | TreeView) -> bool:
    """True where the view's queries read selected blocks together."""
    return view.sparse is not None and view.sparse.is_grouped
