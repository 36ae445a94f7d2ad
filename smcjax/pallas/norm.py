"""Residual addition and RMS norm in one kernel: what stands between two products of a layer.

    x ← x + y
    h = x / rms(x) · weight

What is normed is the sum as it goes on, rounded to x's dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from smcjax.pallas.paged_attention import uses_kernels

Ref = Any  # a reference in a kernel: Pallas gives no better type
MOST_ROWS = 512  # beyond, plain XLA is at the memory's speed

# ---------------------------------------------------------------------------------------------------------- reference


def rms_norm(x: Float[Array, "*shape E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*shape E"]:
    """x / rms(x) · weight, in f32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight


def add_rms_norm_reference(
    x: Float[Array, "*shape E"], y: Float[Array, "*shape E"], weight: Float[Array, " E"], eps: float
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """x + y, and its norm."""
    x = x + y
    return x, rms_norm(x, weight, eps)


# ------------------------------------------------------------------------------------------------------------- kernel


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
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=8)
    x, y, weight = (plgpu.load(ref, layout=layout) for ref in (x_ref.at[row], y_ref.at[row], weight_ref))
    total = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype)
    t = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(t * t) / width + eps)
    normed = (t * scale).astype(dtype).astype(jnp.float32) * weight.astype(jnp.float32)
    sum_ref[row] = total
    normed_ref[row] = normed.astype(dtype)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports_norm(*, rows: int, width: int, dtype: Any) -> bool:
    """Whether the kernel applies to these static shapes."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width % 1024 == 0 and width <= 16384 and rows <= MOST_ROWS


def add_rms_norm(
    x: Float[Array, "*shape E"],
    y: Float[Array, "*shape E"],
    weight: Float[Array, " E"],
    eps: float,
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """x + y, of one dtype, and its RMS norm times `weight`. `implementation` as in `paged_attention`."""
    applies = supports_norm(rows=x.size // x.shape[-1], width=x.shape[-1], dtype=x.dtype)
    compute = add_rms_norm_mosaic if applies and uses_kernels(implementation) else add_rms_norm_reference
    return compute(x, y, weight, eps)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic(
    x: Float[Array, "*shape E"],
    y: Float[Array, "*shape E"],
    weight: Float[Array, " E"],
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """The kernel. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
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
