"""Draft trees as numbers: depths, children, paths and orders of any tree, and what is no tree."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.trees import MAX_NODES, ORDERS, DraftTree


@st.composite
def trees(draw: st.DrawFn, most: int = MAX_NODES) -> DraftTree:
    """Any tree of 2 to `most` nodes."""
    size = draw(st.integers(2, most))
    return DraftTree((-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))))


@given(trees())
def test_paths_lead_from_node_0(tree: DraftTree) -> None:
    """A path is its parent's and the node; behind that the node again."""
    for node, path in enumerate(tree.paths):
        depth = tree.depths[node]
        assert len(path) == tree.depth + 1
        assert path[0] == 0
        assert set(path[depth:]) == {node}
        assert all(tree.parents[below] == above for above, below in itertools.pairwise(path[: depth + 1]))
        assert [tree.depths[above] for above in path[: depth + 1]] == list(range(depth + 1))


@given(trees())
def test_children_are_every_node_but_the_first(tree: DraftTree) -> None:
    assert sorted(child for children in tree.children for child in children) == list(range(1, tree.size))
    assert sorted(tree.inner) == [node for node, children in enumerate(tree.children) if children]
    assert [{tree.depths[node] for node in level} for level in tree.inner_levels] == [{j} for j in range(tree.depth)]


@given(trees())
def test_orders_put_parents_first(tree: DraftTree) -> None:
    """Every order has every node once; levels follow each other, or a subtree is one run of nodes."""
    for name in ORDERS:
        order = tree.order(name)
        assert sorted(order) == list(range(tree.size))
        assert all(order.index(parent) < order.index(node) for node, parent in enumerate(tree.parents) if node)
        if name == "dfs":
            for node in range(tree.size):
                subtree = [order.index(below) for below in range(tree.size) if node in tree.paths[below]]
                assert max(subtree) - min(subtree) == len(subtree) - 1
        else:
            assert [tree.depths[node] for node in order] == sorted(tree.depths)


def test_orders_differ() -> None:
    """Breadth first keeps families together where numbers do not."""
    tree = DraftTree((-1, 0, 0, 2, 1, 2))
    assert [tree.order(name) for name in ORDERS] == [(0, 1, 2, 4, 3, 5), (0, 1, 4, 2, 3, 5), (0, 1, 2, 3, 4, 5)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_children_per_depth_are_parents(counts: list[int]) -> None:
    sizes = [1]
    for count in counts:
        sizes.append(sizes[-1] * count)
    if sum(sizes) > MAX_NODES:
        with pytest.raises(ValueError, match=f"must have from 2 to {MAX_NODES} nodes"):
            DraftTree.of(counts)
        return
    tree = DraftTree.of(counts)
    assert tree == DraftTree.of(tree.parents)
    assert tree.depth == len(counts)
    assert all(len(tree.children[node]) == counts[tree.depths[node]] for node in tree.inner)
    assert tree.order("bfs") == tuple(range(tree.size))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ((), "tree must be children per depth, as (4, 2, 1), or every node's parent, as (-1, 0, 0, 1), got ()."),
        ((2, 0), "or every node's parent, as (-1, 0, 0, 1), got (2, 0)."),
        ((2, 1.5), "or every node's parent, as (-1, 0, 0, 1), got (2, 1.5)."),
        ((True,), "or every node's parent, as (-1, 0, 0, 1), got (True,)."),
        ("4 2", "or every node's parent, as (-1, 0, 0, 1), got '4 2'."),
        (3, "or every node's parent, as (-1, 0, 0, 1), got 3."),
        ((-1,), "tree must have from 2 to 64 nodes, the frontier among them, got 1; add some, or leave some out."),
        ((-1, *range(64)), "tree must have from 2 to 64 nodes, the frontier among them, got 65; add some, or"),
        ((8, 8), "nodes, the frontier among them, and children (8, 8) make more; use fewer."),
        ((10**9,) * 3, "make more; use fewer."),
        ((-1, 0, 2), "got 2 for node 2; number parents before their children."),
        ((-1, -1), "got -1 for node 1; number parents before their children."),
    ],
)
def test_what_is_no_tree_is_refused(described: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftTree.of(described)
