"""Prompts and parameters as users give them, checked before any work starts, and as a batch of host arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smcjax.checks import is_unicode, short
from smcjax.engine.requests.batch import Batch
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.structured.automaton import Automata, Automaton
from smcjax.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, checked. `limit` is the length at which its sequences are cut."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    worst_case_pages: int
    automaton: Automaton | None = None  # of its `response_format`
    call: str = ""  # the same of all requests that were asked for at once (`smcjax.engine.schedule.rounds`)
    trace: bool = False  # whether its reader follows its cycles, and its output holds their history


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list. Raises ValueError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or not all(isinstance(prompt, str | Mapping) for prompt in prompts):
        raise ValueError(
            f"prompts must be text, {{'prompt_token_ids': [...]}}, or a list of these, got {short(prompts)}."
        )
    return list(prompts)


def params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` a prompt, from one for all, a list, or None for the defaults."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {short(params)}.")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts; give one, or one a prompt.")
    return list(params)


def tokenize(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int]]:
    """Text and token ids of a prompt. Raises ValueError (one sentence) for what cannot be one.

    One that is far too long is refused early, by its length or its beginning.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the model directory has no tokenizer; pass {'prompt_token_ids': [...]} instead of text.")
        if not prompt:
            raise ValueError("the prompt is empty; give at least one character.")
        if not is_unicode(prompt):
            raise ValueError(f"the prompt must be valid Unicode, got {short(prompt)}; decode it from its own encoding.")
        text: str | None = prompt
        token_ids = tokenizer.encode(prompt, max_model_len)
    else:
        if set(prompt) != {"prompt_token_ids"}:
            raise ValueError(f"a prompt mapping has the one key 'prompt_token_ids', got {sorted(map(str, prompt))}.")
        text, token_ids = None, prompt["prompt_token_ids"]
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, list | tuple) or not all(
            isinstance(token, int | np.integer) and not isinstance(token, bool) for token in token_ids
        ):
            raise ValueError(f"prompt_token_ids must be a list of whole numbers, got {short(token_ids)}.")
        check_length(len(token_ids), max_model_len)
        token_ids = [int(token) for token in token_ids]
    if not token_ids:
        raise ValueError("the prompt has no tokens; give at least one.")
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt_token_ids holds {token}; ids of this model are 0 to {vocab_size - 1}.")
    return text, token_ids


def check_length(tokens: int, max_model_len: int) -> None:
    """Raises ValueError for prompts that leave no room for an answer."""
    if tokens >= max_model_len:
        raise ValueError(
            f"the prompt has {tokens} tokens and max_model_len is {max_model_len}; "
            "shorten the prompt or raise max_model_len."
        )


def split_stops(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[SamplingParams, tuple[int, ...]]:
    """Splits `stop` into text and tokens: returns parameters with the text alone, and the ids of all stop tokens.

    A stop string that is a special token means that token, which never becomes text. Raises ValueError for one that
    holds a special token among other text, so that it could never be found, and for ids that the model lacks.
    """
    named = tuple(dict.fromkeys(params.stop_token_ids or ()))
    if any(token >= vocab_size for token in named):
        raise ValueError(f"stop_token_ids holds {max(named)}; ids of this model are 0 to {vocab_size - 1}.")
    if not params.stop_strings:
        return params, named
    if tokenizer is None:
        raise ValueError("stop needs a tokenizer, which the model directory lacks; use stop_token_ids.")
    special = tokenizer.special_tokens
    for text in params.stop_strings:
        if text not in special:
            for token in special:
                if token and token in text:
                    raise ValueError(
                        f"stop holds {short(text)}, and {token!r} in it is a special token, which never becomes text; "
                        "make the token a stop by itself."
                    )
        elif special[text] >= vocab_size:
            raise ValueError(
                f"stop holds {text!r}, the token {special[text]}, and ids of this model are 0 to {vocab_size - 1}; "
                "leave it out."
            )
        else:
            named += (special[text],)
    strings = tuple(text for text in params.stop_strings if text not in special)
    return dataclasses.replace(params, stop=strings or None), named


def limit_of(token_ids: list[int], params: SamplingParams, max_model_len: int) -> int:
    """Length at which the request's sequences are cut. Raises ValueError if nothing can be generated."""
    check_length(len(token_ids), max_model_len)
    longest = max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
    limit = min(longest, max_model_len)
    if params.min_tokens > limit - len(token_ids):
        raise ValueError(
            f"min_tokens is {params.min_tokens} and only {limit - len(token_ids)} tokens fit max_model_len "
            f"{max_model_len}; lower min_tokens."
        )
    return limit


def automaton_of(params: SamplingParams, automata: Automata, stop_ids: tuple[int, ...]) -> Automaton | None:
    """The automaton of the request's `response_format`. Raises ValueError where there is none.

    `split_stops` has made stop tokens of stop strings by now.
    """
    if params.expression is None:
        return None
    if not stop_ids:
        raise ValueError(
            "response_format needs a token that ends the answer, and here is none; drop ignore_eos, or give "
            "stop_token_ids."
        )
    return automata.of(params.expression, stop_ids)


def check_room(automaton: Automaton, generated: int) -> None:
    """Raises ValueError where no answer of the automaton fits so many tokens."""
    least = int(automaton.reach[0])
    if least > generated:
        raise ValueError(
            f"response_format asks for an answer of {least} tokens at least, and max_tokens and max_model_len leave "
            f"{generated}; raise them."
        )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for parameters about tokens that the model lacks."""
    unknown = [token for token in params.logit_bias or () if token >= vocab_size]
    if unknown:
        raise ValueError(f"logit_bias holds {unknown[0]}; ids of this model are 0 to {vocab_size - 1}.")


def make_batch(requests: Mapping[int, Request], size: int, *, max_model_len: int, vocab_size: int) -> Batch:
    """The requests, by their slots, as arrays for a batch of `size` groups; the others are absent."""
    batch = Batch.empty(size, max_model_len=max_model_len, vocab_size=vocab_size)
    for group, request in requests.items():
        params = request.params
        batch.prompts[group, : len(request.token_ids)] = request.token_ids
        batch.prompt_length[group] = len(request.token_ids)
        batch.limit[group] = request.limit
        batch.min_tokens[group] = params.min_tokens
        batch.temperature[group] = params.temperature
        batch.top_k[group] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        batch.top_p[group] = params.top_p
        batch.stops[group, list(request.stop_ids)] = True
        if params.control is not None:
            batch.control[group] = params.control
        if request.automaton is not None:
            batch.automaton[group] = 0  # its place in the tables comes with them
        bias = params.logit_bias or {}
        batch.repetition[group] = params.repetition_penalty
        batch.frequency[group] = params.frequency_penalty
        batch.presence[group] = params.presence_penalty
        batch.biased[group, : len(bias)] = list(bias)
        batch.bias[group, : len(bias)] = list(bias.values())
        batch.seed[group] = request.seed
        batch.present[group] = True
    return batch
