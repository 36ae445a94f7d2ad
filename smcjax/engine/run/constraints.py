"""Keeps the automata of the requests in flight on the device, in tables of a fixed number of places.

A batch of `size` slots has as many places, so no request waits for one. Requests with the same automaton share a place.
An automaton stays in its place until another one needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from smcjax.decoding.constraints import NEVER, AutomatonTables
from smcjax.structured.automaton import MAX_CELLS, MAX_STATES, Automaton


def make_tables(
    automata: Mapping[int, Automaton],
    size: int,
    vocab_size: int,
    *,
    most_cells: int = MAX_CELLS,
    most_states: int = MAX_STATES,
) -> AutomatonTables:
    """Host tables of `size` places with these automata, by place; all other places are empty."""
    arrays: dict[str, Any] = {
        "following": np.zeros((size, most_cells), np.int16),
        "needed": np.full((size, most_cells), NEVER, np.int16),
        "reach": np.full((size, most_states), NEVER, np.int16),
        "classes": np.zeros((size, vocab_size), np.int16),
        "width": np.ones(size, np.int32),
    }
    for place, automaton in automata.items():
        following, reach = automaton.following, automaton.reach
        cells = following.size
        arrays["following"][place, :cells] = np.maximum(following, 0).reshape(-1)
        arrays["needed"][place, :cells] = np.where(following < 0, NEVER, reach[following]).reshape(-1)
        arrays["reach"][place, : len(reach)] = reach
        arrays["classes"][place] = automaton.classes
        arrays["width"][place] = following.shape[1]
    return AutomatonTables(**arrays)


class AutomatonPlaces:
    """Assigns automata to places."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._there: list[Automaton | None] = []

    def place(self, wanted: Mapping[int, Automaton], size: int) -> tuple[np.ndarray, AutomatonTables | None]:
        """The place of each slot's automaton, [size] int32, −1 for none; and the tables, or None if they are unchanged.

        `wanted` maps slots to their automata.
        """
        changed = len(self._there) != size
        if changed:
            self._there = [None] * size
        used = set(wanted.values())
        free = [place for place, automaton in enumerate(self._there) if automaton not in used]
        # Empty places first, as a later request may need an automaton that is still in its place.
        free.sort(key=lambda place: self._there[place] is not None)
        for automaton in dict.fromkeys(wanted.values()):
            if automaton not in self._there:
                self._there[free.pop(0)] = automaton
                changed = True
        index = np.full(size, -1, np.int32)
        for slot, automaton in wanted.items():
            index[slot] = self._there.index(automaton)
        if not changed:
            return index, None
        there = {place: automaton for place, automaton in enumerate(self._there) if automaton is not None}
        return index, make_tables(there, size, self._vocab_size)
