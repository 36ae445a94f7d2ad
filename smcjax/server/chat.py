"""/v1/chat/completions: choices are messages."""

from __future__ import annotations

from typing import Any

from smcjax.engine.outputs import CompletionOutput, RequestOutput, StreamChunk
from smcjax.server.population import number
from smcjax.server.schemas import ChatAsk
from smcjax.server.shapes import Shapes
from smcjax.server.tokens import TokenTexts


class ChatShapes(Shapes):
    """A message, with an object a token for log-probabilities; in streams the role, then text, then why it ends."""

    path = "/v1/chat/completions"
    ask = ChatAsk
    prefix = "chatcmpl"
    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
        """A whole answer."""
        answer = output.outputs[0]
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": _logprobs(answer, texts),
            "finish_reason": answer.finish_reason,
        }

    def pieces(self, index: int, chunk: StreamChunk, texts: TokenTexts, *, first: bool) -> list[dict[str, Any]]:
        """The role with the choice's first chunk; the end in a piece of its own, with all log-probabilities."""
        pieces = []
        if first:
            pieces.append(_piece(index, {"role": "assistant", "content": ""}))
        if chunk.text:
            pieces.append(_piece(index, {"content": chunk.text}))
        if chunk.output is not None:
            answer = chunk.output.outputs[0]
            pieces.append(_piece(index, {}, logprobs=_logprobs(answer, texts), finish=answer.finish_reason))
        return pieces or [_piece(index, {})]


def _piece(index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(answer: CompletionOutput, texts: TokenTexts) -> dict[str, Any] | None:
    """The tokens of an answer with their log-probabilities; None where these were not asked for."""
    if answer.logprobs is None:
        return None
    content = [
        {
            "token": texts.text_of(token),
            "logprob": number(logprob),
            "bytes": list(texts.bytes_of(token)),
            "top_logprobs": [],
        }
        for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
