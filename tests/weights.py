"""Random weights of tests: `smcjax.model.init_params`' to the last bit, without a program for every shape.

JAX draws element i of an array from its key and from i alone, whatever the array's shape, so that one program for each
of a few lengths draws for all. Scaling, rounding and what is no draw need no program on the host.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.model import params

_init_leaf = params.init_leaf
MOST = 1 << 20  # elements that the host draws


def normal(key: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """The f32 array that `jax.random.normal(key, shape)` is."""
    size = math.prod(shape)
    length = 256
    while length < size:
        length *= 4
    return np.asarray(jax.random.normal(key, (length,)))[:size].reshape(shape)


def init_leaf(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> Any:
    """The array that `smcjax.model.params.init_leaf` makes, which itself makes those of a trace and large ones."""
    if isinstance(key, jax.core.Tracer) or math.prod(leaf.shape) > MOST:
        return _init_leaf(name, leaf, key)
    if "norm" in name:
        return jnp.asarray(np.ones(leaf.shape, leaf.dtype))
    if "bias" in name:
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
    scale = 0.02 if name == ".embed" else 1.0 / math.sqrt(leaf.shape[-1])
    return jnp.asarray((normal(key, leaf.shape) * np.float32(scale)).astype(leaf.dtype))


def draw_on_the_host() -> None:
    """Has `init_params` draw so from now on."""
    params.init_leaf = init_leaf
