"""Qwen 2 (biases of q, k and v) and Qwen 3 (norms of q and k), some of whose layers may attend within a window."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.families.family import Family
from smcjax.model.families.gguf_keys import GGUFKeys
from smcjax.model.families.hf_keys import HFKeys, local_layers, windowed, written_windows
from smcjax.model.families.llama import plain_keys, plain_layer

_MAX_WINDOW_LAYERS, _DEFAULT_WINDOW = 28, 4096


def _read_qwen2(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    return _with_windows(keys, config, plain_layer(keys, config, qkv_bias=True))


def _read_qwen3(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _with_windows(keys, config, plain_layer(keys, config, qkv_bias=bias, o_bias=bias, qk_norm="head"))


def _with_windows(keys: HFKeys, config: ModelConfig, layer: LayerSpec) -> ModelConfig:
    """Adds the layers; with use_sliding_window they are local from max_window_layers on, or by layer_types."""
    used = keys.flag("use_sliding_window") and not keys.is_null("sliding_window")
    keys.raw("sliding_window"), keys.raw("max_window_layers")  # without effect otherwise
    if not used:
        local_layers(keys, config.num_layers, None)
        return config.with_layers([layer] * config.num_layers)
    first = keys.integer("max_window_layers", _MAX_WINDOW_LAYERS, least=0)
    attention = windowed(keys.integer("sliding_window", _DEFAULT_WINDOW), config.max_position_embeddings)
    kinds = layer, dataclasses.replace(layer, attention=attention)
    return config.with_layers(kinds[local] for local in local_layers(keys, config.num_layers, lambda i: i >= first))


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    layer_types, window = written_windows(config)
    if window is None:
        return plain_keys(config)
    windows = {"use_sliding_window": True, "sliding_window": window, "layer_types": layer_types}
    return {**plain_keys(config), **windows, "max_window_layers": layer_types.index("sliding_attention")}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    layer = config.layer(0)
    return {**_write_qwen2(config), "attention_bias": layer.qkv_bias and layer.o_bias}


def _read_gguf(keys: GGUFKeys, config: ModelConfig, layer: LayerSpec, **variant: Any) -> ModelConfig:
    if keys.window(config) is not None:
        raise keys.refusal("attention.sliding_window", "the file does not say of which layers; use another model")
    layer = dataclasses.replace(layer, rope=keys.rope(config), **variant)
    return config.with_layers([layer] * config.num_layers)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read=_read_qwen2,
    write=_write_qwen2,
    gguf=("qwen2",),
    read_gguf=functools.partial(_read_gguf, qkv_bias=True),
    max_position_embeddings=32768,
    num_kv_heads=32,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=_read_qwen3,
    write=_write_qwen3,
    gguf=("qwen3",),
    read_gguf=functools.partial(_read_gguf, qk_norm="head"),
    head_dim=128,
)
