"""How alike the blocks are that neighbouring queries select: shares in common by distance, and unions of neighbours.

Sets are arrays of consecutive queries, [T, S, blocks], True for the blocks that a query's set has; S sets a query. The
blocks that a query always selects, first and last ones, are alike for near neighbours whatever is selected by rank, so
shares are of all blocks of a set or of those alone that are chosen by rank. How much is read of a union with a window
beside it is counted in slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from smcjax.sparse.nsa import NSA


def chosen_by_rank(
    kind: NSA, sets: Bool[np.ndarray, "*T S blocks"], positions: Int[np.ndarray, "*T"]
) -> Bool[np.ndarray, "*T S blocks"]:
    """The sets of queries at `positions` without the blocks that these always select."""
    own = positions[..., None, None] // kind.block_size
    return sets & ~kind.forced(np.arange(sets.shape[-1]), own)


def unique_slots(
    kind: NSA, sets: Bool[np.ndarray, "T S blocks"], positions: Int[np.ndarray, " T"]
) -> tuple[Int[np.ndarray, " S"], int]:
    """Slots of keys and values that some query of one row reads: positions for each set, and compressed tokens.

    Selection and window read the same pages (kv = "shared"), so a position in both counts once.
    """
    block, end = np.arange(sets.shape[-1]), int(positions.max()) + 1
    window = max(0, int(positions.min()) + 1 - kind.window)
    ends = np.minimum((block + 1) * kind.block_size, end)
    seen, near = (np.maximum(ends - np.maximum(block * kind.block_size, begin), 0) for begin in (0, window))
    of_sets = np.where(sets.any(axis=0), seen, near).sum(-1)
    return of_sets, max(0, (end - kind.kernel_size) // kind.kernel_stride + 1)


@dataclasses.dataclass
class Tally:
    """Sums over runs of consecutive queries of one layer.

    Attributes:
        queries: of a verification, whose union is taken.
        common: by distance from 1 on, blocks that two sets have in common.
        of: by distance, blocks of the later of the two.
        union: blocks of unions of `queries` neighbours' sets.
        single: blocks of a set, the mean over those of a union.
        expected: blocks of such unions and, by distance, in common, if every query drew its own at random.
    """

    queries: int
    common: np.ndarray = dataclasses.field(init=False)
    of: np.ndarray = dataclasses.field(init=False)
    expected: np.ndarray = dataclasses.field(init=False)
    union: float = 0.0
    single: float = 0.0
    expected_union: float = 0.0

    def __post_init__(self) -> None:
        self.common, self.of, self.expected = (np.zeros((2, self.queries - 1)) for _ in range(3))

    def add(self, kind: NSA, sets: Bool[np.ndarray, "T S blocks"], positions: Int[np.ndarray, " T"]) -> None:
        """Adds a run of queries at `positions`, of all blocks and of those chosen by rank."""
        ranked = chosen_by_rank(kind, sets, positions)
        own = positions[:, None] // kind.block_size
        free = np.maximum(own + 1 - kind.init_blocks - kind.local_blocks, 1)  # blocks that rank can choose
        chosen, forced = ranked.sum(-1), (sets & ~ranked).sum(-1)
        for distance in range(1, min(self.queries, len(sets))):
            by_chance = (chosen[distance:] * chosen[:-distance] / free[distance:]).sum()
            always = np.minimum(forced[distance:], forced[:-distance]).sum()
            for number, (some, more) in enumerate(((sets, always), (ranked, 0))):
                self.common[number, distance - 1] += (some[distance:] & some[:-distance]).sum()
                self.of[number, distance - 1] += some[distance:].sum()
                self.expected[number, distance - 1] += by_chance + more
        for first in range(len(sets) - self.queries + 1):
            last = first + self.queries
            self.union += sets[first:last].any(axis=0).sum()
            self.single += sets[first:last].sum() / self.queries
            missed = np.prod(1 - chosen[first:last] / free[first:last], axis=0)
            self.expected_union += (forced[first] + free[first] * (1 - missed)).sum()

    @property
    def whole(self) -> list[float]:
        """By distance, the share of a set's blocks that are in the earlier set too."""
        return (self.common / self.of)[0].tolist()

    @property
    def by_rank(self) -> list[float]:
        """By distance, that share of the blocks that are chosen by rank; NaN where none is."""
        with np.errstate(invalid="ignore"):
            return (self.common / self.of)[1].tolist()

    @property
    def by_chance(self) -> list[float]:
        """By distance, what `by_rank` would be of independent sets of that size."""
        with np.errstate(invalid="ignore"):
            return (self.expected / self.of)[1].tolist()

    @property
    def union_over_one(self) -> float:
        """Blocks of a verification's union over those of a set."""
        return self.union / self.single

    @property
    def union_by_chance(self) -> float:
        """`union_over_one` as it would be of independent sets of that size."""
        return self.expected_union / self.single

    @property
    def as_overlap(self) -> float:
        """The ρ of which n · (1 + (C − 1)(1 − ρ)), the bound of a union by what is new from query to query, is it."""
        return 1 - (self.union_over_one - 1) / (self.queries - 1)


def added(tallies: Sequence[Tally]) -> Tally:
    """Sums several layers."""
    found = Tally(tallies[0].queries)
    for one in tallies:
        for field in dataclasses.fields(one)[1:]:
            setattr(found, field.name, getattr(found, field.name) + getattr(one, field.name))
    return found
