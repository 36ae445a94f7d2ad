"""Log-probabilities in replies: of chosen tokens and of the likeliest at their places, as each route writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from smcjax.engine.results.outputs import CompletionOutput, RequestOutput, StreamChunk, TokenLogprob
from smcjax.server.replies.population import number
from smcjax.server.replies.tokens import TokenTexts


class Scored(NamedTuple):
    """A token that a reply holds, its log-probability, and the likeliest tokens at its place, likeliest first.

    The first token of a prompt has no log-probability and no alternatives: None.
    """

    token: int
    logprob: float | None
    alternatives: Sequence[TokenLogprob] | None
    echoed: bool = False  # it stands in the prompt, whose text may name special tokens, as no answer's does


def scored(part: CompletionOutput | StreamChunk) -> list[Scored] | None:
    """The tokens of an answer, or of a piece of one, with log-probabilities; None where these were not asked for."""
    if part.logprobs is None:
        return None
    tops = part.top_logprobs if part.top_logprobs is not None else [()] * len(part.token_ids)
    return [Scored(*one) for one in zip(part.token_ids, part.logprobs, tops, strict=True)]


def scored_prompt(part: RequestOutput | StreamChunk, prompt: Sequence[int]) -> list[Scored] | None:
    """Likewise the tokens of the prompt, of its output or of the chunk that brings them."""
    if part.prompt_logprobs is None:
        return None
    tops = part.prompt_top_logprobs if part.prompt_top_logprobs is not None else [None] * len(prompt)
    return [Scored(*one) for one in zip(prompt, part.prompt_logprobs, tops, strict=True)]


def likeliest(tokens: Sequence[Scored], count: int) -> list[Scored]:
    """The prompt's tokens with `count` alternatives each, of as many or more."""
    return [Scored(token, logprob, top and top[:count], echoed=True) for token, logprob, top, _ in tokens]


def as_lists(tokens: Iterable[Scored], texts: TokenTexts, begin: int, end: int | None) -> dict[str, Any]:
    """Lists beside each other, as completions have them.

    `begin` is where the first token's text stands in that of the choice, below 0 where a prompt begins with special
    tokens, which no text shows; `end` is the length of that text once it is known, which no token begins behind: the
    text of a stop string is not shown, and its tokens are.
    """
    tokens, offsets, at = list(tokens), [], begin
    for token in tokens:
        offsets.append(max(at if end is None else min(at, end), 0))
        at += length_of(token.token, texts, echoed=token.echoed)
    tops = None
    if any(token.alternatives for token in tokens):
        tops = [
            None
            if token.alternatives is None
            else {texts.text_of(one.token_id): number(one.logprob) for one in token.alternatives}
            for token in tokens
        ]
    return {
        "tokens": [texts.text_of(token.token) for token in tokens],
        "token_logprobs": [None if token.logprob is None else number(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def length_of(token: int, texts: TokenTexts, *, echoed: bool = False) -> int:
    """Characters that a token has in a text: a special one none, but for that of a prompt, which may name it."""
    return 0 if texts.is_special(token) and not echoed else len(texts.bytes_of(token).decode(errors="ignore"))


def as_objects(tokens: Iterable[Scored], texts: TokenTexts) -> dict[str, Any]:
    """An object a token, as chats have them."""
    content = [
        {
            **_object(token.token, token.logprob, texts),
            "top_logprobs": [_object(one.token_id, one.logprob, texts) for one in token.alternatives or ()],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def by_id(tokens: Iterable[Scored], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """An entry a token of the prompt, the chosen and the likeliest ones by their ids, as vLLM has them; null first."""
    return [
        None
        if token.logprob is None
        else {
            str(one.token_id): {"logprob": number(one.logprob), "decoded_token": texts.text_of(one.token_id)}
            for one in (TokenLogprob(token.token, token.logprob), *(token.alternatives or ()))
        }
        for token in tokens
    ]


def _object(token: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    value = None if logprob is None else number(logprob)
    return {"token": texts.text_of(token), "logprob": value, "bytes": list(texts.bytes_of(token))}
