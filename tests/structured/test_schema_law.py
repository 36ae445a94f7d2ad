"""The law of schemas, for random ones: each is refused by a sentence, or whatever is drawn from its automaton is valid.

Keywords, names and values are few, so that they meet, contradict and overlap each other.
"""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from smcjax.structured.automaton import Automaton
from smcjax.structured.byte_automata import Refusal
from tests import tokenizers_like
from tests.structured.answers import Compiler, Judge, accepts, drawn
from tests.structured.test_automaton import accepts as accepts_bytes
from tests.structured.test_json_schema import made

NAMES = ("a", "b", "ab", 'é"')
NUMBERS = (0, 1, -1, 3, 10, 120, 0.5, -2.5, 7.25)
TEXTS = ("", "a", "b", "ab", "a1", "12", "é", "🎈", "Ab c", 'q"\\', "2024-02-29", "a@b.co", "10.0.0.1", "12:30:00Z")
SCALARS = (None, True, False, *NUMBERS, *TEXTS)
PATTERNS = ("^a", "b$", "^[a-z]+$", r"^\d{2}$", r"\w", "^(a|b1?)*$", "^.{1,2}$", r"^\S+@\S+$", "[^a]")
FORMATS = ("date", "date-time", "time", "email", "ipv4", "uuid", "hostname", "uri", "int32")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
REFERENCES = ("#", "#/$defs/one", "#/$defs/two")


