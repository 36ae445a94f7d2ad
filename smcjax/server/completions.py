"""/v1/completions: choices are text."""

from __future__ import annotations

from typing import Any

from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.logprobs import as_lists, length_of, scored, scored_prompt
from smcjax.server.schemas import CompletionAsk
from smcjax.server.shapes import Emitted, Shapes


class CompletionShapes(Shapes):
    """Text, with log-probabilities in lists beside each other; with `echo` behind that of the prompt."""

    path = "/v1/completions"
    ask = CompletionAsk
    prefix = "cmpl"
    reply_object = chunk_object = "text_completion"

    def choice(self, emitted: Emitted, output: RequestOutput) -> dict[str, Any]:
        """A whole answer."""
        answer, echo = output.outputs[0], emitted.echo or ""
        text = echo + answer.text
        begin, tokens = len(echo), scored(answer)
        prompt = scored_prompt(output, output.prompt_token_ids)
        if tokens is not None and emitted.echo is not None and prompt is not None:
            tokens, begin = [*prompt, *tokens], len(echo) - sum(length_of(one.token, emitted.texts) for one in prompt)
        return {
            "index": emitted.index,
            "text": text,
            "logprobs": None if tokens is None else as_lists(tokens, emitted.texts, max(begin, 0), len(text)),
            "finish_reason": answer.finish_reason,
            **emitted.prompt_field(prompt),
        }

    def pieces(self, emitted: Emitted, chunk: StreamChunk) -> list[dict[str, Any]]:
        """One piece of text with the log-probabilities of its tokens, the last one with why it is the last."""
        echo = (emitted.echo or "") if emitted.first else ""
        text, tokens, begin = echo + chunk.text, scored(chunk), emitted.tokens_end
        prompt = scored_prompt(chunk, emitted.prompt_token_ids)
        if tokens is not None and emitted.echo is not None and prompt is not None:
            tokens = [*prompt, *tokens]
            begin = max(begin - sum(length_of(one.token, emitted.texts) for one in prompt), 0)
        ends = chunk.output is not None
        length = emitted.length + len(text)
        piece = {
            "index": emitted.index,
            "text": text,
            "logprobs": as_lists(tokens, emitted.texts, begin, length if ends else None) if tokens else None,
            "finish_reason": chunk.output.outputs[0].finish_reason if chunk.output is not None else None,
            **emitted.prompt_field(prompt),
        }
        emitted.length = length
        if tokens is not None:  # only log-probabilities need to know where a token's text begins
            emitted.tokens_end += sum(length_of(token, emitted.texts) for token in chunk.token_ids)
        return [piece]
