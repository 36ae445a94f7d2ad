"""The keywords of one schema that name no other in its place: what they leave of each type of JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from smcjax.checks import is_number, short
from smcjax.structured.byte_automata import Empty, Refusal
from smcjax.structured.formats import FORMATS, FREE, REAL, WHOLE
from smcjax.structured.json_numbers import Numbers, decimal_of
from smcjax.structured.json_texts import Strings, content
from smcjax.structured.json_values import (
    ANY,
    STATES,
    TYPES,
    Alternative,
    Arrays,
    Nodes,
    Objects,
    Record,
    Values,
    key_of,
    meet_numbers,
    type_of,
)

MAX_DIVISOR = 10_000
KEYWORDS = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "unevaluatedProperties", "dependentRequired"},
}  # fmt: skip
_IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
# What says nothing about which texts are right.
REMARKS = {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
            "discriminator", "xml", "externalDocs", "contentEncoding", "contentMediaType", "contentSchema", "$schema",
            "$id", "id", "$anchor", "$comment", "$defs", "definitions"}  # fmt: skip
KNOWN = {"type", "enum", "const", "format"}.union(_IN_PLACE, REMARKS, *KEYWORDS.values())


def keywords_of(schema: Mapping[str, Any]) -> set[str]:
    """The names in a schema that may say which texts are right."""
    return {name for name in schema if name not in REMARKS and not name.startswith("x-")}


class OwnKeywords:
    """Reads the keywords of one schema that name no other in its place."""

    def __init__(self, schema: Mapping[str, Any], where: str, meet: Callable[[Record, Record], Record | None]) -> None:
        self._schema, self._where, self._meet = schema, where, meet

    def alternative(self) -> Alternative:
        """What they leave."""
        kinds, whole = self._types()
        spoken = {kind for kind, names in KEYWORDS.items() if names & set(self._schema)}
        form = self._format(kinds, spoken)
        records: dict[str, Record] = {kind: ANY[kind] for kind in kinds}
        if "number" in kinds:
            records["number"] = self._numbers(whole, form)
        if "string" in kinds:
            records["string"] = self._strings(form)
        if "array" in kinds:
            records["array"] = self._arrays()
        if "object" in kinds:
            records["object"] = self._objects()
        is_typed = "type" in self._schema
        for name in ("enum", "const"):
            if name in self._schema:
                records, is_typed = self._listed(name, records), True
        return Alternative(records, is_typed, frozenset(spoken))

    def _refuse(self, name: str, mend: str) -> Refusal:
        return Refusal(f"has the {name} {short(self._schema[name])} in {self._where}; {mend}")

    def _types(self) -> tuple[list[str], bool]:
        """The types, and whether numbers are whole."""
        given = self._schema.get("type", list(TYPES))
        named = given if isinstance(given, list) else [given]
        if not named or not all(isinstance(one, str) and one in (*TYPES, "integer") for one in named):
            raise self._refuse("type", "give one that JSON has")
        kinds = [kind for kind in TYPES if kind in named or (kind == "number" and "integer" in named)]
        return kinds, "number" not in named

    def _format(self, kinds: list[str], spoken: set[str]) -> str | None:
        form = self._schema.get("format")
        if form is None or form in FREE | REAL:
            return None
        if isinstance(form, str) and (form in FORMATS or form in WHOLE):
            spoken.add("string" if form in FORMATS else "number")
        elif "string" in kinds:
            raise Refusal(
                f"has the format {short(form)} in {self._where}, and {', '.join(FORMATS)} are kept here; use a "
                "pattern, or leave it out"
            )
        return str(form)

    def _listed(self, name: str, records: Mapping[str, Record]) -> dict[str, Record]:
        """The values of an enum or a const."""
        given = self._schema[name]
        values = [given] if name == "const" else given
        if not isinstance(values, list) or not values:
            raise self._refuse(name, "give a list of values")
        found: dict[str, Record] = {}
        for kind, record in records.items():
            some = {key_of(value): value for value in values if type_of(value) == kind}
            met = self._meet(Values(tuple(some.values())), record)
            if met is not None:
                found[kind] = met
        return found

    def _numbers(self, whole: bool, form: str | None) -> Numbers:
        low, high = self._bound("minimum"), self._bound("maximum")
        above, below = self._schema.get("exclusiveMinimum"), self._schema.get("exclusiveMaximum")
        made: Numbers | None = Numbers(whole, low, above is True, high, below is True)  # True: as in draft 4
        if not isinstance(above, bool):
            made = made and meet_numbers(made, Numbers(low=self._bound("exclusiveMinimum"), above=True))
        if not isinstance(below, bool):
            made = made and meet_numbers(made, Numbers(high=self._bound("exclusiveMaximum"), below=True))
        if form in WHOLE:
            made = made and meet_numbers(made, Numbers(low=Decimal(WHOLE[form][0]), high=Decimal(WHOLE[form][1])))
        if made is None or made.is_empty:
            raise Refusal(f"has bounds of numbers in {self._where} that leave none; mend them")
        divisor = self._schema.get("multipleOf")
        if divisor is None:
            return made
        if not is_number(divisor, 0, MAX_DIVISOR) or not divisor:
            raise self._refuse("multipleOf", f"give a number of at most {MAX_DIVISOR}")
        exact = Fraction(repr(divisor))
        if exact.denominator not in (1, 2, 4, 8):
            raise self._refuse(
                "multipleOf", "of which readers do not agree what its multiples are; give a whole number"
            )
        return dataclasses.replace(made, multiples=frozenset([exact]))

    def _bound(self, name: str) -> Decimal | None:
        given = self._schema.get(name)
        if given is None:
            return None
        if not is_number(given, -math.inf):
            raise self._refuse(name, "give a number")
        return decimal_of(given)

    def _counts(self, low: str, high: str) -> tuple[int, int | None]:
        found = []
        for name in (low, high):
            given = self._schema.get(name)
            if given is not None and (not is_number(given, 0) or given % 1):
                raise self._refuse(name, "give a count")
            found.append(None if given is None else int(given))
        least, most = found[0] or 0, found[1]
        if most is not None and most < least:
            raise Refusal(f"has {low} {least} and {high} {most} in {self._where}; mend them")
        return least, most

    def _strings(self, form: str | None) -> Strings:
        least, most = self._counts("minLength", "maxLength")
        pattern = self._schema.get("pattern")
        if pattern is not None and not isinstance(pattern, str):
            raise self._refuse("pattern", "give a text")
        made = Strings(
            least, most, frozenset([] if pattern is None else [pattern]), frozenset([form] if form in FORMATS else [])
        )
        try:
            content(made, STATES)
        except Empty:
            raise Refusal(f"has strings in {self._where} of which there are none; mend them") from None
        except Refusal as refusal:
            what = "a bound of lengths" if pattern is None else f"the pattern {short(pattern)}"
            raise type(refusal)(f"has {what} in {self._where}, which {refusal}") from None
        return made

    def _arrays(self) -> Arrays:
        first, items = self._schema.get("prefixItems", []), self._schema.get("items", True)
        if isinstance(items, list):  # as in draft 7
            first, items = items, self._schema.get("additionalItems", True)
        if not isinstance(first, list):
            raise self._refuse("prefixItems", "give a list of schemas")
        least, most = self._counts("minItems", "maxItems")
        unique = self._schema.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise self._refuse("uniqueItems", "give true or false")
        some = tuple(((one, f"item {place} of {self._where}"),) for place, one in enumerate(first))
        return Arrays(some, nodes_of(items, f"the items of {self._where}"), least, most, unique)

    def _objects(self) -> Objects:
        properties, patterns = (self._schema.get(name, {}) for name in ("properties", "patternProperties"))
        required = self._schema.get("required", [])
        if (
            not all(isinstance(one, dict) for one in (properties, patterns))
            or not isinstance(required, list)
            or not all(isinstance(one, str) for one in required)
        ):
            raise Refusal(f"has properties or required of another type in {self._where}; mend it")
        least, most = self._counts("minProperties", "maxProperties")
        return Objects(
            {name: ((one, f"property {short(name)}"),) for name, one in properties.items()},
            {name: ((one, f"properties of the pattern {short(name)}"),) for name, one in patterns.items()},
            nodes_of(self._schema.get("additionalProperties", True), f"the properties of {self._where}"),
            nodes_of(self._schema.get("propertyNames", True), f"the names of properties of {self._where}"),
            tuple(dict.fromkeys(required)),
            least,
            most,
        )


def nodes_of(schema: Any, where: str) -> Nodes:
    return () if schema is True else ((schema, where),)
