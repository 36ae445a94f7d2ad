"""Norm and SwiGLU by Triton: interpreted, lowered, compiled for every target, and on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.layer.norm import PendingNorm, add_rms_norm
from smcjax.pallas.layer.norm_triton import MAX_ROWS, MAX_WIDTH, add_rms_norm_triton, swiglu_triton
from smcjax.pallas.layer.swiglu import swiglu
from tests.pallas.layer import test_swiglu as of_swiglu
from tests.pallas.layer.test_norm import EPS
from tests.pallas.layer.test_norm import check as check_norm
from tests.pallas.triton.cubins import TARGETS, compiled, lowered
from tests.pallas.triton.interpreter import interpreted

pytest.importorskip("jax_triton")

SHAPES = [(8, 2048), (8, 9, 4096), (1, 896), (3, 16384)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(1, 1024), (2, 3, 160)], ids=str)
def test_norm_against_the_reference(shape: tuple[int, ...], weighted: bool) -> None:
    check_norm(functools.partial(add_rms_norm_triton, interpret=interpreted), shape, weighted=weighted)


def test_a_norm_without_its_weight_shows() -> None:
    def without(x: jax.Array, y: jax.Array, weight: jax.Array, eps: float) -> Any:
        return add_rms_norm_triton(x, y, None, eps, interpret=interpreted)

    with pytest.raises(AssertionError):
        check_norm(without, (2, 64))


@pytest.mark.parametrize(("shape", "width", "hidden"), [((1,), 1024, 2048), ((2, 3), 1500, 160)])
def test_swiglu_against_float64(shape: tuple[int, ...], width: int, hidden: int) -> None:
    inputs = of_swiglu.operands(shape, width, hidden)
    of_swiglu.check(swiglu_triton(*inputs, interpret=interpreted), of_swiglu.exact(*inputs))
    got = swiglu_triton(inputs[0], PendingNorm(inputs[1].x, inputs[1].eps + 1000), interpret=interpreted)
    with pytest.raises(AssertionError):  # negative control
        of_swiglu.check(got, of_swiglu.exact(*inputs))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    gate_up, pending = of_swiglu.operands((2,), 1024, 1024)
    got = swiglu_triton(gate_up, PendingNorm(pending.x.at[0, 5].set(jnp.nan), EPS), interpret=interpreted)
    assert jnp.isnan(got[0]).all()
    of_swiglu.check(got[1:], of_swiglu.exact(gate_up, pending)[1:])


def shapes(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[Any, Any, Any, Any]:
    """x, y and weight of a norm, and a product three times as wide that is to be gated."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return x, x, jax.ShapeDtypeStruct(shape[-1:], dtype), jax.ShapeDtypeStruct((*shape[:-1], 6 * shape[-1]), dtype)


def both(x: Any, y: Any, weight: Any, gate_up: Any) -> Any:
    """The two operations."""
    return add_rms_norm(x, y, weight, EPS), swiglu(gate_up, PendingNorm(x, EPS))


def test_each_is_one_launch() -> None:
    text = lowered(both, *shapes((8, 9, 4096)))
    assert text.count("custom_call @triton_kernel_call_ffi") == 2
    for shape, dtype in [
        ((MAX_ROWS + 1, 64), jnp.bfloat16),
        ((1, MAX_WIDTH + 2), jnp.bfloat16),
        ((8, 64), jnp.float32),
    ]:
        assert "triton_kernel_call" not in lowered(both, *shapes(shape, dtype))


@pytest.mark.parametrize(
    ("shape", "capability"), [*((SHAPES[-1], target) for target in TARGETS), *zip(SHAPES[:-1], TARGETS, strict=False)]
)
def test_kernels_are_compiled_for_every_target(shape: tuple[int, ...], capability: int) -> None:
    for cubin in compiled(capability, both, *shapes(shape)):
        assert cubin.spilled == 0, cubin
        assert cubin.shared_memory <= cubin.limit, cubin


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (MAX_ROWS, 4096)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    """The compiled kernels, through the operations that choose them."""
    inputs = of_swiglu.operands(shape[:-1], 3 * shape[-1], shape[-1])
    with implementations("triton"):
        check_norm(jax.jit(add_rms_norm, static_argnums=3), shape)
        got = jax.jit(lambda y, x: swiglu(y, PendingNorm(x, EPS)))(inputs[0], inputs[1].x)
    of_swiglu.check(got, of_swiglu.exact(*inputs))
