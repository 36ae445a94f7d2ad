"""The kind of machine that programs run on."""

from __future__ import annotations

import jax


def on_cpu() -> bool:
    """True where JAX's default device is a CPU."""
    return jax.default_backend() == "cpu"
