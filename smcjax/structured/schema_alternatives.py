"""A schema as alternatives: what holds together is met, type by type, and what is excluded is taken away.

Of what is left where something may not hold, an alternative may have less: never more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from smcjax.checks import short
from smcjax.structured.byte_automata import Empty, Refusal, TooLarge
from smcjax.structured.json_numbers import Numbers
from smcjax.structured.json_texts import Strings, content, holds
from smcjax.structured.json_values import (
    ANY,
    NO,
    STATES,
    TYPES,
    Alternative,
    Arrays,
    Node,
    Nodes,
    Objects,
    Record,
    Values,
    key_of,
    meet_numbers,
    type_of,
)
from smcjax.structured.schema_keywords import KNOWN, OwnKeywords, keywords_of

MAX_PARTS = 10_000  # of a schema, references followed
MAX_ALTERNATIVES = 500


def key_of_nodes(nodes: Nodes) -> tuple[int, ...]:
    """What schemas that hold together are known by."""
    return tuple(sorted({id(schema) for schema, _ in nodes}))


class Alternatives:
    """Reads the schemas within one."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._count = 0
        self._read: dict[tuple[int, ...], tuple[list[Alternative], bool]] = {}
        self._possible: dict[tuple[int, ...], bool] = {}
        self._made: list[Any] = []  # schemas made here, whose identity is to stay theirs
        self.followed = False  # whether a reference was

    def canonical(self, nodes: Nodes) -> tuple[Nodes, bool]:
        """The schemas without those that say nothing, and in place of mere references what they refer to."""
        found: dict[int, Node] = {}
        refer = False
        for schema, where in nodes:
            seen: set[int] = set()
            while isinstance(schema, dict) and "$ref" in schema and not keywords_of(schema) - {"$ref"}:
                if id(schema) in seen:
                    raise Refusal(f"has {where} refer to itself alone; mend it")
                seen.add(id(schema))
                (schema, where), refer = self._target(schema["$ref"], where), True
            if schema is not True and not (isinstance(schema, dict) and not keywords_of(schema)):
                found[id(schema)] = (schema, where)
        return tuple(found.values()), refer

    def alternatives(self, nodes: Nodes) -> list[Alternative]:
        """What schemas leave together. It sets `followed`."""
        nodes, _ = self.canonical(nodes)
        key = key_of_nodes(nodes)
        if key not in self._read:
            self.followed = False
            found = [Alternative(ANY)]
            for node in nodes:
                found = self.meet(found, self._of_node(node, ()))
            self._read[key] = found, self.followed
        found, self.followed = self._read[key]
        return found

    def _of_node(self, node: Node, within: tuple[int, ...]) -> list[Alternative]:
        schema, where = node
        self._count += 1
        if self._count > MAX_PARTS:
            raise Refusal(f"has over {MAX_PARTS} parts, its references followed; simplify it")
        if isinstance(schema, bool):
            return [Alternative(ANY)] if schema else []
        if not isinstance(schema, dict):
            raise Refusal(f"has {short(schema)} as {where}, which is no schema; mend it")
        if id(schema) in within:
            raise Refusal(f"has {where} refer to itself, with nothing in between; mend it")
        unknown = sorted(keywords_of(schema) - KNOWN)
        if unknown:
            raise Refusal(f"has {short(unknown[0])} in {where}, which is not kept here; leave it out")
        inside = (*within, id(schema))
        found = [OwnKeywords(schema, where, self.meet_records).alternative()]
        if "$ref" in schema:
            self.followed = True
            found = self.meet(found, self._of_node(self._target(schema["$ref"], where), inside))
        for one in self._listed(schema, "allOf", where):
            found = self.meet(found, self._of_node(one, inside))
        if "anyOf" in schema:
            some = self._listed(schema, "anyOf", where)
            found = self.meet(found, distinct([made for one in some for made in self._of_node(one, inside)]))
        if "oneOf" in schema:
            found = self._one_of(found, [self._of_node(one, inside) for one in self._listed(schema, "oneOf", where)])
        if "not" in schema:
            found = self._less(found, self._of_node((schema["not"], f"the not of {where}"), inside))
        if "if" in schema:
            condition = self._of_node((schema["if"], f"the if of {where}"), inside)
            then, other = (
                self.meet(some, self._of_node((schema.get(name, True), f"the {name} of {where}"), inside))
                for name, some in (("then", self.meet(found, condition)), ("else", self._less(found, condition)))
            )
            found = distinct([*then, *other])
        for name, needed in (schema.get("dependentRequired") or {}).items():
            there = [Alternative({**ANY, "object": Objects(required=(name,))})]
            whole = [Alternative({**ANY, "object": Objects(required=(name, *needed))})]
            found = distinct([*self._less(found, there), *self.meet(found, whole)])
        return _closed(found, schema)

    def _listed(self, schema: Mapping[str, Any], name: str, where: str) -> list[Node]:
        some = schema.get(name, [])
        if not isinstance(some, list) or (name in schema and not some):
            raise Refusal(f"has the {name} {short(some)} in {where}; give a list of schemas")
        return [(one, f"{name} {place} of {where}") for place, one in enumerate(some)]

    def _target(self, name: object, where: str) -> Node:
        """What a reference refers to."""
        base = self._root.get("$id", "") if isinstance(self._root, dict) else ""
        if isinstance(name, str) and base and name.startswith(f"{base}#"):
            name = name[len(base) :]
        if not isinstance(name, str) or not name.startswith("#"):
            raise Refusal(f"refers to {short(name)} in {where}, which is outside of it; put it into it")
        part: Any = self._root
        if name[1:2] not in ("", "/"):
            part = next(
                (one for one in schemas_within(self._root) if name[1:] == one.get("$anchor") or name == one.get("$id")),
                None,
            )
        else:
            for step in unquote(name[1:]).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(part, list) and step.isdecimal() and int(step) < len(part):
                    part = part[int(step)]
                else:
                    part = part.get(step) if isinstance(part, dict) else None
        if part is None:
            raise Refusal(f"refers to {short(name)} in {where}, which it does not have; mend it")
        return part, short(name)

    def meet(self, some: list[Alternative], others: list[Alternative]) -> list[Alternative]:
        if len(some) * len(others) > MAX_ALTERNATIVES:
            raise Refusal(f"has over {MAX_ALTERNATIVES} alternatives that hold together; simplify it")
        found = []
        for one in some:
            for two in others:
                records = {}
                for kind in TYPES:
                    if kind in one.records and kind in two.records:
                        met = self.meet_records(one.records[kind], two.records[kind])
                        if met is not None:
                            records[kind] = met
                if records:
                    found.append(Alternative(records, one.is_typed or two.is_typed, one.spoken | two.spoken))
        return found

    def meet_records(self, one: Record, two: Record) -> Record | None:
        """The values that two records of a type share; None where it shows at once that there are none."""
        if isinstance(two, Values):
            one, two = two, one
        if isinstance(one, Values):
            values = tuple(value for value in one.values if self.record_holds(two, value))
            return Values(values) if values else None
        if isinstance(one, Numbers) and isinstance(two, Numbers):
            return meet_numbers(one, two)
        least = max(one.least, two.least)  # type: ignore[union-attr]
        most = min((m for m in (one.most, two.most) if m is not None), default=None)  # type: ignore[union-attr]
        if most is not None and most < least:
            return None
        if isinstance(one, Strings) and isinstance(two, Strings):
            return Strings(
                least, most, one.patterns | two.patterns, one.formats | two.formats, one.excluded | two.excluded
            )
        if isinstance(one, Arrays) and isinstance(two, Arrays):
            first = tuple(one.at(place) + two.at(place) for place in range(max(len(one.first), len(two.first))))
            return Arrays(first, one.items + two.items, least, most, one.unique or two.unique)
        assert isinstance(one, Objects)
        assert isinstance(two, Objects)
        return self._meet_objects(one, two, least, most)

    def _meet_objects(self, one: Objects, two: Objects, least: int, most: int | None) -> Objects:
        names = dict.fromkeys([*one.properties, *two.properties])
        if (one.patterns and two.others) or (two.patterns and one.others):
            raise Refusal(
                "has patternProperties beside another schema's additionalProperties, which is not kept here; join them"
            )
        patterns = {name: one.patterns.get(name, ()) + two.patterns.get(name, ())
                    for name in dict.fromkeys([*one.patterns, *two.patterns])}  # fmt: skip
        return Objects(
            {name: one.of(name) + two.of(name) for name in names},
            patterns,
            one.others + two.others,
            one.names + two.names,
            tuple(dict.fromkeys([*one.required, *two.required])),
            least,
            most,
        )

    def _one_of(self, found: list[Alternative], some: list[list[Alternative]]) -> list[Alternative]:
        """Those of which exactly one holds."""
        made: list[Alternative] = []
        for place, one in enumerate(some):
            here = self.meet(found, one)
            for other in (*some[:place], *some[place + 1 :]):
                here = self._less(here, other)
            made += here
        return distinct(made)

    def _less(self, found: list[Alternative], excluded: list[Alternative]) -> list[Alternative]:
        """What is left, or some of it, where none of the excluded ones may hold."""
        for out in excluded:
            left: list[Alternative] = []
            for one in found:
                whole = {}
                for kind, record in one.said.items():
                    if kind in out.records and self._overlap(record, out.records[kind]):
                        some = self._less_record(record, out.records[kind])
                        left += [dataclasses.replace(one, records={kind: rest}, is_typed=True) for rest in some]
                    else:
                        whole[kind] = record
                if whole:
                    left.append(dataclasses.replace(one, records=whole, is_typed=True))
            found = distinct(left)
            if len(found) > MAX_ALTERNATIVES:
                raise Refusal(f"has over {MAX_ALTERNATIVES} alternatives that hold together; simplify it")
        return found

    def _overlap(self, record: Record, out: Record) -> bool:
        """False where no value is of both; a format has more texts than are said."""
        if isinstance(record, Values):
            return True
        if isinstance(out, Strings):
            out = dataclasses.replace(out, formats=frozenset())
        met = self.meet_records(record, out)
        return met is not None and self.record_is_possible(met)

    def _less_record(self, record: Record, out: Record) -> Iterator[Record]:
        """Values of a record that are none of another of the same type."""
        if isinstance(record, Values):
            values = tuple(value for value in record.values if not self.record_holds(out, value, surely=False))
            if values:
                yield Values(values)
        elif isinstance(record, Strings) and isinstance(out, Values):
            yield dataclasses.replace(record, excluded=record.excluded | set(out.values))
        elif isinstance(record, Numbers) and isinstance(out, Numbers):
            if out.low is not None:
                yield from self._met(record, Numbers(high=out.low, below=not out.above))
            if out.high is not None:
                yield from self._met(record, Numbers(low=out.high, above=not out.below))
        elif isinstance(record, Objects) and isinstance(out, Objects):
            yield from self._less_object(record, out)
        elif not isinstance(out, Values) and not isinstance(record, Numbers):
            kind = type(record)
            if out.least:  # type: ignore[union-attr]
                yield from self._met(record, kind(most=out.least - 1))  # type: ignore[union-attr]
            if out.most is not None:  # type: ignore[union-attr]
                yield from self._met(record, kind(least=out.most + 1))  # type: ignore[union-attr]

    def _met(self, one: Record, two: Record) -> Iterator[Record]:
        met = self.meet_records(one, two)
        if met is not None:
            yield met

    def _less_object(self, record: Objects, out: Objects) -> Iterator[Record]:
        """Objects that lack a property, or have one of another kind."""
        for name in dict.fromkeys([*out.properties, *out.required]):
            if name in out.required and name not in record.required:
                yield dataclasses.replace(record, properties={**record.properties, name: (NO,)})
            if name in out.properties:
                no = {"not": {"allOf": [schema for schema, _ in out.properties[name]] or [True]}}
                self._made.append(no)
                nodes = (*record.of(name), (no, f"property {short(name)}, as it may not be"))
                if self.is_possible(nodes):
                    required = record.required if name in record.required else (*record.required, name)
                    if name in out.required:
                        required = record.required
                    yield dataclasses.replace(record, properties={**record.properties, name: nodes}, required=required)

    def is_possible(self, nodes: Nodes) -> bool:
        """False where no value can be right; True where one may."""
        nodes, _ = self.canonical(nodes)
        key, followed = key_of_nodes(nodes), self.followed
        if key not in self._possible:
            self._possible[key] = True  # where it needs itself
            self._possible[key] = not nodes or any(
                self.record_is_possible(one) for some in self.alternatives(nodes) for one in some.said.values()
            )
        self.followed = followed
        return self._possible[key]

    def record_is_possible(self, record: Record) -> bool:
        """False where a record shows that no value is its own."""
        if isinstance(record, Values):
            return bool(record.values)
        if isinstance(record, Numbers):
            return not record.is_empty
        if isinstance(record, Strings):
            try:
                content(record, STATES)
            except Empty:
                return False
            except TooLarge:
                return True
            return True
        if isinstance(record, Arrays):
            return all(self.is_possible(record.at(place)) for place in range(min(record.least, len(record.first) + 1)))
        return all(self.may_be_named(record, name) and self.is_possible(record.of(name)) for name in record.required)

    def holds(self, nodes: Nodes, value: Any, surely: bool = True) -> bool:
        """True for a value that schemas hold for (`record_holds`)."""
        kind, followed = type_of(value), self.followed
        found = self.alternatives(nodes)
        self.followed = followed
        return any(kind in one.records and self.record_holds(one.records[kind], value, surely) for one in found)

    def record_holds(self, record: Record, value: Any, surely: bool = True) -> bool:
        """True for a value that a record has; not `surely`: or may have, since formats have texts that are not said."""
        if isinstance(record, Values):
            return any(key_of(value) == key_of(one) for one in record.values)
        if isinstance(record, Numbers):
            return record.holds(value)
        if isinstance(record, Strings):
            formats = record.formats if surely else frozenset()
            return holds(dataclasses.replace(record, formats=formats), value, STATES)
        if not record.least <= len(value) <= (len(value) if record.most is None else record.most):
            return False
        if isinstance(record, Arrays):
            unique = not record.unique or len({key_of(one) for one in value}) == len(value)
            return unique and all(self.holds(record.at(place), one, surely) for place, one in enumerate(value))
        named = all(name in value for name in record.required) and all(
            self.may_be_named(record, name) for name in value
        )
        return named and all(self.holds(record.of(name), one, surely) for name, one in value.items())

    def may_be_named(self, given: Objects, name: str) -> bool:
        return not given.names or self.holds(given.names, name)


def _closed(found: list[Alternative], schema: Mapping[str, Any]) -> list[Alternative]:
    """The alternatives without properties and items that no keyword of the schema describes, where it excludes them."""
    for name, kind, field in (("unevaluatedProperties", "object", "others"), ("unevaluatedItems", "array", "items")):
        if schema.get(name, False) not in (True, False):
            raise Refusal(f"has {name} of a schema, which is not kept here; leave it out")
        closed: Any = {field: (NO,)}
        for place, one in enumerate(found if schema.get(name) is False else ()):
            record = one.records.get(kind)
            if isinstance(record, Arrays | Objects) and not getattr(record, field):
                records = {**one.records, kind: dataclasses.replace(record, **closed)}
                found[place] = dataclasses.replace(one, records=records)
    return found


def schemas_within(part: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings within a schema."""
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from schemas_within(inner)


def distinct(some: list[Alternative]) -> list[Alternative]:
    found: list[Alternative] = []
    for one in some:
        if one not in found:
            found.append(one)
    return found
