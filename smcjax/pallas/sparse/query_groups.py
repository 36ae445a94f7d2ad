"""Verification's queries in groups of neighbours, which read what they have in common once.

A request has M queries: the columns of its N rows one row after the other (SMC, chains), or the nodes of a draft tree.
An order puts those next to each other that are likely to select the same blocks, and every C of them are a group; the
last one may have fewer. Groups are static: they follow from shapes and trees alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from smcjax.trees import ORDERS, DraftTree


@dataclasses.dataclass(frozen=True)
class QueryGroups:
    """M queries of a request in `order`, C = `size` to a group, which is M where more are asked for.

    Raises ValueError unless `order` is a permutation of 0 … M − 1 and `size` at least 1.
    """

    order: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        if not self.order or sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"order must name each of M ≥ 1 queries once, from 0 to M - 1, got {self.order}.")
        if self.size < 1:
            raise ValueError(f"size of a group must be at least 1 query, got {self.size}.")
        object.__setattr__(self, "size", min(self.size, len(self.order)))

    @classmethod
    def of_rows(cls, rows: int, columns: int, order: str, size: int) -> QueryGroups:
        """The columns of a request's rows, query row · columns + column.

        "dfs" goes row by row; "bfs" and "position" go column by column, which of one row are the same.
        """
        _check(order)
        queries = np.arange(rows * columns).reshape(rows, columns)
        return cls(tuple((queries if order == "dfs" else queries.T).reshape(-1).tolist()), size)

    @classmethod
    def of_tree(cls, tree: DraftTree, nodes: Sequence[int], order: str, size: int) -> QueryGroups:
        """The nodes that a forward has, in its columns' order: query m is `nodes[m]`."""
        _check(order)
        column = {node: column for column, node in enumerate(nodes)}
        return cls(tuple(column[node] for node in tree.order(order) if node in column), size)

    @property
    def number(self) -> int:
        """g, groups of a request."""
        return -(-len(self.order) // self.size)

    @property
    def present(self) -> Bool[np.ndarray, "g C"]:
        """False for the places of the last group that no query has."""
        return (np.arange(self.number * self.size) < len(self.order)).reshape(self.number, self.size)

    def split(self, x: Shaped[Array, "R M *rest"]) -> Shaped[Array, "R g C *rest"]:
        """Numbers of queries by group; a place that no query has repeats the last one."""
        missing = self.number * self.size - len(self.order)
        places = jnp.asarray([*self.order, *[self.order[-1]] * missing], jnp.int32)
        return x[:, places.reshape(self.number, self.size)]

    def by_first(self, x: Shaped[Array, "R M *rest"]) -> Shaped[Array, "R M *rest"]:
        """Each query's numbers replaced by those of the first query of its group."""
        split = self.split(x)
        return self.join(jnp.broadcast_to(split[:, :, :1], split.shape))

    def join(self, x: Shaped[Array, "R g C *rest"]) -> Shaped[Array, "R M *rest"]:
        """The inverse of `split`."""
        places: Int[np.ndarray, " M"] = np.argsort(self.order)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, jnp.asarray(places)]


def _check(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}.")
