"""The precision of products in float32, and the kind of random keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

KEYS = "threefry2x32"  # the random keys of all that is made here, whatever JAX_DEFAULT_PRNG_IMPL says


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products in full float32, which GPUs would else round to TF32; None (the default) for other dtypes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


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
