"""Large bodies: others are answered meanwhile, a request's work is done once, and what cannot be is refused early."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from smcjax.engine.requests.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from smcjax.server import begin, routes, state
from smcjax.server.errors import APIError
from smcjax.server.models import Models
from smcjax.server.requests.body import MAX_COMMAS, MAX_PARTS, parse
from smcjax.tokenizer.tokenizer import PIECE, Tokenizer
from tests.server.conftest import MAX_MODEL_LEN, Running, running
from tests.server.test_errors import JSON, told

MANY = 2_000_000
MOST = MAX_COMMAS - 1


def post(http: httpx.Client, body: bytes | str) -> httpx.Response:
    return http.post("/v1/completions", content=body, headers=JSON)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"prompt": [' + "null," * MOST + "null]", "prompt must be"),
        ('"prompt": "a", "stop": [' + '"abcdefgh",' * MOST + '"x"]', "stop must have at most 64 strings"),
        ('"prompt": [' + "[]," * MANY + "[]]", "more than 100000 objects"),
        ('"prompt": [' + "9," * (2 * MANY - 100) + "9]", f"or {MAX_COMMAS} values"),
    ],
    ids=["nulls", "stops", "parts", "values"],
)
def test_bodies_of_megabytes_are_refused_in_a_sentence(http: httpx.Client, fields: str, says: str) -> None:
    """`test_bounds.py` has what others wait meanwhile."""
    refused = post(http, f"{{{fields}}}")
    assert says in str(told(refused, 400)["message"])
    assert len(refused.content) < 1000


def test_nothing_that_grows_with_a_body_runs_on_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither reading JSON, nor its fields, the parameters, the tokens; nor writing the answer."""
    loops, seen = set(), set()

    def noted(holder: Any, name: str) -> None:
        really: Callable[..., Any] = getattr(holder, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            seen.add(name)
            loops.add(threading.current_thread().name.partition("_")[0])
            return really(*args, **kwargs)

        monkeypatch.setattr(holder, name, called)

    for holder, name in (
        (routes, "parse"),
        (begin, "sampling_params"),
        (begin, "_to_prompts"),
        (Tokenizer, "encode"),
        (SamplingParams, "__post_init__"),
        (state.TokenTexts, "text_of"),
    ):
        noted(holder, name)
    assert post(http, '{"prompt": "ab", "logprobs": 1, "max_tokens": 2}').status_code == 200
    assert len(seen) == 6, "a control"
    assert loops == {"requests"}
    loops.clear()
    assert post(http, json.dumps({"prompt": "ab", "user": "x" * state.LARGE_BODY, "max_tokens": 2})).status_code == 200
    assert loops == {"large requests"}


def test_choices_share_what_is_checked(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters and the tokens of a prompt are made once for all its choices."""
    made: list[str] = []
    check, encode = SamplingParams.__post_init__, Tokenizer.encode
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda one: (made.append("params"), check(one))[-1])
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: (made.append("tokens"), encode(*args))[-1])
    answers = post(http, '{"prompt": "ab", "n": 16, "seed": 1, "guided_choice": ["a", "b"]}').json()["choices"]
    assert {answer["text"] for answer in answers} == {"a", "b"}
    assert sorted(made) == ["params", "tokens"]


class Counting:
    """A tokenizer's inner one, which notes the length of each text that it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.lengths = inner, list[int]()

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self._inner(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_long_text_is_refused_by_its_beginning(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a chat; a text that is shorter is told its tokens."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    counting = Counting(tokenizer._inner)
    monkeypatch.setattr(tokenizer, "_inner", counting)
    for path, field, text in (
        ("completions", "prompt", "a" * 2_000_000),
        ("chat/completions", "messages", [{"role": "user", "content": "a" * 2_000_000}]),
    ):
        error = told(http.post(f"/v1/{path}", json={field: text}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert f"more than {MAX_MODEL_LEN} tokens" in str(error["message"])
    assert counting.lengths == [PIECE, PIECE]
    error = told(http.post("/v1/completions", json={"prompt": "a" * PIECE}), 400)
    assert f"has {PIECE} tokens" in str(error["message"])


def test_stop_strings_are_bounded(http: httpx.Client) -> None:
    most = ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stop": most}).status_code == 200
    for stop in ([*most, "x"], ["x" * (MAX_STOP_LENGTH + 1)]):
        assert told(http.post("/v1/completions", json={"prompt": "a", "stop": stop}), 400)["param"] == "stop"


def test_parts_are_counted_outside_of_texts() -> None:
    """Whatever the quotes and backslashes in these."""
    text = '{[:"\\' * MAX_PARTS
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    fields = {str(number): 0 for number in range(MAX_PARTS - 1)}
    assert parse(json.dumps(fields).encode()) == fields
    assert parse(json.dumps({"a": [0] * MAX_COMMAS, "b": "," * MAX_COMMAS}).encode())["a"]
    for beyond in (fields | {"a": 0, "b": 0}, {"a": [[]] * MAX_PARTS}, {"a": [0] * (MAX_COMMAS + 2)}):
        with pytest.raises(APIError, match="more than 100000 objects, arrays and fields"):
            parse(json.dumps(beyond).encode())
    began = time.monotonic()
    with pytest.raises(APIError, match="is no JSON"):
        parse(b'{"' + b'\\":' * MANY)  # of which no text ends
    assert time.monotonic() - began < 5


def test_bodies_are_held_up_to_a_bound(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all requests together; what has been answered is let go."""
    monkeypatch.setattr("smcjax.server.access.MAX_BODY_BYTES", 30_000)
    with running(models, max_body=20_000) as server, server.http() as http:
        body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 19_000})
        server.served.held_bytes = 15_000  # as of others
        refused = post(http, body)
        assert told(refused, 503)["code"] == "unavailable"
        assert "30000 bytes" in refused.text
        assert refused.headers["retry-after"]
        assert server.served.held_bytes == 15_000
        server.served.held_bytes = 0
        for _ in range(3):
            assert post(http, body).status_code == 200
        assert server.served.held_bytes == 0
