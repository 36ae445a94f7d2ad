"""OLMo 2: norms stand behind attention and MLP, none in front; one norm of queries and one of keys take all heads."""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.families.family import HUGGING_FACE, Family
from smcjax.model.families.gguf_keys import GGUFKeys
from smcjax.model.families.hf_keys import HFKeys, local_layers
from smcjax.model.families.llama import plain_keys, plain_layer


def _completed(config: ModelConfig, layer: LayerSpec) -> ModelConfig:
    layer = dataclasses.replace(layer, qk_norm="all", pre_norms=False, post_norms=True)
    return dataclasses.replace(config, float32_norms=True).with_layers([layer] * config.num_layers)


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    local_layers(keys, config.num_layers, None)
    bias = keys.flag("attention_bias")
    return _completed(config, plain_layer(keys, config, qkv_bias=bias, o_bias=bias))


def _write(config: ModelConfig) -> dict[str, Any]:
    layer = config.layer(0)
    return {**plain_keys(config), "attention_bias": layer.qkv_bias and layer.o_bias}


def _read_gguf(keys: GGUFKeys, config: ModelConfig, layer: LayerSpec) -> ModelConfig:
    return _completed(config, dataclasses.replace(layer, rope=keys.rope(config)))


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    read=_read,
    write=_write,
    gguf=("olmo2",),
    read_gguf=_read_gguf,
    max_position_embeddings=2048,
    eos_token_id=50279,
    rms_norm_eps=1e-5,
    names={
        **HUGGING_FACE,
        "attn_post_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
)
