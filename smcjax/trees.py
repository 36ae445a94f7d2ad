"""Draft trees: tokens that a cycle drafts as branching continuations, described statically and without JAX.

    node        0   1   2   3   4          0 ─┬─ 1 ─┬─ 3
    parents    -1   0   0   1   1             │     └─ 4
    depths      0   1   1   2   2             └─ 2

Node 0 is the frontier, a row's newest committed token; every other node is a token drafted behind its parent's, and a
parent's number is below its children's. A node stands at the frontier's position plus its depth: siblings, and all
nodes of one depth, share a position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from smcjax.checks import short

MAX_NODES = 64  # of a tree, the frontier among them
Order = Literal["bfs", "dfs", "position"]
ORDERS = get_args(Order)


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A tree of M nodes, given by their parents. Nodes are numbers from 0; all that is said of them is tuples.

    Raises ValueError unless parents[0] is −1, 0 ≤ parents[m] < m for every other node m, and 2 ≤ M ≤ 64.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.parents) <= MAX_NODES:
            raise ValueError(
                f"tree must have from 2 to {MAX_NODES} nodes, the frontier among them, got {len(self.parents)}; "
                "add some, or leave some out."
            )
        for node, parent in enumerate(self.parents):
            if parent != -1 if node == 0 else not 0 <= parent < node:
                raise ValueError(
                    "tree must begin with -1 and then name each node's parent, from 0 to the node before it, got "
                    f"{parent} for node {node}; number parents before their children."
                )

    @classmethod
    def with_children(cls, counts: Sequence[int]) -> DraftTree:
        """The tree whose nodes of depth j have `counts[j]` ≥ 1 children each, numbered depth by depth."""
        parents, level, nodes = [-1], [0], 1
        for count in counts:
            nodes += len(level) * count
            if nodes > MAX_NODES:
                raise ValueError(
                    f"tree must have from 2 to {MAX_NODES} nodes, the frontier among them, and children "
                    f"{short(tuple(counts))} make more; use fewer."
                )
            parents += [node for node in level for _ in range(count)]
            level = list(range(nodes - len(level) * count, nodes))
        return cls(tuple(parents))

    @classmethod
    def of(cls, described: Sequence[int]) -> DraftTree:
        """The tree that numbers describe: parents where the first is −1, else children per depth.

        Raises ValueError for anything else, in a sentence that begins with "tree".
        """
        whole = isinstance(described, list | tuple) and all(
            isinstance(number, int) and not isinstance(number, bool) for number in described
        )
        if whole and described and described[0] == -1:
            return cls(tuple(described))
        if not (whole and described and min(described) >= 1):
            raise ValueError(
                "tree must be children per depth, as (4, 2, 1), or every node's parent, as (-1, 0, 0, 1), "
                f"got {short(described)}."
            )
        return cls.with_children(described)

    @property
    def size(self) -> int:
        """M, nodes, the frontier among them."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from node 0 to each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """K, the depth of the deepest node: draft tokens that a cycle can accept."""
        return max(self.depths)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children, in the order in which they are judged: by number."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    @functools.cached_property
    def inner_levels(self) -> tuple[tuple[int, ...], ...]:
        """For each depth 0 … K − 1 its nodes that have children, by number."""
        levels: list[list[int]] = [[] for _ in range(self.depth)]
        for node, children in enumerate(self.children):
            if children:
                levels[self.depths[node]].append(node)
        return tuple(map(tuple, levels))

    @property
    def inner(self) -> tuple[int, ...]:
        """The nodes of `inner_levels`, one after the other."""
        return tuple(node for level in self.inner_levels for node in level)

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node its ancestor of every depth 0 … K, itself at its own; from there on itself again."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            before = () if node == 0 else found[parent][: self.depths[node]]
            found.append((*before, *(node,) * (self.depth + 1 - len(before))))
        return tuple(found)

    def drafts_to(self, nodes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """For each of some nodes those on the way to it, itself among them, without node 0, which is no draft."""
        return tuple(self.paths[node][1 : self.depths[node] + 1] for node in nodes)

    def order(self, name: str) -> tuple[int, ...]:
        """All nodes in one of `ORDERS`; in each a parent comes before its children.

        "bfs" goes level by level, children of one parent together; "dfs" is preorder, a child's whole subtree before
        its next sibling; "position" sorts by depth and then by number.
        """
        if name == "position":
            return tuple(sorted(range(self.size), key=lambda node: (self.depths[node], node)))
        found, waiting = [], [0]
        while waiting:
            node = waiting.pop(0)
            found.append(node)
            waiting = [*self.children[node], *waiting] if name == "dfs" else [*waiting, *self.children[node]]
        return tuple(found)
