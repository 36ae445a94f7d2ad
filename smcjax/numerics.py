"""How exactly products are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products in full float32, which GPUs would else round to TF32; None (the default) for other dtypes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def sum_parts(
    x: Float[Array, "*shape I"] | Float[Array, "parts *shape I"], ndim: int, dtype: Any
) -> Float[Array, "*shape I"]:
    """A product as it is, or the sum of the parts that one of more than `ndim` axes lies in (f32, along the first)."""
    return x if x.ndim == ndim else jnp.sum(x, axis=0).astype(dtype)
