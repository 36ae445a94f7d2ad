"""Rows of `bench_sparse.py`: decoders over dense and sparse targets, by benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.sparse.verification import SparseVerification

DENSE, SPARSE = None, "nsa-shared"  # the target's attention
DRAFTS = ("lookup", "head")
# 1 for layers of the bundled target that select, as `calibrate_reuse.py` found: KL 0.0083 nats a token.
CALIBRATED = (1, 0, 0, 0, 0, 0, 1, 0)
TREE = (3, 3, 3)  # the review's: 39 drafts behind the newest token
SAID = {"lookup": "free drafts", "head": "drafts of a head"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One row: its name, the target's attention, the decoder, and who drafts; "": nobody.

    `replayed` is the overlap of the sets that layers read; None: those that they select.
    """

    name: str
    attention: str | None
    decoding: Decoding
    draft: str = ""
    replayed: float | None = None

    def by(self, draft: str) -> Line:
        """The row with other drafts, in its name too."""
        return dataclasses.replace(self, name=f"{self.name}, {SAID[draft]}", draft=draft)

    @property
    def has_neighbours(self) -> bool:
        """True where several queries of a request select in one forward."""
        return self.attention is not None and self.decoding.speculation.scored > 1

    def with_sets(self, overlaps: Sequence[float]) -> list[Line]:
        """The row, and the same with sets of each of these overlaps where its queries have neighbours."""
        others = [
            dataclasses.replace(self, name=f"{self.name}, sets {overlap:g} alike", replayed=overlap)
            for overlap in overlaps
            if self.has_neighbours
        ]
        return [self, *others]


def merged(queries: int, schedule: int | tuple[bool, ...] | None = None) -> SparseVerification:
    """Groups of so many queries, 16 at most, that read the union of their blocks."""
    return SparseVerification("merged", min(queries, 16), schedule=schedule)


def calibrated(layers: int) -> tuple[bool, ...]:
    """`CALIBRATED` for a model of so many layers: a layer selects where the one at its relative depth does."""
    return tuple(bool(CALIBRATED[layer * len(CALIBRATED) // layers]) for layer in range(layers))


ONE_BY_ONE = merged(1)
ALONE = Line("sparse, target alone", SPARSE, Autoregressive(ONE_BY_ONE))


def verify_lines(gamma: int, layers: int, drafts: Sequence[str]) -> list[Line]:
    """Benchmark B: the verification alone. With a spacing of all layers only the first one routes.

    A tree stands beside the chain that its head drafts in as many steps, and beside itself on the dense target.
    """
    queries = gamma + 1
    modes: dict[str, SparseVerification | None] = {
        "one by one": ONE_BY_ONE,
        "merged": merged(queries),
        "merged, first layer selects": merged(queries, layers),
        "by XLA": SparseVerification(),
    }
    tree = Rejection(tree=TREE, sparse=merged(16))
    return [
        *(Line(name, SPARSE, Rejection(gamma, sparse=sparse), "lookup") for name, sparse in modes.items()),
        Line("a chain", SPARSE, Rejection(len(TREE), sparse=merged(len(TREE) + 1))).by("head"),
        Line("a tree of 40 nodes", SPARSE, tree).by("head"),
        Line("a tree of 40 nodes, dense", DENSE, Rejection(tree=TREE)).by("head"),
    ]


def cycle_lines(gamma: int, layers: int, drafts: Sequence[str]) -> list[Line]:
    """Benchmark C: end to end."""
    lines = [Line("dense, target alone", DENSE, Autoregressive()), ALONE]
    for draft in drafts:
        lines += [
            line.by(draft)
            for line in (
                Line("dense, speculation", DENSE, Rejection(gamma)),
                Line("sparse, one by one", SPARSE, Rejection(gamma, sparse=ONE_BY_ONE)),
                Line("sparse, merged", SPARSE, Rejection(gamma, sparse=merged(gamma + 1))),
                Line(
                    "sparse, merged, every other layer selects", SPARSE, Rejection(gamma, sparse=merged(gamma + 1, 2))
                ),
                Line(
                    "sparse, merged, layers select as calibrated",
                    SPARSE,
                    Rejection(gamma, sparse=merged(gamma + 1, calibrated(layers))),
                ),
            )
        ]
    by_xla = Line("sparse, by XLA", SPARSE, Rejection(gamma)).by(drafts[0])
    return [*lines, Line("sparse, target alone, by XLA", SPARSE, Autoregressive()), by_xla]


def group_lines(gamma: int, layers: int, drafts: Sequence[str]) -> list[Line]:
    """Benchmark B by C: the verification alone, by groups of 1, 2, 4 … queries and of all, 16 at most."""
    sizes = sorted({*(size for size in (1, 2, 4, 8, 16) if size <= gamma), min(gamma + 1, 16)})
    return [Line(f"merged by {size}", SPARSE, Rejection(gamma, sparse=merged(size)), "lookup") for size in sizes]


def spacing_lines(gamma: int, layers: int, drafts: Sequence[str]) -> list[Line]:
    """Benchmark D: spacings 1, 2, 4, 8 and that of all layers."""
    spacings = sorted({min(spacing, layers) for spacing in (1, 2, 4, 8, layers)})
    return [
        Line(
            f"spacing {spacing}",
            SPARSE,
            Rejection(gamma, sparse=merged(gamma + 1, None if spacing == 1 else spacing)),
            "lookup",
        )
        for spacing in spacings
    ]


BENCHMARKS: dict[str, Callable[[int, int, Sequence[str]], list[Line]]] = {
    "cycles": cycle_lines,
    "verify": verify_lines,
    "groups": group_lines,
    "spacing": spacing_lines,
}
