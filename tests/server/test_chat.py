"""/v1/chat/completions by OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from smcjax import SamplingParams
from smcjax.engine.outputs import StreamChunk, TokenLogprob
from smcjax.server.chat import ChatShapes
from smcjax.server.shapes import Told
from smcjax.server.tokens import TokenTexts
from tests.server.conftest import EXACT_NAME, Running

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def test_the_answer_is_the_engines(server: Running, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="pair", messages=HELLO, seed=5, max_completion_tokens=20)
    params = SamplingParams(max_tokens=20, seed=5)
    answer = server.llm().chat(HELLO, params, use_tqdm=False)[0].outputs[0]
    assert reply.choices[0].message.content == answer.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == answer.finish_reason
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("[user]hi[assistant]")


def test_contents_in_every_form(client: openai.OpenAI) -> None:
    def answer(*messages: dict[str, object]) -> str | None:
        reply = client.chat.completions.create(model="pair", messages=messages, seed=1, max_tokens=8)
        return reply.choices[0].message.content

    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert answer({"role": "user", "content": parts}) == answer(*HELLO)
    empty = {"role": "assistant", "content": "", "name": None}
    assert answer(*HELLO, {**empty, "content": None}, *HELLO) == answer(*HELLO, empty, *HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_the_templates_own_variables_and_errors(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A variable reaches the template; what the template raises is said, in JSON, before any stream."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('no such thing') }}{% endif %}"
        "{{ messages[0]['content'] }}{% if thinking %} hm{% endif %}"
    )
    monkeypatch.setattr(tokenizer._inner, "chat_template", template)

    def ask(content: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
        return http.post("/v1/chat/completions", json=body)

    for variables, length in (({}, 2), ({"thinking": False}, 2), ({"thinking": True}, 5)):
        assert ask("hi", chat_template_kwargs=variables).json()["usage"]["prompt_tokens"] == length
    refused = ask("no", stream=stream)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "messages"
    assert "the chat template rejects these messages (no such thing)" in error["message"]


@pytest.mark.parametrize("choices", [1, 2])
def test_chunks_make_up_the_reply(client: openai.OpenAI, choices: int) -> None:
    fields: dict[str, Any] = {
        "model": "pair",
        "messages": HELLO,
        "seed": 2,
        "max_tokens": 30,
        "n": choices,
        "logprobs": True,
        "top_logprobs": 2,
    }
    reply = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == reply.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in reply.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert [piece.delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        told = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
        assert choice.logprobs is not None
        whole = choice.logprobs.content or []
        assert [(one.token, one.bytes) for one in told] == [(one.token, one.bytes) for one in whole]
        np.testing.assert_allclose([one.logprob for one in told], [one.logprob for one in whole], atol=1e-4)
        assert all(len(one.top_logprobs) == 2 for one in told)


@pytest.mark.parametrize("text", ["", "a"])
def test_prompt_logprobs_come_in_streams_once_a_choice(text: str) -> None:
    """In the chunk that brings them, be it the first or not; where nobody asks for them by that name, in none."""
    brings = StreamChunk(
        text,
        [7] if text else [],
        finished=False,
        prompt_logprobs=[None, -0.5],
        prompt_top_logprobs=[None, [TokenLogprob(4, -0.25)]],
    )
    chunks = [StreamChunk("", [], finished=False), brings, StreamChunk("b", [8], finished=False)]
    expected = [
        None,
        {"5": {"logprob": -0.5, "decoded_token": "5"}, "4": {"logprob": -0.25, "decoded_token": "4"}},
    ]
    for order in ([0, 1, 2], [1, 2]):
        for asked in (True, False):
            told, pieces = Told(0, TokenTexts(None), [3, 5], prompt_logprobs=asked), []
            for place in order:
                pieces += ChatShapes().pieces(told, chunks[place])
                told.first = False
            found = [piece["prompt_logprobs"] for piece in pieces if "prompt_logprobs" in piece]
            assert found == ([expected] if asked else [])
            assert "".join(piece["delta"].get("content", "") for piece in pieces) == f"{text}b"


def test_logprobs_have_bytes(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=EXACT_NAME, messages=HELLO, seed=3, max_tokens=30, logprobs=True, temperature=900.0, top_logprobs=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    written = b"".join(bytes(one.bytes or []) for one in logprobs.content if one.token != "</s>")
    content = reply.choices[0].message.content or ""
    assert written.decode(errors="replace").replace("<s>", "") == content
    assert any(one.token.startswith("bytes:\\x") for one in logprobs.content)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "user"}]}, "messages", "has no 'content'"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
        ({"messages": [{"role": "user", "content": "a" * 99}]}, "messages", "max_model_len is 96"),
        ({"chat_template_kwargs": {"messages": []}}, "messages", "is set already"),
        ({"max_completion_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(http: httpx.Client, body: dict[str, Any], param: str, says: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]
