"""Answers of a given form over HTTP, by OpenAI's client: in its words and in vLLM's, whole and streamed."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pydantic
import pytest

from smcjax.server.requests.forms import MAX_FORMS
from smcjax.structured import automaton
from tests.server.conftest import EXACT_NAME, SMC_NAME, Running
from tests.server.test_errors import told

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
GRAMMAR = 'start: "(" start ")" | "x" | "y"'
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.slow
def test_a_schema_by_openais_own_field(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model=SMC_NAME, messages=MESSAGES, max_tokens=24, seed=1, n=2, response_format=form, extra_body={"smc": {}}
    )
    for choice in reply.choices:
        value = json.loads(choice.message.content or "")
        assert value.keys() == {"a", "b"}
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "y")
    smc: Any = reply.model_extra["smc"] if reply.model_extra else None
    assert smc["law"] == "given the form"
    assert all(one["log_evidence"] < -5 for one in smc["choices"])


class Thing(pydantic.BaseModel):
    """A model whose schema `parse` sends, and whose instance it makes of the answer."""

    a: bool


@pytest.mark.slow
def test_openais_parse_takes_an_answer_that_ends_at_the_cap(client: openai.OpenAI) -> None:
    """`parse` raises where an answer is cut ("length"); one that the cap has made end is whole ("stop")."""
    used = []
    for most in (10, 11, 12):  # the shortest answer has ten tokens of a byte each
        reply = client.chat.completions.parse(
            model=EXACT_NAME, messages=MESSAGES, max_tokens=most, seed=1, response_format=Thing, extra_body={"smc": {}}
        )
        assert reply.model_extra["smc"]["law"] == "locally masked"
        assert isinstance(reply.choices[0].message.parsed, Thing)
        assert reply.usage is not None
        used.append(reply.usage.completion_tokens == most)
    assert any(used)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):  # control: no answer is so short
        client.chat.completions.parse(model=EXACT_NAME, messages=MESSAGES, max_tokens=9, seed=1, response_format=Thing)


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


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("guided_regex", "a)|(b", "guided_regex is no regular expression .* unbalanced parenthesis"),
        ("guided_grammar", "start: x", "guided_grammar has a grammar whose rule 'start' names 'x'"),
        ("guided_choice", [], "guided_choice: choice must be a list of texts"),
        ("guided_json", "{", "guided_json has the schema '{', which is no JSON"),
        ("structured_outputs", {"json": "{"}, "structured_outputs has the schema '{', which is no JSON"),
        ("structured_outputs", {"regex": "(a"}, "structured_outputs is no regular expression"),
        ("response_format", {"type": "regex", "regex": "(a"}, "response_format is no regular expression"),
    ],
)
def test_refusals_name_the_field_that_was_sent(http: httpx.Client, field: str, value: Any, said: str) -> None:
    error = told(http.post("/v1/completions", json={"prompt": "ab", field: value}), 400)
    assert error["param"] == field
    assert re.match(said, str(error["message"]))


def test_an_error_of_the_compiler(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the server's fault, not the request's, and the next request has its answer."""
    asked = {"prompt": "ab", "guided_regex": "(ab|ba)c"}
    with monkeypatch.context() as patch:
        patch.setattr(automaton, "CHILD", "raise KeyError('secret')")
        error = told(http.post("/v1/completions", json=asked), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in str(error["message"])
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] in ("abc", "bac")


def test_slow_forms_hold_nobody_else_up(server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain requests, forms that are known, and metrics are answered meanwhile; one form too many is turned away."""
    made, go = automaton.compile_expression, threading.Event()

    def slow(*given: Any) -> Any:
        assert go.wait(100)
        return made(*given)

    def ask(**fields: Any) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 8, **fields})

    assert ask(guided_regex="known").status_code == 200
    with monkeypatch.context() as patch, ThreadPoolExecutor(MAX_FORMS) as readers:
        patch.setattr(automaton, "compile_expression", slow)
        try:
            waiting = [readers.submit(ask, guided_regex=f"[ab]{{{count}}}") for count in range(1, MAX_FORMS + 1)]
            while len(server.served.forms) < MAX_FORMS:
                assert not any(one.done() for one in waiting)
                time.sleep(0.01)
            assert http.get("/metrics").status_code == 200
            assert ask().status_code == 200
            assert ask(guided_regex="known").json()["choices"][0]["text"] == "known"
            refused = ask(guided_regex="one too many")
            assert told(refused, 429)["code"] == "queue_full"
            assert refused.headers["retry-after"]
            assert f"{MAX_FORMS} forms of answers may wait" in refused.text
            assert not any(one.done() for one in waiting)
        finally:
            go.set()
        assert [one.result().status_code for one in waiting] == [200] * MAX_FORMS
    assert len(server.served.forms) == 0
