"""SwiGLU behind a pending norm: against the plain version and float64, and lowered for CUDA at real shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.layer.swiglu import swiglu, swiglu_mosaic, swiglu_reference

EPS = 1e-5


def operands(shape: tuple[int, ...], width: int, hidden: int) -> tuple[jax.Array, PendingNorm]:
    """A product of large numbers, some gates far on either side of 0, and the residual stream that it is of."""
    keys = jax.random.split(jax.random.key(width))
    x = 50 * jax.random.normal(keys[0], (*shape, hidden), jnp.bfloat16)
    return 300 * jax.random.normal(keys[1], (*shape, 2 * width), jnp.bfloat16), PendingNorm(x, EPS)


def exact(gate_up: jax.Array, pending: PendingNorm) -> np.ndarray:
    x, y = np.asarray(pending.x, np.float64), np.asarray(gate_up, np.float64)
    gate, up = np.split(y / np.sqrt((x**2).mean(axis=-1, keepdims=True) + pending.eps), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def check(got: jax.Array, want: np.ndarray) -> None:
    """One rounding of bf16, and f32's before."""
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8 + 1e-4, atol=1e-12)


@pytest.mark.parametrize(("shape", "width", "hidden"), [((2, 3), 1024, 2048), ((2,), 3 * 1024, 1024)], ids=str)
def test_against_float64(shape: tuple[int, ...], width: int, hidden: int) -> None:
    """Also where blocks share a row."""
    inputs = operands(shape, width, hidden)
    check(swiglu_reference(*inputs), exact(*inputs))
    check(swiglu_mosaic(*inputs, interpret=plgpu.InterpretGPUParams()), exact(*inputs))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    gate_up, pending = operands((2,), 1024, 1024)
    broken = PendingNorm(pending.x.at[0, 5].set(jnp.nan), EPS)
    got = swiglu_mosaic(gate_up, broken, interpret=plgpu.InterpretGPUParams())
    assert jnp.isnan(got[0]).all()
    check(got[1:], exact(gate_up, pending)[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "width", "hidden"), [((8, 9), 14336, 4096), ((8,), 8192, 2048), ((288,), 14336, 4096)]
)
def test_on_the_gpu(shape: tuple[int, ...], width: int, hidden: int) -> None:
    """The compiled kernel, through the wrapper that chooses it."""
    assert active_implementation() == "mosaic"
    inputs = operands(shape, width, hidden)
    check(jax.jit(lambda y, x: swiglu(y, PendingNorm(x, EPS)))(inputs[0], inputs[1].x), exact(*inputs))


def lowered(rows: int, width: int, hidden: int, implementation: str = "mosaic", dtype: Any = jnp.bfloat16) -> str:
    gate_up, x = (jax.ShapeDtypeStruct((rows, size), dtype) for size in (2 * width, hidden))

    def compute(gate_up: jax.Array, x: jax.Array) -> jax.Array:
        return swiglu(gate_up, PendingNorm(x, EPS))

    with implementations(implementation):
        return jax.jit(compute).trace(gate_up, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(72, 14336, 4096), (1, 3072, 1024)], ids=str)
def test_lowers_for_cuda(shape: tuple[int, int, int]) -> None:
    assert lowered(*shape).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_the_wrapper_takes_the_kernel_only_where_it_applies() -> None:
    assert "mosaic_gpu" not in lowered(8, 8192, 2048, "xla")
    assert "mosaic_gpu" not in lowered(8, 8192, 2048, dtype=jnp.float32)
    assert "mosaic_gpu" not in lowered(8, 4864, 2048)
    assert "mosaic_gpu" not in lowered(72, 11008, 4096)
    assert "mosaic_gpu" not in lowered(8, 8192, 896)
    assert "mosaic_gpu" not in lowered(4096, 8192, 2048)
