"""How exactly products are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products in full float32, which GPUs would else round to TF32; None (the default) for other dtypes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
