"""KV bytes that the verification of a population reads in a sparse layer, counted by its tasks, over those that differ.

    python scripts/count_sparse_reads.py                       # SMC, N = 8, K = 8, at 65,536 positions
    python scripts/count_sparse_reads.py --rows 32 --groups 16 72 --order dfs

No kernel runs: the layer makes its tasks as always (`smcjax.model.nsa_groups`), and units are counted instead of read.
`issued` is what groups read, a task of a group and key-value head its unit once; `unique` are the slots that some query
sees, each once, whether the selection, the window or both read it. Rows of a request share a prompt's pages and have
the last `--tail` positions in pages of their own. Neighbours, column by column, select sets of which the fraction
`--overlap` is alike. Shapes are those of Llama 3.1 8B, with one pair of keys and values and the paper's options.

A group of more than 16 queries at four heads a key-value head is several tiles for the kernel, which read the same
units at about the same time: those after the first find them in the L2, if the device keeps them there. `loads` counts
every tile's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_sparse_attention import Case, Layer, sets_of

from smcjax.model import nsa_groups
from smcjax.model.nsa import NSA
from smcjax.model.view import BatchView
from smcjax.pallas.grouped_attention import Branch, Part
from smcjax.pallas.products import QUERIES
from smcjax.sparse import SparseVerification


class Counted(Exception):
    """Tasks are counted and nothing is to be computed."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """Slots of one key-value head, summed over heads: of a verification of one request."""

    compressed: int  # by the groups' tasks, as the next two
    selected: int
    window: int
    unique: int
    tiles: int  # that read a group's tasks

    @property
    def issued(self) -> int:
        return self.compressed + self.selected + self.window


class Population:
    """N rows of T new tokens each at the end of `context` positions, and the blocks that they select."""

    def __init__(self, layer: Layer, context: int, rows: int, columns: int, tail: int, overlap: float) -> None:
        size, pages = layer.page_size, context // layer.page_size
        self.layer, self.context = layer, context
        self.kind = NSA(kv="shared", phi="mean", num_blocks=layer.num_blocks, window=layer.window)
        first = (context - columns - tail) // size  # the first page of each row's own
        shared = np.broadcast_to(np.arange(1, 1 + first), (rows, first))
        own = 1 + first + np.arange(rows * (pages - first)).reshape(rows, -1)
        self.table = np.concatenate([shared, own], axis=1)
        self.positions = context - columns + np.arange(columns) + np.zeros((rows, 1), int)
        by_column = sets_of(Case(context, rows * columns, 1, overlap), layer)[0]
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

    def unique(self) -> int:
        """Slots that some query sees, summed over heads."""
        layer, kind = self.layer, self.kind
        at, last = np.arange(self.context), self.positions[..., None]
        window = (at <= last) & (at > last - kind.window)
        seen = self.selected.repeat(kind.block_size, axis=-1)[..., : self.context] & (at <= last)[:, :, None]
        seen = (seen | window[:, :, None]).any(axis=1)  # [N, S, positions]
        slot = self.table[:, at // layer.page_size] * layer.page_size + at % layer.page_size
        positions = sum(np.unique(slot[seen[:, head]]).size for head in range(layer.kv_heads))
        ends = np.arange(kind.kernel_size - 1, self.positions.max() + 1, kind.kernel_stride)
        compressed = np.unique(slot[:, ends][(ends <= last.max(axis=1))]).size
        return positions + layer.kv_heads * compressed

    def reads(self, sparse: SparseVerification) -> Reads:
        """Counts what a layer that selects reads by its tasks."""
        layer = self.layer
        of_pages = jnp.zeros((1, layer.page_size, layer.kv_heads, layer.dim), jnp.bfloat16)
        of_tokens = of_pages[:, : layer.compressed_page]
        q = jnp.zeros((*self.positions.shape, layer.heads, layer.dim), jnp.bfloat16)

        @jax.jit
        def count(view: BatchView, chosen: jax.Array) -> dict[str, jax.Array]:
            slots: dict[str, jax.Array] = {}
            with recorded(slots):
                with contextlib.suppress(Counted):
                    nsa_groups.rows_routed(self.kind, q, (of_tokens, of_tokens), view, view.positions)
                with contextlib.suppress(Counted):
                    nsa_groups.rows_by_groups(self.kind, q, (of_pages,) * 4, None, view, chosen, view.positions)
            return slots

        slots = {name: int(many) for name, many in count(self.view(sparse), jnp.asarray(self.selected)).items()}
        size = min(sparse.queries, self.positions.size)
        tiles = -(-size * (layer.heads // layer.kv_heads) // QUERIES)
        return Reads(**slots, unique=self.unique(), tiles=tiles)


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
    nsa_groups.grouped_scores, nsa_groups.grouped_branches = scores, branches  # type: ignore[assignment]
    try:
        yield
    finally:
        nsa_groups.grouped_scores, nsa_groups.grouped_branches = kept


def main(argv: Sequence[str] | None = None) -> int:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=65_536, help="T, a multiple of 128")
    parser.add_argument("--rows", type=int, default=8, help="N")
    parser.add_argument("--gamma", type=int, default=8, help="K: each row has K + 1 queries")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16, 36, 72], help="C")
    parser.add_argument("--order", default="bfs", help="of queries: bfs or dfs")
    parser.add_argument("--tail", type=int, default=256, help="positions of a row's own before its new tokens")
    parser.add_argument("--overlap", type=float, default=0.75, help="of neighbours' sets")
    args = parser.parse_args(argv)
    layer = Layer()
    population = Population(layer, args.context, args.rows, args.gamma + 1, args.tail, args.overlap)
    print(
        f"{args.rows} rows of {args.gamma + 1} queries, {args.context} positions, the last {args.tail} each row's own"
    )
    print("MB a layer; of each row by itself compressed tokens would be read as often as there are rows")
    print(f"{'C':>4} {'compressed':>11} {'selected':>9} {'window':>7} {'issued':>7} {'unique':>7}  ratio  loads")
    for size in args.groups:
        reads = population.reads(SparseVerification("merged", size, args.order))
        numbers = (reads.compressed, reads.selected, reads.window, reads.issued, reads.unique)
        mb = [layer.slot * number / 1e6 for number in numbers]
        ratio = reads.issued / reads.unique
        print(
            f"{size:4} {mb[0]:11.1f} {mb[1]:9.1f} {mb[2]:7.1f} {mb[3]:7.1f} {mb[4]:7.1f} {ratio:6.2f}"
            f" {ratio * reads.tiles:6.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
