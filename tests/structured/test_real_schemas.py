"""90 schemas of the kinds that clients send: whatever is drawn from their automata, two libraries' validators take.

`schemas.jsonl` has a schema a line: its name, its kind, and an answer that it must be possible to give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from smcjax.model.files.hub import packaged_model
from smcjax.tokenizer.tokenizer import Tokenizer
from tests import tokenizers_like
from tests.structured.answers import Compiler, Judge, accepts, drawn

LINES = Path(__file__).with_name("schemas.jsonl").read_text(encoding="utf8").splitlines()
SCHEMAS = {one["name"]: one for one in map(json.loads, LINES)}
REFUSED = {  # the names of those that are refused, and what each refusal names
    "set-field": "uniqueItems beside items that no enum lists",
    "contains": "'contains' in the schema",
    "even": r"the multipleOf 0\.01 in property 'cents'",
}
NO_ASSERTION = {"int32", "int64", "double", "float", "password"}  # formats that say nothing about which texts are right


@pytest.fixture(scope="module")
def bytewise() -> Compiler:
    """Tokens of single bytes for the most part: any text can be spelled, and none takes long to be compiled."""
    return Compiler(tokenizers_like.byte_level())


@pytest.fixture(scope="module")
def smollm2() -> Compiler:
    tokenizer = Tokenizer.load(packaged_model("smollm2"))
    assert tokenizer is not None
    return Compiler(tokenizer)


def formats(schema: Any) -> Iterator[str]:
    """The formats that are named anywhere in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("format"), str):
            yield schema["format"]
        for inner in schema.values():
            yield from formats(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from formats(inner)


def test_the_set() -> None:
    """As many as promised, each format known to the library that judges, and at most ten refused."""
    assert len(SCHEMAS) == 90
    assert set(REFUSED) <= set(SCHEMAS)
    assert len(REFUSED) <= 10
    named = {one for schema in SCHEMAS.values() for one in formats(schema["schema"])}
    checked = set(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    assert {"email", "uri", "hostname", "ipv4", "uuid", "date", "date-time", "time"} <= named & checked
    assert named - checked <= NO_ASSERTION
    for one in SCHEMAS.values():
        assert not Judge(one["schema"]).objection(json.dumps(one["answer"]).encode()), one["name"]


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in REFUSED])
def test_answers_are_of_their_schema(name: str, bytewise: Compiler) -> None:
    schema, answer = SCHEMAS[name]["schema"], SCHEMAS[name]["answer"]
    automaton, judge = bytewise.of(schema), Judge(schema)
    for text in drawn(automaton, bytewise.tokens, 30, seed=1):
        assert not judge.objection(text), text
    for separators in ((",", ":"), (", ", ": ")):
        assert accepts(automaton, json.dumps(answer, ensure_ascii=False, separators=separators))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str, bytewise: Compiler) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        bytewise.of(SCHEMAS[name]["schema"])
    assert str(caught.value).startswith("response_format")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["invoice", "menu"])
def test_answers_in_real_tokens(name: str, smollm2: Compiler) -> None:
    """SmolLM2's 49,152 tokens, many of which reach over the ends of strings and numbers."""
    schema = SCHEMAS[name]["schema"]
    automaton, judge = smollm2.of(schema), Judge(schema)
    for text in drawn(automaton, smollm2.tokens, 30, seed=1):
        assert not judge.objection(text), text


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
PLANTED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # dropped of a schema, and the rest
    ({"minimum": 3}, INTEGER),
    ({"maximum": 30}, INTEGER),
    ({"exclusiveMinimum": 1}, {**INTEGER, "minimum": 1, "maximum": 9}),
    ({"multipleOf": 3}, INTEGER),
    ({"minLength": 2}, TEXT),
    ({"maxLength": 8}, TEXT),
    ({"pattern": "^[a-z]+$"}, {**TEXT, "pattern": "^[a-z0-9]+$"}),
    ({"pattern": r"^\d{2}$"}, {**TEXT, "pattern": "^[0-9٣]{2}$"}),
    ({"format": "date"}, {**TEXT, "pattern": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"}),
    ({"format": "email"}, TEXT),
    ({"format": "uri"}, TEXT),
    ({"format": "hostname"}, TEXT),
    ({"format": "ipv4"}, {**TEXT, "pattern": r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"}),
    ({"enum": ["low", "high"]}, {"enum": ["low", "high", None]}),
    ({"minItems": 1}, {"type": "array", "items": INTEGER}),
    ({"maxItems": 2}, {"type": "array", "items": INTEGER}),
    ({"uniqueItems": True}, {"type": "array", "items": {**INTEGER, "minimum": 0, "maximum": 9}}),
    ({"required": ["a"]}, {"type": "object", "properties": {"a": INTEGER}}),
    ({"minProperties": 2}, {"type": "object", "additionalProperties": INTEGER}),
    ({"minProperties": 2}, {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}),
    ({"patternProperties": {"[a-z]": INTEGER}}, {"type": "object", "additionalProperties": TEXT}),
    ({"propertyNames": {"maxLength": 3}}, {"type": "object", "additionalProperties": TEXT}),
    ({"oneOf": [{"maximum": 5}, {"minimum": 3}]}, INTEGER),
    ({"not": {"const": "a"}}, {"enum": ["a", "b"]}),
]


@pytest.mark.parametrize(("dropped", "rest"), PLANTED, ids=lambda one: json.dumps(one)[:40])
def test_a_keyword_that_is_dropped_is_seen(dropped: dict[str, Any], rest: dict[str, Any], bytewise: Compiler) -> None:
    """The control: draws and judges find each of these wrong automata."""
    judge = Judge({**rest, **dropped} if "enum" not in dropped else {**TEXT, **dropped})
    assert any(judge.objection(text) for text in drawn(bytewise.of(rest), bytewise.tokens, 100, seed=1))


def test_draws_are_many_and_of_every_kind(bytewise: Compiler) -> None:
    """Members that may be there are and are not, and texts are short and long."""
    automaton = bytewise.of(SCHEMAS["deprecated-field"]["schema"])
    texts = drawn(automaton, bytewise.tokens, 100, seed=1)
    assert len(set(texts)) > 90
    members = {frozenset(json.loads(text)) for text in texts}
    assert {frozenset({"uid"}), frozenset({"id", "uid", "xml"})} <= members
    assert np.ptp([len(text) for text in texts]) > 60
