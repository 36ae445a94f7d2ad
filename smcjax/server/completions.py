"""/v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from smcjax.engine.outputs import CompletionOutput, StreamChunk
from smcjax.server.answers import Answers, Shapes, begin
from smcjax.server.body import read_body
from smcjax.server.errors import json_response
from smcjax.server.schemas import CompletionAsk
from smcjax.server.sse import EventStream, whole, with_end
from smcjax.server.state import Served
from smcjax.server.tokens import TokenTexts


class CompletionShapes(Shapes):
    """Choices of completions: text."""

    chunk_object = "text_completion"

    def pieces(self, answers: Answers, choice: int, chunk: StreamChunk, *, first: bool) -> list[dict[str, Any]]:
        """One piece of text, the last one with why it is, and with the log-probabilities of all tokens."""
        answer = None if chunk.output is None else chunk.output.outputs[0]
        return [
            {
                "index": choice,
                "text": chunk.text,
                "logprobs": None if answer is None else _logprobs(answer, answers.token_texts),
                "finish_reason": None if answer is None else answer.finish_reason,
            }
        ]


def routes(served: Served) -> APIRouter:
    """The route of completions."""
    router, settings = APIRouter(), served.settings
    schema = {"requestBody": {"content": {"application/json": {"schema": CompletionAsk.model_json_schema()}}}}

    @router.post("/v1/completions", openapi_extra=schema)
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        ask = await read_body(request, CompletionAsk, limit=settings.max_body, seconds=settings.body_seconds)

        async def answer() -> Response:
            return json_response(await _reply(await begin(served, ask)))

        if not ask.stream:
            return await whole(request, answer())
        answers = await begin(served, ask)
        return EventStream(with_end(answers.stream(CompletionShapes())), answers.close, settings.ping_seconds)

    return router


async def _reply(answers: Answers) -> dict[str, Any]:
    outputs = await answers.outputs()
    choices = [
        {
            "index": choice,
            "text": output.outputs[0].text,
            "logprobs": _logprobs(output.outputs[0], answers.token_texts),
            "finish_reason": output.outputs[0].finish_reason,
        }
        for choice, output in enumerate(outputs)
    ]
    return {**answers.head("text_completion"), "choices": choices, "usage": answers.usage(), **answers.smc(*outputs)}


def _logprobs(answer: CompletionOutput, texts: TokenTexts) -> dict[str, Any] | None:
    """The tokens of an answer with their log-probabilities; None where these were not asked for."""
    if answer.logprobs is None:
        return None
    tokens = [texts.text_of(token) for token in answer.token_ids]
    offsets, at = [], 0
    for token in answer.token_ids:
        offsets.append(min(at, len(answer.text)))
        at += len(texts.bytes_of(token).decode(errors="ignore"))
    return {"tokens": tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": offsets}
