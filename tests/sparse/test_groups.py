"""Sparse attention by groups of queries: golden cases of chains and trees, and the layer without groups."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.kv import TRASH, KVCache
from smcjax.model.decoder import linear
from smcjax.model.view import BatchView, TreeView
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.grouped_attention import group_tasks, grouped_scores
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse import groups as nsa_groups
from smcjax.sparse import nsa
from smcjax.sparse.groups import routes_by_kernel, rows_routed, takes_compressed
from smcjax.sparse.verification import MODES, SparseVerification
from smcjax.trees import ORDERS, DraftTree
from tests.lazily import program_patches
from tests.model import nsa_oracle
from tests.sparse.test_nsa import (
    SMALL,
    Arrays,
    Options,
    SmallModel,
    config_of,
    golden,
    kind_of,
    layer_weights,
    projected,
    random_weights,
)

SIZES = (2, 3)
CHAIN, TREE = "chain_C1to4", "tree_depth3"


def lengths_of(arrays: Arrays) -> list[int]:
    """Committed positions of the golden cases."""
    return sorted({int(name[1:3]) for name in arrays if name.startswith("P")})


def tree_of(arrays: Arrays) -> DraftTree:
    return DraftTree(tuple(arrays["parents"].tolist()))


@pytest.mark.parametrize("name", [CHAIN, TREE])
@pytest.mark.parametrize("size", SIZES)
def test_golden_blocks(name: str, size: int) -> None:
    """How many blocks are read for groups and for their queries, in pages of a block and of half a block."""
    o, arrays = golden(name)
    lengths = lengths_of(arrays)
    sets = np.concatenate([arrays[f"P{length}.strict.selected"] for length in lengths])  # [P · L, M, S, n]
    selected = jnp.asarray((sets[..., None] == np.arange(9)).any(axis=3))
    for order in ORDERS:
        want = np.concatenate([arrays[f"P{length}.strict.{order}.C{size}.blocks"] for length in lengths])
        groups = QueryGroups.of_tree(tree_of(arrays), range(len(arrays["parents"])), order, size)
        for page_size in (o["block"], o["block"] // 2):
            table = jnp.arange(72 // page_size)[None, None] + jnp.zeros((*selected.shape[:2], 1), jnp.int32)
            shape = {"page_size": page_size, "block_size": o["block"], "most_blocks": o["n"]}
            tasks = jax.jit(functools.partial(group_tasks, groups=groups, **shape))
            number = np.asarray(tasks(selected, table).number).sum(axis=(1, 2))
            np.testing.assert_array_equal(number * page_size // o["block"], want[:, 0])
        np.testing.assert_array_equal(np.asarray(selected).sum(axis=(1, 2, 3)), want[:, 1])


@functools.partial(jax.jit, static_argnums=0)
def _layer(key: str, w: Arrays, cache: Any, scratch: Any, view: Any, x: jax.Array, earlier: Any = None) -> Any:
    """Adds a layer of the golden cases' small model to x; without scratch over a sequence.

    Returns the sum, and what each query has chosen or taken.
    """
    o = json.loads(key)
    projection = projected(o, layer_weights(w, "nsa."), normed(x), view.positions)
    if scratch is None:
        branches, _ = kind_of(o).paged_branches(projection, cache, view, earlier)
    else:
        branches, _ = kind_of(o).tree_branches(projection, cache, scratch, view, earlier)
    x = linear(branches.gated().reshape(*x.shape[:2], -1), w["wo"], None, add_to=x)
    return linear(jax.nn.relu(linear(normed(x), w["w1"], None)), w["w2"], None, add_to=x), branches.chosen


def normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Prefilled:
    """A golden case behind `length` committed tokens: logits behind its draft, as a chain or as a tree."""

    def __init__(self, name: str, length: int, page_size: int) -> None:
        self.o, arrays = golden(name)
        self.arrays, self.w, self.length = arrays, layer_weights(arrays), length
        self.model, tokens = SmallModel(self.o, self.w, page_size), arrays["tokens"]
        for at in range(0, length, 16):
            self.model.forward(tokens[at : min(at + 16, length)], at)
        drafts, table = arrays["node_tokens"][None], jnp.asarray(self.model.table, jnp.int32)
        self.tree, tokens = tree_of(arrays), jnp.asarray(drafts, jnp.int32)
        positions = length + np.array(self.tree.depths)[None]
        root = jnp.asarray([length], jnp.int32)
        if name == TREE:
            nodes = tuple(range(self.tree.size))
            self.view: Any = TreeView(tokens, root, root, table, self.tree, nodes, page_size=page_size)
            shapes = kind_of(self.o).cache(config_of(self.o)).arrays
            self.scratch: Any = {
                of: jnp.full((1, self.tree.size, array.heads, array.dim), jnp.nan) for of, array in shapes.items()
            }
        else:
            pages = np.take_along_axis(self.model.table, positions // page_size, axis=1)
            ends = jnp.asarray(positions[:, -1] + 1)
            arguments = (tokens, jnp.asarray(positions, jnp.int32), table, jnp.asarray(pages, jnp.int32), ends, ends)
            self.view, self.scratch = BatchView(*arguments, page_size=page_size), None

    def logits(self, sparse: SparseVerification, mark: str = "") -> np.ndarray:
        """Behind every node; with another `mark` programs are traced anew."""
        x = self.layers(dataclasses.replace(self.view, sparse=sparse), mark)
        return np.asarray(linear(normed(x), self.w["emb"], None)[0])

    def layers(self, view: Any, mark: str = "", layer: Any = None) -> jax.Array:
        """Every node behind all layers, each by `layer`: `_layer`, if there is none."""
        x, chosen = jnp.asarray(self.w["emb"])[view.tokens], []
        for index, (cache, source) in enumerate(zip(self.model.caches, view.sparse.sources(3), strict=True)):
            w, earlier = layer_weights(self.w, f"layers.{index}."), None if source == index else chosen[source]
            key = json.dumps(self.o | {"mark": mark})
            x, its = (layer or _layer)(key, w, cache, self.scratch, view, x, earlier)
            chosen.append(its)
        return x

    def path_logits(self, schedule: tuple[bool, ...] | None = None) -> np.ndarray:
        """Behind each node of the path to commit, by the oracle: what is committed selects in every layer."""
        path, start = self.arrays["commit_path"], self.length
        tokens = np.concatenate([self.arrays["tokens"][:start], self.arrays["node_tokens"][path]])
        w = {name: np.asarray(value, np.float64) for name, value in self.w.items()}

        def norm(x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)

        x, selections = w["emb"][tokens], []
        for index, source in enumerate(SparseVerification(schedule=schedule).sources(3)):
            of = layer_weights(w, f"layers.{index}.")
            given = {t: selections[source][t] for t in range(start, len(tokens))} if source != index else None
            found = nsa_oracle.layer(self.o, layer_weights(of, "nsa."), norm(x), given=given)
            selections.append(found.selected)
            x = x + found.out.reshape(len(tokens), -1) @ of["wo"].T
            x = x + np.maximum(norm(x) @ of["w1"].T, 0) @ of["w2"].T
        return (norm(x) @ w["emb"].T)[start:]


@functools.cache
def prefilled(name: str, page_size: int) -> list[Prefilled]:
    return [Prefilled(name, length, page_size) for length in lengths_of(golden(name)[1])]


FEW = [(CHAIN, "bfs"), (TREE, "dfs")]
GOLDEN_LOGITS = [(*case, mode, size) for case in FEW for mode, size in zip(MODES[1:], (4, 4, 2), strict=True)]
GOLDEN_LOGITS += [(CHAIN, "bfs", "shared", 1)]


@pytest.mark.parametrize(("name", "order", "mode", "size"), GOLDEN_LOGITS)
def test_golden_logits(name: str, order: str, mode: str, size: int) -> None:
    """Behind every node: merged as each query by itself, approximate modes as the specification has them.

    Control: shared by four is no longer strict.
    """
    page_size = {"bfs": 16, "dfs": 2}[order]
    strayed = []
    for case in prefilled(name, page_size):
        of = f"P{case.length}.strict"
        strict = case.arrays[f"{of}.logits"]
        want = strict if mode == "merged" else case.arrays[f"{of}.{order}.C{size}.{mode}.logits"]
        np.testing.assert_allclose(case.logits(SparseVerification(mode, size, order)), want, atol=1e-3)
        strayed.append(np.abs(want - strict).max())
    if size == 1:
        assert max(strayed) < 1e-5
    if mode == "shared" and size == 4:
        assert min(strayed) > 1e-2


TOGETHER = [(CHAIN, "bfs", 16), (TREE, "dfs", 16)]  # with eight compressed tokens a page or more


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order", "page_size"), [(TREE, "dfs", 2), TOGETHER[0]])
def test_layers_take_the_blocks_of_earlier_ones(name: str, order: str, page_size: int) -> None:
    """Each query and head those of the nearest layer before that selects: what the oracle computes along a path.

    Control: where every layer selects, logits are others, and so they are by the first layer's blocks in all.
    """
    case = prefilled(name, page_size)[0]
    assert takes_compressed(kind_of(case.o), page_size) == ((name, order, page_size) in TOGETHER)
    path = case.arrays["commit_path"]
    strict = case.arrays[f"P{case.length}.strict.logits"][path]
    np.testing.assert_allclose(case.path_logits(), strict, atol=1e-3)
    found = {}
    for schedule in ((True, False, False), (True, True, False)):
        found[schedule] = case.logits(SparseVerification("merged", 3, order, schedule))[path]
        np.testing.assert_allclose(found[schedule], case.path_logits(schedule), atol=1e-3)
        assert np.abs(found[schedule] - strict).max() > 1e-2
    assert np.abs(found[True, False, False] - found[True, True, False]).max() > 1e-2


@functools.partial(jax.jit, static_argnums=0)
def _forward(key: str, w: Arrays, cache: Any, view: BatchView, x: jax.Array) -> Any:
    """A layer's parts over pages."""
    o = json.loads(key)
    return kind_of(o).paged_branches(projected(o, w, x, view.positions), cache, view)


