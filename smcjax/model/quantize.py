"""Weight-only int8 (`smcjax.matmul.Int8`) of every matrix that a forward streams.

Norms, biases, weights that a kind of attention has of its own and an embedding that is only looked up stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from smcjax.matmul import Int8, interleave
from smcjax.model.params import Params

QUANTIZATIONS = ("int8",)


def check_quantization(name: str, value: object) -> None:
    """Raises ValueError unless argument `name` is "int8" or None."""
    if value is not None and value not in QUANTIZATIONS:
        raise ValueError(f"{name} must be 'int8' or None (weights as they are), got {value!r}.")


def quantize_matrix(matrix: jax.Array) -> Int8:
    """Rounds each row to nearest, symmetrically."""
    wide = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    scale = jnp.where(largest > 0, largest / 127.0, 1.0)
    values = jnp.round(wide / scale[:, None]).astype(jnp.int8)
    return Int8(interleave(values), scale, jnp.dtype(matrix.dtype).name)


def quantize_params(params: Params, *, consume: bool = False) -> Params:
    """Returns the decoder with every matrix that a forward streams in int8; `consume` frees each that is replaced."""
    quantize = jax.jit(quantize_matrix)

    def convert(path: Any, leaf: jax.Array) -> Any:
        name = jax.tree_util.keystr(path)
        looked_up_only = params.lm_head is not None and name == ".embed"
        if leaf.ndim != 2 or looked_up_only or ".attention" in name:
            return leaf
        quantized = quantize(leaf)
        if consume:
            jax.block_until_ready(quantized)
            leaf.delete()
        return quantized

    return jax.tree_util.tree_map_with_path(convert, params)
