"""A forward over a draft tree: every node's logits are those of its path written out, for every kind of attention."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.kv import TRASH, KVCache
from smcjax.model import LayerSpec, ModelConfig, Params
from smcjax.model.attention import SlidingWindow
from smcjax.model.decoder import linear, unembed
from smcjax.model.paged import (
    create_cache,
    create_scratch,
    paged_hidden_states,
    plan_attention,
    tree_hidden_states,
    write_path,
)
from smcjax.model.view import BatchView, TreeView
from smcjax.model.visible_kv import grouped, masked_softmax, scaled_scores, tree_kv
from smcjax.pallas.attention.reference import sees
from smcjax.trees import ORDERS, DraftTree
from tests.helpers import noisy_params, tiny_config
from tests.model.test_paged import LAYERS, VOCAB, dense_logits
from tests.sparse.test_nsa import SmallModel, config_of, golden, kind_of, layer_weights, projected

TREE = DraftTree.of((-1, 0, 0, 2, 1, 2, 3, 3, 4, 7))  # 4 deep, numbered across families
ROOTS = np.arange(1, 11)  # committed positions of the rows: every length mod blocks, strides and pages


@functools.partial(jax.jit, static_argnums=0)
def _paged(config: ModelConfig, params: Params, cache: Any, view: BatchView) -> Any:
    plans = plan_attention(config, params, view, columns=view.tokens.shape[1])
    hidden, cache = paged_hidden_states(config, params, cache, view, plans)
    return unembed(params, hidden), cache


class Rows:
    """Rows whose committed tokens are in pages that are full of NaN elsewhere, and a tree behind each."""

    def __init__(self, config: ModelConfig, params: Params, page_size: int, tree: DraftTree = TREE) -> None:
        self.config, self.params, self.page_size, self.tree = config, params, page_size, tree
        rng, count, longest = np.random.default_rng(0), len(ROOTS), int(ROOTS[-1]) + tree.depth + 2
        self.committed = [rng.integers(0, VOCAB, root).tolist() for root in ROOTS]
        self.nodes = rng.integers(0, VOCAB, (count, tree.size))
        width = -(-longest // page_size)
        self.table = jnp.asarray(1 + rng.permutation(count * width).reshape(count, width), jnp.int32)
        cache = create_cache(config, params, num_pages=1 + count * width, page_size=page_size)
        cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)
        padded = np.array([[*row, *[0] * (ROOTS[-1] - len(row))] for row in self.committed])
        _, self.cache = self.forward(cache, padded, np.zeros(count, int), ROOTS)

    def pages(self, positions: np.ndarray, within: np.ndarray) -> jax.Array:
        pages = np.take_along_axis(np.asarray(self.table), positions // self.page_size, axis=1)
        return jnp.asarray(np.where(within, pages, TRASH))

    def forward(self, cache: Any, tokens: Any, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, Any]:
        """Feeds a sequence of tokens to each row, from `starts` to `lengths`."""
        positions = starts[:, None] + np.arange(tokens.shape[1])
        ends = jnp.asarray(lengths, jnp.int32)
        view = BatchView(
            tokens=jnp.asarray(tokens, jnp.int32),
            positions=jnp.asarray(positions, jnp.int32),
            block_table=self.table,
            write_pages=self.pages(positions, positions < lengths[:, None]),
            lengths=ends,
            num_immutable=ends,
            page_size=self.page_size,
        )
        logits, cache = _paged(self.config, self.params, cache, view)
        return np.asarray(logits), cache

    def view(self, nodes: tuple[int, ...], ahead: int = 0) -> TreeView:
        return TreeView(
            tokens=jnp.asarray(self.nodes[:, list(nodes)], jnp.int32),
            root=jnp.asarray(ROOTS, jnp.int32),
            committed=jnp.asarray(ROOTS + ahead, jnp.int32),
            block_table=self.table,
            tree=self.tree,
            nodes=nodes,
            page_size=self.page_size,
        )

    def scratch(self) -> Any:
        """Scratch full of NaN."""
        scratch = create_scratch(self.config, self.params, rows=len(ROOTS), nodes=self.tree.size)
        return jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), scratch)

    def over(self, nodes: tuple[int, ...], scratch: Any = None, cache: Any = None, ahead: int = 0) -> Any:
        """Logits behind `nodes` [R, T, V], and scratch. Not jitted under its own name: controls patch what it calls."""
        scratch = self.scratch() if scratch is None else scratch

        def run(params: Params, cache: Any, scratch: Any, view: TreeView) -> Any:
            hidden, scratch = tree_hidden_states(self.config, params, cache, scratch, view)
            return unembed(params, hidden), scratch

        cache = self.cache if cache is None else cache
        logits, scratch = jax.jit(run)(self.params, cache, scratch, self.view(nodes, ahead))
        return np.asarray(logits), scratch

    def path(self, row: int, node: int) -> list[int]:
        """The row's tokens and those of the node's path."""
        nodes = self.tree.paths[node][: self.tree.depths[node] + 1]
        return [*self.committed[row], *self.nodes[row, list(nodes)].tolist()]

    @functools.cached_property
    def want(self) -> np.ndarray:
        """Dense logits behind every node [R, M, V]."""
        paths = [self.path(row, node) for row in range(len(ROOTS)) for node in range(self.tree.size)]
        return np.array([row[-1] for row in dense_logits(self.config, self.params, paths)]).reshape(
            len(ROOTS), self.tree.size, -1
        )

    def difference(self, nodes: tuple[int, ...]) -> float:
        """The largest between the logits of one forward and those wanted."""
        return float(np.abs(self.over(nodes)[0] - self.want[:, list(nodes)]).max())


@functools.cache
def rows_of(name: str, page_size: int) -> Rows:
    config = tiny_config(VOCAB, layers=LAYERS[name], num_layers=2)
    return Rows(config, noisy_params(config), page_size)


PAGES = {"sparse": 2, "sparse with shared keys": 8, "gemma": 1}


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "sparse, local, global, sparse"])
def test_every_node_is_its_path(name: str) -> None:
    """In one forward over all nodes, whichever come first."""
    rows = rows_of(name, PAGES.get(name, 4))
    assert rows.difference(TREE.order("dfs" if PAGES.get(name) else "bfs")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["means of blocks", "sparse"])
def test_depth_by_depth_and_what_is_kept(name: str) -> None:
    """As a draft goes: node 0 in pages, a forward a depth; then a path goes to pages, and a token follows it.

    Each row accepts another node, 0 among them; what it wrote where it has not accepted anything stays NaN.
    """
    rows = rows_of(name, PAGES.get(name, 4))
    _, cache = rows.forward(rows.cache, rows.nodes[:, :1], ROOTS, ROOTS + 1)
    scratch = rows.scratch()
    for depth in range(1, TREE.depth + 1):
        level = tuple(node for node in range(TREE.size) if TREE.depths[node] == depth)
        logits, scratch = rows.over(level, scratch, cache, ahead=1)
        np.testing.assert_allclose(logits, rows.want[:, list(level)], atol=1e-4)
    last = np.arange(len(ROOTS)) % TREE.size
    column, depths = np.arange(TREE.depth + 1), np.array(TREE.depths)[last]
    positions = ROOTS[:, None] + column
    pages = rows.pages(positions, (column >= 1) & (column <= depths[:, None]))
    nodes = jnp.asarray(np.array(TREE.paths)[last])
    cache = jax.jit(write_path, static_argnums=0)(rows.config, cache, scratch, nodes, jnp.asarray(positions), pages)
    ends = ROOTS + depths + 1
    got, _ = rows.forward(cache, np.full((len(ROOTS), 1), 7), ends, ends + 1)
    want = dense_logits(rows.config, rows.params, [[*rows.path(row, node), 7] for row, node in enumerate(last)])
    np.testing.assert_allclose(got[:, 0], [row[-1] for row in want], atol=1e-4)


@pytest.mark.slow
def test_orders_are_all_one() -> None:
    """This holds for `bfs`, and for an order that is none of the three; `dfs` is above."""
    rows = rows_of("sparse", 2)
    for nodes in (TREE.order("bfs"), (0, 2, 5, 1, 4, 3, 8, 6, 7, 9)):
        assert rows.difference(nodes) < 1e-4


@pytest.mark.slow
def test_control_slot_order_for_ancestry(patch_programs: Any) -> None:
    """A node that takes the nodes right before it for its ancestors is seen."""

    def before(view: TreeView) -> np.ndarray:
        depths = np.array([view.tree.depths[node] for node in view.nodes])[:, None]
        column = np.arange(len(depths))[:, None] - np.maximum(depths - np.arange(view.tree.depth + 1), 0)
        return np.asarray(view.nodes)[np.maximum(column, 0)]

    rows = rows_of("sparse", 2)
    patch_programs(TreeView, "paths", property(before))
    assert rows.difference(TREE.order("bfs")) > 1e-2


@pytest.mark.slow
def test_control_compression_update_dropped(patch_programs: Any) -> None:
    """A tree whose nodes complete no compressed tokens is seen."""
    put = TreeView.put

    def without_update(view: TreeView, scratch: Any, new: Any) -> Any:
        incomplete = {name: jnp.zeros_like(array) for name, array in new.items() if "compressed" in name}
        return put(view, scratch, {**new, **incomplete})

    rows = rows_of("sparse", 2)
    patch_programs(TreeView, "put", without_update)
    assert rows.difference(TREE.order("bfs")) > 1e-2


@dataclasses.dataclass(frozen=True)
class BySlot(SlidingWindow):
    """A mistaken kind, whose window counts a tree's nodes as if each stood behind the one before it."""

    def over_tree(self, projection: Any, cache: Any, scratch: Any, view: TreeView, earlier: Any = None) -> Any:
        q, keys, values = projection.heads()
        scratch = view.put(scratch, {"keys": keys, "values": values})
        seen_keys, seen_values = (tree_kv(view, cache[name], scratch[name]) for name in ("keys", "values"))
        slots, at = jnp.arange(seen_keys.shape[1])[None, None, None, None], view.positions[:, :, None, None, None]
        by_slot = (view.root[:, None] + jnp.asarray(view.nodes)[None])[:, :, None, None, None]
        visible = sees(slots, by_slot, self.window) & (slots <= at)
        scores = scaled_scores(grouped(q, keys.shape[2]), seen_keys, self.scale)
        return masked_softmax(scores, seen_values, visible)[1].reshape(q.shape), scratch, None


