"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from smcjax.engine.outputs import CompletionOutput, StreamChunk
from smcjax.server.answers import Answers, Shapes, begin
from smcjax.server.body import read_body
from smcjax.server.errors import json_response
from smcjax.server.schemas import ChatAsk
from smcjax.server.sse import EventStream, whole, with_end
from smcjax.server.state import Served
from smcjax.server.tokens import TokenTexts


class ChatShapes(Shapes):
    """Choices of chats: the role first, then text, then why it ends."""

    chunk_object = "chat.completion.chunk"

    def pieces(self, answers: Answers, choice: int, chunk: StreamChunk, *, first: bool) -> list[dict[str, Any]]:
        """The role with the choice's first chunk; the end in a piece of its own, with all log-probabilities."""
        pieces = []
        if first:
            pieces.append(_piece(choice, {"role": "assistant", "content": ""}))
        if chunk.text:
            pieces.append(_piece(choice, {"content": chunk.text}))
        if chunk.output is not None:
            answer = chunk.output.outputs[0]
            pieces.append(
                _piece(choice, {}, logprobs=_logprobs(answer, answers.token_texts), finish=answer.finish_reason)
            )
        return pieces or [_piece(choice, {})]


def routes(served: Served) -> APIRouter:
    """The route of chats."""
    router, settings = APIRouter(), served.settings
    schema = {"requestBody": {"content": {"application/json": {"schema": ChatAsk.model_json_schema()}}}}

    @router.post("/v1/chat/completions", openapi_extra=schema)
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        ask = await read_body(request, ChatAsk, limit=settings.max_body, seconds=settings.body_seconds)

        async def answer() -> Response:
            return json_response(await _reply(await begin(served, ask)))

        if not ask.stream:
            return await whole(request, answer())
        answers = await begin(served, ask)
        return EventStream(with_end(answers.stream(ChatShapes())), answers.close, settings.ping_seconds)

    return router


def _piece(choice: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


async def _reply(answers: Answers) -> dict[str, Any]:
    outputs = await answers.outputs()
    choices = [
        {
            "index": choice,
            "message": {"role": "assistant", "content": output.outputs[0].text, "refusal": None},
            "logprobs": _logprobs(output.outputs[0], answers.token_texts),
            "finish_reason": output.outputs[0].finish_reason,
        }
        for choice, output in enumerate(outputs)
    ]
    return {**answers.head("chat.completion"), "choices": choices, "usage": answers.usage(), **answers.smc(*outputs)}


def _logprobs(answer: CompletionOutput, texts: TokenTexts) -> dict[str, Any] | None:
    """The tokens of an answer with their log-probabilities; None where these were not asked for."""
    if answer.logprobs is None:
        return None
    content = [
        {
            "token": texts.text_of(token),
            "logprob": logprob,
            "bytes": list(texts.bytes_of(token)),
            "top_logprobs": [],
        }
        for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