def _some(keywords: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """At most so many of the keywords."""
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=most, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Keywords that are about values of one type, beside that type or without it."""
    number, count, name = st.sampled_from(NUMBERS), st.integers(0, 3), st.sampled_from(NAMES)
    names = st.lists(name, max_size=2, unique=True)
    of_type = {
        "number": _some(
            dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), number)
            | {"multipleOf": st.sampled_from((1, 2, 5, 0.5))},
            3,
        ),
        "string": _some(
            {"minLength": count, "maxLength": st.integers(0, 12)}
            | {"pattern": st.sampled_from(PATTERNS), "format": st.sampled_from(FORMATS)},
            3,
        ),
        "array": _some(
            {"items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2), "minItems": count}
            | {"maxItems": count, "uniqueItems": st.booleans()},
            3,
        ),
        "object": _some(
            {
                "properties": st.dictionaries(name, inner, min_size=1, max_size=3),
                "required": names,
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(PATTERNS[:5]), inner, min_size=1, max_size=2),
                "propertyNames": _some({"pattern": st.sampled_from(PATTERNS[:5]), "maxLength": count}, 2),
                "minProperties": count,
                "maxProperties": count,
                "dependentRequired": st.dictionaries(
                    name, st.lists(name, max_size=2, unique=True), min_size=1, max_size=1
                ),
            },
            4,
        ),
        "null": st.just({}),
        "boolean": st.just({}),
    }
    of_type["integer"] = of_type["number"]
    typed = st.sampled_from(TYPES).flatmap(lambda kind: of_type[kind].map(lambda more: {"type": kind, **more}))
    untyped = st.sampled_from(("number", "string", "array", "object")).flatmap(of_type.__getitem__)
    types = st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds})
    return st.one_of(typed, typed, untyped, st.tuples(types, untyped).map(lambda both: {**both[0], **both[1]}))


def _joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Keywords that join schemas, or list values."""
    several = st.lists(inner, min_size=1, max_size=3)
    value = st.one_of(st.sampled_from(SCALARS), st.sampled_from(([], [1, "a"], {}, {"a": 1})))
    values = st.lists(value, min_size=1, max_size=4, unique_by=repr)
    return _some(
        {"anyOf": several, "oneOf": several, "allOf": several, "not": inner, "if": inner, "then": inner, "else": inner}
        | {
            "enum": values,
            "const": value,
            "$ref": st.sampled_from(REFERENCES),
        },
        2,
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Objects of keywords, within each other, with definitions that may refer to each other and to the whole."""
    part = st.one_of(st.booleans(), _keywords(st.just(True)), _joined(_keywords(st.just(True))))
    for _ in range(2):
        both = st.tuples(_keywords(part), st.one_of(st.just({}), _joined(part)))
        part = st.one_of(_keywords(part), both.map(lambda two: {**two[0], **two[1]}), _joined(part))
    return st.tuples(part, part, part).map(lambda all: {**all[0], "$defs": {"one": all[1], "two": all[2]}})


def law(compiler: Compiler, schema: Any, read_as: Any) -> tuple[str, Automaton | None]:
    """What breaks the law where `schema` was asked for and an automaton of `read_as` was made; and that automaton."""
    try:
        automaton = compiler.of(read_as)
    except ValueError as error:
        said = str(error)
        is_a_sentence = said.startswith("response_format") and said.isprintable() and said.endswith(".")
        return "" if is_a_sentence else f"refused by {said!r}", None
    judge = Judge(schema)
    for text in drawn(automaton, compiler.tokens, 40, seed=1):
        if objection := judge.objection(text):
            return f"{text!r}: {objection}", automaton
    return "", automaton


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(tokenizers_like.byte_level())


@pytest.mark.slow
def test_answers_of_random_schemas(compiler: Compiler) -> None:
    """And whatever plain value such a schema with a type takes, its automaton takes too."""
    taken = []

    @settings(max_examples=30, database=None)
    @hypothesis.given(schemas())
    def every(schema: dict[str, Any]) -> None:
        broken, automaton = law(compiler, schema, schema)
        assert not broken
        taken.append(automaton is not None)
        if automaton is not None and "type" in schema:
            judge = Judge(schema)
            for value in SCALARS:
                text = json.dumps(value, ensure_ascii=False)
                assert accepts(automaton, text) == (not judge.objection(text.encode())), text

    every()
    assert sum(taken) > len(taken) / 3, "most are refused: the law says little"


@st.composite
def _between(draw: st.DrawFn) -> dict[str, int]:
    """Bounds that at least one whole number is between."""
    low, size = draw(st.integers(-3, 10)), draw(st.integers(0, 6))
    above, below = draw(st.booleans()), draw(st.booleans())
    return {
        "exclusiveMinimum" if above else "minimum": low - above,
        "exclusiveMaximum" if below else "maximum": low + size + below,
    }


@settings(max_examples=200, database=None)
@hypothesis.given(
    st.fixed_dictionaries(
        {"type": st.just("integer")},
        optional={name: st.lists(_between(), min_size=1, max_size=3) for name in ("allOf", "anyOf", "oneOf")}
        | {name: _between() for name in ("not", "if", "then", "else")},
    )
)
def test_whole_numbers_by_enumeration(schema: dict[str, Any]) -> None:
    """Of schemas of bounds exactly the right numbers are said, and none is refused that has some."""
    right = {value for value in range(-20, 30) if jsonschema.Draft202012Validator(schema).is_valid(value)}
    try:
        automaton = made(schema)
    except Refusal:
        assert not right
        return
    assert {value for value in range(-20, 30) if accepts_bytes(automaton, str(value))} == right


@pytest.mark.parametrize("keyword", ["minimum", "enum", "maxLength"])
def test_a_reader_that_drops_a_keyword_is_found(keyword: str, compiler: Compiler) -> None:
    """The control: among random schemas are some that show it."""

    def without(schema: Any) -> Any:
        if isinstance(schema, dict):
            return {name: without(one) for name, one in schema.items() if name != keyword}
        return [without(one) for one in schema] if isinstance(schema, list) else schema

    def shows(schema: Any) -> bool:
        read_as = without(schema)
        return read_as != schema and bool(law(compiler, schema, read_as)[0])

    generate = settings(max_examples=100, database=None, phases=[hypothesis.Phase.generate])
    hypothesis.find(schemas(), shows, settings=generate)
