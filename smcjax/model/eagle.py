"""EAGLE-3 heads: one decoder layer that drafts from a target's own hidden states (arXiv 2503.01840).

    f_t = fc · [s_low; s_middle; s_high]                  of the target's residual streams at position t
    x_t = layer([norm(embed[token_t]); norm(f_{t−1})])    residual f_{t−1}, query, key and value 2E wide
    logits behind token_t = lm_head · norm(x_t)           over the draft's own vocabulary

Where the target has not been, x_{t−1} stands for f_{t−1}. An entry of the head is kept and rotated at the position of
its *token*, one behind that of its feature: rotary scores go by differences, so they are the same, and what a slot
holds follows from the tokens up to it, so that rows that share a page agree about it. Position 0 has no entry: no query
sees its slot.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.kv import CacheSpec, PageArray
from smcjax.matmul import matrix
from smcjax.model.attention import AfterFirst, Projection
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.decoder import gated, linear, rope_angles
from smcjax.pallas import add_rms_norm, rms_norm

ATTENTION = AfterFirst()


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The static description of a head.

    Attributes:
        layer: sizes and rotary embedding of its one layer; the vocabulary is the target's.
        draft_vocab_size: token ids that it gives logits for.
        target_hidden_size: width of the target's residual stream.
        aux_layers: layers of the target, ascending, whose inputs are read; the number of layers: the last output.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]

    @property
    def spec(self) -> LayerSpec:
        """The variant of the layer."""
        return self.layer.layer(0)

    @property
    def prunes(self) -> bool:
        """True where some of the target's tokens are never drafted."""
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def feature_spec(self) -> CacheSpec:
        """The features f that pages hold beside keys and values: that of position t at t."""
        return CacheSpec({"features": PageArray(1, self.layer.hidden_size)})

    @property
    def cache_spec(self) -> CacheSpec:
        """The arrays of the head's pages."""
        return CacheSpec({**ATTENTION.cache(self.layer).arrays, **self.feature_spec.arrays})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleParams:
    """The weights of a head; E is its width, S the target's, V the target's vocabulary and Vd the draft's."""

    fc: Any  # [E, aux_layers·S]
    embed: Any  # [V, E]; None: the target's, which `joined` puts here
    embed_norm: Any  # [E]
    feature_norm: Any  # [E]
    qkv: Any  # [(H + 2·Hkv)·D, 2·E]
    o: Any  # [E, H·D]
    mlp_norm: Any  # [E]
    gate_up: Any  # [2·F, E]
    down: Any  # [E, F]
    final_norm: Any  # [E]
    lm_head: Any  # [Vd, E]; None: the target's
    token_ids: Any = None  # Int32[Vd], the target's id of each of the draft's; None: the same

    def joined(self, embed: Any, unembed: Any) -> EagleParams:
        """The head with the target's embedding and unembedding matrix where it has none of its own."""
        return dataclasses.replace(
            self,
            embed=embed if self.embed is None else self.embed,
            lm_head=unembed if self.lm_head is None else self.lm_head,
        )


def eagle_shapes(
    config: EagleConfig, dtype: Any, *, embed: bool = False, lm_head: bool = True, token_ids: bool = False
) -> EagleParams:
    """The tree of `jax.ShapeDtypeStruct` of a head that has these of its own."""
    layer = config.layer
    e, f, d = layer.hidden_size, layer.intermediate_size, layer.head_dim

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return EagleParams(
        fc=array(e, len(config.aux_layers) * config.target_hidden_size),
        embed=array(layer.vocab_size, e) if embed else None,
        embed_norm=array(e),
        feature_norm=array(e),
        qkv=array((layer.num_heads + 2 * layer.num_kv_heads) * d, 2 * e),
        o=array(e, layer.num_heads * d),
        mlp_norm=array(e),
        gate_up=array(2 * f, e),
        down=array(e, f),
        final_norm=array(e),
        lm_head=array(config.draft_vocab_size, e) if lm_head else None,
        token_ids=jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.dtype(jnp.int32)) if token_ids else None,
    )


def eagle_bytes(config: EagleConfig, dtype: Any) -> int:
    """Bytes of a head that has the target's embedding and a head of its own, in `dtype`."""
    leaves = jax.tree.leaves(eagle_shapes(config, dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def fuse(params: EagleParams, streams: Float[Array, "R T aux_layers S"]) -> Float[Array, "R T E"]:
    """The features of positions, from the target's residual streams there."""
    return linear(streams.reshape(*streams.shape[:2], -1).astype(params.fc.dtype), params.fc, None)


def project(
    config: EagleConfig,
    params: EagleParams,
    tokens: Int[Array, "R T"],
    features: Float[Array, "R T E"],
    positions: Int[Array, "R T"],
) -> Projection:
    """Queries, keys and values of entries: tokens at `positions`, each with the feature of the position before."""
    layer = config.layer
    eps, angles = layer.rms_norm_eps, functools.partial(rope_angles, config.spec.rope, layer.head_dim)
    embedded = rms_norm(matrix(params.embed).rows(tokens), params.embed_norm, eps)
    x = jnp.concatenate([embedded, rms_norm(features, params.feature_norm, eps)], axis=-1)
    cos, sin = angles(positions)
    return Projection(
        qkv=linear(x, params.qkv, None).reshape(*tokens.shape, -1, layer.head_dim),
        cos=cos,
        sin=sin,
        num_kv_heads=layer.num_kv_heads,
        norms=None,
        pending=None,
        x=x,
        weights=None,
        angles=angles,
    )


def conclude(
    config: EagleConfig,
    params: EagleParams,
    features: Float[Array, "R T E"],
    attended: Float[Array, "R T H D"],
) -> Float[Array, "R T E"]:
    """The layer's output x, what attention gives added to the features: not normed, the next step's feature."""
    flat = attended.reshape(*attended.shape[:2], -1)
    x, normed = add_rms_norm(features, linear(flat, params.o, None), params.mlp_norm, config.layer.rms_norm_eps)
    return linear(gated(linear(normed, params.gate_up, None), None, "silu"), params.down, None, add_to=x)


def eagle_logits(config: EagleConfig, params: EagleParams, x: Float[Array, "*shape E"]) -> Float[Array, "*shape V"]:
    """Logits over the target's vocabulary, f32; −∞ for tokens that the draft does not have."""
    normed = rms_norm(x, params.final_norm, config.layer.rms_norm_eps)
    logits = matrix(params.lm_head)(normed, out=jnp.float32)
    if params.token_ids is None:
        return logits
    return jnp.full((*logits.shape[:-1], config.layer.vocab_size), -jnp.inf).at[..., params.token_ids].set(logits)


def eagle_forward(
    config: EagleConfig, params: EagleParams, tokens: Int[Array, "B T"], features: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """The layer's outputs for entries at positions 1 … T, dense and without a cache: the oracle, and what is trained.

    `features` are those of positions 0 … T − 1, `tokens` int32 those at 1 … T.
    """
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    projection = project(config, params, tokens, features, positions)
    return conclude(config, params, features, ATTENTION.dense(projection, positions))
