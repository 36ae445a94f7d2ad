"""One functional decoder for the Llama family and its relatives.

    x = embed[tokens]
    x = x + o · attention(rope(norm(x) · qkv))        for every layer
    x = x + down · (silu(gate · norm(x)) ∘ up · norm(x))
    logits = unembed · norm(x)

A layer's spec varies this (`smcjax.model.config.LayerSpec`). The layer body is written once. Uses differ in where keys
and values come from, so `hidden_states` takes that as a function of the layer's fused product: `logits` attends densely
over the tokens themselves (the oracle, and training), the paged path (`smcjax.model.paged`) writes pages and reads them
back.

Numerics: matrices and activations in the weights' dtype, products accumulated in f32, norms, rotary angles and
softmax in f32, logits f32. Layers are unrolled: separate weights beat slices of stacked ones under XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.matmul import Dense, Quantized, is_whole, matrix
from smcjax.model.attention import Projection
from smcjax.model.config import ModelConfig, Rope
from smcjax.model.params import Folded, Params, PreNorm
from smcjax.pallas import (
    HeadNorms,
    Norm,
    PendingNorm,
    add_rms_norm,
    implementations,
    rms_norm,
    round_rows,
    skinny_gemm,
    skinny_gemm_eight_bits,
    skinny_gemm_swiglu,
    swiglu,
)

# (layer index, its product) -> attention output [R, T, H, D]
Attend = Callable[[int, Projection], jax.Array]
# (layer index, the residual stream [R, T, E] that enters the layer); the last index is the number of layers
Watch = Callable[[int, jax.Array], None]


class _Reader(NamedTuple):
    """A product that reads the residual stream."""

    norm: PreNorm | None
    left: Norm | None = None  # what has not been applied to what it reads (`_divided`)


class AuxHiddenStates:
    """Collects the residual streams that enter `layers`. Pass it to `hidden_states` as `watch`, one for each trace."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._streams: dict[int, jax.Array] = {}

    def __call__(self, index: int, stream: jax.Array) -> None:
        if index in self.layers:
            self._streams[index] = stream

    @property
    def streams(self) -> Float[Array, "R T aux_layers E"]:
        """The streams in the order of `layers`."""
        return jnp.stack([self._streams[layer] for layer in self.layers], axis=2)


def linear(
    x: Float[Array, "*shape I"],
    weight: Any,
    bias: Float[Array, " O"] | None,
    *,
    norm: Norm | None = None,
    add_to: Float[Array, "*shape O"] | None = None,
) -> Float[Array, "*shape O"]:
    """add_to + weight · x + bias with f32 accumulation, in x's dtype; `weight` [O, I] is a leaf of `Params`.

    A `norm` of x is applied where `norms_itself` is true of the matrix.
    """
    if bias is None:
        return product(x, weight, norm=norm, add_to=add_to)
    y = matrix(weight)(x, add_to=add_to)
    return y + jnp.broadcast_to(bias, y.shape)  # which XLA adds within the product


def product(
    x: Float[Array, "*shape I"],
    weight: Any,
    *,
    norm: Norm | None = None,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
) -> Float[Array, "*shape O"]:
    """`Matrix`'s add_to + weight · x, of few rows by a kernel; of the normed x where `norms_itself` is true."""
    of = matrix(weight)
    if isinstance(of, Quantized):
        return skinny_gemm_eight_bits(x, of, norm=norm, add_to=add_to, out=out)
    assert norm is None
    if isinstance(of, Dense):
        return skinny_gemm(x, of.values, add_to=add_to, out=out)
    return of(x, add_to=add_to, out=out)


def norms_itself(weight: Any, x: Float[Array, "*shape I"]) -> bool:
    """True for a matrix whose product norms x as it rounds it: in float8, by a kernel that reads x anyway."""
    return isinstance(weight, Quantized) and round_rows.kernel_for(x, weight.kind) is not None


