"""Llama with Native Sparse Attention in all or some layers, under our own names: no public class computes all of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.attention import FULL, AttentionKind
from smcjax.model.config import ModelConfig
from smcjax.model.families.family import Family
from smcjax.model.families.hf_keys import HFKeys, read_layer_types, windowed, written_windows
from smcjax.model.families.llama import plain_keys, plain_layer
from smcjax.sparse.nsa import NSA

_KEY = "native_sparse_attention"  # an object of the fields of `smcjax.sparse.nsa.NSA`; an absent one has its default
# Choices that earlier files name, of which one is left.
_SETTLED = {"compressed_rope": "block", "score": "prob", "share": "group", "gate": "x"}
_TYPES = (_KEY, "full_attention", "sliding_attention")  # of layers, in layer_types; without, all are of the first


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    types = read_layer_types(keys, config.num_layers, _TYPES) or [_KEY] * config.num_layers
    inner = keys.inner(_KEY)
    options = {field.name: inner.raw(field.name, field.default) for field in dataclasses.fields(NSA)}
    try:
        attention = NSA(**options)
    except ValueError as error:
        raise ValueError(f"{_KEY} in the model's config: {error}") from None
    for name, only in {**_SETTLED, "phi": attention.phi}.items():
        if inner.raw(name, only) != only:
            why = f" with kv {attention.kv!r}" if name == "phi" else ""
            raise inner.refusal(name, f"only {only!r} is implemented{why}; use a model with that")
    inner.refuse_unknown()
    kinds: dict[str, AttentionKind] = {_KEY: attention, "full_attention": FULL}
    if "sliding_attention" in types:
        kinds["sliding_attention"] = windowed(keys.integer("sliding_window"), config.max_position_embeddings)
    bias = keys.flag("attention_bias")
    variant: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": keys.flag("mlp_bias")}
    layer = plain_layer(keys, config, **variant)
    return config.with_layers(dataclasses.replace(layer, attention=kinds[kind]) for kind in types)


def _write(config: ModelConfig) -> dict[str, Any] | None:
    layer = config.layer(0)
    kinds = [config.layer(index).attention for index in range(config.num_layers)]
    sparse = [kind for kind in kinds if isinstance(kind, NSA)]
    if not sparse:
        return None
    types, window = written_windows(config)
    types = [_KEY if isinstance(kind, NSA) else other for kind, other in zip(kinds, types, strict=True)]
    biases = {"attention_bias": layer.qkv_bias and layer.o_bias, "mlp_bias": layer.mlp_bias}
    mixed = {} if len(sparse) == len(kinds) else {"layer_types": types, "sliding_window": window}
    return {**plain_keys(config), **biases, **mixed, _KEY: dataclasses.asdict(sparse[0])}


FAMILY = Family(
    architecture="SmcjaxNSAForCausalLM",
    model_type="smcjax_nsa",
    read=_read,
    write=_write,
    max_position_embeddings=2048,
)
