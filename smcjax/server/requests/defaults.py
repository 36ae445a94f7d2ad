"""Fields of other servers that ask for nothing, by their values: what they ask for is done here in any case.

Clients send them with every request. With any other value they are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smcjax.server.errors import APIError

Defaults = Mapping[str, tuple[Any, ...]]
EITHER = (True, False)

COMMON: dict[str, tuple[Any, ...]] = {
    # vLLM
    "min_p": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    # SGLang
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": EITHER,  # no text of a model is told apart as reasoning
    "stream_reasoning": EITHER,
    # llama.cpp
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "repeat_penalty": (1,),
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "n_keep": (0,),
    "n_probs": (0,),
    "timings_per_token": (False,),
}
COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": ("",), "best_of": (1,), "add_special_tokens": (True,)}
CHAT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": EITHER,
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    # vLLM
    "add_special_tokens": (False,),  # the chat template alone decides on them
    "include_reasoning": (True,),
    "documents": ([],),
    "echo": (False,),
}
_CHOOSES = {"tools": "tool_choice", "functions": "function_call"}  # "none" here: the list there has no effect


def given(fields: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """The fields that ask for something. Raises APIError for one of `defaults` with a value that is not there."""
    left = {}
    for name, value in fields.items():
        if value is None or fields.get(_CHOOSES.get(name, "")) == "none" or value in defaults.get(name, ()):
            continue
        if name in defaults:
            message = f"{name} is not supported by this server; leave it out."
            raise APIError(400, message, param=name, code="unsupported")
        left[name] = value
    return left
