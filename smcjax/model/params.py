"""The weights of one decoder as a pytree, and their shapes.

Matrices keep the row-major [out, in] layout in which Hugging Face stores them, so that loading never transposes and
a product streams whole rows. Projections that read the same input are stored as one matrix: query, key and value
stacked in that order along `out`, gate above up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.model.config import LayerSpec, ModelConfig

Array = Any  # jax.Array, or jax.ShapeDtypeStruct in `param_shapes`
PreNorm = Any  # the weights, or `FOLDED`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Folded:
    """A norm whose weights are part of the matrix behind it (`smcjax.model.folding`): what is left is x / rms(x)."""


FOLDED = Folded()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """One decoder layer. Letters: ModelConfig; a `None` field is a variant that the config does not have."""

    attn_norm: PreNorm | None  # [E]; or folded into qkv
    qkv: Array  # [(H + 2·C·Hkv)·D, E], C pairs of keys and values (`AttentionKind.kv_pairs`)
    qkv_bias: Array | None  # [(H + 2·C·Hkv)·D]
    q_norm: Array | None  # [D], or [H·D] of all heads at once (`LayerSpec.qk_norm`)
    k_norm: Array | None  # [D], or [Hkv·D]
    o: Array  # [E, H·D]
    o_bias: Array | None  # [E]
    mlp_norm: PreNorm | None  # [E]; or folded into gate_up
    gate_up: Array  # [2·F, E]
    gate_up_bias: Array | None  # [2·F]
    down: Array  # [E, F]
    down_bias: Array | None  # [E]
    attn_post_norm: Array | None = None  # [E]
    mlp_post_norm: Array | None = None  # [E]
    attention: Any = None  # the weights that the kind of attention has of its own, `AttentionKind.param_shapes`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """The weights of a whole decoder."""

    embed: Array  # [V, E]
    layers: tuple[LayerParams, ...]
    final_norm: Array  # [E]
    lm_head: Array | None  # [V, E]; None when tied to `embed`

    @property
    def unembed(self) -> Array:
        """The matrix that makes logits, [V, E]."""
        return self.embed if self.lm_head is None else self.lm_head


def qk_norm_widths(config: ModelConfig, spec: LayerSpec) -> tuple[int, int]:
    """How many numbers of a token's queries, and of its keys, are normed as one vector."""
    heads = (config.num_heads, config.num_kv_heads) if spec.qk_norm == "all" else (1, 1)
    return heads[0] * config.head_dim, heads[1] * config.head_dim


def param_shapes(config: ModelConfig, dtype: Any) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` that `config` calls for."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def norm(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((width,), jnp.dtype(jnp.float32 if config.float32_norms else dtype))

    def layer(spec: LayerSpec) -> LayerParams:
        qkv = (config.num_heads + 2 * spec.attention.kv_pairs * config.num_kv_heads) * d
        q_norm, k_norm = qk_norm_widths(config, spec)
        return LayerParams(
            attn_norm=norm(e) if spec.pre_norms else None,
            qkv=array(qkv, e),
            qkv_bias=array(qkv) if spec.qkv_bias else None,
            q_norm=norm(q_norm) if spec.qk_norm else None,
            k_norm=norm(k_norm) if spec.qk_norm else None,
            o=array(e, config.num_heads * d),
            o_bias=array(e) if spec.o_bias else None,
            mlp_norm=norm(e) if spec.pre_norms else None,
            gate_up=array(2 * f, e),
            gate_up_bias=array(2 * f) if spec.mlp_bias else None,
            down=array(e, f),
            down_bias=array(e) if spec.mlp_bias else None,
            attn_post_norm=norm(e) if spec.post_norms else None,
            mlp_post_norm=norm(e) if spec.post_norms else None,
            attention=spec.attention.param_shapes(config, dtype),
        )

    return Params(
        embed=array(config.vocab_size, e),
        layers=tuple(layer(config.layer(index)) for index in range(config.num_layers)),
        final_norm=norm(e),
        lm_head=None if config.tie_embeddings else array(config.vocab_size, e),
    )


def num_params(config: ModelConfig) -> int:
    """The number of weights that `config` calls for, without making a tree of them."""
    pattern = len(config.layers)
    few = param_shapes(dataclasses.replace(config, num_layers=pattern), jnp.float32)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(dataclasses.replace(few, layers=())))
    for index, layer in enumerate(few.layers):
        times = len(range(index, config.num_layers, pattern))
        total += times * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layer))
    return total


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: norms 1, biases 0, matrices Gaussian with standard deviation 1/√(fan-in), 0.02 for the
    embedding; what a training run starts from and what a speed benchmark runs on."""
    structure = jax.tree.structure(param_shapes(config, dtype))
    return jax.tree.unflatten(structure, list(init_leaves(config, key, dtype)))


def init_leaves(config: ModelConfig, key: jax.Array, dtype: Any) -> Iterator[jax.Array]:
    """The arrays of `init_params` in the tree's order, each made when it is asked for."""
    flat = jax.tree_util.tree_leaves_with_path(param_shapes(config, dtype))
    for (path, leaf), leaf_key in zip(flat, jax.random.split(key, len(flat)), strict=True):
        yield init_leaf(jax.tree_util.keystr(path), leaf, leaf_key)


def init_leaf(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """The random array of `init_params` with this path in the tree."""
    if "norm" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    if "bias" in name:
        return jnp.zeros(leaf.shape, leaf.dtype)
    scale = 0.02 if name == ".embed" else 1.0 / math.sqrt(leaf.shape[-1])
    return (jax.random.normal(key, leaf.shape, jnp.float32) * scale).astype(leaf.dtype)
