"""Tensor-core products of one warpgroup, for attention kernels, and the shapes that they want."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.mosaic.compat import pl, plgpu

QUERIES = 64  # the M of a warpgroup's matrix product
MASKED = -1e30  # a score that no visible one can reach; finite, so that a wholly masked chunk gives no ∞ − ∞

# A jax.Array in registers of a warpgroup, or a reference: Pallas gives kernels no better type.
Ref = Any
Product = Callable[..., jax.Array]  # what `product_of` returns


def swizzled() -> tuple[Any, ...]:
    """The transforms of bf16 in shared memory as products read it."""
    return _tiled_and_swizzled(64)


def swizzled_f32() -> tuple[Any, ...]:
    """The same of f32."""
    return _tiled_and_swizzled(32)


def swizzled_int8() -> tuple[Any, ...]:
    """The same of int8, as `int8.operands` reads it."""
    return _tiled_and_swizzled(128)


def _tiled_and_swizzled(columns: int) -> tuple[Any, ...]:
    tiling: Any = plgpu.TilingTransform  # their annotations call these two classes abstract
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(128)


def product_of(interpret: bool) -> Product:
    """acc + Σ a·b on the tensor cores, or what stands for it when interpreted."""
    return _interpreted_product if interpret else _tensor_core_product


def _tensor_core_product(acc: jax.Array | None, *factors: tuple[jax.Array | Ref, Ref]) -> jax.Array:
    """acc + Σ a·b over `factors` with every b in shared memory, a too or in registers; done when it returns."""

    def run(ref: Ref) -> None:
        for a, b in factors:
            plgpu.wgmma(ref, a, b)

    def run_from_zero(ref: Ref) -> jax.Array:
        run(ref)
        return ref[...]

    if acc is None:
        (a, b), *_ = factors
        return pl.run_scoped(run_from_zero, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
    return pl.run_state(run)(plgpu.ACC.init(acc))


def _interpreted_product(acc: jax.Array | None, *factors: tuple[jax.Array | Ref, Ref]) -> jax.Array:
    """acc + Σ a·b for interpret mode, which knows no product with `a` in registers."""
    terms = [jnp.dot(a[...], b[...], preferred_element_type=jnp.float32) for a, b in factors]
    return functools.reduce(jnp.add, terms if acc is None else [acc, *terms])


def across(row_values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value a query, repeated along the other axis."""
    return lax.broadcast_in_dim(row_values, shape, [0])


def of_part(place: jax.Array, values: Sequence[jax.Array], width: int) -> jax.Array:
    """values[place // width], element by element."""
    out = values[-1]
    for part in reversed(range(len(values) - 1)):
        out = jnp.where(place < (part + 1) * width, values[part], out)
    return out
