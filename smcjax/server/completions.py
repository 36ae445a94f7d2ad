"""/v1/completions: choices are text."""

from __future__ import annotations

from typing import Any

from smcjax.engine.outputs import CompletionOutput, RequestOutput, StreamChunk
from smcjax.server.population import numbers
from smcjax.server.schemas import CompletionAsk
from smcjax.server.shapes import Shapes
from smcjax.server.tokens import TokenTexts


class CompletionShapes(Shapes):
    """Text, with log-probabilities in lists beside each other."""

    path = "/v1/completions"
    ask = CompletionAsk
    prefix = "cmpl"
    reply_object = chunk_object = "text_completion"

    def choice(self, index: int, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
        """A whole answer."""
        answer = output.outputs[0]
        return {
            "index": index,
            "text": answer.text,
            "logprobs": _logprobs(answer, texts),
            "finish_reason": answer.finish_reason,
        }

    def pieces(self, index: int, chunk: StreamChunk, texts: TokenTexts, *, first: bool) -> list[dict[str, Any]]:
        """One piece of text, the last one with why it is, and with the log-probabilities of all tokens."""
        if chunk.output is not None:
            return [{**self.choice(index, chunk.output, texts), "text": chunk.text}]
        return [{"index": index, "text": chunk.text, "logprobs": None, "finish_reason": None}]


def _logprobs(answer: CompletionOutput, texts: TokenTexts) -> dict[str, Any] | None:
    """The tokens of an answer with their log-probabilities; None where these were not asked for."""
    if answer.logprobs is None:
        return None
    offsets, at = [], 0
    for token in answer.token_ids:
        offsets.append(min(at, len(answer.text)))
        at += len(texts.bytes_of(token).decode(errors="ignore"))
    return {
        "tokens": [texts.text_of(token) for token in answer.token_ids],
        "token_logprobs": numbers(answer.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
