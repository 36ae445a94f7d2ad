"""From a request's fields to `SamplingParams`, which all its choices share, and the seeds of these."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from smcjax.checks import short
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.server.errors import APIError
from smcjax.server.requests.schemas import Ask, ChatAsk, CompletionAsk

COMPLETION_TOKENS = 16  # of a completion whose request says nothing

# vLLM's words for kinds of `response_format`.
_OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name}": kind for name, kind in _OUTPUTS.items()}
_OUTPUTS["json_object"] = "json_object"
_ALIKE = (  # fields that are those of `SamplingParams`
    *("temperature", "top_p", "top_k", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def sampling_params(ask: Ask, potentials: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
    """The parameters of all answers but for their seeds. Raises APIError for fields, ValueError for values.

    `potentials` are those that a request may name.
    """
    logprobs = _logprobs(ask)
    of_prompt = [count for count in (echo_logprobs(ask), ask.prompt_logprobs) if count is not None]
    given: dict[str, Any] = {
        **{name: getattr(ask, name) for name in _ALIKE},
        "stop": ask.stop or None,
        "logit_bias": _bias(ask.logit_bias),
        "response_format": _form(ask),
        "control": None if ask.smc is None else ask.smc.control,
        "potentials": _potentials(ask, potentials),
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=_max_tokens(ask),
        logprobs=logprobs,
        prompt_logprobs=max(of_prompt, default=None),
    )


def _potentials(ask: Ask, known: Mapping[str, Any]) -> list[Any] | None:
    """The potentials that a request names. Raises APIError for names without one."""
    names = (ask.smc.potentials if ask.smc is not None else None) or []
    for name in names:
        if name not in known:
            there = f"use {', '.join(sorted(known))}" if known else "this server has none (serve --potential)"
            raise APIError(400, f"smc.potentials names {short(name)}, which is not here; {there}.", param="smc")
    return [known[name] for name in dict.fromkeys(names)] or None


def _form(ask: Ask) -> Mapping[str, Any] | None:
    """The form that the answer is to have, by whichever field says so. Raises APIError where several do."""
    given = _forms(ask)
    if not given:
        return None
    if len(given) > 1:
        first, second = list(given)[:2]
        raise APIError(400, f"{first} and {second} both say what the answer is like; give one.", param=second)
    ((name, value),) = given.items()
    if name == "response_format":
        return value
    if name == "structured_outputs":
        asked = [key for key, one in value.items() if one not in (None, False)]
        if len(asked) != 1 or asked[0] not in _OUTPUTS:
            raise APIError(
                400, f"structured_outputs must have one of {', '.join(_OUTPUTS)}, got {short(asked)}.", param=name
            )
        kind, value = _OUTPUTS[asked[0]], value[asked[0]]
    else:
        kind = _GUIDED[name]
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, kind: {"schema": _parsed(value, name)}}
    return {"type": kind, kind: value}


def _forms(ask: Ask) -> dict[str, Any]:
    """The fields that say what the answer is like, and what they say."""
    given = {name: getattr(ask, name) for name in ("response_format", *_GUIDED, "structured_outputs")}
    return {name: value for name, value in given.items() if value not in (None, {}, {"type": "text"})}


def by_own_field(error: Exception, ask: Ask) -> Exception:
    """The error of a request, in the names of the fields that the client sent: of a form and of the longest answer."""
    said = str(error)
    if not isinstance(error, ValueError):
        return error
    if said.startswith("response_format"):
        said = next(iter(_forms(ask)), "response_format") + said.removeprefix("response_format")
    if isinstance(ask, ChatAsk) and ask.max_completion_tokens is not None:
        said = re.sub(r"\bmax_tokens\b", "max_completion_tokens", said)
    return error if said == str(error) else ValueError(said)


def _parsed(schema: Any, field: str) -> Any:
    """A schema that vLLM's fields may hold as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise APIError(
            400, f"{field} has the schema {short(schema)}, which is no JSON; mend it.", param=field
        ) from None


def _logprobs(ask: Ask) -> int | None:
    """How many alternatives to each chosen token the reply is to hold; None: no log-probabilities at all."""
    if isinstance(ask, CompletionAsk):
        return ask.logprobs
    assert isinstance(ask, ChatAsk)
    if ask.top_logprobs and not ask.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true; set it.", param="top_logprobs")
    return (ask.top_logprobs or 0) if ask.logprobs else None


def echo_logprobs(ask: Ask) -> int | None:
    """How many alternatives to each token of the prompt the reply is to hold in front of its answer; None: no such."""
    return ask.logprobs if isinstance(ask, CompletionAsk) and ask.echo else None


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Biases by token id, which JSON writes as text."""
    for token in bias or ():
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise APIError(
                400, f"logit_bias has the key {short(token)}, and keys are token ids; mend it.", param="logit_bias"
            )
    return {int(token): value for token, value in bias.items()} if bias else None


def _max_tokens(ask: Ask) -> int | None:
    if isinstance(ask, ChatAsk):
        return ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
    return COMPLETION_TOKENS if ask.max_tokens is None else ask.max_tokens


def seeds_of(ask: Ask) -> list[int | None]:
    """The seeds of a prompt's answers."""
    return [seed_of(ask.seed, choice) for choice in range(ask.choices)]


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
