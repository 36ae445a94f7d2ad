"""Triton kernels do what stands between a layer's products: residual addition with RMS norm, and SwiGLU.

References and what the kernels compute: `norm.py`, `swiglu.py`. A block has one row, whose sum of squares it makes by
itself, so a launch needs no other one before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.pallas.triton.launch import launch, power_of_two

MAX_WIDTH = 16384  # of a row, which a block keeps in registers
MAX_ROWS = 512  # beyond, plain XLA is at the memory's speed
GATES = 1024  # of a row's results a block


def supports_norm(x: jax.Array, y: jax.Array, weight: jax.Array | None, eps: float) -> bool:
    """True for rows that the kernel norms: bfloat16, few, and no wider than a block keeps."""
    alike = x.dtype == y.dtype == jnp.bfloat16 and (weight is None or weight.dtype == x.dtype)
    return alike and 0 < x.shape[-1] <= MAX_WIDTH and 0 < x.size // x.shape[-1] <= MAX_ROWS


def supports_swiglu(gate_up: jax.Array, pending: Any) -> bool:
    """True for products that the kernel takes whose pending norm is of such rows."""
    return supports_norm(pending.x, pending.x, None, pending.eps) and gate_up.dtype == pending.x.dtype


def add_rms_norm_triton(
    x: Float[Array, "*shape E"],
    y: Float[Array, "*shape E"],
    weight: Float[Array, " E"] | None,
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "*shape E"], Float[Array, "*shape E"]]:
    """Computes `add_rms_norm` by the kernel."""
    from smcjax.pallas.layer.norm_triton_kernel import add_rms_norm

    width = x.shape[-1]
    rows = x.size // width
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    flat = [array.reshape(rows, width) for array in (x, y)]
    total, normed = launch(
        add_rms_norm,
        *(*flat, flat[0] if weight is None else weight),
        out=(out, out),
        grid=(rows,),
        warps=_warps(width),
        stages=1,
        interpret=interpret,
        WIDTH=width,
        PADDED=power_of_two(width),
        EPS=eps,
        WEIGHTED=weight is not None,
    )
    return total.reshape(x.shape), normed.reshape(x.shape)


def swiglu_triton(
    gate_up: Float[Array, "*shape FF"], pending: Any, *, interpret: Any = None
) -> Float[Array, "*shape F"]:
    """Computes `swiglu` by the kernel."""
    from smcjax.pallas.layer.norm_triton_kernel import swiglu

    *shape, double = gate_up.shape
    rows, hidden, width = gate_up.size // double, pending.x.shape[-1], double // 2
    result: Any = launch(
        swiglu,
        *(gate_up.reshape(rows, double), pending.x.reshape(rows, hidden)),
        out=jax.ShapeDtypeStruct((rows, width), gate_up.dtype),
        grid=(rows, -(-width // GATES)),
        warps=_warps(hidden),
        stages=1,
        interpret=interpret,
        WIDTH=width,
        HIDDEN=hidden,
        PADDED=power_of_two(hidden),
        EPS=pending.eps,
        BLOCK=GATES,
    )
    return result.reshape(*shape, width)


def _warps(width: int) -> int:
    return 4 if width <= 4096 else 8
