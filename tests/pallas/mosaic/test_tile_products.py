"""Rows times eight vectors by the tensor core: products of which 16 bits count."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.mosaic import threads, tile_products
from smcjax.pallas.mosaic.threads import WARPS, Ref, Threads
from smcjax.pallas.mosaic.tile_products import (
    CHUNK,
    ROWS,
    STAGE,
    VECTORS,
    Factor,
    Stages,
    factor,
    own_columns,
    own_vector,
)

TILES = 2
INTERPRET = plgpu.InterpretGPUParams()


def products(rows: Any, vectors: Any, *, stages: int, keeps_rest: bool = True, interpret: Any = None) -> jax.Array:
    """Products [rows, 8] of one block, whose warps have 32 rows each."""
    width = rows.shape[1]

    def program(t: Threads, rows: Ref, vectors: Ref, out: Ref, *memory: Ref) -> None:
        first = t.index // threads.WARP * (TILES * ROWS) + own_vector(t)

        def offset(tile: int, half: int, chunk: int) -> int:
            return (tile * ROWS + half * (ROWS // 2)) * width + chunk * CHUNK

        def factors() -> list[Factor]:
            begins = [own_vector(t) * width + own_columns(t) + i * CHUNK for i in range(width // CHUNK)]
            found = [factor(t, t.load4(vectors, at) + t.load4(vectors, at + 4)) for at in begins]
            return found if keeps_rest else [Factor(one.rounded, [t.constant(0)] * 4) for one in found]

        shape = {"tiles": TILES, "chunks": width // CHUNK, "stages": Stages(memory[0], stages) if memory else None}
        made = tile_products.tile_products(t, rows, first * width + own_columns(t), offset, factors, **shape)
        for tile, sums in enumerate(made):
            for i, one in enumerate(sums):
                index = first + (tile * ROWS + i // 2 * (ROWS // 2))
                t.store(out, index * VECTORS + own_columns(t) // 4 + i % 2, one)

    def body(*refs: Ref, **memory: Ref) -> None:
        threads.run(program, *refs, *memory.values(), interpret=interpret is not None)

    made: jax.Array = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((WARPS * TILES * ROWS, VECTORS), jnp.float32),
        scratch_types={"stages": plgpu.SMEM((stages * STAGE,), jnp.bfloat16)} if stages else {},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="tile_products",
    )(rows, vectors)
    return made


def drawn(width: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(width)
    rows = jnp.asarray(rng.standard_normal((WARPS * TILES * ROWS, width)), jnp.bfloat16)
    return rows, jnp.asarray(rng.standard_normal((VECTORS, width)), jnp.float32)


def away(got: jax.Array, rows: jax.Array, vectors: jax.Array) -> float:
    """The largest error, as a part of a product of the sizes."""
    wide, right = np.asarray(rows, np.float64), np.asarray(vectors, np.float64).T
    return float((np.abs(np.asarray(got, np.float64) - wide @ right) / (np.abs(wide) @ np.abs(right))).max())


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["", "gpu"])
@pytest.mark.parametrize(("width", "stages"), [(32, 0), (96, 2)])
def test_16_bits_count(width: int, stages: int, interpret: Any) -> None:
    """Controls: vectors rounded to bfloat16, and columns in another order, are seen."""
    given = drawn(width)
    run = functools.partial(products, *given, stages=stages, interpret=interpret)
    got = run()
    assert away(got, *given) < 2**-16
    assert away(run(keeps_rest=False), *given) > 2**-12
    rows, vectors = given
    assert away(got, rows[:, ::-1], vectors) > 0.05
