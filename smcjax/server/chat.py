"""/v1/chat/completions: choices are messages."""

from __future__ import annotations

from typing import Any

from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.logprobs import Scored, as_objects, scored, scored_prompt
from smcjax.server.schemas import ChatAsk
from smcjax.server.shapes import Emitted, Shapes


class ChatShapes(Shapes):
    """A message, with an object a token for log-probabilities; in streams the role, then text, then why it ends.

    OpenAI's specification has "message content tokens" there, so the token that ends the turn is none of them.
    """

    path = "/v1/chat/completions"
    ask = ChatAsk
    prefix = "chatcmpl"
    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, emitted: Emitted, output: RequestOutput) -> dict[str, Any]:
        """A whole answer."""
        answer = output.outputs[0]
        tokens, prompt = _content(scored(answer), emitted), scored_prompt(output, output.prompt_token_ids)
        return {
            "index": emitted.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None if tokens is None else as_objects(tokens, emitted.texts),
            "finish_reason": answer.finish_reason,
            **emitted.prompt_field(prompt),
        }

    def pieces(self, emitted: Emitted, chunk: StreamChunk) -> list[dict[str, Any]]:
        """The role with the choice's first chunk; text with its tokens' log-probabilities; the end in its own piece.

        The prompt's log-probabilities are in the first piece of the chunk that brings them.
        """
        pieces, tokens, prompt = [], _content(scored(chunk), emitted), scored_prompt(chunk, emitted.prompt_token_ids)
        if emitted.first:
            pieces.append(_piece(emitted.index, {"role": "assistant", "content": ""}))
        if chunk.text or tokens:
            logprobs = as_objects(tokens, emitted.texts) if tokens else None
            pieces.append(_piece(emitted.index, {"content": chunk.text}, logprobs=logprobs))
        if chunk.output is not None:
            pieces.append(_piece(emitted.index, {}, finish=chunk.output.outputs[0].finish_reason))
        pieces = pieces or [_piece(emitted.index, {})]
        pieces[0] |= emitted.prompt_field(prompt)
        return pieces


def _content(tokens: list[Scored] | None, emitted: Emitted) -> list[Scored] | None:
    """The tokens without the one that ends them."""
    return None if tokens is None else [one for one in tokens if one.token not in emitted.ends]


def _piece(index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
