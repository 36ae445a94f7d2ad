"""Automata over bytes: of parts that are joined, of two at once, and with equivalent states made one.

A deterministic one is a table [S + 1, 256] of next states, S being dead, and which states accept, [S + 1]; its first
state is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from smcjax.structured.parts import Ranges

MAX_MEMBERS = 64  # steps for each state that an automaton may have


class Refusal(Exception):
    """An automaton cannot be made; the message says why, in words that follow the name of what was asked for."""


class Empty(Refusal):
    """An automaton would accept no text."""


class TooLarge(Refusal):
    """An automaton has too many states or cells; the message lacks the mend, which the handler adds."""


def minimal(table: Any, accepts: Any, most_states: int) -> tuple[Any, Any]:
    """The automaton with equivalent states made one; its first state is 0, its dead one the last.

    Raises Empty where it accepts nothing, TooLarge where it has more states.
    """
    columns, _ = kinds_of_bytes(table)
    group = _groups(columns, accepts)
    rows, (_, first) = group[columns], np.unique(group, return_index=True)
    if (rows != rows[first[group]]).any():  # hashes that collided
        group = _groups_by_rows(columns, accepts)
    count, dead = int(group.max()) + 1, group[-1]
    if group[0] == dead:
        raise Empty("matches no text at all; mend it")
    if count - 1 > most_states:
        raise TooLarge(f"has an automaton of {count - 1} states, and {most_states} are the most")
    order = [group[0], *(g for g in range(count) if g not in (group[0], dead)), dead]
    renumbered = np.empty(count, np.int32)
    renumbered[order] = np.arange(count)
    group = renumbered[group]
    _, first = np.unique(group, return_index=True)
    return group[table[first]].astype(np.int32), accepts[first]


def kinds_of_bytes(table: Any) -> tuple[Any, Any]:
    """The columns of a table that differ, and which of them each byte has."""
    place: dict[bytes, int] = {}
    kinds = [place.setdefault(column.tobytes(), len(place)) for column in np.ascontiguousarray(table.T)]
    return table[:, np.unique(kinds, return_index=True)[1]], np.array(kinds)


def _groups_by_rows(columns: Any, accepts: Any) -> Any:
    """The group of each state, equivalent ones having the same (Moore 1956)."""
    group, count = accepts.astype(np.int64), 0
    while (now := int(group.max()) + 1) > count:
        count = now
        group = np.unique(np.column_stack([group, group[columns]]), axis=0, return_inverse=True)[1].reshape(-1)
    return group


def _groups(columns: Any, accepts: Any) -> Any:
    """Groups equal rows as `_groups_by_rows` does, by hashes: rows whose hashes collide share a group.

    Only states that lead to one whose group is new are looked at again, so a chain takes a step a state, not all states
    a step. The others of a group share a hash, which is `common` to it; where there are none, its largest part stays.
    """
    states, kinds = columns.shape
    draw = np.random.default_rng(0)
    word = draw.integers(1, 2**63, states + 2, np.uint64)  # of each group
    factors = draw.integers(1, 2**63, kinds, np.uint64) | np.uint64(1)
    order = np.argsort(columns, axis=None, kind="stable")
    leading = order // kinds  # the states that lead to each state, one state behind another
    begin = np.searchsorted(columns.reshape(-1)[order], np.arange(states + 1))
    group, count = accepts.astype(np.int64), 2
    size, common = np.zeros(states + 2, np.int64), np.zeros(states + 2, np.uint64)
    size[:2] = np.bincount(group, minlength=2)
    looked = np.arange(states)
    while len(looked):
        row = word[group[columns[looked]]] @ factors
        sort = np.lexsort((row, group[looked]))
        looked, row, old = looked[sort], row[sort], group[looked[sort]]
        starts = np.append(True, (old[1:] != old[:-1]) | (row[1:] != row[:-1]))
        part = np.cumsum(starts) - 1
        number, of, row = np.bincount(part), old[starts], row[starts]
        others = size[of] - np.bincount(old)[of]
        stays = (others > 0) & (row == common[of])
        by_size = np.lexsort((-number, of))
        largest = by_size[np.append(True, of[by_size][1:] != of[by_size][:-1])]
        stays[largest] |= others[largest] == 0
        name = of.copy()
        name[~stays] = np.arange(count, count + (~stays).sum())
        count += int((~stays).sum())
        common[name] = row
        np.subtract.at(size, of[~stays], number[~stays])
        size[name[~stays]] = number[~stays]
        group[looked] = name[part]
        moved = looked[~stays[part]]
        looked = np.unique(np.concatenate([moved[:0], *(leading[begin[s] : begin[s + 1]] for s in moved)]))
    return np.unique(group, return_inverse=True)[1].reshape(-1)


def product(one: tuple[Any, Any], two: tuple[Any, Any], most_states: int) -> tuple[Any, Any]:
    """The minimal automaton of the texts that both accept. Raises Empty, TooLarge."""
    (table, accepts), (other, ends) = one, two
    width = other.shape[0]
    columns, kind_of = kinds_of_bytes(np.concatenate([table, other]))
    first, second = columns[: table.shape[0]], columns[table.shape[0] :]
    found = np.zeros(1, np.int64)
    frontier = found
    rows: list[Any] = []
    while len(frontier):
        a, b = first[frontier // width], second[frontier % width]
        pairs = np.where((a == table.shape[0] - 1) | (b == width - 1), -1, a.astype(np.int64) * width + b)
        rows.append(pairs)
        frontier = np.setdiff1d(pairs[pairs >= 0], found)
        found = np.concatenate([found, frontier])
        if len(found) > 8 * most_states:
            raise TooLarge(f"has an automaton of over {8 * most_states} states, and {most_states} are the most")
    order = np.argsort(found)
    pairs = np.concatenate(rows)
    number = order[np.minimum(np.searchsorted(found, pairs, sorter=order), len(found) - 1)]
    joined = np.concatenate([np.where(pairs < 0, len(found), number), np.full((1, columns.shape[1]), len(found))])
    both = np.append(accepts[found // width] & ends[found % width], False)
    return minimal(joined[:, kind_of].astype(np.int32), both, most_states)


def complement(one: tuple[Any, Any]) -> tuple[Any, Any]:
    """An automaton of all other sequences of bytes."""
    table, accepts = one
    last = np.full((1, 256), table.shape[0], np.int32)
    return np.concatenate([table, last]), np.append(~accepts, False)


def utf8_ranges(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """Ranges of bytes, one behind another, which together are the characters from `first` to `last`."""
    for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
        for begin, end in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(low, begin) <= min(high, end):
                yield from _of_one_length(max(low, begin), min(high, end))


def _of_one_length(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """`utf8_ranges` of characters of as many bytes each."""
    for mask in ((1 << 6) - 1, (1 << 12) - 1, (1 << 18) - 1):
        if low | mask < high | mask:
            if low & mask:
                yield from _of_one_length(low, low | mask)
                yield from _of_one_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _of_one_length(low, (high & ~mask) - 1)
                yield from _of_one_length(high & ~mask, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


class Joined:
    """Parts of an automaton joined by transitions that read nothing; `minimal` makes it deterministic.

    A worked example, "ab" or nothing: `text(b"ab", p, q)` and `skip(p, q)`, then `minimal(p, q, …)`.
    """

    def __init__(self, most_states: int) -> None:
        self._most = 8 * most_states  # of parts, and of subsets of them
        self._skips: list[list[int]] = []  # of each state
        self._anchors: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})  # skips at the beginning, the end
        self._arrows: list[list[tuple[int, int, int]]] = []  # of each state: the first and last byte, the next state

    def state(self, count: int = 1) -> int:
        """A new state, or the first of so many."""
        first = len(self._skips)
        if first + count > self._most:
            raise TooLarge(f"has parts of over {self._most} states")
        self._skips += [[] for _ in range(count)]
        self._arrows += [[] for _ in range(count)]
        return first

    def skip(self, begin: int, end: int) -> None:
        """Lets a text be at `end` where it is at `begin`."""
        self._skips[begin].append(end)

    def anchor(self, at_end: bool, begin: int, end: int) -> None:
        """Lets a text be at `end` where it is at `begin`, before its first byte or behind its last one."""
        self._anchors[at_end].setdefault(begin, []).append(end)

    def text(self, data: bytes, begin: int, end: int) -> None:
        """Lets these bytes lead from `begin` to `end`."""
        self._lay([(byte, byte) for byte in data], begin, end)

    def characters(self, ranges: Ranges, begin: int, end: int) -> None:
        """Lets each of these characters lead from `begin` to `end`."""
        for first, last in ranges:
            for some in utf8_ranges(first, last):
                self._lay(some, begin, end)

    def automaton(self, part: tuple[Any, Any], begin: int, end: int) -> None:
        """Lets the texts of a deterministic automaton lead from `begin` to `end`."""
        table, accepts = part
        size = table.shape[0] - 1
        first = self.state(size)
        self.skip(begin, first)
        states, before = np.nonzero(table[:size, 1:] != table[:size, :-1])
        starts = np.concatenate([np.stack([np.arange(size), np.zeros(size, int)]), np.stack([states, before + 1])], 1)
        starts = starts[:, np.lexsort((starts[1], starts[0]))]
        lasts = np.where(np.diff(starts[0], append=size), 255, np.append(starts[1][1:], 0) - 1)
        targets = table[starts[0], starts[1]]
        for state, low, high, target in zip(*starts.tolist(), lasts.tolist(), targets.tolist(), strict=True):
            if target < size:
                self._arrows[first + state].append((low, high, first + target))
        for state in np.flatnonzero(accepts[:size]):
            self.skip(first + int(state), end)

    def minimal(self, begin: int, end: int, most_states: int) -> tuple[Any, Any]:
        """The minimal deterministic automaton of the texts from `begin` to `end`, by subsets (Rabin and Scott 1959).

        Raises Empty where there are none, TooLarge.
        """
        cuts = sorted({0, 256, *(cut for some in self._arrows for low, high, _ in some for cut in (low, high + 1))})
        kind_of = {cut: kind for kind, cut in enumerate(cuts)}
        arrows = [[(kind_of[low], kind_of[high + 1], target) for low, high, target in some] for some in self._arrows]
        behind: dict[int, frozenset[int]] = {}  # each state: those among what it skips to that matter
        members = 0

        def closed(states: Iterable[int]) -> frozenset[int]:
            nonlocal members
            for state in states:
                if state not in behind:
                    seen = self._behind([state])
                    members += len(seen)
                    behind[state] = frozenset(
                        one for one in seen if arrows[one] or one == end or one in self._anchors[True]
                    )
            found = frozenset().union(*(behind[state] for state in states))
            members += len(found)
            if members > MAX_MEMBERS * most_states:
                raise TooLarge(f"takes over {MAX_MEMBERS * most_states} steps to be made")
            return found

        subsets = [closed(self._behind([begin], self._anchors[False]))]
        number: dict[frozenset[int], int] = {}  # of those behind a byte
        following: list[dict[int, int]] = []
        for subset in subsets:  # which grows
            targets: dict[int, set[int]] = {}
            for state in subset:
                for low, high, target in arrows[state]:
                    for kind in range(low, high):
                        targets.setdefault(kind, set()).add(target)
            leads: dict[int, int] = {}
            known: dict[frozenset[int], int] = {}  # many bytes lead alike
            for kind, some in targets.items():
                states = frozenset(some)
                if states not in known:
                    after = closed(states)
                    if after not in number:
                        number[after] = len(subsets)
                        subsets.append(after)
                    known[states] = number[after]
                leads[kind] = known[states]
            following.append(leads)
            if len(subsets) > self._most:
                raise TooLarge(f"has an automaton of over {self._most} states, and {most_states} are the most")
        table = np.full((len(subsets) + 1, len(cuts) - 1), len(subsets), np.int32)
        for place, leads in enumerate(following):
            table[place, list(leads)] = list(leads.values())
        last = self._anchors[True]
        ends = [end in (self._behind(subset, last) if last else subset) for subset in subsets]
        ends[0] |= end in self._behind([begin], *self._anchors)  # the empty text, which begins where it ends
        return minimal(np.repeat(table, np.diff(cuts), axis=1), np.array([*ends, False]), most_states)

    def _behind(self, states: Iterable[int], *anchors: dict[int, list[int]]) -> set[int]:
        """The states, and those that they lead to by reading nothing, through these anchors too."""
        seen, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            after = self._skips[state]
            for some in anchors:
                after = after + some.get(state, [])
            for one in after:
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        return seen

    def _lay(self, some: list[tuple[int, int]], begin: int, end: int) -> None:
        """Lets one byte of each of these ranges, one behind another, lead from `begin` to `end`."""
        if not some:
            self.skip(begin, end)
        for place, (low, high) in enumerate(some):
            after = end if place == len(some) - 1 else self.state()
            self._arrows[begin].append((low, high, after))
            begin = after
