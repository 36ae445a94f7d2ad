"""RMS norm, and residual addition and RMS norm in one kernel.

    x ← x + y
    h = x / rms(x) · weight

What is normed is the sum as it goes on, rounded to x's dtype.

A norm without weights commutes with the product behind it but for a factor a row, W · (x / rms(x)) = (W · x) / rms(x),
so a product can read x itself, and what reads the product divides: that norm is then *pending*.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic, runs_triton
from smcjax.pallas.layer import norm_triton as triton
from smcjax.pallas.mosaic.compat import plgpu

Ref = Any  # a reference in a kernel: Pallas gives no better type
MAX_ROWS = 512  # beyond, plain XLA is at the memory's speed

# ---------------------------------------------------------------------------------------------------------- reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm that a product is to apply to what it reads: x / rms(x) · weight (None: 1)."""

    weight: Float[Array, " E"] | None
    eps: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Float[Array, "*shape E"]) -> Float[Array, "*shape E"]:
        """The normed x, in its dtype."""
        return rms_norm(x, self.weight, self.eps)


class PendingNorm(NamedTuple):
    """A norm that a product of x still lacks, where one of x / rms(x) is meant."""

    x: Float[Array, "*shape E"]
    eps: float

    def divide(self, y: Float[Array, "*shape ..."]) -> Float[Array, "*shape ..."]:
        """y / rms(x), in f32."""
        scale = inverse_rms_of(self.x, self.eps)
        return y.astype(jnp.float32) * scale.reshape(*scale.shape, *[1] * (y.ndim - self.x.ndim + 1))


def inverse_rms_of(x: Float[Array, "*shape E"], eps: float) -> Float[Array, "*shape"]:
    """1/rms(x) of each row in f32."""
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)


def rms_norm(x: Float[Array, "*shape E"], weight: Float[Array, " E"] | None, eps: float) -> Float[Array, "*shape E"]:
    """x / rms(x) · weight (None: 1) in x's dtype; x / rms(x) is made in f32, and kept so for a weight in f32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * inverse_rms_of(x32, eps)[..., None]
    if weight is None:
        return normed.astype(x.dtype)
    dtype = np.promote_types(x.dtype, weight.dtype)
    return (normed.astype(dtype) * jnp.broadcast_to(weight.astype(dtype), x.shape)).astype(x.dtype)


def add_rms_norm_reference(
    x: Float[Array, "*shape E"], y: Float[Array, "*shape E"], weight: Float[Array, " E"] | None, eps: float
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """x + y, of one dtype, and its RMS norm times `weight` (None: 1)."""
    x = x + y
    return x, rms_norm(x, weight, eps)


# ------------------------------------------------------------------------------------------------------------- kernel


def row_layout(width: int) -> Any:
    """Registers of a warpgroup for a row, a multiple of 1,024 numbers."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=8)


def inverse_rms(x: Float[Array, " E"], eps: float) -> Float[Array, ""]:
    """1/rms(x) of a row in f32, in `row_layout`."""
    return lax.rsqrt(jnp.sum(x * x) / x.shape[0] + eps)


def _kernel(
    x_ref: Ref,  # [rows, E] GMEM, as all
    y_ref: Ref,  # [rows, E]
    weight_ref: Ref,  # [E]
    sum_ref: Ref,  # [rows, E]
    normed_ref: Ref,  # [rows, E]
    *,
    eps: float,
) -> None:
    """One block a row."""
    row = lax.axis_index("row")
    width, dtype = x_ref.shape[1], x_ref.dtype
    layout = row_layout(width)
    x, y, weight = (plgpu.load(ref, layout=layout) for ref in (x_ref.at[row], y_ref.at[row], weight_ref))
    total = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype)
    t = total.astype(jnp.float32)
    normed = (t * inverse_rms(t, eps)).astype(dtype).astype(jnp.float32) * weight.astype(jnp.float32)
    sum_ref[row] = total
    normed_ref[row] = normed.astype(dtype)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports_norm(*, rows: int, width: int, dtype: Any) -> bool:
    """True for rows [rows, width] that kernels norm: bfloat16, and few and narrow enough."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width % 1024 == 0 and width <= 16384 and rows <= MAX_ROWS


def _supports(x: jax.Array, y: jax.Array, weight: jax.Array | None, eps: float) -> bool:
    alike = x.dtype == y.dtype and (weight is None or weight.dtype == x.dtype)
    return alike and supports_norm(rows=x.size // x.shape[-1], width=x.shape[-1], dtype=x.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic(
    x: Float[Array, "*shape E"],
    y: Float[Array, "*shape E"],
    weight: Float[Array, " E"] | None,
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """Computes `add_rms_norm` by the kernel; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    weight = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
    width = x.shape[-1]
    rows = x.size // width
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    total, normed = plgpu.kernel(
        functools.partial(_kernel, eps=eps),
        out_type=[out, out],
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="add_rms_norm",
    )(x.reshape(rows, width), y.reshape(rows, width), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


add_rms_norm = Op(add_rms_norm_reference)
add_rms_norm.register(Kernel(runs_mosaic, add_rms_norm_mosaic, _supports))
add_rms_norm.register(Kernel(runs_triton, triton.add_rms_norm_triton, triton.supports_norm))
