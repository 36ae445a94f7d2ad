"""A JSON schema as a regular expression: each text that it matches is JSON that the schema accepts.

The reverse does not hold: properties come in the schema's order and no others beside them, there is at most one space
between tokens, and strings have no \\u escapes. What a schema says and an automaton cannot keep is refused by name, so
nothing is left out silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from smcjax.plain import short

ANY_OBJECT, ANY_VALUE = r"\x01", r"\x02"  # `smcjax.structured.automaton_child` puts automata in their place
SPACE = "[ ]?"
INNER = r'([^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'  # a character of a JSON string
INTEGER = "(0|[1-9][0-9]*)"
FRACTION = r"(\.[0-9]+)?([eE][+-][0-9]+)?"
MOST_VALUES = 10_000  # of an integer between two bounds
MOST_PARTS = 10_000  # of a schema, references followed

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
# What says nothing about which texts are right.
REMARKS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
REMARKS |= {"$schema", "$id", "$comment", "$defs", "definitions"}


def escape(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(c if c.isalnum() or c in ' "_' or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


def unanchored(regex: str) -> tuple[str, bool, bool]:
    """The expression without a ^ that begins it and a $ that ends it, and which of them it had."""
    begins = regex.startswith("^")
    body = regex[1:] if begins else regex
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    return body[:-1] if ends else body, begins, ends


def regex_of_schema(schema: object) -> tuple[str, dict[str, str], bool]:
    """The expression, patterns of strings by their places, and whether it has `ANY_OBJECT` or `ANY_VALUE` in it.

    Raises ValueError (one sentence: the place, the keyword) for what is no schema, or cannot be kept.
    """
    reader = _Reader(schema)
    return reader.regex(schema, "the schema", ()), reader.inner, reader.is_open


class _Reader:
    """Reads one schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._parts = 0
        self.inner: dict[str, str] = {}
        self.is_open = False

    def regex(self, schema: object, where: str, within: tuple[str, ...]) -> str:
        """The expression of a part of the schema; `within` are the references that led there."""
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ValueError(f"json_schema has over {MOST_PARTS} parts, its references followed; simplify it.")
        if schema is True or (isinstance(schema, dict) and not set(schema) - REMARKS):
            self.is_open = True
            return ANY_VALUE
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema has {short(schema)} as {where}, which no text matches; mend it.")
        kind = self._kind(schema, where)
        used: set[str] = set()

        def take(name: str) -> Any:
            used.add(name)
            return schema.get(name)

        made = getattr(self, f"_{kind}")(take, where, within)
        unknown = sorted(set(schema) - used - REMARKS - {"type"})
        if unknown:
            raise ValueError(f"json_schema has {short(unknown[0])} in {where}, which is not kept here; leave it out.")
        return f"({made})"

    @staticmethod
    def _kind(schema: Mapping[str, Any], where: str) -> str:
        """The name of the method that reads it."""
        for keyword, kind in (("$ref", "reference"), ("const", "values"), ("enum", "values"), ("anyOf", "one_of")):
            if keyword in schema:
                return kind
        for keyword, kind in (("oneOf", "one_of"), ("allOf", "all_of")):
            if keyword in schema:
                return kind
        named = schema.get("type")
        if named is None:
            hints = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
            named = next((kind for keyword, kind in hints.items() if keyword in schema), None)
        if isinstance(named, list) and named:
            return "types"
        if named not in ("object", "array", "string", "integer", "number", "boolean", "null"):
            raise ValueError(f"json_schema has the type {short(named)} in {where}; give one that JSON has.")
        return str(named)

    def _reference(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        name, part = take("$ref"), self._root
        if not isinstance(name, str) or not name.startswith("#"):
            raise ValueError(f"json_schema refers to {short(name)} in {where}, which is outside of it; put it into it.")
        if name in within:
            raise ValueError(
                f"json_schema has {short(name)} refer to itself, without an end; write out how deep it may be."
            )
        for step in name[1:].split("/")[1:]:
            part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
        if part is None:
            raise ValueError(f"json_schema refers to {short(name)} in {where}, which it does not have; mend it.")
        return self.regex(part, short(name), (*within, name))

    def _values(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        const, enum = take("const"), take("enum")
        values = [const] if enum is None else enum
        if not isinstance(values, list) or not values:
            raise ValueError(f"json_schema has the enum {short(values)} in {where}; give a list of values.")
        return "|".join(map(_literal, values))

    def _one_of(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        name = "anyOf" if take("anyOf") is not None else "oneOf"
        some = take(name)
        if not isinstance(some, list) or not some:
            raise ValueError(f"json_schema has the {name} {short(some)} in {where}; give a list of schemas.")
        return "|".join(self.regex(one, f"{where}, {name} {i}", within) for i, one in enumerate(some))

    def _all_of(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        some = take("allOf")
        if not isinstance(some, list) or len(some) != 1:
            raise ValueError(f"json_schema has an allOf of several in {where}, which is not kept here; join them.")
        return self.regex(some[0], where, within)

    def _types(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        return "|".join(self.regex({"type": one}, where, within) for one in take("type"))

    def _null(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        return "null"

    def _boolean(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        return "true|false"

    def _string(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        pattern, form = take("pattern"), take("format")
        least, most = _bounds(take, "minLength", "maxLength", where)
        if form is not None and form not in FORMATS:
            raise ValueError(
                f"json_schema has the format {short(form)} in {where}, and {', '.join(FORMATS)} are kept here; use a "
                "pattern, or leave it out."
            )
        if (pattern is not None) + (form is not None) + ((least, most) != (0, None)) > 1:
            raise ValueError(f"json_schema has more than one of pattern, format and lengths in {where}; keep one.")
        if form is not None:
            return f'"{FORMATS[form]}"'
        if pattern is None:
            return f'"{_times(INNER, least, most)}"'
        if not isinstance(pattern, str):
            raise ValueError(f"json_schema has the pattern {short(pattern)} in {where}; give a text.")
        body, begins, ends = unanchored(pattern)
        self.inner[f"the pattern {short(pattern)} of {where}"] = body
        return f'"{"" if begins else f"{INNER}*"}({body}){"" if ends else f"{INNER}*"}"'

    def _integer(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        low, high = take("minimum"), take("maximum")
        above, below = take("exclusiveMinimum"), take("exclusiveMaximum")
        if not all(bound is None or (isinstance(bound, int) and not isinstance(bound, bool))
                   for bound in (low, high, above, below)):  # fmt: skip
            raise ValueError(f"json_schema bounds an integer by what is none in {where}; round the bounds.")
        lows = [*([] if low is None else [low]), *([] if above is None else [above + 1])]
        highs = [*([] if high is None else [high]), *([] if below is None else [below - 1])]
        if not lows and not highs:
            return f"-?{INTEGER}"
        if lows and highs and 0 <= min(highs) - max(lows) < MOST_VALUES:
            return "|".join(map(escape, map(str, range(max(lows), min(highs) + 1))))
        if not highs and max(lows) in (0, 1):
            return "[1-9][0-9]*" if max(lows) else INTEGER
        raise ValueError(
            f"json_schema bounds an integer in {where} by {short([*lows, *highs])}, and what is kept here is minimum 0 "
            f"or 1 alone, or at most {MOST_VALUES} values; leave the bound out."
        )

    def _number(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        low = take("minimum")
        if low not in (None, 0):
            raise ValueError(f"json_schema has a number of minimum {short(low)} in {where}; use 0, or leave it out.")
        return f"{'' if low == 0 else '-?'}{INTEGER}{FRACTION}"

    def _array(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        first, items = take("prefixItems") or [], take("items")
        least, most = _bounds(take, "minItems", "maxItems", where)
        fixed = [self.regex(one, f"{where}, prefixItems {i}", within) for i, one in enumerate(first)]
        if fixed and (items not in (None, False) or least > len(fixed) or (most is not None and most < len(fixed))):
            raise ValueError(f"json_schema has prefixItems beside other items in {where}; keep one of them.")
        if fixed:
            return rf"\[{SPACE}{f'{SPACE},{SPACE}'.join(fixed)}{SPACE}\]"
        item = self.regex(True if items is None else items, f"the items of {where}", within)
        return rf"\[{SPACE}{_listed(item, least, most)}\]"

    def _object(self, take: Callable[[str], Any], where: str, within: tuple[str, ...]) -> str:
        properties, required = take("properties") or {}, take("required") or []
        others = take("additionalProperties")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError(f"json_schema has properties or required of another type in {where}; mend it.")
        lacking = [name for name in required if name not in properties]
        if lacking:
            raise ValueError(f"json_schema requires {short(lacking[0])} in {where} without describing it; add it.")
        if not properties:
            least, most = _bounds(take, "minProperties", "maxProperties", where)
            if others in (None, True) and (least, most) == (0, None):
                self.is_open = True
                return ANY_OBJECT
            if others is False:
                return rf"\{{{SPACE}\}}"
            value = self.regex(True if others is None else others, f"the properties of {where}", within)
            return rf"\{{{SPACE}{_listed(f'"{INNER}*"{SPACE}:{SPACE}{value}', least, most)}\}}"
        if isinstance(others, dict):
            raise ValueError(f"json_schema has additionalProperties beside properties in {where}; keep one of them.")
        pairs = {
            name: f"{_literal(name)}{SPACE}:{SPACE}" + self.regex(value, f"property {short(name)}", within)
            for name, value in properties.items()
        }
        return rf"\{{{SPACE}{_ordered(pairs, set(required))}\}}"


def _literal(value: Any) -> str:
    """An expression for one value."""
    comma = f"{SPACE},{SPACE}"
    if isinstance(value, list):
        return rf"\[{SPACE}{comma.join(map(_literal, value))}{SPACE}\]"
    if isinstance(value, dict):
        pairs = (f"{_literal(name)}{SPACE}:{SPACE}{_literal(one)}" for name, one in value.items())
        return rf"\{{{SPACE}{comma.join(pairs)}{SPACE}\}}"
    return escape(json.dumps(value, ensure_ascii=False))


def _bounds(take: Callable[[str], Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = take(low) or 0, take(high)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in (least, most or 0)) or (
        most is not None and most < least
    ):
        raise ValueError(f"json_schema has {low} {short(least)} and {high} {short(most)} in {where}; mend them.")
    return least, most


def _times(regex: str, least: int, most: int | None) -> str:
    return f"{regex}{'*' if (least, most) == (0, None) else f'{{{least},{"" if most is None else most}}}'}"


def _listed(item: str, least: int, most: int | None) -> str:
    """From `least` to `most` items with commas between them, and a space behind."""
    if most == 0:
        return ""
    some = f"{item}{_times(f'({SPACE},{SPACE}{item})', max(least - 1, 0), None if most is None else most - 1)}{SPACE}"
    return some if least else f"({some})?"


def _ordered(pairs: Mapping[str, str], required: set[str]) -> str:
    """The pairs in their order with commas between them, those that are not required perhaps left out."""
    comma = f"{SPACE},{SPACE}"
    names = list(pairs)

    def behind(place: int) -> str:
        return "".join(
            f"{comma}{pairs[name]}" if name in required else f"({comma}{pairs[name]})?" for name in names[place:]
        )

    first = next((i for i, name in enumerate(names) if name in required), None)
    if first is not None:
        before = "".join(f"({pairs[name]}{comma})?" for name in names[:first])
        return f"{before}{pairs[names[first]]}{behind(first + 1)}{SPACE}"
    return "(" + "|".join(f"{pairs[name]}{behind(i + 1)}{SPACE}" for i, name in enumerate(names)) + ")?"


# An expression in this module has one syntax in Python and in Rust, but for what users bring.
assert re.compile(INNER)
