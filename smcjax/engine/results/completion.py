"""From the tokens of a row to an answer: its text, cut at stop strings, and the reason why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from smcjax.engine.requests.requests import Request
from smcjax.engine.results.outputs import CompletionOutput
from smcjax.engine.results.text import AnswerText, answer_text
from smcjax.tokenizer.tokenizer import Tokenizer


def normalized(log_weights: np.ndarray) -> np.ndarray:
    """softmax of log weights [N], in float64; NaN where all of them are −inf."""
    weights = np.asarray(log_weights, np.float64)
    if not np.isfinite(weights.max()):
        return np.full(weights.shape, np.nan)
    weights = np.exp(weights - weights.max())
    return weights / weights.sum()


def _stops(request: Request, token_ids: list[int]) -> bool:
    """True where a stop token ended the sequence."""
    return bool(token_ids) and token_ids[-1] in request.stop_ids


def reason_of(request: Request, token_ids: list[int]) -> str:
    """The reason why a finished sequence ended; a stop token at the cap counts as a stop.

    An answer of a given form is complete wherever it ends, also at the cap (`smcjax.decoding.constraints`).
    """
    return "stop" if request.automaton is not None or _stops(request, token_ids) else "length"


def completion_of(
    request: Request,
    token_ids: list[int],
    tokenizer: Tokenizer | None,
    text_of: Callable[[Sequence[int]], str | None] | None = None,
) -> CompletionOutput:
    reason = reason_of(request, token_ids)
    if tokenizer is None:
        return CompletionOutput(0, "", token_ids, reason)
    shown = token_ids[:-1] if _stops(request, token_ids) else token_ids
    text = None if text_of is None else text_of(shown)
    if text is None:
        text = answer_text(tokenizer, request.token_ids, shown)
    stops = request.params.stop_strings
    cut = first_stop(text, stops)
    if cut is None:
        return CompletionOutput(0, text, token_ids, reason)
    end = cut + min(len(stop) for stop in stops if text.startswith(stop, cut))
    return CompletionOutput(0, text[:cut], _tokens_up_to(text[:end], shown, request, tokenizer), "stop")


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The place where the first stop string begins, None without one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def _tokens_up_to(text: str, token_ids: list[int], request: Request, tokenizer: Tokenizer) -> list[int]:
    """The fewest leading tokens whose text begins with `text`, as that of all of them does."""
    answer, final = AnswerText(tokenizer, request.token_ids), 0
    for count, token in enumerate(token_ids, 1):
        final += len(answer.feed(token))
        if final >= len(text) or answer.rest().startswith(text[final:]):
            return token_ids[:count]
    return token_ids
