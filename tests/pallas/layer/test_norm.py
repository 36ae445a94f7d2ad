"""Residual addition and RMS norm in one kernel: against the plain version, and lowered for CUDA at real shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.layer.norm import add_rms_norm, add_rms_norm_mosaic, add_rms_norm_reference, rms_norm, supports_norm

EPS = 1e-5


def check(compute: Any, shape: tuple[int, ...], *, weighted: bool = True) -> None:
    """The norm to one rounding of bf16 before the weight and one after; the sum exactly."""
    x, y, weight = (
        jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate([shape, shape, shape[-1:]])
    )
    y, weight = 100 * y, weight if weighted else None
    got, want = compute(x, y, weight, EPS), add_rms_norm_reference(x, y, weight, EPS)
    np.testing.assert_array_equal(got[0].astype(jnp.float32), want[0].astype(jnp.float32))
    assert got[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[1].astype(jnp.float32), want[1].astype(jnp.float32), rtol=2**-6)


@pytest.mark.parametrize("shape", [(1, 1024), (2, 3, 2048)], ids=str)
def test_against_the_reference(shape: tuple[int, ...]) -> None:
    kernel = functools.partial(add_rms_norm_mosaic, interpret=plgpu.InterpretGPUParams())
    check(jax.jit(kernel, static_argnums=3), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2048), (8, 2, 2048), (8, 9, 4096), (288, 4096), (3, 16384)], ids=str)
def test_on_the_gpu(shape: tuple[int, ...]) -> None:
    """The compiled kernel, through the wrapper that chooses it."""
    assert active_implementation() == "mosaic"
    check(jax.jit(add_rms_norm, static_argnums=3), shape)


@pytest.mark.parametrize("shape", [(72, 4096), (1, 16384)], ids=str)
def test_lowers_for_cuda(shape: tuple[int, ...]) -> None:
    assert lowered(shape, "mosaic", jnp.bfloat16).count("stablehlo.custom_call @mosaic_gpu") == 1


def lowered(shape: tuple[int, ...], implementation: str, dtype: Any) -> str:
    x, weight = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
    compute = functools.partial(add_rms_norm, eps=EPS)
    with implementations(implementation):
        return jax.jit(compute).trace(x, x, weight).lower(lowering_platforms=("cuda",)).as_text()


def test_a_weight_in_float32_is_multiplied_before_the_rounding() -> None:
    """Gemma rounds once, behind the weight; a weight of x's dtype is one of Llama's, who rounds before it as well."""
    x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    weight = (1 + 0.3 * jax.random.normal(jax.random.key(1), (32,))).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPS)
    once = jnp.asarray(exact * np.asarray(weight, np.float64)).astype(jnp.bfloat16)
    twice = jnp.asarray(exact).astype(jnp.bfloat16) * weight[None]
    got = rms_norm(x, weight.astype(jnp.float32), EPS)
    assert got.dtype == jnp.bfloat16
    assert (got == once).mean() > 0.99
    assert (rms_norm(x, weight, EPS) == twice).mean() > 0.99
    assert (once == twice).mean() < 0.9, "control: these differ"


def test_the_wrapper_takes_the_kernel_only_where_it_applies() -> None:
    assert "mosaic_gpu" not in lowered((8, 2048), "xla", jnp.bfloat16)
    assert "mosaic_gpu" not in lowered((8, 2048), "mosaic", jnp.float32)
    assert "mosaic_gpu" not in lowered((8, 96), "mosaic", jnp.bfloat16)


def test_supports() -> None:
    assert supports_norm(rows=72, width=4096, dtype=jnp.bfloat16)
    others: list[dict[str, Any]] = [{"rows": 100_000}, {"width": 896}, {"dtype": jnp.float32}]
    assert not any(supports_norm(**{"rows": 72, "width": 4096, "dtype": jnp.bfloat16, **other}) for other in others)
