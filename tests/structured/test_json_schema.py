"""JSON schemas as expressions: what an expression matches is JSON of the schema, and what cannot be kept is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from smcjax.structured.automaton_child import compiled
from smcjax.structured.byte_automata import Refusal
from smcjax.structured.json_schema import regex_of_schema, unanchored
from smcjax.structured.response_format import expression_of

NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}}
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
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [[1], ["a", 1]]),
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
]
REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": 3}, "bounds an integer in the schema by"),
    ({"type": "integer", "minimum": 0, "maximum": 100_000}, "bounds an integer"),
    ({"type": "integer", "minimum": 0.5}, "by what is none"),
    ({"type": "number", "minimum": 1}, "a number of minimum 1"),
    ({"type": "number", "multipleOf": 2}, "has 'multipleOf' in the schema, which is not kept here"),
    ({"type": "string", "format": "email"}, "has the format 'email'"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "more than one of pattern, format and lengths"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "has 'uniqueItems'"),
    ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "an allOf of several"),
    ({"not": {"type": "integer"}}, "has the type None in the schema"),
    ({"type": "integer", "not": {"const": 1}}, "has 'not' in the schema"),
    ({"type": "object", "patternProperties": {"a": True}, "properties": {"b": True}}, "has 'patternProperties'"),
    ({"type": "object", "properties": {"a": True}, "required": ["b"]}, "requires 'b' in the schema"),
    ({"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "null"}}, "beside properties"),
    ({"properties": {"a": {"type": "integer", "if": True}}}, "has 'if' in property 'a'"),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "has '#/\\$defs/node' refer to itself"),
    ({"$ref": "other.json"}, "which is outside of it"),
    ({"$ref": "#/nowhere"}, "which it does not have"),
    ({"type": "thing"}, "has the type 'thing'"),
    ({"enum": []}, "the enum \\[\\]"),
    ({"minLength": -1, "type": "string"}, "minLength -1"),
    (False, "has False as the schema"),
    ([1], "has \\[1\\] as the schema"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ACCEPTED, ids=lambda one: json.dumps(one)[:40])
def test_what_it_matches(schema: Any, good: list[Any], bad: list[Any]) -> None:
    regex, _, is_open = regex_of_schema(schema)
    assert not is_open
    for separators in ((",", ":"), (", ", ": ")):
        for value in good:
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            assert re.fullmatch(regex, text.replace("e-07", "E-7")), text
        for value in bad:
            assert not re.fullmatch(regex, json.dumps(value, ensure_ascii=False, separators=separators)), value


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda one: json.dumps(one)[:40])
def test_refusals(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        expression_of({"type": "json_schema", "json_schema": {"schema": schema}})
    assert "\n" not in str(caught.value)


def test_open_shapes_patterns_and_anchors() -> None:
    open_ones = [True, {}, {"type": "object"}, {"type": "array"}, {"properties": {"a": {}}}]
    assert all(regex_of_schema(schema)[2] for schema in open_ones)
    _, inner, _ = regex_of_schema({"properties": {"a": {"type": "string", "pattern": "^x$"}}})
    assert inner == {"the pattern '^x$' of property 'a'": "x"}
    assert unanchored("^a$") == ("a", True, True)
    assert unanchored(r"a\$") == (r"a\$", False, False)
    assert unanchored(r"a\\$") == (r"a\\", False, True)


def test_a_pattern_that_leaves_its_brackets() -> None:
    """As part of the schema's expression it would let answers through that are no JSON."""
    asked = expression_of({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": '^a")|(b$'}}})
    assert asked is not None
    request = {"grammar": "", "depth": 0, "most_states": 100, "most_cells": 1000, "mend": "simplify it"}
    request |= {"regex": asked.regex, "free_of_quotes": dict(asked.inner)}
    with pytest.raises(Refusal, match=r"^has the pattern '.*' of the schema, which is no .* unbalanced parenthesis"):
        compiled(request, [bytes([byte]) for byte in range(128)])


def test_references_that_multiply() -> None:
    """Twenty definitions, each of two of the next: a million parts."""
    defs: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d20": {"type": "null"}}}
    with pytest.raises(ValueError, match="has over 10000 parts"):
        regex_of_schema(schema)


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
        ({"type": "choice", "choice": ["x" * 300_000]}, "an expression of 300000 characters"),
    ],
)
def test_formats_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expression_of(given)
