"""Selections of sparse layers in a benchmark's verification: others' in their place, and what they are.

Random weights select blocks by queries that have next to nothing in common, so that neighbours' sets are hardly alike
and a group reads a union of up to as many sets as it has queries. A trained model's are alike. `Replay` holds sets
whose neighbours have the fraction ρ of their blocks in common, another draw for each request, layer and set. While a
program is traced by `watched`, what a layer's routing has selected is replaced by them: scores, kept ones among them,
and ranking are computed as they are and cost what they cost, because the sets are XORed with and chosen by a value of
the run, a position below 0 that never is, which no compiler knows. One elementwise launch a layer is added. First and
last blocks are those of each query's own position.

`watched` also gives the sets of a forward back beside its results, to be counted (`Sets`). Replayed ones are known
without it (`Replay.counted`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from block_overlap import Tally, unique_slots
from jaxtyping import Array, Bool, Int, UInt32

from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse import groups as nsa_groups
from smcjax.sparse.nsa import NSA
from smcjax.sparse.routing import Routing

WORD = 32  # blocks of a word


class Sets(NamedTuple):
    """Selections of one forward: those of each layer that selects, in order."""

    selected: Bool[Array, "layers R M S blocks"]
    positions: Int[Array, "R M"]


def neighbours(rng: np.random.Generator, free: np.ndarray, count: int, new: int, queries: int) -> Iterator[np.ndarray]:
    """Yields `count` of the `free` blocks for one query after the other, `new` of them not the one's before it."""
    chosen = rng.permutation(free)[:count]
    yield chosen
    for _ in range(queries - 1):
        others = rng.permutation(np.setdiff1d(free, chosen))[:new]
        chosen = np.concatenate([rng.permutation(chosen)[: len(chosen) - len(others)], others])
        yield chosen


def new_blocks(overlap: float, blocks: int, forced: int) -> int:
    """Blocks of a query's set that the one's before it has not; of `blocks` in all, `forced` are in every set."""
    return min(round((1 - overlap) * blocks), blocks - forced)


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Stored sets without first and last blocks, a bit a block, which hold for all positions from `first` on."""

    kind: NSA
    words: UInt32[np.ndarray, "layers R M S words"]

    @classmethod
    def of(
        cls, kind: NSA, *, layers: int, requests: int, queries: int, sets: int, first: int, overlap: float
    ) -> Replay:
        """Sets of queries at positions `first` and later, of which neighbours have the fraction `overlap` alike.

        Of all blocks of a set: those always selected count as alike.
        """
        forced = kind.init_blocks + kind.local_blocks
        # Queries with few blocks have them all; what is stored for later ones is free where there are n.
        blocks = max(first // kind.block_size + 1, kind.num_blocks)
        free = np.arange(kind.init_blocks, blocks - kind.local_blocks)
        count, new = kind.num_blocks - forced, new_blocks(overlap, kind.num_blocks, forced)
        shape, rng = (layers, requests, queries, sets), np.random.default_rng(0)
        bits = np.zeros((*shape, -(-blocks // WORD) * WORD), bool)
        for layer, request, of_set in np.ndindex(layers, requests, sets):
            for query, chosen in enumerate(neighbours(rng, free, count, new, queries)):
                bits[layer, request, query, of_set, chosen] = True
        return cls(kind, np.packbits(bits, axis=-1, bitorder="little").view("<u4"))

    def __call__(
        self, layer: int, routed: Bool[Array, "R M S blocks"], positions: Int[Array, "R M"]
    ) -> Bool[Array, "R M S blocks"]:
        """The stored sets of the layer in place of what it has `routed`, of which XLA cannot know that it is unused."""
        stored, blocks = self.words[layer % len(self.words)], routed.shape[-1]
        if stored.shape[:3] != routed.shape[:3]:
            raise ValueError(
                f"sets are stored for {stored.shape[:3]} requests, queries and sets, not for {routed.shape[:3]}"
            )
        never = (positions < 0)[:, :, None, None]
        words = jnp.asarray(np.pad(stored, [(0, 0)] * 3 + [(0, max(0, -(-blocks // WORD) - stored.shape[-1]))]))
        words = (words ^ never.astype(jnp.uint32))[..., None]
        bits = jnp.broadcast_to(words, (*words.shape[:-1], WORD)).reshape(*words.shape[:3], -1)[..., :blocks]
        block, own = jnp.arange(blocks)[None, None, None], positions[:, :, None, None] // self.kind.block_size
        alike = (bits >> (block % WORD).astype(jnp.uint32)) & 1 != 0
        # A query with no more blocks than it may have has them all.
        replayed = (block <= own) & (alike | self.kind.forced(block, own) | (own < self.kind.num_blocks))
        return jnp.where(never, routed, replayed)

    def counted(self, positions: Int[np.ndarray, "R M"]) -> Counted:
        """The sets that queries at these positions read."""
        routed = jnp.zeros((*self.words.shape[1:4], int(positions.max()) // self.kind.block_size + 1), bool)
        at = jnp.asarray(positions)
        sets = [np.asarray(self(layer, routed, at)) for layer in range(len(self.words))]
        return Counted(self.kind, np.stack(sets), positions)


@dataclasses.dataclass
class _Trace:
    """A program that is being traced: what stands for its selections, and what they were."""

    replay: Replay | None
    selected: list[jax.Array] = dataclasses.field(default_factory=list)
    positions: jax.Array | None = None

    def __call__(self, routed: jax.Array, positions: jax.Array) -> jax.Array:
        """Notes a layer's selection, and returns what the layer goes on with."""
        found = routed if self.replay is None else self.replay(len(self.selected), routed, positions)
        self.selected.append(found)
        self.positions = positions
        return found


