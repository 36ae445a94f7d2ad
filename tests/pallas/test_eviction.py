"""Copies with a policy for the L2: they copy what Pallas' own do, and the instructions carry the policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas import eviction
from smcjax.pallas.products import SWIZZLED, Ref

BLOCKS, WARPGROUPS = 3, 2
HINT = "L2::cache_hint"
LOAD = "nvvm.cp.async.bulk.tensor.shared.cluster.global"  # Pallas' own, without a policy
STORE = "nvvm.cp.async.bulk.tensor.global.shared.cta"


def reversed_rows(x: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Blocks of [64, D] the other way round: loaded to leave, by a kernel that writes its own instructions."""

    def body(x_ref: Ref, out_ref: Ref, buffer: Ref, full: Ref) -> None:
        block = lax.axis_index("block")
        source = x_ref.at[BLOCKS - 1 - block]
        eviction.load_to_leave(source, buffer, full, interpret=interpret is not None)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape[1:], x.dtype, transforms=SWIZZLED), plgpu.Barrier()]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x)


def swapped(x: jax.Array, *, interpret: Any = None) -> jax.Array:
    """[blocks, warpgroups, 64, D] with warpgroups exchanged: stored to stay, by every warpgroup its own."""

    def body(x_ref: Ref, out_ref: Ref, buffer: Ref, full: Ref) -> None:
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        plgpu.copy_gmem_to_smem(x_ref.at[block, warpgroup], buffer.at[warpgroup], full.at[warpgroup])
        plgpu.barrier_wait(full.at[warpgroup])
        place = (block, WARPGROUPS - 1 - warpgroup)
        eviction.store_to_stay(buffer.at[warpgroup], out_ref, place, interpret=interpret is not None)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, *x.shape[2:]), x.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ],
        interpret=interpret,
    )(x)


Copy = Callable[..., jax.Array]
NAMES = ["load", "store"]
COPIES = [(reversed_rows, (BLOCKS,)), (swapped, (BLOCKS, WARPGROUPS))]  # the last axis of these is turned round
copies = pytest.mark.parametrize(("copy", "leading"), COPIES, ids=NAMES)
widths = pytest.mark.parametrize("width", [64, 128])


@copies
@widths
def test_copies_when_interpreted(copy: Copy, leading: tuple[int, ...], width: int) -> None:
    check(copy, leading, width, interpret=plgpu.InterpretGPUParams())


@pytest.mark.gpu
@copies
@widths
def test_copies_on_a_gpu(copy: Copy, leading: tuple[int, ...], width: int) -> None:
    check(copy, leading, width)


def check(copy: Copy, leading: tuple[int, ...], width: int, **how: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (*leading, 64, width), jnp.float16)
    np.testing.assert_array_equal(jax.jit(functools.partial(copy, **how))(x), jnp.flip(x, len(leading) - 1))


@pytest.mark.parametrize(
    ("copy", "leading", "replaced", "left"),
    [(*COPIES[0], LOAD, STORE), (*COPIES[1], STORE, LOAD)],
    ids=NAMES,
)
@widths
def test_lowers_for_cuda(copy: Copy, leading: tuple[int, ...], replaced: str, left: str, width: int) -> None:
    """With the policy, and the copy that has none is gone."""
    x = jax.ShapeDtypeStruct((*leading, 64, width), jnp.float16)
    text = jax.jit(copy).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert HINT in text
    assert replaced not in text
    assert left in text
