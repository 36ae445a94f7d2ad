"""A Triton kernel is one custom call of a JAX program, runs in the interpreter, and is compiled for every target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.pallas.triton.launch import launch
from tests.pallas.triton.cubins import TARGETS, compiled, lowered
from tests.pallas.triton.interpreter import interpreted

pytest.importorskip("jax_triton")


def times(w: jax.Array, x: jax.Array, count: jax.Array, *, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    from tests.pallas.triton.scaled_triton_kernel import matrix_times_vector

    rows, columns = w.shape
    out = (jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct(count.shape, count.dtype))
    return launch(
        matrix_times_vector,
        *(w, x, count),
        out=out,
        grid=(rows // 16,),
        warps=4,
        stages=2,
        aliases={2: 1},
        interpret=interpret,
        ROWS=16,
        COLUMNS=columns,
        FACTOR=3,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_the_interpreter_computes_the_kernel(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.normal(size=(32, 64)), dtype), jnp.asarray(rng.normal(size=64), dtype)
    count = jnp.arange(2, dtype=jnp.int32)
    y, counted = times(w, x, count, interpret=interpreted)
    np.testing.assert_allclose(y, 3 * (np.float32(w) @ np.float32(x)), rtol=1e-5, atol=1e-4)
    assert counted.tolist() == [1, 2]
    assert count.tolist() == [0, 1]  # an alias takes memory of a copy


def test_a_program_has_one_custom_call() -> None:
    w, x, count = jnp.ones((32, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16), jnp.zeros(2, jnp.int32)
    assert lowered(times, w, x, count).count("custom_call @triton_kernel_call_ffi") == 1


@pytest.mark.parametrize("capability", TARGETS)
def test_the_kernel_is_compiled_for_every_target(capability: int) -> None:
    (cubin,) = compiled(
        capability, times, jnp.ones((32, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16), jnp.zeros(2, jnp.int32)
    )
    assert cubin.spilled == 0
    assert 0 < cubin.registers <= 255
    assert cubin.shared_memory <= cubin.limit
