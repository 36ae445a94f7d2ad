"""Weight-only int8 (`smcjax.matmul.Int8`) of every matrix that a forward streams.

Norms, biases, weights that a kind of attention has of its own and an embedding that is only looked up stay as they are.
Such matrices may also come from files in int8, and go into them (`smcjax.model.hf_quantization`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from smcjax.matmul import Int8, interleave, is_packed
from smcjax.model.params import Params

QUANTIZATIONS = ("int8",)


def check_quantization(name: str, value: object) -> None:
    """Raises ValueError unless argument `name` is "int8" or None."""
    if value is not None and value not in QUANTIZATIONS:
        raise ValueError(f"{name} must be 'int8' or None (weights as they are), got {value!r}.")


def quantize_matrix(matrix: jax.Array) -> Int8:
    """Rounds each row to nearest, symmetrically."""
    wide = matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / 127.0
    scale = jnp.where(scale > 0, scale, 1.0)  # of a row of zeros, or of numbers that are 0 beside any other
    values = jnp.round(wide / scale[:, None]).astype(jnp.int8)
    return Int8(interleave(values), scale, jnp.dtype(matrix.dtype).name)


def streamed(params: Params) -> list[bool]:
    """For each leaf of `params`, packed matrices being leaves: True for a matrix that a forward streams."""

    def is_streamed(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path)
        looked_up_only = params.lm_head is not None and name == ".embed"
        return len(leaf.shape) == 2 and not looked_up_only and ".attention" not in name

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return [is_streamed(path, leaf) for path, leaf in leaves]


def quantize_params(params: Params, *, consume: bool = False) -> Params:
    """Returns the decoder with every matrix that a forward streams in int8; those that are so already stay as they are.

    `consume` frees each that is replaced.
    """
    quantize = jax.jit(quantize_matrix)

    def convert(leaf: Any, chosen: bool) -> Any:
        if not chosen or is_packed(leaf):
            return leaf
        quantized = quantize(leaf)
        if consume:
            jax.block_until_ready(quantized)
            leaf.delete()
        return quantized

    leaves, treedef = jax.tree.flatten(params, is_leaf=is_packed)
    return jax.tree.unflatten(treedef, map(convert, leaves, streamed(params)))
