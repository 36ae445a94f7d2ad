"""The script that counts what EAGLE-3 heads draft well: the trees that it makes, and its rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_eagle

from smcjax import Rejection
from smcjax.trees import DraftTree


@pytest.mark.parametrize(("width", "depth", "nodes"), [(8, 5, 32), (10, 7, 63), (1, 4, 4), (3, 2, 6)])
def test_trees_have_the_likeliest_paths(width: int, depth: int, nodes: int) -> None:
    tree = DraftTree(bench_eagle.tree_of(width, depth, nodes))
    assert (tree.size, tree.depth) == (nodes + 1, depth)
    assert max(tree.depths.count(level) for level in range(depth + 1)) <= width
    # The likeliest child is a node's first, so that the chain of likeliest tokens is always there, to the whole depth.
    node = 0
    for level in range(depth):
        node = tree.children[node][0]
        assert tree.depths[node] == level + 1
    ranks = [len(children) for children in tree.children]
    assert ranks[0] == max(ranks)


def test_rows() -> None:
    args = bench_eagle.parse(["head", "--chains", "4", "6", "--trees", "8x5x32"])
    assert (args.model, args.draft_model) == ("recall", "recall-draft")
    found = bench_eagle.decoders(args)
    assert [(draft, bench_eagle.said(one)) for draft, one in found] == [
        ("head", "chain, K = 4"),
        ("head", "chain, K = 6"),
        ("head", "tree, 32 nodes, 8 wide, 5 deep"),
        ("model", "chain, K = 4"),
        ("model", "chain, K = 6"),
    ]
    assert all(isinstance(one, Rejection) and one.exact for _, one in found)
    with pytest.raises(SystemExit):
        bench_eagle.parse(["head", "--documents", "3"])
