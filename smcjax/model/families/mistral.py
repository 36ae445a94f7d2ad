"""Mistral: Llama without biases, all of whose layers may attend within a window. Its GGUF files are Llama's."""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.attention import FULL, AttentionKind
from smcjax.model.config import ModelConfig
from smcjax.model.families.hf_keys import HFKeys, local_layers, windowed, written_windows
from smcjax.model.families.llama import LLAMA, plain_keys, plain_layer

_DEFAULT_WINDOW = 4096


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    attention: AttentionKind = FULL
    if not keys.is_null("sliding_window"):
        attention = windowed(keys.integer("sliding_window", _DEFAULT_WINDOW), config.max_position_embeddings)
    local = local_layers(keys, config.num_layers, None if attention == FULL else lambda _: True)
    if attention != FULL and not all(local):
        raise keys.refusal("layer_types", "Mistral's sliding_window is of all layers; remove one of the two")
    return config.with_layers([plain_layer(keys, config, attention=attention)] * config.num_layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**plain_keys(config), "sliding_window": written_windows(config)[1]}


MISTRAL = dataclasses.replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    read=_read,
    write=_write,
    gguf=(),
    num_kv_heads=8,
    max_position_embeddings=131072,
)
