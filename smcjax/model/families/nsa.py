"""Llama with Native Sparse Attention in all layers, under our own names: no public model class computes all of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.config import ModelConfig
from smcjax.model.families.family import Family
from smcjax.model.families.llama import plain_keys, plain_layer
from smcjax.model.hf_keys import HFKeys, local_layers
from smcjax.model.nsa import NSA as Attention

_KEY = "native_sparse_attention"  # an object of the fields of `smcjax.model.nsa.NSA`; an absent one has its default


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    local_layers(keys, config.num_layers, None)
    inner = keys.inner(_KEY)
    options = {field.name: inner.raw(field.name, field.default) for field in dataclasses.fields(Attention)}
    inner.refuse_unknown()
    try:
        attention = Attention(**options)
    except ValueError as error:
        raise ValueError(f"{_KEY} in the model's config: {error}") from None
    bias = keys.flag("attention_bias")
    variant: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": keys.flag("mlp_bias")}
    return config.with_layers([plain_layer(keys, config, attention=attention, **variant)] * config.num_layers)


def _write(config: ModelConfig) -> dict[str, Any] | None:
    layer = config.layer(0)
    if not isinstance(layer.attention, Attention):
        return None
    biases = {"attention_bias": layer.qkv_bias and layer.o_bias, "mlp_bias": layer.mlp_bias}
    return {**plain_keys(config), **biases, _KEY: dataclasses.asdict(layer.attention)}


NSA = Family(
    architecture="SmcjaxNSAForCausalLM",
    model_type="smcjax_nsa",
    read=_read,
    write=_write,
    max_position_embeddings=2048,
)
