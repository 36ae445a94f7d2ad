"""The best blocks of rows, interpreted: exactly the reference's, ties and all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.best_blocks import best_blocks, best_blocks_mosaic, best_blocks_reference

INTERPRET = plgpu.InterpretGPUParams()


def drawn(shape: tuple[int, ...], values: int) -> jax.Array:
    """Few values, so that many are equal; some always chosen, some never, and rows of few that may be."""
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, values, shape).astype(np.float32)
    ranks[rng.random(shape) < 0.3] = -np.inf
    ranks[rng.random(shape) < 0.02] = np.inf
    ranks[0] = -np.inf
    ranks[0, ..., -2] = 0
    return jnp.asarray(ranks)


@pytest.mark.parametrize(("shape", "n", "values"), [((2, 3, 40), 5, 4), ((3, 300), 7, 3), ((4, 4), 16, 9)])
def test_kernel_is_the_reference(shape: tuple[int, ...], n: int, values: int) -> None:
    ranks = drawn(shape, values)
    got, want = best_blocks_mosaic(ranks, n, interpret=INTERPRET), best_blocks_reference(ranks, n)
    np.testing.assert_array_equal(got, want)
    assert want.sum(axis=-1).max() == min(n, shape[-1]) or shape[-1] < n
    later = best_blocks_reference(ranks[..., ::-1], n)[..., ::-1]  # a control: of equal ones the later
    assert shape[-1] < n or (later != want).any()


def test_lowers_for_cuda() -> None:
    """At an 8B model's shapes and 64 Ki positions; more blocks than threads can hold are XLA's."""

    def lowered(blocks: int) -> str:
        with implementations("mosaic"):
            traced = jax.jit(lambda ranks: best_blocks(ranks, 16)).trace(
                jax.ShapeDtypeStruct((9, 8, blocks), jnp.float32)
            )
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lowered(1024)
    assert "mosaic_gpu" not in lowered(8192)
