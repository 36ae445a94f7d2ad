"""How drafts are verified on a target with Native Sparse Attention: what a user chooses, checked without JAX.

    strict        each query by itself or `merged`, every layer selects: the target's own law
    reuse         a schedule by which layers take the blocks of earlier ones: another model, exactly decoded
    approximate   blocks of a group's first query for all of it: what is said of a token depends on the groups

`smcjax.sparse.nsa` computes it, by `smcjax.sparse.groups` where queries read in groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, get_args

from smcjax.checks import (
    Rule,
    is_whole,
    names_unknown,
    normalize_fields,
    normalize_numbers,
    one_of,
    require,
    short,
    whole,
)
from smcjax.trees import ORDERS, Order

Mode = Literal["per_query", "merged", "shared", "shared_forced"]
MODES = get_args(Mode)
SHARED = ("shared", "shared_forced")
GROUP, MAX_QUERIES = 4, 128  # queries of a group: usually, and at most
KERNEL_GROUP = 16  # by kernels: what fills their tile where four heads share keys; 32 take longer (dev/LOG.md)


@names_unknown
@dataclasses.dataclass(frozen=True)
class SparseVerification:
    """How the queries of a target's forward behind the prompt read selected blocks, and which layers select.

    Prompts are read as without it: each query by itself, every layer selecting. Raises ValueError for what is unknown,
    out of range, or has no use.

    Attributes:
        mode: "per_query" reads for each query by itself. "merged" reads the blocks that the queries of a group have
            selected once for all of them, each attending to its own: the same result. "shared" lets all queries of a
            group attend to the blocks of its first one, as far as they see them, and "shared_forced" to those that a
            query always selects as well: approximate.
        group: C, queries of a group, from 1 to 128. None: 4, or with "per_query" 1, which is what the field then holds.
        order: which queries are neighbours, "bfs", "dfs" or "position" (`pallas.sparse.query_groups.QueryGroups`).
        schedule: which sparse layers select blocks anew, the first always; others take those that the same query has
            selected in the nearest layer before that does. A flag for each sparse layer, or the spacing of those that
            select; None: all do.
    """

    mode: Mode = "per_query"
    group: int | None = None
    order: Order = "bfs"
    schedule: int | tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        normalize_fields(self)
        if self.group is None:
            object.__setattr__(self, "group", GROUP if self.is_grouped else 1)
        group = Rule(whole(1, MAX_QUERIES).holds, f"a whole number of queries from 1 to {MAX_QUERIES}")
        require(vars(self), {"mode": one_of(*MODES), "order": one_of(*ORDERS), "group": group})
        if not self.is_grouped and (self.group != 1 or self.order != "bfs"):
            raise ValueError(
                f"group is {self.group} and order {self.order!r}, which mode='per_query' has no use for; "
                "use mode='merged', or leave them out."
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Keeps a schedule of flags as a tuple of bools."""
        if self.schedule is None or is_whole(self.schedule, 1, 1 << 20):
            return
        flags = normalize_numbers(self.schedule)
        if not (isinstance(flags, tuple) and flags and all(isinstance(flag, bool) for flag in flags)):
            raise ValueError(
                "schedule must be a spacing of at least 1, or True or False for each sparse layer, as "
                f"(True, False, True), got {short(self.schedule)}."
            )
        if not flags[0]:
            raise ValueError(
                f"schedule must begin with True, because no layer is before the first, got {short(flags)}."
            )
        object.__setattr__(self, "schedule", flags)

    @property
    def is_grouped(self) -> bool:
        """True where queries read in groups."""
        return self.mode != "per_query"

    @property
    def queries(self) -> int:
        """C, queries of a group."""
        assert self.group is not None
        return self.group

    @property
    def precision(self) -> str:
        """The class of what is computed: "strict", "reuse" or "approximate"."""
        if self.mode in SHARED and self.queries > 1:
            return "approximate"
        return "strict" if all(self.refreshes(2)) else "reuse"

    @property
    def of_single_queries(self) -> SparseVerification | None:
        """The schedule alone, for a target that decodes without drafts, query by query; None where there is none."""
        return None if self.schedule is None else SparseVerification(schedule=self.schedule)

    def refreshes(self, layers: int) -> tuple[bool, ...]:
        """True for each of so many sparse layers that selects blocks anew."""
        if isinstance(self.schedule, tuple):
            return self.schedule
        return tuple(layer % (self.schedule or 1) == 0 for layer in range(layers))

    def sources(self, layers: int) -> tuple[int, ...]:
        """For each of so many sparse layers the one whose blocks it takes: itself, or the nearest before that selects.

        Layers are counted among the sparse ones, from 0.
        """
        found: list[int] = []
        for layer, is_refreshed in enumerate(self.refreshes(layers)):
            found.append(layer if is_refreshed else found[-1])
        return tuple(found)

    def check(self, selecting: Collection[Any]) -> None:
        """Raises ValueError for a target that cannot be verified so, of the kinds of whose sparse layers these are."""
        if not selecting:
            raise ValueError(
                "sparse is about a target's selected blocks and this target has no layer that selects any; leave it "
                "out, or use a target with Native Sparse Attention."
            )
        flags = self.refreshes(len(selecting))
        if len(flags) != len(selecting):
            raise ValueError(
                f"schedule must have a flag for each of the target's sparse layers, {len(selecting)} in all, got "
                f"{len(flags)}; give as many, or a spacing."
            )
        if not all(flags) and len(set(selecting)) > 1:
            raise ValueError(
                f"schedule is {short(self.schedule)} and the target's sparse layers differ in their options, so that "
                "blocks of one mean nothing to another; leave it out."
            )

    def __str__(self) -> str:
        """A few words for a line of figures."""
        words = [f"{self.mode} by {self.queries}, {self.order}"] if self.is_grouped else []
        if isinstance(self.schedule, int):
            words.append(f"selecting layers {self.schedule} apart")
        elif self.schedule is not None:
            words.append(
                f"selecting layers {', '.join(str(layer) for layer, flag in enumerate(self.schedule) if flag)}"
            )
        return "; ".join(words) or "every query by itself"
