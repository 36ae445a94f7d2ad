"""From a request's fields to `SamplingParams`: what is passed on, what is refused by name, and seeds of choices.

Whatever the engine learns (alternatives to the chosen tokens, log-probabilities of prompts, penalties, biases) is to
be passed on in `sampling_params`, and to leave `_NOT_YET`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from smcjax.engine.sampling_params import MAX_SEED, SamplingParams
from smcjax.server.errors import APIError
from smcjax.server.schemas import Ask, ChatAsk, CompletionAsk

COMPLETION_TOKENS = 16  # of a completion whose request says nothing

# Fields that are refused, by the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "echo": (False,),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "store": (None, False),
}


def sampling_params(ask: Ask, seed: int | None) -> SamplingParams:
    """The parameters of one answer. Raises APIError for fields that cannot be honoured, ValueError for values."""
    for name, values in _NOT_YET.items():
        value = getattr(ask, name, values[0])
        if value not in values:
            message = f"{name} is not supported by this server; leave it out."
            raise APIError(400, message, param=name, code="unsupported")
    if isinstance(ask, CompletionAsk) and ask.logprobs:
        raise APIError(
            400,
            f"logprobs is {ask.logprobs}, and this server knows those of the chosen tokens alone; use logprobs=0.",
            param="logprobs",
            code="unsupported",
        )
    given: dict[str, Any] = {
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "stop": ask.stop or None,
        "stop_token_ids": ask.stop_token_ids,
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=_max_tokens(ask),
        min_tokens=ask.min_tokens,
        ignore_eos=ask.ignore_eos,
        seed=seed,
        logprobs=1 if wants_logprobs(ask) else None,
    )


def wants_logprobs(ask: Ask) -> bool:
    """True where the reply is to hold log-probabilities."""
    if isinstance(ask, CompletionAsk):
        return ask.logprobs is not None
    return isinstance(ask, ChatAsk) and bool(ask.logprobs)


def _max_tokens(ask: Ask) -> int | None:
    if isinstance(ask, ChatAsk):
        return ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
    return COMPLETION_TOKENS if ask.max_tokens is None else ask.max_tokens


def seed_of(seed: int | None, choice: int) -> int | None:
    """The seed of a prompt's `choice`-th answer, 0 to 2³² − 1; None lets the engine choose.

    The first has the request's own, so that it is what `LLM.generate` gives; further ones, and seeds out of range, are
    derived by SHA-256.
    """
    if seed is None:
        return None
    if choice == 0 and 0 <= seed <= MAX_SEED:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:4], "big")
