"""Llama 2 and 3, and models that are built alike."""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.attention import FULL
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.families.family import Family
from smcjax.model.families.gguf_keys import GGUFKeys
from smcjax.model.families.hf_keys import HFKeys, local_layers, read_rope, written_rope


def plain_layer(keys: HFKeys, config: ModelConfig, **variant: Any) -> LayerSpec:
    """A layer with the config's rope and the fields in `variant`."""
    if keys.raw("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.refusal("hidden_act", "only silu is implemented; use a model with that activation")
    objects = [keys.inner(name) for name in ("rope_parameters", "rope_scaling")]
    return LayerSpec(rope=read_rope(keys, config, objects), **variant)


def plain_keys(config: ModelConfig) -> dict[str, Any]:
    """Activation and rope, the latter in both spellings, so that transformers 4 and 5 agree on the model."""
    rope = written_rope(config.layer(0).rope)
    return {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    local_layers(keys, config.num_layers, None)
    bias = keys.flag("attention_bias")
    layer = plain_layer(keys, config, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))
    return config.with_layers([layer] * config.num_layers)


def _write(config: ModelConfig) -> dict[str, Any] | None:
    layer = config.layer(0)
    if config.hidden_size % config.num_heads and not layer.o_bias and not layer.mlp_bias:
        return None  # transformers refuses this shape in Llama; Mistral has it
    return {
        **plain_keys(config),
        "attention_bias": layer.qkv_bias and layer.o_bias,
        "mlp_bias": layer.mlp_bias,
    }


def _read_gguf(keys: GGUFKeys, config: ModelConfig, layer: LayerSpec) -> ModelConfig:
    layer = dataclasses.replace(layer, rope=keys.rope(config), attention=keys.window(config) or FULL)
    return config.with_layers([layer] * config.num_layers)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=_read,
    write=_write,
    gguf=("llama", "mistral"),  # files of Mistral say either
    read_gguf=_read_gguf,
    gguf_interleaves=True,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
)
