"""Automata over bytes: of a regular expression, of parts that are joined, and with equivalent states made one.

A deterministic one is a table [S + 1, 256] of next states, S being dead, and which states accept, [S + 1]; its first
state is 0.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from smcjax.plain import short

# How outlines-core's error begins for an expression that it has read and whose bytes a vocabulary lacks.
_IS_READ = "The vocabulary provided is incompatible"


class Refusal(Exception):
    """An automaton cannot be made; the message says why, in words that follow the name of what was asked for."""


class Empty(Refusal):
    """An automaton would accept no text."""


class TooLarge(Refusal):
    """An automaton has too many states or cells; the message lacks the mend, which whoever catches it adds."""


def byte_automaton(regex: str, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes: next states [S + 1, 256], S being dead, and which states accept [S + 1].

    State 0 is the first one. Raises Refusal for what is no regular expression, matches nothing, or takes more states.
    """
    import numpy as np
    from outlines_core import Index, Vocabulary

    # First by itself, since "a)|(b" is none, and would be one within the brackets below. A vocabulary without its bytes
    # saves most of the time.
    try:
        Index(regex, Vocabulary(256, {b"\0": [0]}))
    except ValueError as error:
        if not str(error).startswith(_IS_READ):
            raise _no_regex(regex, error) from None
    # outlines-core (0.2.14) loses what goes on behind an accepting state to one that is not: so no text may accept
    # before its end, which a byte marks that no text has.
    try:
        index = Index(f"(?:{regex})\\x00", Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        raise _no_regex(regex, error) from None
    transitions, final = index.get_transitions(), set(index.get_final_states())
    states = list(dict.fromkeys((index.get_initial_state(), *transitions)))
    number = {state: place for place, state in enumerate(states)}
    table = np.full((len(states) + 1, 256), len(states), np.int32)
    accepts = np.zeros(len(states) + 1, bool)
    for state, following in transitions.items():
        accepts[number[state]] = following.get(0) in final
        for byte, after in following.items():
            if 0 < byte < 256:  # 256 is what outlines-core ends a text with
                table[number[state], byte] = number[after]
    return minimal(table, accepts, most_states)


def _no_regex(regex: str, error: ValueError) -> Refusal:
    """A refusal of what outlines-core does not read, in Python's words where Python does not read it either."""
    said = " ".join(str(error).removeprefix("Failed to build DFA").split())[:200]
    if said.startswith((_IS_READ, "Index failed since anchored universal start state")):
        said = "part of it matches no text, or has an anchor, which is kept at either end of the whole alone"
    elif said == "error building NFA":
        said = "look-around, back-references and whatever else Rust's syntax lacks are not kept here"
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(regex)
        except (re.error, ValueError, OverflowError, RecursionError) as fault:
            found = str(fault)[:100]
            if found.isprintable() and not found.startswith("bad escape"):  # Rust's crate knows others
                said = found
    return Refusal(f"is no regular expression that has an automaton ({short(regex)}: {said}); mend it")


def minimal(table: Any, accepts: Any, most_states: int) -> tuple[Any, Any]:
    """The automaton with equivalent states made one (Moore 1956); its first state is 0, its dead one the last.

    Raises Empty where it accepts nothing, TooLarge where it has more states.
    """
    import numpy as np

    columns = np.unique(table, axis=1)  # bytes that lead alike are one
    group = accepts.astype(np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, columns.shape[1] + 1, np.uint64) | np.uint64(1)
    count, exact = 0, False
    while True:
        if exact:
            rows = np.column_stack([accepts, group, group[columns]])
            _, group = np.unique(rows, axis=0, return_inverse=True)
        else:  # equal rows by a hash of theirs, in a hundredth of the time: what it takes for equal is compared last
            hashed = group * factors[0] + group[columns] @ factors[1:]
            _, group = np.unique(hashed, return_inverse=True)
        group = group.reshape(-1).astype(np.uint64)
        now = int(group.max()) + 1
        if now == count and exact:
            break
        count, exact = now, exact or now == count
    group = group.astype(np.int64)
    dead = group[-1]
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


class Joined:
    """Parts of an automaton joined by transitions that read nothing; `minimal` makes it deterministic.

    A worked example, "ab" or nothing: `text(b"ab", p, q)` and `skip(p, q)`, then `minimal(p, q, …)`.
    """

    def __init__(self, most_states: int) -> None:
        self._most = 8 * most_states  # of parts, and of subsets of them
        self._skips: list[list[int]] = []  # of each state
        self._rows: list[Any] = []  # next states [256] of those that read, −1 for none
        self._reader: list[int] = []  # of each state: its row, −1 for none

    def state(self) -> int:
        """A new state."""
        return self._states(1)

    def skip(self, begin: int, end: int) -> None:
        """Lets a text be at `end` where it is at `begin`."""
        self._skips[begin].append(end)

    def text(self, data: bytes, begin: int, end: int) -> None:
        """Lets these bytes lead from `begin` to `end`."""
        import numpy as np

        for byte in data:
            after, row = self._states(2), np.full(256, -1, np.int32)
            row[byte] = after + 1
            self._set_rows(after, row[None])
            self.skip(begin, after)
            begin = after + 1
        self.skip(begin, end)

    def automaton(self, part: tuple[Any, Any], begin: int, end: int) -> None:
        """Lets the texts of a deterministic automaton lead from `begin` to `end`."""
        import numpy as np

        table, accepts = part
        size = table.shape[0] - 1
        first = self._states(size)
        self._set_rows(first, np.where(table[:size] == size, -1, table[:size] + first))
        self.skip(begin, first)
        for state in np.flatnonzero(accepts[:size]):
            self.skip(first + int(state), end)

    def minimal(self, begin: int, end: int, most_states: int) -> tuple[Any, Any]:
        """The minimal deterministic automaton of the texts from `begin` to `end`, by subsets (Rabin and Scott 1959).

        Raises Empty where there are none, TooLarge.
        """
        import numpy as np

        rows = np.stack([*self._rows, np.full(256, -1, np.int32)])
        columns, kind_of = np.unique(rows, axis=1, return_inverse=True)  # bytes that lead alike
        arrows = [[(kind, target) for kind, target in enumerate(row) if target >= 0] for row in columns.tolist()]
        behind: dict[
            frozenset[int], frozenset[int]
        ] = {}  # states: those among what they skip to that read, or are the end

        def closed(states: frozenset[int]) -> frozenset[int]:
            if states not in behind:
                seen, waiting = set(states), list(states)
                while waiting:
                    fresh = [state for state in self._skips[waiting.pop()] if state not in seen]
                    seen.update(fresh)
                    waiting += fresh
                behind[states] = frozenset(state for state in seen if self._reader[state] >= 0 or state == end)
            return behind[states]

        first = closed(frozenset([begin]))
        number, subsets = {first: 0}, [first]
        following: list[dict[int, int]] = []
        for subset in subsets:  # which grows
            targets: dict[int, set[int]] = {}
            for state in subset:
                for kind, target in arrows[self._reader[state]] if self._reader[state] >= 0 else ():
                    targets.setdefault(kind, set()).add(target)
            leads: dict[int, int] = {}
            for kind, states in targets.items():
                after = closed(frozenset(states))
                if after not in number:
                    number[after] = len(subsets)
                    subsets.append(after)
                leads[kind] = number[after]
            following.append(leads)
            if len(subsets) > self._most:
                raise TooLarge(f"has an automaton of over {self._most} states, and {most_states} are the most")
        table = np.full((len(subsets) + 1, columns.shape[1]), len(subsets), np.int32)
        for place, leads in enumerate(following):
            table[place, list(leads)] = list(leads.values())
        accepts = np.array([*(end in subset for subset in subsets), False])
        return minimal(table[:, kind_of.reshape(-1)], accepts, most_states)

    def _states(self, count: int) -> int:
        """The first of new states."""
        first = len(self._skips)
        if first + count > self._most:
            raise TooLarge(f"has parts of over {self._most} states")
        self._skips += [[] for _ in range(count)]
        self._reader += [-1] * count
        return first

    def _set_rows(self, first: int, rows: Any) -> None:
        for place, row in enumerate(rows):
            self._reader[first + place] = len(self._rows)
            self._rows.append(row)