def rope_angles(
    rope: Rope, head_dim: int, positions: Int[Array, "R T"]
) -> tuple[Float[Array, "R T half"], Float[Array, "R T half"]]:
    """Cosine and sine of every rotary pair's angle, f32."""
    # As constants they would not be an array that cosine and sine share, and XLA would make a launch of each.
    frequencies = jax.lax.optimization_barrier(jnp.asarray(rope.frequencies(head_dim), jnp.float32))
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    attend: Attend,
    watch: Watch | None = None,
) -> Float[Array, "R T E"]:
    """Normalised output of the last layer, ready for `unembed`; `attend` supplies keys and values.

    `watch` is told the residual stream in front of every layer, and behind the last.

    With kernels, norms that `smcjax.model.folding` has folded into the products behind them are left pending: a
    product then reads the residual stream itself, which the product before has added to, and its reader divides. A
    product with a float8 matrix reads the stream too, and norms what it rounds.
    Only within `implementations("xla")` can it be differentiated.
    """
    angles = {rope: rope_angles(rope, config.head_dim, positions) for rope in {s.rope: None for s in config.layers}}
    eps, flat = config.rms_norm_eps, (*tokens.shape, -1)
    x = matrix(params.embed).rows(tokens)
    if config.embed_scale != 1:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    leaves_pending = _leaves_pending(x)

    def reader(norm: PreNorm | None, weight: Any, bias: jax.Array | None, own: Any = None) -> _Reader:
        """The product with `weight`; weights of the attention's `own` read what has been normed as well."""
        if isinstance(norm, Folded):
            return _Reader(norm, Norm(None, eps) if leaves_pending else None)
        plain = norm is None or bias is not None or own or not norms_itself(weight, x)
        return _Reader(norm, None if plain else Norm(norm, eps))

    def reads_stream(by: _Reader) -> bool:
        """True where a product reads the residual stream itself: its norm is left to it, or there is none."""
        return by.norm is None or by.left is not None

    def weight_of(norm: PreNorm | None) -> jax.Array | None:
        return None if isinstance(norm, Folded) else norm

    def added(
        x: jax.Array, y: jax.Array, weight: Any, bias: jax.Array | None, post: jax.Array | None, by: _Reader
    ) -> tuple[jax.Array, jax.Array]:
        """x + weight · y, the product normed by `post` where the layer does so; and what the next reader reads."""
        if not reads_stream(by):
            return add_rms_norm(x, normed_by(post, linear(y, weight, bias)), weight_of(by.norm), eps)
        x = linear(y, weight, bias, add_to=x) if post is None else x + normed_by(post, linear(y, weight, bias))
        return x, x

    def normed_by(norm: jax.Array | None, y: jax.Array) -> jax.Array:
        return y if norm is None else rms_norm(y, norm, eps)

    readers = []  # two a layer, and what is made of the last stream
    for layer in params.layers:
        readers.append(reader(layer.attn_norm, layer.qkv, layer.qkv_bias, layer.attention))
        readers.append(reader(layer.mlp_norm, layer.gate_up, layer.gate_up_bias))
    readers.append(_Reader(params.final_norm))
    normed = x if reads_stream(readers[0]) else rms_norm(x, weight_of(readers[0].norm), eps)
    for index, layer in enumerate(params.layers):
        if watch is not None:
            watch(index, x)
        spec, (attn, mlp, following) = config.layer(index), readers[2 * index : 2 * index + 3]
        cos, sin = angles[spec.rope]
        own, pending = _divided(attn.left, x)
        qkv = linear(normed, layer.qkv, layer.qkv_bias, norm=own)
        qkv = qkv.reshape(*tokens.shape, -1, config.head_dim)
        of_heads = None
        if layer.q_norm is not None and layer.k_norm is not None:
            of_heads = HeadNorms(layer.q_norm, layer.k_norm, eps)
        projection = Projection(
            qkv=qkv,
            cos=cos,
            sin=sin,
            num_kv_heads=spec.attention.kv_pairs * config.num_kv_heads,
            norms=of_heads,
            pending=pending,
            x=normed,
            weights=layer.attention,
            angles=functools.partial(rope_angles, spec.rope, config.head_dim),
        )
        attended = attend(index, projection).reshape(flat)
        x, normed = added(x, attended, layer.o, layer.o_bias, layer.attn_post_norm, mlp)
        h = gated_product(normed, layer.gate_up, layer.gate_up_bias, mlp.left, spec.activation)
        x, normed = added(x, h, layer.down, layer.down_bias, layer.mlp_post_norm, following)
    if watch is not None:
        watch(len(params.layers), x)
    return normed


def gated_product(
    x: Float[Array, "*shape E"], weight: Any, bias: jax.Array | None, norm: Norm | None, activation: str
) -> Float[Array, "*shape F"]:
    """activation(gate) · up of the product with x, whose `norm` is left (`_divided`); of few rows by one kernel."""
    if is_whole(weight) and bias is None and activation == "silu":
        kernel = skinny_gemm_swiglu.kernel_for(x, weight, norm)
        if kernel is not None:
            return kernel.run(x, weight, norm)
    own, pending = _divided(norm, x)
    return gated(linear(x, weight, bias, norm=own), pending, activation)


def _divided(left: Norm | None, x: Float[Array, "*shape E"]) -> tuple[Norm | None, PendingNorm | None]:
    """Who applies the norm of x that is left: a product the one with weights, its reader the one without."""
    if left is None or left.weight is not None:
        return left, None
    return None, PendingNorm(x, left.eps)


def gated(gate_up: Float[Array, "*shape FF"], pending: PendingNorm | None, activation: str) -> Float[Array, "*shape F"]:
    """activation(gate) · up, of a product that may still lack its norm."""
    if activation == "silu" and pending is not None:
        return swiglu(gate_up, pending)
    if pending is not None:
        gate_up = pending.divide(gate_up).astype(gate_up.dtype)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def _gelu_tanh(x: Float[Array, "*shape F"]) -> Float[Array, "*shape F"]:
    """GELU by its approximation with tanh, in f32 and rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": _gelu_tanh}


def _leaves_pending(x: Float[Array, "R T E"]) -> bool:
    """True where norms without weights are left to the readers of products: where our kernels do that."""
    return add_rms_norm.kernel_for(x, x, None, 0.0) is not None


def unembed(params: Params, hidden: Float[Array, "*shape E"]) -> Float[Array, "*shape V"]:
    """Logits in f32, whatever the weights' dtype."""
    return product(hidden, params.unembed, out=jnp.float32)


def forward(config: ModelConfig, params: Params, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T E"]:
    """Hidden states of every position, ready for `unembed`, dense and without a cache.

    Position t attends to positions 0…t, or to its window; `token_ids` int32 in [0, V). Returns the weights' dtype.
    """
    token_ids = jnp.asarray(token_ids)
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)

    def attend(index: int, projection: Projection) -> jax.Array:
        return config.layer(index).attention.dense(projection, positions)

    with implementations("xla"):
        return hidden_states(config, params, token_ids, positions, attend)


def logits(config: ModelConfig, params: Params, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, float32, by `forward`: what everything else is compared with."""
    return unembed(params, forward(config, params, token_ids))
