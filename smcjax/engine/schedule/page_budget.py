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

SHARE_REPORTS = 16  # over which the share is averaged that groups use of their worst cases


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
        """Pages of a group that has just joined."""
        return pages_for(prompt_length, self.page_size)

    def worst_case(self, prompt_length: int, limit: int) -> int:
        """Pages that a group names at most, ever.

        Full pages of the prompt stay shared for good, and what comes after is each row's own up to `limit` tokens; but
        rows that agree between cycles share all pages but those that one cycle touches.
        """
        shared = min(prompt_length, limit) // self.page_size
        return self._named(shared, limit, limit)

    def _named(self, shared: int, before: int, reached: int) -> int:
        """Pages of rows that share so many for good, in a cycle that begins and ends at these lengths at most."""
        diverged = shared + self.rows * (pages_for(reached, self.page_size) - shared)
        if not self.agrees:
            return diverged
        return min(diverged, pages_for(before, self.page_size) + self.rows * pages_touched(self.width, self.page_size))

    def need(self, prompt_length: int, limit: int, cycles: int, *, ragged: bool = False) -> int:
        """Pages that the next cycle takes at most; of a `ragged` group also where others are not."""
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
        """Pages that the group names at most in the last of so many cycles, and after it."""
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
    """A lower bound on the free pages, from reports that come late and what has been enqueued since then.

    Also the `share` of their worst cases that running groups, young and old, have been using of late; 1 at first.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.share = 1.0
        self.clear()

    def clear(self) -> None:
        """All pages are free."""
        self._taken = 0  # since the beginning: the most that programs can have taken, less what they surely gave back
        self._credit = self._pages  # free pages by the last report, and what had been taken until then
        self.unread = 0  # reports under way

    @property
    def at_least(self) -> int:
        """Pages that will be free when all that is enqueued has run."""
        return self._credit - self._taken

    def take(self, pages: int) -> None:
        """A program that takes at most so many is enqueued; negative for one that gives back."""
        self._taken += pages

    def mark(self, worst: int, unused: int) -> Mark:
        """A program is enqueued whose report will come."""
        self.unread += 1
        return Mark(self._taken, worst, unused)

    def report(self, mark: Mark, free: int) -> None:
        """So many pages were free after the program of that mark."""
        self.unread -= 1
        self._credit = free + mark.taken
        if mark.worst:
            used = (self._pages - free - mark.unused) / mark.worst
            self.share += (used - self.share) / SHARE_REPORTS
