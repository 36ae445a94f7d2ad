"""JSON schemas as automata: what one accepts is JSON of the schema, and what cannot be kept is refused."""

from __future__ import annotations

import calendar
import datetime
import json
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from smcjax.structured.automaton_child import byte_automaton
from smcjax.structured.byte_automata import Refusal
from smcjax.structured.grammar import weight_of_list
from smcjax.structured.response_format import JSON_DEPTH, expression_of
from tests.structured.test_automaton import accepts

NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}}
LIST = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
ACCEPTED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -12, 345], [1.5, "1", None]),
    ({"type": "integer", "minimum": 1}, [1, 90], [0, -1]),
    ({"type": "integer", "minimum": -2, "exclusiveMaximum": 12}, [-2, 0, 11], [-3, 12, 111]),
    ({"type": "number", "minimum": 0}, [0, 2.5, 1e-7], [-1.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語", '"\\'], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[A-Z]{2}$"}, ["AB"], ["ABC", "ab"]),
    ({"type": "string", "pattern": "b+"}, ["b", "abbc", '"b'], ["ac", ""]),
    ({"type": "string", "format": "date"}, ["2026-11-26"], ["2026-13-01", "26-11-26"]),
    (
        {"type": "string", "format": "date-time"},
        ["2026-11-26T07:01:21Z", "2026-11-26T07:01:21.5+01:00"],
        ["2026-11-26"],
    ),
    ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0"]),
    ({"enum": ['a"é\n.', 1, None, [1, "x"]]}, ['a"é\n.', 1, None, [1, "x"]], ["a", 11]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    ({"type": ["string", "null"]}, ["x", None], [1]),
    ({"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}}]}, [True, [], [None, None]], [[1]]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[1], [1] * 4],
    ),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, [[]], [[1]]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        [[1, "a"], [1], []],
        [[1, "a", 2], ["a", 1]],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
    ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1}, [{"a": None}], [{}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    (
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
        [{}, {"a": None}, {"b": None}, {"a": None, "c": None}, {"a": None, "b": None, "c": None}],
        [{"d": None}, {"a": 1}],
    ),
    (
        {"properties": {"a": {"type": "null"}, 'b"': {"type": "null"}, "c": {"type": "null"}}, "required": ['b"']},
        [{'b"': None}, {"a": None, 'b"': None}, {'b"': None, "c": None}, {"a": None, 'b"': None, "c": None}],
        [{}, {"a": None}, {"a": None, "c": None}],
    ),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b~1"}]}, "b/": {"const": 1}},
        },
        [None, 1],
        [2],
    ),
    ({"title": "T", "description": "d", "default": 1, "allOf": [{"type": "integer"}]}, [1], ["1"]),
    # Keywords that stand beside each other hold together.
    ({"type": "string", "enum": ["low", None]}, ["low"], [None]),
    ({"type": "integer", "const": 2, "enum": [1, 2, "2"]}, [2], [1, "2"]),
    ({"enum": [1, True, 3, None], "anyOf": [{"minimum": 2}, {"type": "boolean"}]}, [3, True, None], [1]),
    ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 2}}}, [2, 3], [1, 4]),
    ({"type": ["integer", "string"], "oneOf": [{"type": "string"}, {"minimum": 5}]}, [5], ["a", 4]),
    ({"allOf": [{"type": "integer"}, {"type": "number", "maximum": 3}], "minimum": 1}, [1, 3], [0, 4, 1.5]),
    (
        {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": WHOLE, "b": NULL}, "required": ["b"]}]},
        [{"b": None}, {"a": 1, "b": None}],
        [{"a": 0, "b": None}, {"a": 1.5, "b": None}, {"a": 1}],
    ),
    (
        {"type": "object", "properties": {"a": NULL, "b": NULL}, "oneOf": EITHER},
        [{"a": None}, {"b": None}],
        [{}, {"a": None, "b": None}],
    ),
    (
        {"type": "object", "properties": {"a": NULL, "b": NULL}, "anyOf": EITHER},
        [{"a": None}, {"a": None, "b": None}],
        [{}],
    ),
    ({"type": "string", "not": {"enum": ["", "no"]}}, ["n", "nope"], ["", "no"]),
    ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6, -9], [3, 5]),
    (
        {
            "properties": {"c": {"enum": ["US", "NL"]}, "z": TEXT},
            "required": ["c", "z"],
            "if": {"properties": {"c": {"const": "US"}}},
            "then": {"properties": {"z": {"maxLength": 1}}},
        },
        [{"c": "US", "z": "1"}, {"c": "NL", "z": "123"}],
        [{"c": "US", "z": "123"}],
    ),
    (
        {"properties": {"a": NULL, "b": NULL}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": None}, {"a": None, "b": None}],
        [{"a": None}],
    ),
    # Counts of properties, of which none is said twice.
    ({"properties": {"a": NULL, "b": NULL}, "minProperties": 1}, [{"a": None}, {"b": None}], [{}]),
    (
        {"properties": {"a": NULL, "b": NULL, "c": NULL}, "maxProperties": 1},
        [{}, {"c": None}],
        [{"a": None, "c": None}],
    ),
    ({"type": "object", "additionalProperties": NULL, "maxProperties": 1}, [{}, {"x": None}], [{"x": None, "y": None}]),
    (
        {"properties": {"a": WHOLE}, "additionalProperties": NULL},
        [{"a": 1}, {"a": 1, "b": None}, {"b": None}],
        [{"a": None}, {"b": None, "a": None}],
    ),
    (
        {"properties": {"a": NULL}, "required": ["b"], "additionalProperties": WHOLE},
        [{"a": None, "b": 1}, {"b": 1}],
        [{"a": None}, {"b": "x"}],
    ),
    (
        {"type": "object", "patternProperties": {"^x_": WHOLE}, "additionalProperties": False},
        [{}, {"x_1": 2}],
        [{"y": 2}, {"x_": "a"}],
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": NULL},
        [{"ab": None}],
        [{"abc": None}],
    ),
    # Numbers.
    ({"type": "integer", "minimum": 18}, [18, 99, 100, 4711], [17, 0, -18, 1.5]),
    ({"type": "integer", "maximum": -7}, [-7, -12, -100], [-6, 0, 7]),
    ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3}, [1, 2], [0, 3]),
    ({"type": "integer", "minimum": -12, "maximum": 105}, [-12, -3, 0, 99, 105], [-13, 106, 1000]),
    ({"type": "number", "minimum": 1.25}, [1.25, 1.3, 2, 10.5], [1.2, 1, 0.5, -2]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001, 0.99], [0, 0.0, 1, 1.0, -0.5]),
    ({"type": "number", "minimum": 5, "exclusiveMinimum": True}, [5.5, 6], [5, 5.0]),
    ({"type": "number", "minimum": -1.5, "maximum": -0.25}, [-1.5, -1, -0.25, -0.3], [-0.2, -1.6, 0, 1]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 700], [1, 6, -8]),
    ({"type": "number", "multipleOf": 0.5, "minimum": 1}, [1, 1.5, 20.0], [0.5, 1.25]),
    ({"type": "number", "multipleOf": 0.25}, [-2.75, 123456789012345], [1.1, 0.125, 10**16]),
    ({"anyOf": [{"type": "integer", "multipleOf": 3, "minimum": 10**20}, NULL]}, [None], [3 * 10**20, 3]),
    ({"type": "integer", "format": "int32"}, [2147483647, -2147483648, 0], [2147483648]),
    # Strings.
    ({"type": "string", "minLength": 17}, ["a" * 17, "é" * 20], ["a" * 16]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["abcd", "A", ""]),
    ({"type": "string", "pattern": "^.{2}$"}, ['"\\', "é\t", "ab"], ["a\n", "abc"]),
    ({"type": "string", "pattern": r"^\d{3}$"}, ["345"], ["٣٤٥", "34"]),
    ({"type": "string", "pattern": r"^\w\s\D$"}, ["a b", "_\u00a0é"], ["é a", "a 1", "a ٣"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "a"], ["x", "bx"]),
    ({"type": "string", "pattern": r"^(?=.*[A-Z])(?!.*\s).{2,}$"}, ["aB", "Bxx"], ["ab", "A b", "A"]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "0001-01-01"],
        ["2023-02-29", "1900-02-29", "0000-01-01"],
    ),
    ({"type": "string", "format": "email"}, ["a.b@x.org"], ["a@", "a..b@x.org", "a b@x.org"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["1.2.3.256", "01.2.3.4"]),
    (
        {"type": "string", "format": "ipv6"},
        ["::1", "2001:db8::7:0", "1:2:3:4:5:6:7:8"],
        ["1::2::3", "1:2:3:4:5:6:7:8:9"],
    ),
    (
        {"type": "string", "format": "uri"},
        ["https://example.org/a?b=1#c", "mailto:a@b.c"],
        ["example.org", "http://a b"],
    ),
    ({"type": "string", "format": "duration"}, ["P1Y2M3DT4H5M6S", "PT1S", "P3W"], ["P", "1D", "P1DT"]),
    ({"type": "string", "nullable": True, "x-order": 1, "example": "a"}, ["a"], [None]),
    # Arrays.
    ({"type": ["array", "null"], "items": WHOLE}, [None, [], [1, 2]], [["a"]]),
    ({"prefixItems": [WHOLE], "items": NULL, "minItems": 2}, [[1, None], [1, None, None]], [[1], [1, 1]]),
    ({"type": "array", "items": {"enum": [1, 2, 1]}, "uniqueItems": True}, [[], [1, 2], [2]], [[1, 1]]),
    ({"type": "array", "items": NULL, "uniqueItems": False}, [[None, None]], [[1]]),
    # Schemas that need themselves, to a depth.
    (LIST, [{}, {"n": {"n": {"n": {}}}}], [{"n": {"n": {"n": {"n": {"n": {}}}}}}, {"n": 1}]),
    ({"oneOf": [{**WHOLE, "minimum": i, "maximum": i + 50} for i in range(3)]}, [0, 52], [1, 50, 51, 53]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1}, [1], [0, 2]),
    ({"type": "integer", "enum": [1.0, -0.0, 2.5]}, [1, 0], [1.0, 2.5]),
    ({"type": "number", "minimum": 1e308, "maximum": 1e308}, [int(1e308)], [10**308]),  # which is less than that double
    ({"type": "string", "pattern": r"^\S$"}, ["a"], [" ", "\ufeff"]),
]
REFUSED: list[tuple[Any, str]] = [
    ({"type": "number", "multipleOf": 0.01}, "the multipleOf 0.01 in the schema; of which readers do not agree"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds of numbers in the schema that leave none"),
    ({"type": "integer", "minimum": "3"}, "has the minimum '3' in the schema; give a number"),
    ({"type": "string", "format": "phone"}, "has the format 'phone' in the schema, and date, time"),
    ({"type": "array", "items": WHOLE, "uniqueItems": True}, "has uniqueItems beside items that no enum lists"),
    ({"type": "array", "contains": WHOLE}, "has 'contains' in the schema, which is not kept here; leave it out"),
    ({"properties": {"a": {"type": "integer", "minimun": 1}}}, "has 'minimun' in property 'a'"),
    (
        {"type": "object", "additionalProperties": NULL, "minProperties": 2},
        "has minProperties 2 of names that may be said twice",
    ),
    (
        {"type": "object", "properties": {"a": True}, "required": ["b"], "additionalProperties": False},
        "matches no text",
    ),
    ({"type": "integer", "enum": ["a", None]}, "matches no text"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "matches no text"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}], "minimum": 0, "type": "integer"}, "matches no text"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, NULL]}}},
        "refer to itself, with nothing in between",
    ),
    ({"$ref": "#"}, "has '#' refer to itself alone"),
    (
        {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}, "$ref": "#/$defs/n"},
        "matches no text",
    ),
    ({"$ref": "other.json"}, "which is outside of it"),
    ({"$ref": "#/nowhere"}, "which it does not have"),
    (
        {"properties": {"a": {"$id": "http://x/y", "$ref": "#/$defs/b", "$defs": {"b": NULL}}}, "$defs": {"b": WHOLE}},
        r"has the \$id 'http://x/y' within it, below which references mean",
    ),
    ({"type": "thing"}, "has the type 'thing'"),
    ({"enum": []}, "the enum \\[\\]"),
    ({"minLength": -1, "type": "string"}, "the minLength -1"),
    (False, "matches no text"),
    ([1], "has \\[1\\] as the schema"),
    ({"type": "string", "pattern": '^a")|(b$'}, "the pattern .* in the schema, which is no .* unbalanced"),
    ({"type": "string", "pattern": r"\bfoo"}, "an anchor in it looks at what is beside it"),
    ({"type": "string", "pattern": r"(a)\1"}, "back-references"),
    ({"type": "string", "pattern": r"\Aa"}, "the escape .* is not known to ECMA-262"),
    ({"type": "string", "pattern": "x", "maxLength": 0}, "has strings in the schema of which there are none"),
]
LARGE: dict[str, Any] = {
    "properties": {
        "properties": {f"p{i}": {"type": "integer", "minimum": 0, "maximum": 10**i % 9999} for i in range(4000)}
    },
    "doubling": {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"required": ["a", "b"], "properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "ab"}}
            for i in range(30)
        }
        | {"d30": NULL},
    },
    "alternatives": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)} | {"d20": NULL},
    },
    "length": {"type": "string", "maxLength": 10**9},
    "items": {"type": "array", "items": NULL, "maxItems": 10**9},
    "together": {"allOf": [{"anyOf": [{"properties": {f"{name}{i}": NULL}} for name in "ab"]} for i in range(40)]},
    "pattern": {"type": "string", "pattern": "^(a{1000}b){1000}$"},
}


