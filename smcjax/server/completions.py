"""/v1/completions: choices are text."""

from __future__ import annotations

from typing import Any

from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.logprobs import as_lists, length_of, scored, scored_prompt
from smcjax.server.schemas import CompletionAsk
from smcjax.server.shapes import Shapes, Told


class CompletionShapes(Shapes):
    """Text, with log-probabilities in lists beside each other; with `echo` behind that of the prompt."""

    path = "/v1/completions"
    ask = CompletionAsk
    prefix = "cmpl"
    reply_object = chunk_object = "text_completion"

    def choice(self, told: Told, output: RequestOutput) -> dict[str, Any]:
        """A whole answer."""
        answer, echo = output.outputs[0], told.echo or ""
        text = echo + answer.text
        begin, tokens = len(echo), scored(answer)
        prompt = scored_prompt(output, output.prompt_token_ids)
        if tokens is not None and told.echo is not None and prompt is not None:
            tokens, begin = [*prompt, *tokens], len(echo) - sum(length_of(one.token, told.texts) for one in prompt)
        return {
            "index": told.index,
            "text": text,
            "logprobs": None if tokens is None else as_lists(tokens, told.texts, max(begin, 0), len(text)),
            "finish_reason": answer.finish_reason,
            **told.prompt_field(prompt),
        }

    def pieces(self, told: Told, chunk: StreamChunk) -> list[dict[str, Any]]:
        """One piece of text with the log-probabilities of its tokens, the last one with why it is the last."""
        echo = (told.echo or "") if told.first else ""
        text, tokens, begin = echo + chunk.text, scored(chunk), told.tokens_end
        prompt = scored_prompt(chunk, told.prompt_token_ids)
        if tokens is not None and told.echo is not None and prompt is not None:
            tokens = [*prompt, *tokens]
            begin = max(begin - sum(length_of(one.token, told.texts) for one in prompt), 0)
        ends = chunk.output is not None
        length = told.length + len(text)
        piece = {
            "index": told.index,
            "text": text,
            "logprobs": as_lists(tokens, told.texts, begin, length if ends else None) if tokens else None,
            "finish_reason": chunk.output.outputs[0].finish_reason if chunk.output is not None else None,
            **told.prompt_field(prompt),
        }
        told.length = length
        if tokens is not None:  # only log-probabilities need to know where a token's text begins
            told.tokens_end += sum(length_of(token, told.texts) for token in chunk.token_ids)
        return [piece]
