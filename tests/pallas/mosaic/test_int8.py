"""int8 weights on their way to the tensor core: products exactly, lowering for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.mosaic.int8 import operands
from smcjax.pallas.mosaic.wgmma import Ref, swizzled, swizzled_int8
from smcjax.quantization import interleave

ROWS, COLUMNS = 16, 256


def multiply(values: jax.Array, x: jax.Array, interpret: Any = None) -> jax.Array:
    """values · xᵀ of 64 stored rows, by one block in two halves."""
    interpreted = interpret is not None

    def kernel(w_ref: Ref, x_ref: Ref, out_ref: Ref, *, w_smem: Ref, x_smem: Ref, full: Ref) -> None:
        plgpu.copy_gmem_to_smem(w_ref, w_smem, full)
        plgpu.copy_gmem_to_smem(x_ref, x_smem, full)
        plgpu.barrier_wait(full)
        half = COLUMNS // 2

        def factors() -> Iterator[tuple[jax.Array, Ref]]:
            for part, a in enumerate(operands(w_smem, half, interpret=interpreted)):
                yield a, x_smem.at[:, pl.ds(part * half, half)].transpose((1, 0))

        def sums(acc: Ref) -> jax.Array:
            for a, b in factors():
                plgpu.wgmma(acc, a, b)
            return acc[...]

        if interpreted:  # knows no product with a factor in registers
            terms = (jnp.dot(a, b[...], preferred_element_type=jnp.float32) for a, b in factors())
            out_ref[...] = functools.reduce(jnp.add, terms)
        else:
            out_ref[...] = pl.run_scoped(sums, plgpu.ACC((64, ROWS), jnp.float32))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, ROWS), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        scratch_types={
            "w_smem": plgpu.SMEM((64, COLUMNS), jnp.int8, transforms=swizzled_int8()),
            "x_smem": plgpu.SMEM((ROWS, COLUMNS), jnp.bfloat16, transforms=swizzled()),
            "full": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="int8_product",
    )(interleave(values), x)


def every_value() -> tuple[jax.Array, jax.Array]:
    """Each int8 in every place of a word, but −128, which no matrix has; and small integers, so that sums are exact."""
    values = (jnp.arange(64 * COLUMNS) * 67) % 255 - 127
    x = jax.random.randint(jax.random.key(1), (ROWS, COLUMNS), -8, 9)
    return values.reshape(64, COLUMNS).astype(jnp.int8), x.astype(jnp.bfloat16)


@pytest.mark.parametrize("interpret", [plgpu.InterpretGPUParams(), pytest.param(None, marks=pytest.mark.gpu)])
def test_products_are_exact(interpret: Any) -> None:
    values, x = every_value()
    exact = np.asarray(values, np.int64) @ np.asarray(x, np.int64).T
    np.testing.assert_array_equal(multiply(values, x, interpret), exact)


def test_lowers_for_cuda() -> None:
    text = jax.jit(multiply).trace(*every_value()).lower(lowering_platforms=("cuda",)).as_text()
    assert "sub.bf16x2" in text
