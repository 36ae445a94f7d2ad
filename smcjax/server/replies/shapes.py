"""How replies look: choices are text for /v1/completions and messages for /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.replies.logprobs import (
    Scored,
    as_lists,
    as_objects,
    by_id,
    length_of,
    likeliest,
    scored,
    scored_prompt,
)
from smcjax.server.replies.tokens import TokenTexts
from smcjax.server.requests.schemas import ChatAsk, CompletionAsk


@dataclasses.dataclass
class Emitted:
    """One choice of a reply, and how much of it a stream has emitted."""

    index: int  # its place in the reply
    texts: TokenTexts
    prompt_token_ids: list[int]
    ends: frozenset[int] = frozenset()  # tokens that end an answer, and are no content of it
    echo: str | None = None  # the prompt's text where the request wants it in front of the answer's
    echo_logprobs: int | None = None  # alternatives to each token of that text, of requests with log-probabilities
    prompt_logprobs: int | None = None  # alternatives to each, of requests that ask for these by that name
    first: bool = True  # nothing has been emitted yet
    length: int = 0  # characters emitted, the prompt's included
    tokens_end: int = 0  # where the text of the next token begins, by the texts of the tokens before it

    def __post_init__(self) -> None:
        self.tokens_end = len(self.echo or "")

    def prompt_field(self, prompt: Sequence[Scored] | None) -> dict[str, Any]:
        """{"prompt_logprobs": …} of a choice whose request asks for these by that name, else {}."""
        if self.prompt_logprobs is None or prompt is None:
            return {}
        return {"prompt_logprobs": by_id(likeliest(prompt, self.prompt_logprobs), self.texts)}

    def with_echo(
        self, tokens: list[Scored] | None, prompt: Sequence[Scored] | None, begin: int
    ) -> tuple[list[Scored] | None, int]:
        """The answer's tokens, behind the prompt's where these have log-probabilities too, and where the text begins.

        `begin` is where that of the answer's does.
        """
        if self.echo_logprobs is None or prompt is None:
            return tokens, begin
        length = sum(length_of(one.token, self.texts, echoed=True) for one in prompt)
        return [*likeliest(prompt, self.echo_logprobs), *(tokens or ())], begin - length


class CompletionShapes:
    """Text, with log-probabilities in lists beside each other; with `echo` behind that of the prompt."""

    path = "/v1/completions"
    ask = CompletionAsk
    prefix = "cmpl"  # of replies' ids
    reply_object = chunk_object = "text_completion"  # what whole replies and chunks call themselves

    def choice(self, emitted: Emitted, output: RequestOutput) -> dict[str, Any]:
        """The entry of `choices` that is a whole answer."""
        answer, echo = output.outputs[0], emitted.echo or ""
        text = echo + answer.text
        prompt = scored_prompt(output, output.prompt_token_ids)
        tokens, begin = emitted.with_echo(scored(answer), prompt, len(echo))
        return {
            "index": emitted.index,
            "text": text,
            "logprobs": None if tokens is None else as_lists(tokens, emitted.texts, begin, len(text)),
            "finish_reason": answer.finish_reason,
            **emitted.prompt_field(prompt),
        }

    def pieces(self, emitted: Emitted, chunk: StreamChunk) -> list[dict[str, Any]]:
        """The entry of `choices` that a chunk becomes, the last one with why it is the last. Moves `emitted` on."""
        echo = (emitted.echo or "") if emitted.first else ""
        text, prompt = echo + chunk.text, scored_prompt(chunk, emitted.prompt_token_ids)
        tokens, begin = emitted.with_echo(scored(chunk), prompt, emitted.tokens_end)
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


class ChatShapes:
    """A message, with an object a token for log-probabilities; in streams the role, then text, then why it ends.

    OpenAI's specification has "message content tokens" there, so the token that ends the turn is none of them.
    """

    path = "/v1/chat/completions"
    ask = ChatAsk
    prefix = "chatcmpl"
    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, emitted: Emitted, output: RequestOutput) -> dict[str, Any]:
        """The entry of `choices` that is a whole answer."""
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
        """The entries of `choices` that a chunk becomes, one a streamed reply: the role first, text, the end by itself.

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


Shapes = CompletionShapes | ChatShapes  # of one route's replies


def _content(tokens: list[Scored] | None, emitted: Emitted) -> list[Scored] | None:
    """The tokens without the one that ends them."""
    return None if tokens is None else [one for one in tokens if one.token not in emitted.ends]


def _piece(index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
