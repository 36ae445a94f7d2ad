"""Values of JSON by their types, as schemas describe them: what an alternative of a schema says of each type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from smcjax.structured.json_numbers import Numbers
from smcjax.structured.json_texts import Strings, holds

STATES = 1 << 15  # of an automaton of strings
TYPES = ("null", "boolean", "number", "string", "array", "object")

Node = tuple[Any, str]  # a schema, and where it is
Nodes = tuple[Node, ...]  # which hold together
NO: Node = (False, "what is excluded")


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of one type, one by one."""

    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arrays by the schemas of their items, first of those at their beginning."""

    first: tuple[Nodes, ...] = ()
    items: Nodes = ()
    least: int = 0
    most: int | None = None
    unique: bool = False

    def at(self, place: int) -> Nodes:
        """The schemas of an item."""
        return self.first[place] if place < len(self.first) else self.items


@dataclasses.dataclass(frozen=True)
class Objects:
    """Objects by the schemas of their properties, of those that patterns name, of others, and of names."""

    properties: Mapping[str, Nodes] = dataclasses.field(default_factory=dict)
    patterns: Mapping[str, Nodes] = dataclasses.field(default_factory=dict)
    others: Nodes = ()
    names: Nodes = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None

    def of(self, name: str) -> Nodes:
        """The schemas of a property."""
        some = list(self.properties.get(name, ()))
        fitting = [
            nodes for one, nodes in self.patterns.items() if holds(Strings(patterns=frozenset([one])), name, STATES)
        ]
        for nodes in fitting:
            some += nodes
        return tuple(some) if name in self.properties or fitting else self.others


Record = Values | Numbers | Strings | Arrays | Objects


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The values that a schema may have, by their types; and the types of which its keywords speak."""

    records: Mapping[str, Record]
    is_typed: bool = False  # a keyword says which types there are
    spoken: frozenset[str] = frozenset()

    @property
    def said(self) -> dict[str, Record]:
        """The records of the types that answers have."""
        if self.is_typed or not self.spoken:
            return dict(self.records)
        return {kind: record for kind, record in self.records.items() if kind in self.spoken}


ANY: dict[str, Record] = {
    "null": Values((None,)),
    "boolean": Values((True, False)),
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}


def meet_numbers(one: Numbers, two: Numbers) -> Numbers | None:
    """The numbers that two records share; None where their bounds leave none."""
    lows = [(n.low, n.above) for n in (one, two) if n.low is not None]
    highs = [(n.high, not n.below) for n in (one, two) if n.high is not None]
    low, above = max(lows) if lows else (None, False)
    high, within = min(highs) if highs else (None, True)
    made = Numbers(one.whole or two.whole, low, above, high, not within, one.multiples | two.multiples)
    return None if made.is_empty else made


def type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


def key_of(value: Any) -> str:
    """A text that equal values share, and no others."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