def test_control_window_by_slot() -> None:
    config = tiny_config(VOCAB, layers=(LayerSpec(BySlot(5)),), num_layers=1)
    assert Rows(config, noisy_params(config), 4).difference(TREE.order("bfs")) > 1e-2


def test_a_broken_node_breaks_its_own_paths_alone() -> None:
    """NaN of one token: nodes that do not descend from it are as they would be without."""
    rows = rows_of("sparse", 2)
    broken = copy.copy(rows)
    broken.params = dataclasses.replace(rows.params, embed=rows.params.embed.at[0].set(jnp.nan))
    broken.nodes = np.maximum(rows.nodes, 1)
    broken.nodes[:, 2] = 0
    got, _ = broken.over(TREE.order("bfs"))
    logits = dict(zip(TREE.order("bfs"), np.moveaxis(got, 1, 0), strict=True))
    for node in range(TREE.size):
        assert np.isnan(logits[node]).all() if 2 in TREE.paths[node] else np.isfinite(logits[node]).all()


@functools.partial(jax.jit, static_argnums=0)
def _small_model(key: str, w: Any, caches: list[Any], scratch: list[Any], view: TreeView) -> Any:
    """Logits of the golden cases' own small model over a tree's nodes."""
    o = json.loads(key)

    def norm(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    x, kept, selected = w["emb"][view.tokens], [], []
    for index, (cache, own) in enumerate(zip(caches, scratch, strict=True)):
        of_layer = layer_weights(w, f"layers.{index}.")
        projection = projected(o, layer_weights(of_layer, "nsa."), norm(x), view.positions)
        branches, own = kind_of(o).tree_branches(projection, cache, own, view)
        x = linear(branches.gated().reshape(*x.shape[:2], -1), of_layer["wo"], None, add_to=x)
        x = linear(jax.nn.relu(linear(norm(x), of_layer["w1"], None)), of_layer["w2"], None, add_to=x)
        kept.append(own)
        selected.append(branches.selected)
    return linear(norm(x), w["emb"], None), jnp.stack(selected), kept


@pytest.mark.slow
def test_golden_trees() -> None:
    """Logits and selections behind every node, strictly; then the accepted path is kept, and another token fed."""
    page_size, (o, arrays) = 8, golden("tree_depth3")
    w, tokens, drafts = layer_weights(arrays), arrays["tokens"], arrays["node_tokens"]
    tree = DraftTree(tuple(arrays["parents"].tolist()))
    for name in ORDERS:
        assert tree.order(name) == tuple(arrays[f"order.{name}"].tolist())
    nodes, spec = tree.order("dfs"), kind_of(o).cache(config_of(o))
    lengths = sorted({int(name[1:3]) for name in arrays if name.startswith("P")})
    assert len(lengths) > 2
    for length in lengths:
        model = SmallModel(o, w, page_size)
        for at in range(0, length, 16):
            model.forward(tokens[at : min(at + 16, length)], at)
        scratch = [
            {name: jnp.full((1, tree.size, a.heads, a.dim), jnp.nan) for name, a in spec.arrays.items()}
            for _ in model.caches
        ]
        view = TreeView(
            tokens=jnp.asarray(drafts[list(nodes)][None], jnp.int32),
            root=jnp.asarray([length], jnp.int32),
            committed=jnp.asarray([length], jnp.int32),
            block_table=jnp.asarray(model.table, jnp.int32),
            tree=tree,
            nodes=nodes,
            page_size=page_size,
        )
        got, selected, scratch = _small_model(json.dumps(o), w, model.caches, scratch, view)
        np.testing.assert_allclose(got[0], arrays[f"P{length}.strict.logits"][list(nodes)], atol=1e-3)
        wanted = arrays[f"P{length}.strict.selected"][..., None] == np.arange(selected.shape[-1])
        np.testing.assert_array_equal(selected[:, 0], wanted.any(axis=3)[:, list(nodes)])
        path = arrays["commit_path"]
        positions = length + np.arange(len(path))[None]
        pages = np.take_along_axis(model.table, positions // page_size, axis=1)
        cache = KVCache(tuple(model.caches), page_size)
        new = [{name: array[:, path] for name, array in layer.items()} for layer in scratch]
        kept = cache.write([spec] * len(model.caches), new, jnp.asarray(positions), jnp.asarray(pages))
        model.caches = list(kept.layers)
        after, _ = model.forward([5], length + len(path))
        np.testing.assert_allclose(after, arrays[f"P{length}.strict.after_commit.logits"], atol=1e-3)
