"""Answers of a given form over HTTP, by OpenAI's client: in its words and in vLLM's, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.server.conftest import EXACT_NAME, SMC_NAME

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
GRAMMAR = 'start: "(" start ")" | "x" | "y"'
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("model", [SMC_NAME, EXACT_NAME])
def test_a_schema_by_openais_own_field(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, seed=1, n=2, response_format=form, extra_body={"smc": {}}
    )
    for choice in reply.choices:
        value = json.loads(choice.message.content or "")
        assert value.keys() == {"a", "b"}
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "y")
    smc: Any = reply.model_extra["smc"] if reply.model_extra else None
    assert smc["law"] == ("given the form" if model == SMC_NAME else "locally masked")
    if model == SMC_NAME:
        assert all(one["log_evidence"] < -5 for one in smc["choices"])


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": json.dumps({"type": "null"})}, "null"),
        ({"structured_outputs": {"regex": "[xyz]+!"}}, "[xyz]+!"),
        ({"structured_outputs": {"json": {"const": 1}, "regex": None}}, "1"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "regex", "regex": "^a|b$"}}, "a|b"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
        ({"guided_grammar": GRAMMAR}, r"(\(){0,4}[xy](\)){0,4}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" root | [yz]'}}, "x*[yz]"),
        ({"response_format": {"type": "grammar", "grammar": GRAMMAR, "max_depth": 1}}, r"[xy]|\([xy]\)"),
    ],
)
def test_vllms_fields(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    """In completions, streamed and whole alike."""
    fields: Any = {"model": SMC_NAME, "prompt": "ab", "seed": 3, "extra_body": extra}
    whole = client.completions.create(**fields).choices[0].text
    assert re.fullmatch(pattern, whole)
    with client.completions.create(**fields, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == whole
