"""One functional decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3).

    x = embed[tokens]
    x = x + o · attention(rope(norm(x) · qkv))        for every layer
    x = x + down · (silu(gate · norm(x)) ∘ up · norm(x))
    logits = unembed · norm(x)

The layer body is written once. What differs between uses is where keys and values come from, so `hidden_states` takes
that as a function of the layer's fused product: `logits` attends densely over the tokens themselves (the oracle, and
training), the paged path (`smcjax.model.paged`) writes pages and reads them back.

Numerics: matrices and activations in the weights' dtype, products accumulated in f32, norms, rotary angles and
softmax in f32, logits f32. Layers are unrolled: separate weights beat slices of stacked ones under XLA.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.matmul import matrix
from smcjax.model.config import ModelConfig, Rope
from smcjax.model.params import Params
from smcjax.pallas import (
    HeadNorms,
    PendingNorm,
    add_rms_norm,
    attention,
    rms_norm,
    split_and_rotate,
    supports_norm,
    swiglu,
    uses_kernels,
)


@dataclasses.dataclass(frozen=True)
class Projection:
    """A layer's fused product, and what makes queries, keys and values of it."""

    qkv: Float[Array, "R T HHH D"]  # H query heads, Hkv key heads, Hkv value heads
    cos: Float[Array, "R T half"]
    sin: Float[Array, "R T half"]
    num_kv_heads: int
    norms: HeadNorms | None
    pending: PendingNorm | None  # the layer's norm, where the product was made without

    def heads(self) -> tuple[Float[Array, "R T H D"], Float[Array, "R T Hkv D"], Float[Array, "R T Hkv D"]]:
        """q, k, v; the first two normed where the model does so, and rotated."""
        return split_and_rotate(
            self.qkv, self.cos, self.sin, num_kv_heads=self.num_kv_heads, norms=self.norms, pending=self.pending
        )


# (layer index, its product) -> attention output [R, T, H, D]
Attend = Callable[[int, Projection], jax.Array]


def linear(
    x: Float[Array, "*shape I"],
    weight: Any,
    bias: Float[Array, " O"] | None,
    *,
    add_to: Float[Array, "*shape O"] | None = None,
) -> Float[Array, "*shape O"]:
    """add_to + weight · x + bias with f32 accumulation, in x's dtype; `weight` [O, I] is a leaf of `Params`."""
    y = matrix(weight)(x, add_to=add_to)
    return y if bias is None else y + bias


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular step per position of each rotary pair, float64 [D/2]; llama3 scaling applied where it is asked for.

    Llama 3 keeps wavelengths below `original/high_freq_factor`, divides those above `original/low_freq_factor` by
    `factor`, and blends linearly in original/wavelength between.
    """
    half = head_dim // 2
    frequencies = rope.theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_angles(
    rope: Rope, head_dim: int, positions: Int[Array, "R T"]
) -> tuple[Float[Array, "R T half"], Float[Array, "R T half"]]:
    """Cosine and sine of every rotary pair's angle, f32."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(rope_frequencies(rope, head_dim), jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    attend: Attend,
    *,
    implementation: str = "xla",
) -> Float[Array, "R T E"]:
    """Normalised output of the last layer, ready for `unembed`; `attend` supplies keys and values.

    `implementation` of what stands between the products: `smcjax.pallas.paged_attention` says which there are. Only
    "xla" can be differentiated.

    With kernels, norms that `smcjax.model.folding` has folded into the products behind them are left pending: a
    product then reads the residual stream itself, which the product before has added to, and its reader divides.
    """
    angles = {rope: rope_angles(rope, config.head_dim, positions) for rope in {s.rope: None for s in config.layers}}
    eps, flat = config.rms_norm_eps, (*tokens.shape, -1)
    norms = [layer.attn_norm for layer in params.layers] + [params.final_norm]
    x = matrix(params.embed).rows(tokens)
    leaves_pending = _leaves_pending(x)

    def pending(x: jax.Array, norm: jax.Array | None) -> PendingNorm | None:
        return PendingNorm(x, eps) if norm is None and leaves_pending else None

    def added(
        x: jax.Array, y: jax.Array, weight: Any, bias: jax.Array | None, norm: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """x + weight · y, and what the next product reads."""
        if pending(x, norm) is None:
            return add_rms_norm(x, linear(y, weight, bias), norm, eps)
        x = linear(y, weight, bias, add_to=x)
        return x, x

    normed = rms_norm(x, norms[0], eps) if pending(x, norms[0]) is None else x
    for index, layer in enumerate(params.layers):
        cos, sin = angles[config.layer(index).rope]
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.reshape(*tokens.shape, -1, config.head_dim)
        of_heads = None
        if layer.q_norm is not None and layer.k_norm is not None:
            of_heads = HeadNorms(layer.q_norm, layer.k_norm, eps)
        projection = Projection(qkv, cos, sin, config.num_kv_heads, of_heads, pending(x, layer.attn_norm))
        attended = attend(index, projection).reshape(flat)
        x, normed = added(x, attended, layer.o, layer.o_bias, layer.mlp_norm)
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
        h = gated(gate_up, pending(x, layer.mlp_norm))
        x, normed = added(x, h, layer.down, layer.down_bias, norms[index + 1])
    return normed


def gated(gate_up: Float[Array, "*shape FF"], pending: PendingNorm | None) -> Float[Array, "*shape F"]:
    """silu(gate) · up, of a product that may still lack its norm."""
    if pending is not None:
        return swiglu(gate_up, pending)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _leaves_pending(x: Float[Array, "R T E"]) -> bool:
    """Whether norms without weights are left to those who read the products: where our kernels do."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    return uses_kernels() and supports_norm(rows=rows, width=width, dtype=x.dtype)


def unembed(params: Params, hidden: Float[Array, "*shape E"]) -> Float[Array, "*shape V"]:
    """Logits in f32, whatever the weights' dtype."""
    return matrix(params.unembed)(hidden, out=jnp.float32)


def forward(config: ModelConfig, params: Params, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T E"]:
    """Hidden states of every position, ready for `unembed`, dense and without a cache.

    Position t attends to positions 0…t; `token_ids` int32 in [0, V). Returns the weights' dtype.
    """
    token_ids = jnp.asarray(token_ids)
    batch, length = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return hidden_states(config, params, token_ids, positions, lambda _, new: attention(*new.heads(), causal))


def logits(config: ModelConfig, params: Params, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, float32, by `forward`: what everything else is compared with."""
    return unembed(params, forward(config, params, token_ids))
