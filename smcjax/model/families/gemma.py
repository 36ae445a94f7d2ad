"""Gemma 3's text models: most layers attend within a window and turn by a rope of their own, every sixth to all."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from smcjax.model.attention import Full
from smcjax.model.config import LayerSpec, ModelConfig, Rope
from smcjax.model.families.family import HUGGING_FACE, Family
from smcjax.model.families.gguf_keys import GGUFKeys
from smcjax.model.families.hf_keys import HFKeys, local_layers, read_rope, windowed, written_rope, written_windows

_ACTIVATION = "gelu_pytorch_tanh"
_DEFAULT_WINDOW, _PATTERN = 4096, 6
_LOCAL_THETA = 10_000.0
_ROPES = (  # layers, the old key of their base, and its default
    ("full_attention", "rope_theta", 1_000_000.0),
    ("sliding_attention", "rope_local_base_freq", _LOCAL_THETA),
)
_QUERY_SCALAR = 256
_LAYERS_OF_27B = 62  # the one size whose queries are scaled by another width than a head's


def _completed(
    config: ModelConfig, layer: LayerSpec, local: list[bool], ropes: tuple[Rope, Rope], window: int, scalar: int
) -> ModelConfig:
    """Adds Gemma's layers; `ropes` are the global ones' and the local ones', queries are divided by √`scalar`."""
    scale = None if scalar == config.head_dim else scalar**-0.5
    layer = dataclasses.replace(layer, qk_norm="head", post_norms=True, activation="gelu_tanh")
    attentions = Full(scale), windowed(window, config.max_position_embeddings, scale)
    kinds = [dataclasses.replace(layer, attention=a, rope=r) for a, r in zip(attentions, ropes, strict=True)]
    config = dataclasses.replace(config, embed_scale=math.sqrt(config.hidden_size), float32_norms=True)
    return config.with_layers(kinds[within] for within in local)


def _read(keys: HFKeys, config: ModelConfig) -> ModelConfig:
    if keys.raw("hidden_activation", _ACTIVATION) != _ACTIVATION:
        raise keys.refusal("hidden_activation", f"only {_ACTIVATION} is implemented in this class; use another model")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if keys.raw(key) is not None:
            raise keys.refusal(key, "soft caps are not implemented; use a model without")
    pattern = keys.integer("sliding_window_pattern", _PATTERN)
    local = local_layers(keys, config.num_layers, lambda index: (index + 1) % pattern != 0)
    if any(local) and keys.is_null("sliding_window"):
        raise keys.refusal("sliding_window", "the local layers need it; set it to a positive integer")
    window = keys.integer("sliding_window", _DEFAULT_WINDOW)
    nested, scaling = keys.inner("rope_parameters"), [keys.inner("rope_scaling")]
    global_rope, local_rope = (
        read_rope(keys, config, [nested.inner(kind), *more], theta=key, default=default, kinds=("default", "linear"))
        for (kind, key, default), more in zip(_ROPES, (scaling, []), strict=True)
    )
    nested.refuse_unknown()
    bias = keys.flag("attention_bias")
    layer = LayerSpec(qkv_bias=bias, o_bias=bias)
    return _completed(
        config, layer, local, (global_rope, local_rope), window, keys.integer("query_pre_attn_scalar", _QUERY_SCALAR)
    )


def _write(config: ModelConfig) -> dict[str, Any] | None:
    if config.hidden_size % config.num_heads:
        return None  # transformers refuses this shape
    layer_types, window = written_windows(config)
    specs = [config.layer(index) for index in range(config.num_layers)]
    if window is None and len({spec.rope for spec in specs}) == 2:  # a window that no position feels
        layer_types = ["sliding_attention" if spec.rope == specs[0].rope else "full_attention" for spec in specs]
    ropes = {kind: written_rope(spec.rope) for kind, spec in zip(layer_types, specs, strict=True)}
    layer, scale = specs[0], getattr(specs[0].attention, "scale", None)
    return {
        "hidden_activation": _ACTIVATION,
        "layer_types": layer_types,
        "sliding_window": window or config.max_position_embeddings,
        "rope_parameters": ropes,
        **{key: ropes[kind]["rope_theta"] for kind, key, _ in _ROPES if kind in ropes},
        "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
        "attention_bias": layer.qkv_bias and layer.o_bias,
    }


def _read_gguf(keys: GGUFKeys, config: ModelConfig, layer: LayerSpec) -> ModelConfig:
    pattern = keys.integer("attention.sliding_window_pattern", _PATTERN)
    local = [(index + 1) % pattern != 0 for index in range(config.num_layers)]
    ropes = keys.rope(config, linear=True), Rope(keys.number("rope.freq_base_swa", _LOCAL_THETA))
    scalar = config.hidden_size // config.num_heads if config.num_layers == _LAYERS_OF_27B else config.head_dim
    return _completed(config, layer, local, ropes, keys.integer("attention.sliding_window"), scalar)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read=_read,
    write=_write,
    gguf=("gemma3",),
    read_gguf=_read_gguf,
    num_kv_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    bos_token_id=2,
    eos_token_id=1,
    tie_embeddings=True,
    names={
        **HUGGING_FACE,
        "attn_post_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
        "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
