"""Groups of verification's queries: orders, neighbours, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.trees import ORDERS, DraftTree
from tests.test_trees import trees


@given(st.permutations(range(7)), st.integers(1, 9))
def test_join_undoes_split(order: list[int], size: int) -> None:
    """Groups are runs of the order, none longer than it; absent places repeat a query and come back as none."""
    groups, x = QueryGroups(tuple(order), size), np.arange(14).reshape(2, 7)
    split = np.asarray(groups.split(jnp.asarray(x)))
    assert split.shape == (2, groups.number, min(size, 7))
    assert groups.present.any(axis=0).all()  # no place of every group is nobody's: no tile of theirs is empty
    assert split[1][groups.present].tolist() == [x[1, query] for query in order]
    np.testing.assert_array_equal(groups.join(jnp.asarray(split)), x)
    firsts = [x[0, order[place // size * size]] for place in range(7)]
    assert np.asarray(groups.by_first(jnp.asarray(x)))[0, order].tolist() == firsts


@given(trees(most=9), st.sampled_from(ORDERS), st.data())
def test_trees_are_grouped_by_node_whatever_the_columns(tree: DraftTree, order: str, data: st.DataObject) -> None:
    """Also where a forward has some of the nodes only."""
    nodes = data.draw(st.permutations(range(tree.size)))[: data.draw(st.integers(1, tree.size))]
    groups = QueryGroups.of_tree(tree, nodes, order, 2)
    assert [nodes[column] for column in groups.order] == [node for node in tree.order(order) if node in nodes]


def test_rows_are_trees_that_branch_once() -> None:
    assert QueryGroups.of_rows(2, 3, "dfs", 2).order == (0, 1, 2, 3, 4, 5)
    assert QueryGroups.of_rows(2, 3, "bfs", 2).order == QueryGroups.of_rows(2, 3, "position", 2).order
    assert QueryGroups.of_rows(2, 3, "bfs", 2).order == (0, 3, 1, 4, 2, 5)
    assert {QueryGroups.of_rows(1, 4, order, 2).order for order in ORDERS} == {(0, 1, 2, 3)}


def test_what_is_no_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order must name each .*, got \(0, 2\)\.$"):
        QueryGroups((0, 2), 1)
    with pytest.raises(ValueError, match=r"size of a group must be at least 1 query, got 0\.$"):
        QueryGroups((0,), 0)
    with pytest.raises(ValueError, match=r"order must be one of bfs, dfs, position, got 'random'\.$"):
        QueryGroups.of_rows(1, 2, "random", 1)
