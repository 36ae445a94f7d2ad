"""/v1/chat/completions by OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from smcjax import SamplingParams
from smcjax.engine.results.outputs import StreamChunk, TokenLogprob
from smcjax.server.replies.shapes import ChatShapes, Emitted
from smcjax.server.replies.tokens import TokenTexts
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


def set_template(server: Running, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Gives the served model another chat template for a test."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer._inner, "chat_template", template)


@pytest.mark.parametrize("stream", [False, True])
def test_the_templates_own_variables_and_errors(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A variable reaches the template; what the template raises is said, in JSON, before any stream."""
    template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('no such thing') }}{% endif %}"
        "{{ messages[0]['content'] }}{% if thinking %} hm{% endif %}"
    )
    set_template(server, monkeypatch, template)

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


def test_chunks_make_up_the_reply(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "pair",
        "messages": HELLO,
        "seed": 2,
        "max_tokens": 30,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    client.chat.completions.create(**fields)  # from now on the prompt's pages are cached, which usage says
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
        emitted = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
        assert choice.logprobs is not None
        whole = choice.logprobs.content or []
        assert [(one.token, one.bytes) for one in emitted] == [(one.token, one.bytes) for one in whole]
        np.testing.assert_allclose([one.logprob for one in emitted], [one.logprob for one in whole], atol=1e-4)
        assert all(len(one.top_logprobs) == 2 for one in emitted)


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
        for asked in (1, None):
            emitted, pieces = Emitted(0, TokenTexts(None), [3, 5], prompt_logprobs=asked), []
            for place in order:
                pieces += ChatShapes().pieces(emitted, chunks[place])
                emitted.first = False
            found = [piece["prompt_logprobs"] for piece in pieces if "prompt_logprobs" in piece]
            assert found == ([] if asked is None else [expected])
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


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages", "'tool_calls'] holds"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
    ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": [{"role": "user"}]}, "messages", "has no 'content'"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
    ({"messages": [{"role": "user", "content": "a" * 99}]}, "messages", "max_model_len is 96"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "is set already"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 2, "min_tokens": 5}, "min_tokens", "exceed max_completion_tokens"),
]


def test_what_cannot_be_honoured_is_refused(http: httpx.Client) -> None:
    for body, param, says in REFUSED:
        response = http.post("/v1/chat/completions", json={"messages": HELLO, **body})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert says in response.json()["error"]["message"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


def test_histories_with_tool_calls(http: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the template, arguments as data."""
    template = (
        "{% for message in messages %}{{ message.role }}{% for call in message.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments.a + 1 }}{% endfor %}{{ message.tool_call_id }}{% endfor %}"
    )
    set_template(server, monkeypatch, template)
    for messages in (CALLED, [CALLED[0], {"role": "assistant", "tool_calls": [CALL]}, CALLED[2]]):
        reply = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).json()
        assert reply["usage"]["prompt_tokens"] == len("userassistantadd2toolcall_1")


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"add_generation_prompt": True, "add_special_tokens": False, "use_beam_search": False, "verbosity": "medium"},
        {"min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": True, "mirostat": 0, "truncate_prompt_tokens": None},
    ],
)
def test_what_asks_for_nothing(http: httpx.Client, asked: dict[str, Any]) -> None:
    def answer(**fields: Any) -> Any:
        reply = http.post("/v1/chat/completions", json={"messages": HELLO, "seed": 1, "max_tokens": 8, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    assert answer(**asked) == answer()


# Of the official specification.
NULLABLE = """
    audio frequency_penalty logit_bias logprobs max_completion_tokens
    max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
    stream_options temperature tool_choice tools top_logprobs top_p user verbosity
    web_search_options best_of echo suffix
"""


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_null_is_not_given(http: httpx.Client, path: str) -> None:
    """All at once: a refusal would name the field."""
    answer = {"role": "assistant", "content": None, "audio": None, "refusal": None}
    body: dict[str, Any] = {"messages": [*HELLO, answer]} if "chat" in path else {"prompt": "ab"}
    for options in (dict.fromkeys(NULLABLE.split()), {"stream": True, "stream_options": {"include_usage": None}}):
        reply = http.post(f"/v1/{path}", json={**body, **options})
        assert reply.status_code == 200, reply.text


def test_the_end_of_a_turn_is_no_content(http: httpx.Client, server: Running) -> None:
    """OpenAI's specification has log-probabilities of "message content tokens"; `usage` counts the end too."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    end = tokenizer.vocab["k"]
    body = {
        "model": EXACT_NAME,
        "messages": HELLO,
        "max_tokens": 8,
        "logprobs": True,
        "logit_bias": {str(end): 100},
        "stop_token_ids": [end],
    }
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["logprobs"]["content"] == []
    assert reply["usage"]["completion_tokens"] == 1
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert '"logprobs":{' not in streamed
    del body["stop_token_ids"]
    tokens = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in tokens] == ["k"] * 8, "a control"
