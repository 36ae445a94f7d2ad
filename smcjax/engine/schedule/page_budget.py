"""How many pages groups can take, and how many are free at least. Host arithmetic: the device alone knows the counts.

A group of N rows whose prompt has L tokens names ⌈L/B⌉ pages when it joins; those that are full stay shared for good.
Every live row is as long as its group's cycles have made it (or, where drafts are rejected, at most as long), so before
a cycle of W tokens the host knows the positions that it writes, and with them

    need      pages that the cycle can take at most: those it enters, and a copy of the part-filled one for all rows
              but one (one row keeps the original, or is finished and takes none)
    ceiling   pages that the group can name at most in it and after it: every row on its own behind the shared pages;
              where rows agree between cycles, what they share, and what each of them takes in the cycle
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from smcjax.decoders import Decoding
from smcjax.kv import pages_for, pages_touched

UTILIZATION_REPORTS = 16  # reports over which `FreePages.utilization` is averaged


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bounds for requests of any prompt and limit, both in tokens; `cycles` are those of the group so far."""

    rows: int  # N
    page_size: int  # B
    width: int  # W, tokens a cycle
    ragged: bool = False  # every group is ragged: a cycle gives a row 1 to W tokens, and gives back the pages behind
    agrees: bool = False  # between cycles the rows of a group share all pages

    @classmethod
    def of(cls, decoding: Decoding, page_size: int) -> Footprint:
        """Bounds for the requests of a decoder."""
        return cls(decoding.rows, page_size, decoding.tokens_per_cycle, decoding.ragged, decoding.agrees)

    def prompt(self, prompt_length: int) -> int:
        """Pages of a group right after it joins."""
        return pages_for(prompt_length, self.page_size)

    def worst_case(self, prompt_length: int, limit: int) -> int:
        """Upper bound on the distinct pages of a group at any time.

        Rows share the prompt's full pages permanently and may diverge behind them, up to `limit` tokens. Rows that
        agree between cycles share all pages except those that one cycle touches.
        """
        shared = min(prompt_length, limit) // self.page_size
        return self._named(shared, limit, limit)

    def _named(self, shared: int, before: int, reached: int) -> int:
        """Upper bound on the distinct pages of a group whose rows permanently share `shared` prefix pages.

        No row is longer than `before` at the start of the cycle, and than `reached` at its end.
        """
        diverged = shared + self.rows * (pages_for(reached, self.page_size) - shared)
        if not self.agrees:
            return diverged
        return min(diverged, pages_for(before, self.page_size) + self.rows * pages_touched(self.width, self.page_size))

    def need(self, prompt_length: int, limit: int, cycles: int, *, ragged: bool = False) -> int:
        """Upper bound on the pages that the next cycle takes. `ragged`: this group is ragged, if others are not."""
        if ragged or self.ragged:
            if prompt_length + cycles >= limit - 1:
                return 0
            return self.rows * pages_touched(self.width, self.page_size)
        first = prompt_length + cycles * self.width
        if first >= limit - 1:  # at the cap every row is finished
            return 0
        last = min(first + self.width, limit) - 1
        entered = last // self.page_size - first // self.page_size
        return self.rows * entered + (self.rows - 1 if first % self.page_size else self.rows)

    def ceiling(self, prompt_length: int, limit: int, cycles: int) -> int:
        """Upper bound on the distinct pages of a group during its cycle number `cycles`, and after it."""
        if not cycles:
            return self.prompt(prompt_length)
        before, reached = (min(prompt_length + some * self.width, limit) for some in (cycles - 1, cycles))
        return self._named(prompt_length // self.page_size, before, reached)


class Mark(NamedTuple):
    """Pages taken when a program was enqueued that reports the number of free pages after it."""

    taken: int
    worst: int  # pages of the running groups' worst cases
    unused: int  # pages that only the cache keeps


class FreePages:
    """A lower bound on the free pages, from late reports and what was enqueued after the reported programs.

    `utilization` is the mean fraction of their worst cases that running groups have used recently; 1 at first.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.utilization = 1.0
        self.clear()

    def clear(self) -> None:
        """Marks all pages as free."""
        self._taken = 0  # upper bound on what enqueued programs took, less what they gave back
        self._credit = self._pages  # free pages by the last report, plus what had been taken until then
        self.unread = 0  # reports under way

    @property
    def at_least(self) -> int:
        """Pages that will be free when all that is enqueued has run."""
        return self._credit - self._taken

    def take(self, pages: int) -> None:
        """Counts an enqueued program that takes at most `pages`; negative for one that gives pages back."""
        self._taken += pages

    def mark(self, worst: int, unused: int) -> Mark:
        """Counts an enqueued program that will report, and returns its mark for `report`."""
        self.unread += 1
        return Mark(self._taken, worst, unused)

    def report(self, mark: Mark, free: int) -> None:
        """Takes the report that `free` pages were free after the program of this mark."""
        self.unread -= 1
        self._credit = free + mark.taken
        if mark.worst:
            used = (self._pages - free - mark.unused) / mark.worst
            self.utilization += (used - self.utilization) / UTILIZATION_REPORTS
