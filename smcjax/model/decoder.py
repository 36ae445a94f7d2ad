"""One functional decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3).

    x = embed[tokens]
    x = x + o · attention(rope(norm(x) · qkv))        for every layer
    x = x + down · (silu(gate · norm(x)) ∘ up · norm(x))
    logits = unembed · norm(x)

The layer body is written once. What differs between uses is where keys and values come from, so `hidden_states` takes
that as a function: `logits` attends densely over the tokens themselves (the oracle, and training), the paged path
(`smcjax.model.paged`) writes pages and reads them back.

Numerics: matrices and activations in the weights' dtype, products accumulated in f32, norms, rotary angles and
softmax in f32, logits f32. Layers are unrolled: separate weights beat slices of stacked ones under XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.model.config import ModelConfig
from smcjax.model.params import LayerParams, Params
from smcjax.numerics import product_precision
from smcjax.pallas import attention

# (layer index, q [R, T, H, D], k [R, T, Hkv, D], v [R, T, Hkv, D]) -> attention output [R, T, H, D]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def rms_norm(x: Float[Array, "*shape E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*shape E"]:
    """x / rms(x) · weight, in f32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight


def linear(
    x: Float[Array, "*shape I"], weight: Float[Array, "O I"], bias: Float[Array, " O"] | None
) -> Float[Array, "*shape O"]:
    """weight · x + bias with f32 accumulation, in x's dtype."""
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=product_precision(x.dtype))
    return y if bias is None else y + bias


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular step per position of each rotary pair, float64 [D/2]; llama3 scaling applied where the config has it.

    Llama 3 keeps wavelengths below `original/high_freq_factor`, divides those above `original/low_freq_factor` by
    `factor`, and blends linearly in original/wavelength between.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rotate(
    x: Float[Array, "R T H D"], cos: Float[Array, "R T half"], sin: Float[Array, "R T half"]
) -> Float[Array, "R T H D"]:
    """Rotary embedding: pairs are (first half, second half) of a head, as in Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _layer(
    config: ModelConfig,
    params: LayerParams,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    rows, columns, _ = x.shape
    h, hkv, d = config.num_heads, config.num_kv_heads, config.head_dim

    qkv = linear(rms_norm(x, params.attn_norm, config.rms_norm_eps), params.qkv, params.qkv_bias)
    qkv = qkv.reshape(rows, columns, h + 2 * hkv, d)
    q, k, v = qkv[:, :, :h], qkv[:, :, h : h + hkv], qkv[:, :, h + hkv :]
    if params.q_norm is not None and params.k_norm is not None:
        q, k = rms_norm(q, params.q_norm, config.rms_norm_eps), rms_norm(k, params.k_norm, config.rms_norm_eps)
    attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + linear(attended.reshape(rows, columns, h * d), params.o, params.o_bias)

    gate_up = linear(rms_norm(x, params.mlp_norm, config.rms_norm_eps), params.gate_up, params.gate_up_bias)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, params.down, params.down_bias)


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    attend: Attend,
) -> Float[Array, "R T E"]:
    """Normalised output of the last layer, ready for `unembed`; `attend` supplies keys and values."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(rope_frequencies(config), jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = params.embed[tokens]
    for index, layer in enumerate(params.layers):

        def attend_here(q: jax.Array, k: jax.Array, v: jax.Array, index: int = index) -> jax.Array:
            return attend(index, q, k, v)

        x = _layer(config, layer, x, cos, sin, attend_here)
    return rms_norm(x, params.final_norm, config.rms_norm_eps)


def unembed(params: Params, hidden: Float[Array, "*shape E"]) -> Float[Array, "*shape V"]:
    """Logits in f32, whatever the weights' dtype."""
    return jax.lax.dot_general(
        hidden,
        params.unembed,
        (((hidden.ndim - 1,), (1,)), ((), ())),
        precision=product_precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def logits(config: ModelConfig, params: Params, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, dense and without a cache: what everything else is compared with.

    Position t attends to positions 0…t; `token_ids` int32 in [0, V). Returns float32.
    """
    token_ids = jnp.asarray(token_ids)
    batch, length = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    hidden = hidden_states(config, params, token_ids, positions, lambda _, q, k, v: attention(q, k, v, causal))
    return unembed(params, hidden)