def made(schema: Any) -> tuple[Any, Any]:
    """The automaton of a schema."""
    return byte_automaton("json_schema", json.dumps(schema), JSON_DEPTH - 1, 32_000)


@pytest.mark.parametrize(("schema", "good", "bad"), ACCEPTED, ids=lambda one: json.dumps(one)[:40])
def test_what_it_accepts(schema: Any, good: list[Any], bad: list[Any]) -> None:
    automaton = made(schema)
    for separators in ((",", ":"), (", ", ": ")):
        for value in good:
            assert accepts(automaton, json.dumps(value, ensure_ascii=False, separators=separators)), value
        for value in bad:
            assert not accepts(automaton, json.dumps(value, ensure_ascii=False, separators=separators)), value


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda one: json.dumps(one)[:40])
def test_refusals(schema: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        made(schema)
    assert str(caught.value).startswith("has a JSON schema that ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LARGE)
def test_sizes_are_refused_before_anything_is_built(name: str) -> None:
    begin = time.process_time()
    with pytest.raises(Refusal, match="over"):
        made(LARGE[name])
    assert time.process_time() - begin < 1


def calls_of(work: Callable[[], object]) -> int:
    """The calls of Python functions that a piece of work takes."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("required", [False, True])
def test_too_many_properties_are_refused_before_they_are_read(required: bool) -> None:
    """Each took over 500 calls, so 2,000 took 1.9 s; of required ones it is first asked whether there are values."""
    names = [f"p{i}" for i in range(4000 if required else 2000)]
    schema = {
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in names},
        "required": names if required else [],
    }

    def refused() -> None:
        with pytest.raises(Refusal, match="has a JSON schema that has an automaton of over 32000 states"):
            made(schema)

    assert calls_of(refused) < 150 * len(names)


def test_properties_that_are_never_there_are_not_counted() -> None:
    """Properties of the schema `false` do not count, and between required ones only those that may come next do."""
    never = {f"p{i}": False for i in range(2000)}
    assert accepts(made({"properties": {**never, "a": NULL}}), '{"a":null}')
    assert weight_of_list(1, (False,) * 2000) > 32_000
    assert weight_of_list(1, (False, True) * 2000) < 1000


def test_half_of_a_surrogate_pair() -> None:
    with pytest.raises(Refusal, match="has half of a surrogate pair, which no text has; mend it"):
        made({"properties": {"\ud800": NULL}})
    with pytest.raises(Refusal, match="matches no text"):
        made({"const": "\ud800"})


def test_many_properties() -> None:
    """200 that may be left out, of 12 kB, took 1.9 GB when each way to leave some out was written."""
    begin = time.process_time()
    automaton = made(
        {"properties": {f"p{i}": {"type": "integer", "minimum": 0, "maximum": 1000 + i} for i in range(200)}}
    )
    assert time.process_time() - begin < 5
    assert len(automaton[0]) < 5000
    assert accepts(automaton, '{"p3":1003,"p17":0,"p199":7}')
    assert not accepts(automaton, '{"p17":0,"p3":1}')


def test_every_day_of_the_calendar() -> None:
    automaton = made({"type": "string", "format": "date"})
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in range(33):
                try:
                    datetime.date(year, month, day)
                    there = True
                except ValueError:
                    there = False
                assert accepts(automaton, f'"{year:04}-{month:02}-{day:02}"') == there
    leap = {year for year in range(1, 10_000) if accepts(automaton, f'"{year:04}-02-29"')}
    assert leap == {year for year in range(1, 10_000) if calendar.isleap(year)}


@pytest.mark.parametrize(
    "bounds", [(-1.25, 0.5), (0.07, 13), (-3, -0.001), (None, 2.5), (99.5, None), (0.123, 0.125), (0, 0)]
)
@pytest.mark.parametrize("strict", [False, True])
def test_numbers_between_bounds(bounds: tuple[float | None, float | None], strict: bool) -> None:
    """Of a grid of decimals, exactly those between the bounds are said."""
    low, high = bounds
    if strict and low == high:
        return
    names = ("exclusiveMinimum", "exclusiveMaximum") if strict else ("minimum", "maximum")
    automaton = made({"type": "number"} | {name: b for name, b in zip(names, bounds, strict=True) if b is not None})
    values = [i / 1000 for i in range(-3100, 3100)] + [i / 10 for i in range(-200, 2000)]
    for value in values:
        wants = (low is None or value > low or (value == low and not strict)) and (
            high is None or value < high or (value == high and not strict)
        )
        text = f"{value:.3f}"
        if value or not text.startswith("-"):
            assert accepts(automaton, text) == wants, text
            assert accepts(automaton, text.rstrip("0").rstrip(".")) == wants, text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "json_schema", "json_schema": {"schema": '{"type": "integer"}'}}, "holds its schema as text"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": float("nan")}}}, "no JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}, "must be a mapping with a 'schema'"),
        ({"type": "choice", "choice": []}, "choice must be a list of texts"),
        ({"type": "regex", "regex": 1}, "regex must be a text"),
        ({"type": "lark_grammar"}, "what is known here is text, json_object, json_schema, regex, choice, grammar; use"),
        ({"type": "xml"}, "what is known here is text, json_object"),
        ({"type": "choice", "choice": ["x" * 300_000]}, "response_format has 3"),
    ],
)
def test_formats_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expression_of(given)