# Programs are traced in several threads, each with what its own asks for.
_tracing: contextvars.ContextVar[_Trace | None] = contextvars.ContextVar("tracing", default=None)


def watched(function: Callable[..., Any], replay: Replay | None, *, gives_sets: bool = False) -> Callable[..., Any]:
    """The function of a job with these sets in place of its layers'; with `gives_sets`, (its result, `Sets`).

    To be traced within `watching()`. Selections must be made in the function's own trace, not in a loop's.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        trace = _Trace(replay)
        token = _tracing.set(trace)
        try:
            result = function(*arguments)
        finally:
            _tracing.reset(token)
        if trace.positions is None:
            raise RuntimeError("no layer has selected blocks while the program was traced within watching()")
        return (result, Sets(jnp.stack(trace.selected), trace.positions)) if gives_sets else result

    return run


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Lets `watched` programs see what sparse layers select, by kernels and by XLA; others are traced as always."""
    by_kernel, by_xla = nsa_groups.blocks_selected, Routing.select

    def seen(selected: jax.Array | None, positions: jax.Array) -> Any:
        trace = _tracing.get()
        return selected if trace is None or selected is None else trace(selected, positions)

    def blocks_selected(kind: Any, kept: Any, positions: jax.Array, *rest: Any) -> Any:
        return seen(by_kernel(kind, kept, positions, *rest), positions)

    def select(self: Any, scores: jax.Array, positions: jax.Array) -> Any:
        return seen(by_xla(self, scores, positions), positions)

    nsa_groups.blocks_selected = blocks_selected  # type: ignore[assignment]
    Routing.select = select  # type: ignore[method-assign]
    try:
        yield
    finally:
        nsa_groups.blocks_selected, Routing.select = by_kernel, by_xla  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True)
class Counted:
    """Sets of one verification, counted, of requests with a row each, in all layers that select.

    Attributes:
        kind: of these layers.
        selected: the sets.
        positions: of the queries.
    """

    kind: NSA
    selected: Bool[np.ndarray, "layers R M S blocks"]
    positions: Int[np.ndarray, "R M"]

    @functools.cached_property
    def tally(self) -> Tally:
        """Shares in common and unions, summed over layers and requests."""
        found = Tally(self.selected.shape[2])
        for layer in self.selected:
            for sets, positions in zip(layer, self.positions, strict=True):
                found.add(self.kind, sets, positions)
        return found

    def union(self, size: int) -> float:
        """Blocks of the union of a group of `size` queries, the mean over groups, sets, requests and layers."""
        queries = self.selected.shape[2]
        groups = QueryGroups.of_rows(1, queries, "bfs", size)
        unions = [
            self.selected[:, :, first : first + groups.size].any(axis=2).sum(-1).mean()
            for first in range(0, queries, groups.size)
        ]
        return float(np.mean(unions))

    def unique_slots(self) -> float:
        """Slots of keys and values that some query of a request reads, compressed ones too: of one set, the mean."""
        found = []
        for layer in self.selected:
            for sets, positions in zip(layer, self.positions, strict=True):
                of_sets, compressed = unique_slots(self.kind, sets, positions)
                found.append(of_sets.mean() + compressed)
        return float(np.mean(found))
