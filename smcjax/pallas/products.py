"""What attention kernels share: tensor-core products of one warpgroup, and the shapes that these want."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64  # the M of a warpgroup's matrix product
STREAMING_MULTIPROCESSORS = 132  # of an H100 or H200
MASKED = -1e30  # a score that no visible one can reach; finite, so that a wholly masked chunk gives no ∞ − ∞

# A jax.Array in registers of a warpgroup, or a reference: Pallas gives kernels no better type.
Ref = Any

_tiling: Any = plgpu.TilingTransform  # their annotations call these two classes abstract
_swizzle: Any = plgpu.SwizzleTransform
SWIZZLED = (_tiling((8, 64)), _swizzle(128))  # bf16 in shared memory as products read it
SWIZZLED_F32 = (_tiling((8, 32)), _swizzle(128))


def tensor_core_product(acc: jax.Array | None, a: jax.Array, b_ref: Ref) -> jax.Array:
    """acc + a·b with `b` in shared memory, `a` too or in registers; done when it returns."""

    def run(ref: Ref) -> jax.Array:
        plgpu.wgmma(ref, a, b_ref)
        return ref[...]

    if acc is None:
        return pl.run_scoped(run, plgpu.ACC((a.shape[0], b_ref.shape[1]), jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b_ref))(plgpu.ACC.init(acc))


def interpreted_product(acc: jax.Array | None, a: jax.Array, b_ref: Ref) -> jax.Array:
    """The same for interpret mode, which knows no product with `a` in registers."""
    a = a if isinstance(a, jax.Array) else a[...]
    ab = jnp.dot(a, b_ref[...], preferred_element_type=jnp.float32)
    return ab if acc is None else acc + ab


def across(row_values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value a query, repeated along the other axis."""
    return lax.broadcast_in_dim(row_values, shape, [0])
