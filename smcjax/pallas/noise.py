"""JAX's random bits inside a kernel: element i of a vector of noise without the vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), JAX's default generator."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = lax.shift_left(x1, _like(x1, rotation)) | lax.shift_right_logical(x1, _like(x1, 32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def _like(x: jax.Array, value: int) -> jax.Array:
    return jnp.full(x.shape, value, x.dtype)


def fold_in(key0: jax.Array, key1: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of the key that `jax.random.fold_in` makes of a key's words and uint32 `data`."""
    return _threefry(key0, key1, jnp.zeros_like(data), data)


def uniform(key0: jax.Array, key1: jax.Array, ids: jax.Array) -> jax.Array:
    """The number in [0, 1) that `jax.random.uniform` gives element `ids` of a vector."""
    high, low = _threefry(key0, key1, jnp.zeros_like(ids), ids)
    bits = lax.shift_right_logical(high ^ low, _like(high, 9)) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1.0


def gumbel(key0: jax.Array, key1: jax.Array, ids: jax.Array) -> jax.Array:
    """The noise that `jax.random.gumbel` gives element `ids` of a vector."""
    return -jnp.log(-jnp.log(jnp.maximum(uniform(key0, key1, ids), float(jnp.finfo(jnp.float32).tiny))))
