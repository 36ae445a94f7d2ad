"""A population at the end of its context, and the slots that the tasks of its sparse layers name.

The layer makes its tasks as always (`smcjax.sparse.groups`); they are counted in place of being read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from replayed_sets import neighbours, new_blocks

from smcjax.model.view import BatchView
from smcjax.pallas.sparse.grouped_attention import Branch, Part
from smcjax.sparse import groups as nsa_groups
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer and of what its pages hold."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 128
    kernel_size: int = 32  # l
    kernel_stride: int = 16  # d
    block_size: int = 64  # l'
    num_blocks: int = 16  # n
    window: int = 512  # w
    forced: int = 3  # of n: the first block and the last two

    @property
    def kind(self) -> NSA:
        """The layer's attention."""
        sizes = {name: getattr(self, name) for name in ("kernel_size", "kernel_stride", "block_size", "num_blocks")}
        return NSA(**sizes, window=self.window, kv="shared")

    @property
    def slot(self) -> int:
        """Bytes of a slot's keys and values for one key-value head."""
        return 2 * 2 * self.dim

    @property
    def compressed_page(self) -> int:
        """Slots of a page of compressed tokens."""
        return self.page_size // self.kernel_stride


def sets_of(layer: Layer, context: int, queries: int, overlap: float) -> np.ndarray:
    """[M, Hkv, blocks]: sets of n blocks, of which each query's has the fraction `overlap` of the one's before it."""
    rng, blocks = np.random.default_rng(0), context // layer.block_size
    n = min(layer.num_blocks, blocks)
    free = np.arange(1, max(1, blocks - 2))
    new = new_blocks(overlap, n, layer.forced)
    sets = np.zeros((queries, layer.kv_heads, blocks), bool)
    sets[..., [0, -2, -1]] = True
    for head in range(layer.kv_heads):
        for query, chosen in enumerate(neighbours(rng, free, n - layer.forced, new, queries)):
            sets[query, head, chosen] = True
    return sets


class Counted(Exception):
    """Tasks are counted and nothing is to be computed."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """Slots of one key-value head, summed over heads: of a verification of one request."""

    compressed: int  # by the groups' tasks, as the next two
    selected: int
    window: int
    unique_compressed: int
    unique_tokens: int

    @property
    def issued(self) -> int:
        return self.compressed + self.selected + self.window

    @property
    def unique(self) -> int:
        return self.unique_compressed + self.unique_tokens


class Population:
    """N rows of T new tokens each at the end of `context` positions, and the blocks that they select."""

    def __init__(self, layer: Layer, context: int, rows: int, columns: int, tail: int, overlap: float) -> None:
        size, pages = layer.page_size, context // layer.page_size
        self.layer, self.context = layer, context
        self.kind = layer.kind
        first = (context - columns - tail) // size  # the first page of each row's own
        shared = np.broadcast_to(np.arange(1, 1 + first), (rows, first))
        own = 1 + first + np.arange(rows * (pages - first)).reshape(rows, -1)
        self.table = np.concatenate([shared, own], axis=1)
        self.positions = context - columns + np.arange(columns) + np.zeros((rows, 1), int)
        by_column = sets_of(layer, context, rows * columns, overlap)
        self.selected = by_column.reshape(columns, rows, *by_column.shape[1:]).swapaxes(0, 1)  # [N, T, S, blocks]

    def view(self, sparse: SparseVerification) -> BatchView:
        """Makes the view of a forward over the new tokens."""
        rows = self.table.shape[0]
        written = np.take_along_axis(self.table, self.positions // self.layer.page_size, axis=1)
        ends = np.full(rows, self.context)
        of_tokens = jnp.asarray(self.positions, jnp.int32)
        table, written_to, lengths = (jnp.asarray(array, jnp.int32) for array in (self.table, written, ends))
        arrays = (of_tokens, of_tokens, table, written_to, lengths, lengths)
        return BatchView(*arrays, rows=rows, sparse=sparse, page_size=self.layer.page_size)

    def unique(self) -> tuple[int, int]:
        """Slots that some query sees, summed over heads: of compressed tokens, and of positions."""
        layer, kind = self.layer, self.kind
        at, last = np.arange(self.context), self.positions[..., None]
        window = (at <= last) & (at > last - kind.window)
        seen = self.selected.repeat(kind.block_size, axis=-1)[..., : self.context] & (at <= last)[:, :, None]
        seen = (seen | window[:, :, None]).any(axis=1)  # [N, S, positions]
        slot = self.table[:, at // layer.page_size] * layer.page_size + at % layer.page_size
        positions = sum(np.unique(slot[seen[:, head]]).size for head in range(layer.kv_heads))
        ends = np.arange(kind.kernel_size - 1, self.positions.max() + 1, kind.kernel_stride)
        compressed = np.unique(slot[:, ends][(ends <= last.max(axis=1))]).size
        return layer.kv_heads * compressed, positions

    def reads(self, sparse: SparseVerification) -> Reads:
        """Counts what a layer that selects reads by its tasks."""
        layer = self.layer
        of_pages = jnp.zeros((1, layer.page_size, layer.kv_heads, layer.dim), jnp.bfloat16)
        of_tokens = of_pages[:, : layer.compressed_page]
        q = jnp.zeros((*self.positions.shape, layer.heads, layer.dim), jnp.bfloat16)

        @jax.jit
        def count(view: BatchView, selected: jax.Array) -> dict[str, jax.Array]:
            slots: dict[str, jax.Array] = {}
            with recorded(slots):
                with contextlib.suppress(Counted):
                    nsa_groups.rows_routed(self.kind, q, (of_tokens, of_tokens), view, view.positions)
                with contextlib.suppress(Counted):
                    chosen = nsa_groups.Chosen(selected)
                    nsa_groups.rows_by_groups(self.kind, q, (of_pages,) * 4, None, view, chosen, view.positions)
            return slots

        slots = {name: int(many) for name, many in count(self.view(sparse), jnp.asarray(self.selected)).items()}
        compressed, tokens = self.unique()
        return Reads(**slots, unique_compressed=compressed, unique_tokens=tokens)

    @property
    def pages(self) -> int:
        """Pages of a layer's pool."""
        return int(self.table.max()) + 1


@contextlib.contextmanager
def recorded(slots: dict[str, jax.Array]) -> Iterator[None]:
    """Counts the slots of tasks that `nsa_groups` hands to its kernels, instead of computing."""

    def count(*of: tuple[str, Any, int]) -> None:
        for name, tasks, unit in of:
            slots[name] = tasks.number.sum() * unit
        raise Counted

    def scores(q: Any, keys: Any, values: Any, tasks: Any, *rest: Any, unit: int, **options: Any) -> tuple[Part, Any]:
        count(("compressed", tasks, unit))
        raise AssertionError

    def branches(q: Any, of: tuple[Branch, ...], *rest: Any, units: tuple[int, ...], **options: Any) -> Any:
        count(*((name, one.tasks, unit) for name, one, unit in zip(("selected", "window"), of, units, strict=True)))

    kept = nsa_groups.grouped_scores, nsa_groups.grouped_branches
    nsa_groups.grouped_scores, nsa_groups.grouped_branches = scores, branches
    try:
        yield
    finally:
        nsa_groups.grouped_scores, nsa_groups.grouped_branches = kept
