"""Operations take the kernel that supports their arguments on this device, and the reference elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from smcjax.device import HOPPER
from smcjax.pallas import dispatch
from smcjax.pallas.dispatch import Kernel, Op, implementations, is_hopper
from tests.lazily import program_patches


def doubled(x: jax.Array) -> jax.Array:
    """Adds x to itself."""
    return x + x


def make_op() -> Op[[jax.Array], jax.Array]:
    op = Op(doubled)
    op.register(Kernel(is_hopper, lambda x: 200 * x, lambda x: x.ndim == 1))
    op.register(Kernel(is_hopper, lambda x: 300 * x, lambda x: x.ndim <= 2))
    op.register(Kernel(lambda device: device.arch == "sm100", lambda x: 400 * x, lambda x: True))
    return op


def test_the_first_kernel_that_takes_the_arguments_runs() -> None:
    op, row, matrix, cube = make_op(), jnp.ones(1), jnp.ones((1, 1)), jnp.ones((1, 1, 1))
    with implementations("mosaic"):
        assert op(row) == 200
        assert op(matrix) == 300
        assert op(cube) == 2  # the third kernel is for another architecture
        assert op.kernel_for(cube) is None
    with implementations("xla"):
        assert op(row) == 2
        assert op.kernel_for(row) is None


def test_auto_means_the_kernels_of_the_default_device() -> None:
    op = make_op()
    with implementations("auto"):
        with program_patches(dispatch, "this_device", lambda: HOPPER):
            assert dispatch.active_implementation() == "mosaic"
            assert op(jnp.ones(1)) == 200
        if jax.default_backend() == "cpu":
            assert dispatch.active_implementation() == "xla"
            assert op(jnp.ones(1)) == 2


def test_a_jitted_function_is_traced_anew_for_another_choice() -> None:
    compute = jax.jit(make_op())
    with implementations("mosaic"):
        assert compute(jnp.ones(1)) == 200
    with implementations("xla"):
        assert compute(jnp.ones(1)) == 2


def test_another_name_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"implementation must be one of auto, mosaic, xla, got 'cuda'\."):
        implementations("cuda")
