"""Random keys, and numbers with the same bits in XLA's programs and inside kernels, where element i needs no vector.

Threefry makes 64 bits of a key and a counter. JAX's own uniforms are multiples of 2⁻²³: `u < p` is then true too often
where p is small, and Gumbel noise never exceeds 15.94, so that a token a millionth as likely as the likeliest is drawn
too seldom, and one a hundred-millionth as likely hardly ever. Here all 64 bits count.

All steps but the logarithms are exact or round once, so that no compiler's fused multiply-add changes a bit.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

KEYS = "threefry2x32"  # the random keys of all that is made here, whatever JAX_DEFAULT_PRNG_IMPL says
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
SMALL = 2.0**-8  # x + x²/2 is −log(1 − x) to 5e-6 of it below, and so is the logarithm of a rounded 1 − x above


def key_of(seed: Any) -> jax.Array:
    """The random key of a seed, whichever kind of keys JAX makes by default.

    Draws by other kinds than threefry depend on what is drawn beside them.
    """
    return jax.random.key(seed, impl=KEYS)


def key_from(words: jax.Array) -> jax.Array:
    """Keys [...] from their words [..., 2] uint32."""
    return jax.random.wrap_key_data(words, impl=KEYS)


def words_of(keys: jax.Array) -> jax.Array:
    """The words [..., 2] uint32 of keys [...]. Raises ValueError for keys of another kind."""
    kind = str(jax.random.key_impl(keys))
    if kind != KEYS:
        raise ValueError(f"keys are {kind!r} and draws know {KEYS!r} only; use jax.random.key(…, impl={KEYS!r}).")
    return jax.random.key_data(keys)


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


def uniform_of_words(high: jax.Array, low: jax.Array) -> jax.Array:
    """The number in (0, 1) that 64 uniform bits stand for, (2³²·high + low + ½)/2⁶⁴ rounded to float32."""
    tail = low.astype(jnp.float32) * 2.0**-64 + 2.0**-65
    return jnp.minimum(high.astype(jnp.float32) * 2.0**-32 + tail, BELOW_ONE)


def gumbel_of_words(high: jax.Array, low: jax.Array) -> jax.Array:
    """Gumbel noise of 64 uniform bits: −log of the exponential variable −log(1 − x), x from `uniform_of_words`."""
    x = uniform_of_words(high, low)
    return -jnp.log(jnp.where(x < SMALL, x * (1.0 + 0.5 * x), -jnp.log(1.0 - x)))


def uniform(key0: jax.Array, key1: jax.Array, ids: jax.Array) -> jax.Array:
    """Element `ids` of a vector of uniforms in (0, 1), by a key's words."""
    return uniform_of_words(*_threefry(key0, key1, jnp.zeros_like(ids), ids))


def gumbel(key0: jax.Array, key1: jax.Array, ids: jax.Array) -> jax.Array:
    """Element `ids` of a vector of Gumbel noise, by a key's words."""
    return gumbel_of_words(*_threefry(key0, key1, jnp.zeros_like(ids), ids))


def uniforms(keys: Key[Array, "*batch"], shape: tuple[int, ...]) -> Float[Array, "*batch *shape"]:
    """Uniforms in (0, 1), float32; `u < p` has probability p to float32's relative accuracy from 2⁻⁶⁰ on.

    Raises ValueError for keys that are not threefry2x32.
    """
    return uniform(*_broadcast(keys, shape))


def gumbels(keys: Key[Array, "*batch"], shape: tuple[int, ...]) -> Float[Array, "*batch *shape"]:
    """Gumbel noise, float32, from −2.8 to 45. Raises ValueError for keys that are not threefry2x32."""
    return gumbel(*_broadcast(keys, shape))


def _broadcast(keys: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two words of each key and the counters of its elements, of shapes that broadcast."""
    words = words_of(keys)
    key0, key1 = (words[..., i].reshape(*keys.shape, *[1] * len(shape)) for i in range(2))
    ids = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return key0, key1, ids.reshape(*[1] * keys.ndim, *shape)
