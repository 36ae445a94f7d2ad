"""JAX's settings that change what a program computes, or whether it can be made: the engine has its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

# Parts that users write may mix dtypes and ranks, as JAX lets them; the package mixes none, and tests hold it to that.
PROMOTION = {"dtype": "standard", "rank": "allow"}

GUARDS = ("jax_transfer_guard", "jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host")


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Within it, in this thread, programs are made as JAX makes them unless it is told otherwise.

    So a seed gives the same tokens under jax_enable_x64, strict promotion or another form of threefry, and the flags
    for debugging other code neither stop the engine nor slow it down: what is not a number ends its own request. What
    a request sends to the device, and reads of it, is said to be meant (`jax.device_put`, `jax.device_get`).
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion(PROMOTION["dtype"]),
        jax.numpy_rank_promotion(PROMOTION["rank"]),
        jax.threefry_partitionable(True),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.debug_key_reuse(False),
        jax.transfer_guard("allow"),
    ):
        yield


def require_settings() -> None:
    """Raises ValueError where a setting forbids what the engine is made of."""
    if jax.config.jax_disable_jit:
        raise ValueError("jax_disable_jit is on and the engine runs compiled programs; unset it (JAX_DISABLE_JIT).")
    for name in GUARDS:
        if getattr(jax.config, name) == "disallow_explicit":
            raise ValueError(f"{name} is 'disallow_explicit' and requests go to the device and back; use 'disallow'.")
