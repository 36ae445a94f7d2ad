"""SwiGLU of a product whose norm is pending: what stands between a layer's last two products.

    gate, up = split(gate_up / rms(x))          (`smcjax.pallas.layer.norm`)
    h = silu(gate) · up

in f32, rounded once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic, runs_triton
from smcjax.pallas.layer import norm_triton as triton
from smcjax.pallas.layer.norm import PendingNorm, inverse_rms, row_layout, supports_norm
from smcjax.pallas.mosaic.compat import pl, plgpu

Ref = Any  # a reference in a kernel: Pallas gives no better type
MAX_COLUMNS = 2048  # of a block

# ---------------------------------------------------------------------------------------------------------- reference


def swiglu_reference(gate_up: Float[Array, "*shape FF"], pending: PendingNorm) -> Float[Array, "*shape F"]:
    """silu(gate) · up of gate_up / rms(x), gate above up."""
    gate, up = jnp.split(pending.divide(gate_up), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


# ------------------------------------------------------------------------------------------------------------- kernel


def _kernel(
    gate_up_ref: Ref,  # [rows, 2·F] GMEM, as all
    x_ref: Ref,  # [rows, E]
    out_ref: Ref,  # [rows, F]
    *,
    columns: int,
    eps: float,
) -> None:
    """One block a row and `columns` of its columns."""
    row, start = lax.axis_index("row"), lax.axis_index("part") * columns
    width, dtype = out_ref.shape[1], out_ref.dtype

    def part(start: jax.Array) -> jax.Array:
        return plgpu.load(gate_up_ref.at[row, pl.ds(start, columns)], layout=row_layout(columns))

    # All is on its way before the first is waited for: loads do not move up across the sum's barrier.
    gate, up, x = part(start), part(width + start), plgpu.load(x_ref.at[row], layout=row_layout(x_ref.shape[1]))
    scale = inverse_rms(x.astype(jnp.float32), eps)
    gate, up = gate.astype(jnp.float32) * scale, up.astype(jnp.float32) * scale
    out_ref[row, pl.ds(start, columns)] = (gate / (1 + jnp.exp(-gate)) * up).astype(dtype)


# ------------------------------------------------------------------------------------------------------------ wrapper


def _supports(gate_up: jax.Array, pending: PendingNorm) -> bool:
    hidden, width = pending.x.shape[-1], gate_up.shape[-1] // 2
    alike = gate_up.dtype == pending.x.dtype and width % 1024 == 0
    return alike and supports_norm(rows=pending.x.size // hidden, width=hidden, dtype=gate_up.dtype)


def swiglu_mosaic(
    gate_up: Float[Array, "*shape FF"], pending: PendingNorm, *, interpret: Any = None
) -> Float[Array, "*shape F"]:
    """Computes `swiglu` by the kernel; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    *shape, double = gate_up.shape
    rows = gate_up.size // double
    x = pending.x.reshape(rows, -1)
    return _swiglu(gate_up.reshape(rows, double), x, eps=pending.eps, interpret=interpret).reshape(*shape, -1)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _swiglu(
    gate_up: Float[Array, "rows FF"], x: Float[Array, "rows E"], *, eps: float, interpret: Any
) -> Float[Array, "rows F"]:
    """A jit of its own, so that a model's layers trace and lower the kernel once."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    columns = MAX_COLUMNS if width % MAX_COLUMNS == 0 else 1024
    return plgpu.kernel(
        functools.partial(_kernel, columns=columns, eps=eps),
        out_type=jax.ShapeDtypeStruct((rows, width), gate_up.dtype),
        grid=(rows, width // columns),
        grid_names=("row", "part"),
        interpret=interpret,
        kernel_name="swiglu",
    )(gate_up, x)


swiglu = Op(swiglu_reference)
swiglu.register(Kernel(runs_mosaic, swiglu_mosaic, _supports))
swiglu.register(Kernel(runs_triton, triton.swiglu_triton, triton.supports_swiglu))
