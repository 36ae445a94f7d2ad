"""Weights in float32, for CPUs.

XLA multiplies bfloat16 and int8 on a CPU by converting them anew in every product, which took five times as long as
float32 products of the same shapes. Converted once, they are exactly the numbers that they were: bfloat16 is a part of
float32, and an int8 matrix is multiplied out, scale times value. Only the memory is float32's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from smcjax.matmul import is_packed, matrix


def widen_params[P](params: P) -> P:
    """Converts all weights of a tree to float32, int8 matrices to dense ones. Frees each array as it is replaced."""
    convert = jax.jit(_wide)

    def widen(leaf: Any) -> jax.Array:
        if all(part.dtype == jnp.float32 for part in jax.tree.leaves(leaf)):
            return leaf
        wide: jax.Array = convert(leaf).block_until_ready()
        for part in jax.tree.leaves(leaf):
            part.delete()
        return wide

    widened: P = jax.tree.map(widen, params, is_leaf=is_packed)
    return widened


def _wide(leaf: Any) -> jax.Array:
    return matrix(leaf).rows(slice(None), out=jnp.float32)
