"""A JSON schema as rules of parts: each text that these derive is JSON that the schema accepts.

All keywords of a schema hold together, so a schema is read as *alternatives*, of which each says for every type of JSON
which values it has: schemas that hold together are met alternative by alternative, type by type; those of which one may
hold are listed. What a `not`, an `oneOf` or an `if` excludes is taken away from these.

The reverse does not hold: properties come in the schema's order, and strings and numbers are spelled as
`smcjax.structured.json_texts` says. Where no type is given, it is one that the keywords speak of. What a schema says
and an automaton cannot keep is refused by name, so nothing is left out silently.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.checks import short
from smcjax.structured.byte_automata import Refusal, TooLarge
from smcjax.structured.grammar import weight_of_list
from smcjax.structured.json_texts import COMMA, Strings, array, element, literal, object_, pair
from smcjax.structured.json_values import Alternative, Arrays, Nodes, Objects, Record, Values, key_of
from smcjax.structured.parts import NOTHING, START, Choice, Listed, Part, Reference, Repeat, Sequence
from smcjax.structured.schema_alternatives import Alternatives, key_of_nodes, schemas_within

PAIR = 6  # states at least of a pair without its name: quotes, colon and spaces


def rules_of_schema(schema: object, most_states: int) -> dict[str, Part]:
    """The rules of a schema, `START` among them. Raises Refusal (the place, the keyword) for what cannot be kept.

    Raises TooLarge, before it reads them, for properties whose names alone show that there are more states.
    """
    for part in schemas_within(schema):
        name = part.get("$id")
        is_own = part is not schema and isinstance(name, str) and not name.startswith("#")
        if is_own and any("$ref" in one for one in schemas_within(part)):
            raise Refusal(
                f"has the $id {short(name)} within it, below which references mean another schema; leave it out"
            )
    reader = _Writer(schema, most_states)
    reader.rules[START] = reader.part(((schema, "the schema"),))
    return reader.rules


class _Writer(Alternatives):
    """Makes parts of one schema."""

    def __init__(self, root: object, most_states: int) -> None:
        super().__init__(root)
        self._most = most_states
        self.rules: dict[str, Part] = {}
        self._names: dict[tuple[int, ...], str] = {}  # of rules, by the schemas that hold together in them

    def part(self, nodes: Nodes) -> Part:
        """The texts of values that schemas hold for together. Those that refer to others are rules."""
        nodes, refer = self.canonical(nodes)
        key = key_of_nodes(nodes)
        if key not in self._names:
            alternatives = self.alternatives(nodes)
            if not (refer or self.followed or not nodes):
                return self._choice(alternatives)
            self._names[key] = f"rule {len(self._names)}"
            self.rules[self._names[key]] = self._choice(alternatives)
        return Reference(self._names[key])

    def _choice(self, alternatives: list[Alternative]) -> Part:
        records = [record for one in alternatives for record in one.said.values()]
        parts = [self._texts(record) for record in records if self.record_is_possible(record)]
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _texts(self, record: Record) -> Part:
        if isinstance(record, Values):
            return Choice(tuple(literal(value) for value in record.values))
        if isinstance(record, Arrays):
            return self._array(record)
        return self._object(record) if isinstance(record, Objects) else record.part()

    def _array(self, given: Arrays) -> Part:
        if given.unique:
            return self._set(given)
        most, closed = given.most, len(given.first)
        if given.first and not given.items:  # where they are not described, no more items are said than there must be
            closed = max(closed, given.least)
        if (given.first and not given.items) or not self.is_possible(given.items):
            most = closed if most is None else min(most, closed)
        first = given.first[:most]
        rest = None if most is None else most - len(first)
        tail: Part = NOTHING
        if rest != 0:
            item = element(self.part(given.items))
            more, least = Repeat(Sequence((COMMA, item)), 0, None), given.least - len(first)
            if first:
                tail = dataclasses.replace(more, least=max(least, 0), most=rest)
            else:
                more = dataclasses.replace(more, least=max(least - 1, 0), most=None if rest is None else rest - 1)
                tail = Sequence((item, more)) if least else Repeat(Sequence((item, more)), 0, 1)
        for place in reversed(range(len(first))):
            here = (element(self.part(first[place])), tail)
            tail = Sequence((COMMA, *here) if place else here)
            tail = tail if place < given.least else Repeat(tail, 0, 1)
        return array(tail)

    def _set(self, given: Arrays) -> Part:
        """Arrays without an item twice: of listed values, in their order."""
        values: dict[str, Any] = {}
        for one in self.alternatives(given.items):
            for record in one.said.values():
                if not isinstance(record, Values) or given.first:
                    if given.most is not None and given.most <= 1:
                        return self._array(dataclasses.replace(given, unique=False))
                    raise Refusal(
                        "has uniqueItems beside items that no enum lists, which is not kept here; leave it out"
                    )
                values |= {key_of(value): value for value in record.values}
        items = tuple(element(literal(value)) for value in values.values())
        return array(Listed(COMMA, items, (False,) * len(items), None, given.least, given.most))

    def _object(self, given: Objects) -> Part:
        names = [*given.properties, *(name for name in given.required if name not in given.properties)]
        required = set(given.required)
        self._count_states(given, names, required)
        kept = {name: given.of(name) for name in names if self.may_be_named(given, name)}
        kept = {name: nodes for name, nodes in kept.items() if name in required or self.is_possible(nodes)}
        pairs = tuple(pair(literal(name), self.part(nodes)) for name, nodes in kept.items())
        others = self._others(given, set(names))
        least, most = given.least, given.most
        if least <= len(required):
            least = 0
        elif others is not None and least > len(required) + 1:
            raise Refusal(
                f"has minProperties {given.least} of names that may be said twice, which is not kept here; lower it"
            )
        if most is not None and others is None and most >= len(pairs):
            most = None
        return object_(Listed(COMMA, pairs, tuple(name in required for name in kept), others, least, most))

    def _count_states(self, given: Objects, names: list[str], required: set[str]) -> None:
        """Refuses an object whose pairs would have too many states, before their values are read."""
        said = [name for name in names if not any(schema is False for schema, _ in given.properties.get(name, ()))]
        least = sum(len(name) + PAIR for name in said)
        if weight_of_list(least, tuple(name in required for name in said)) > self._most:
            raise TooLarge(f"has an automaton of over {self._most} states")

    def _others(self, given: Objects, names: set[str]) -> Part | None:
        """The pairs of properties that have no name of their own."""
        regions = list(given.patterns.items())
        if not regions and (given.others or not given.properties):
            regions = [("", given.others)]
        for place, (one, _) in enumerate(regions):
            for other, _ in regions[:place]:
                if self.record_is_possible(Strings(patterns=frozenset([one, other]))):
                    raise Refusal(
                        f"has the patternProperties {short(one)} and {short(other)}, which name the same; keep one"
                    )
        records = [record for one in self.alternatives(given.names)
                   if (record := one.records.get("string")) is not None]  # fmt: skip
        pairs = []
        for pattern, nodes in regions:
            patterns = frozenset([pattern] if pattern else [])
            for record in records if self.is_possible(nodes) else ():
                met = self.meet_records(record, Strings(patterns=patterns, excluded=frozenset(names)))
                if met is not None and self.record_is_possible(met):
                    pairs.append(pair(self._texts(met), self.part(nodes)))
        return Choice(tuple(pairs)) if pairs else None
