"""Weights as an engine keeps them: norms folded into the products that read them, on a CPU all in float32.

    W · (g ∘ x / rms(x)) = (W · diag(g)) · (x / rms(x))

A norm that has no weights left need not be computed before the product (`smcjax.pallas.layer.norm`). Folded weights are
rounded anew, once, which changes a product of bfloat16 by as much as rounding its operand does.

XLA multiplies bfloat16 and int8 on a CPU by converting them anew in every product, which took five times as long as
float32 products of the same shapes. Converted once, they are exactly the numbers that they were: bfloat16 is a part of
float32, and an int8 matrix is multiplied out, scale times value. Only the memory is float32's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.matmul import is_packed, matrix
from smcjax.model.attention import OwnWeight
from smcjax.model.config import ModelConfig
from smcjax.model.params import FOLDED, Folded, LayerParams, Params, param_shapes
from smcjax.pallas import add_rms_norm


def fold_for_kernels(params: Params, config: ModelConfig) -> Params:
    """Folds the norms of bfloat16 weights, consuming them, where kernels come into question; returns others as is."""
    wanted = add_rms_norm.has_kernel() and params.embed.dtype == jnp.bfloat16
    return fold_norms(params, config, consume=True) if wanted else params


def fold_norms(params: Params, config: ModelConfig, *, consume: bool = False) -> Params:
    """Returns the decoder with `attn_norm` and `mlp_norm` folded into qkv and gate_up.

    Weights of the attention's own that multiply the layer's input are folded too. Norms in front of a packed matrix or
    of a product with a bias stay, as does the last norm, whose matrix may be the embedding. `consume` frees each matrix
    as it is replaced.
    """
    multiply = jax.jit(_scaled_columns, donate_argnums=0) if consume else jax.jit(_scaled_columns)

    def folded(layer: LayerParams, norm: str, matrix: str, own: Mapping[str, OwnWeight] | None = None) -> LayerParams:
        weights, columns = getattr(layer, matrix), getattr(layer, norm)
        if columns is None or isinstance(columns, Folded):
            return layer
        if is_packed(weights) or getattr(layer, f"{matrix}_bias") is not None:
            return layer
        changed: dict[str, Any] = {matrix: multiply(weights, columns), norm: FOLDED}
        if own:
            changed["attention"] = {
                name: multiply(weight, columns) if own[name].of_input else weight
                for name, weight in layer.attention.items()
            }
        return dataclasses.replace(layer, **changed)

    layers = (
        folded(layer, "attn_norm", "qkv", config.layer(index).attention.own_weights(config))
        for index, layer in enumerate(params.layers)
    )
    return dataclasses.replace(params, layers=tuple(folded(layer, "mlp_norm", "gate_up") for layer in layers))


def folded_shapes(config: ModelConfig, dtype: Any) -> Params:
    """Describes a model's weights, folded."""
    return jax.eval_shape(lambda params: fold_norms(params, config), param_shapes(config, dtype))


def _scaled_columns(matrix: Float[Array, "*O I"], scale: Float[Array, " I"]) -> Float[Array, "*O I"]:
    wide = jnp.broadcast_to(scale.astype(jnp.float32), matrix.shape)
    return (matrix.astype(jnp.float32) * wide).astype(matrix.dtype)


def widen_params[P](params: P) -> P:
    """Converts all weights of a tree to float32, int8 matrices to dense ones. Frees each array as it is replaced."""
    convert = jax.jit(lambda leaf: matrix(leaf).rows(slice(None), out=jnp.float32))

    def widen(leaf: Any) -> jax.Array:
        if all(part.dtype == jnp.float32 for part in jax.tree.leaves(leaf)):
            return leaf
        wide: jax.Array = convert(leaf).block_until_ready()
        for part in jax.tree.leaves(leaf):
            part.delete()
        return wide

    widened: P = jax.tree.map(widen, params, is_leaf=is_packed)
    return widened