def verified(
    o: Options, page_size: int, sparse: SparseVerification | None, mark: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and selections of four rows, of which two share what they begin with; the last writes nothing.

    Pages hold NaN where nothing is written. With another `mark` programs are traced anew.
    """
    rows, columns, before, w, rng = 4, 3, 45, random_weights(o, 0), np.random.default_rng(0)
    width = -(-(before + columns) // page_size)
    shared = before // page_size
    table = 1 + np.arange(rows * width).reshape(rows, width)
    table[1::2, :shared] = table[::2, :shared]
    cache = KVCache.create([kind_of(o).cache(config_of(o))], num_pages=99, page_size=page_size, dtype=jnp.float32)
    pages = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), cache.layers[0])
    x = rng.standard_normal((rows, before + columns, o["width"])).astype(np.float32)
    x[1::2, :before] = x[::2, :before]

    def view(first: int, last: int) -> BatchView:
        positions = np.arange(first, last) + np.zeros((rows, 1), int)
        written = np.take_along_axis(table, positions // page_size, axis=1)
        ends = np.full(rows, last)
        if first:
            written[-1], ends[-1] = TRASH, 0
        arrays = (positions, positions, table, written, ends, ends)
        return BatchView(*(jnp.asarray(array, jnp.int32) for array in arrays), rows=2, page_size=page_size)

    key = json.dumps(o)
    _, pages = _forward(key, w, pages, view(0, before), x[:, :before])
    draft = dataclasses.replace(view(before, before + columns), sparse=sparse)
    branches, _ = _forward(json.dumps(o | {"mark": mark}), w, pages, draft, x[:, before:])
    return np.asarray(branches.outputs)[:-1], np.asarray(branches.selected)[:-1]


OTHERS = {"kv": "shared", "phi": "linear", "block": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "page_size", "order", "size"),
    [({}, 2, "dfs", 4), (OTHERS, 8, "bfs", 5)],
)
def test_merged_rows_are_each_query_by_itself(changes: Options, page_size: int, order: str, size: int) -> None:
    """Groups across the rows of a request, of any options; a row that writes nothing sees nothing and spoils nothing.

    Control: the first query's blocks for all are others, in every one of these cases.
    """
    o = SMALL | changes
    want, selected = verified(o, page_size, None)
    got, own = verified(o, page_size, SparseVerification("merged", size, order))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(own, selected)
    shared, _ = verified(o, page_size, SparseVerification("shared", size, order))
    assert np.abs(shared - want).max() > 1e-2
    np.testing.assert_allclose(shared[..., [0, 2], :], want[..., [0, 2], :], atol=1e-5)


@pytest.mark.slow
def test_routing_by_groups_is_each_querys_own(patch_programs: Any) -> None:
    """Compressed tokens read once a group, as where a kernel keeps the scores that rank blocks.

    Controls: scores that are a slot late rank other blocks, and so do pages of the first row for all of a request.
    """
    o, page_size = SMALL | OTHERS, 2
    want, selected = verified(o, page_size, None)
    sparse, asked = SparseVerification("merged", 4, "dfs"), []
    patch_programs(nsa, "routes_by_kernel", lambda *_: not asked.append(1))
    got, own = verified(o, page_size, sparse, mark="by groups")
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(own, selected)
    by_blocks = nsa.NSA.by_blocks
    with program_patches(nsa.NSA, "by_blocks", lambda kind, x, n: by_blocks(kind, jnp.roll(x, 1, axis=-1), n)):
        _, late = verified(o, page_size, sparse, mark="late")
    assert len(asked) == 2
    assert (late != selected).any()
    tables = nsa_groups._tables

    def of_first(view: BatchView) -> jax.Array:
        found = tables(view)
        return found[np.arange(found.shape[0]) // 2 * 2]

    patch_programs(nsa_groups, "_tables", of_first)
    strayed, _ = verified(o, page_size, sparse, mark="first row's")
    assert not np.abs(strayed[..., 0, :] - want[..., 0, :]).max() < 1e-2  # NaN where that row has nothing


@pytest.mark.parametrize(("name", "page_size"), [(CHAIN, 16), (TREE, 2)])
def test_layers_take_tasks_with_blocks(name: str, page_size: int, patch_programs: Any) -> None:
    """A layer that takes blocks reads them by the tasks that were made where they were selected.

    Control: where every layer selects, each makes its own.
    """
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(group_tasks(*args, **options))
        return made[-1]

    patch_programs(nsa_groups, "group_tasks", make)
    case, counts = prefilled(name, page_size)[0], []
    for schedule in (None, (True, False, True), (True, False, False)):
        made.clear()
        view = dataclasses.replace(case.view, sparse=SparseVerification("merged", 3, schedule=schedule))
        jax.eval_shape(functools.partial(case.layers, layer=inspect.unwrap(_layer)), view)
        counts.append(len(made))
    assert counts == [3, 2, 1]


@functools.partial(jax.jit, static_argnums=0)
def _first_layer(key: str, w: Arrays, cache: Any, scratch: Any, view: TreeView, x: jax.Array) -> Any:
    """The parts of a golden case's first layer."""
    o = json.loads(key)
    projection = projected(o, layer_weights(w, "nsa."), normed(x), view.positions)
    return kind_of(o).tree_branches(projection, cache, scratch, view)[0]


@pytest.mark.slow
def test_trees_route_by_groups_as_each_node_by_itself(patch_programs: Any) -> None:
    """Compressed tokens in pages read once a group, and those that drafts complete joined to them, weights included.

    Controls: scores without the weights of those that drafts complete, and all nodes' tokens for every node.
    """
    patch_programs(nsa, "routes_by_kernel", lambda *_: True)

    def branches(sparse: SparseVerification | None, mark: str) -> list[nsa.Branches]:
        found = []
        for case in prefilled(TREE, 2):
            w, key = layer_weights(case.w, "layers.0."), json.dumps(case.o | {"mark": mark})
            view = dataclasses.replace(case.view, sparse=sparse)
            found.append(_first_layer(key, w, case.model.caches[0], case.scratch, view, case.w["emb"][view.tokens]))
        return found

    want = branches(None, "each by itself")

    def away(mark: str) -> tuple[float, float]:
        """The largest differences of the compressed branch's outputs, and of scores."""
        got = branches(SparseVerification("merged", 3, "dfs"), mark)
        pairs = list(zip(got, want, strict=True))
        outputs = max(float(jnp.abs(a.outputs - b.outputs)[..., 0, :].max()) for a, b in pairs)
        return outputs, max(float(jnp.abs(a.scores - b.scores).max()) for a, b in pairs)

    assert max(away("by groups")) < 1e-5
    whole, drafted = nsa_groups.nodes_routed, nsa_groups._drafted

    def without(kind: Any, q: Any, compressed: Any, own: Any, view: TreeView) -> nsa_groups.Weighed:
        routing = whole(kind, q, compressed, own, view)
        of_pages = (
            jnp.arange(routing.weights.shape[-1])[None, None, None]
            < (view.committed // kind.kernel_stride)[:, None, None, None]
        )
        return routing._replace(weights=jnp.where(of_pages, routing.weights, 0))

    with program_patches(nsa, "nodes_routed", without):
        outputs, scores = away("without")
        assert outputs < 1e-5
        assert scores > 1e-2
    with program_patches(nsa_groups, "_drafted", lambda view: (drafted(view)[0], jnp.ones_like(drafted(view)[1]))):
        assert not min(away("of all")) <= 1e-2  # NaN: not all nodes' tokens are there


@pytest.mark.parametrize(
    ("options", "changes", "routes"),
    [
        ({}, {}, True),
        ({}, {"heads": 40, "group": 4, "page_size": 384}, True),  # heads padded, a last group of one
        ({}, {"page_size": 64}, False),  # four compressed tokens
        ({}, {"dim": 256}, False),
        ({}, {"dtype": jnp.float32}, False),
        ({}, {"rows": 2, "group": 16}, True),
        ({}, {"rows": 2, "heads": 256, "group": 128}, False),  # more rows than tiles,
    ],
)
def test_routing_by_groups_is_chosen_where_the_kernel_is(
    options: dict[str, Any], changes: dict[str, Any], routes: bool, patch_programs: Any
) -> None:
    """Elsewhere each query routes by itself: the reference computes scores twice."""
    sizes: Any = {"dim": 128, "heads": 32, "group": 9, "page_size": 128, "dtype": jnp.bfloat16, "rows": 1} | changes
    kind, requests, columns, kv_heads = nsa.NSA(**options), 2, 9, 8

    def numbers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    of_rows, of_tokens = numbers(requests), numbers(requests, columns)
    view = BatchView(
        *(of_tokens, of_tokens, numbers(requests, 16), of_tokens, of_rows, of_rows),
        rows=sizes["rows"],
        sparse=SparseVerification("merged", sizes["group"]),
        page_size=sizes["page_size"],
    )
    per_page, dtype = sizes["page_size"] // kind.kernel_stride, sizes["dtype"]
    q: Any = jax.ShapeDtypeStruct((requests, columns, sizes["heads"], sizes["dim"]), dtype)
    compressed: Any = (jax.ShapeDtypeStruct((40, per_page, kv_heads, sizes["dim"]), dtype),) * 2
    kernels, kernel_for = [], grouped_scores.kernel_for
    patch_programs(grouped_scores, "kernel_for", lambda *a, **k: kernels.append(kernel_for(*a, **k)) or kernels[-1])
    with implementations("xla"):
        assert not routes_by_kernel(kind, q, compressed, view)
    with implementations("mosaic"):
        assert routes_by_kernel(kind, q, compressed, view) == routes
        if routes:
            weighed = jax.eval_shape(functools.partial(rows_routed, kind), q, compressed, view, of_tokens)
            output, weights, selected = weighed
            blocks = 16 * sizes["page_size"] // kind.block_size
            assert output.shape == q.shape
            assert selected is not None
            assert selected.shape == (*q.shape[:2], kv_heads, blocks)
            assert weights.shape == (*q.shape[:3], 16 * per_page)
            assert kernels[0] is not None
