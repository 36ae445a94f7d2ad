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

from smcjax.pallas.mosaic import l2_policy
from smcjax.pallas.mosaic.l2_policy import STORE
from smcjax.pallas.mosaic.wgmma import Ref, swizzled

BLOCKS, WARPGROUPS = 3, 2


def reversed_rows(x: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Blocks of [64, D] the other way round: loaded to leave, by a kernel that writes its own instructions."""

    def body(x_ref: Ref, out_ref: Ref, buffer: Ref, full: Ref) -> None:
        block = lax.axis_index("block")
        source = x_ref.at[BLOCKS - 1 - block]
        l2_policy.load_to_leave(source, buffer, full, interpret=interpret is not None)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape[1:], x.dtype, transforms=swizzled()), plgpu.Barrier()]
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
    """[blocks, warpgroups, 64, D] with warpgroups exchanged: loaded to leave, stored to stay, by each its own."""

    def body(x_ref: Ref, out_ref: Ref, buffer: Ref, full: Ref) -> None:
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        source, target = x_ref.at[block, warpgroup], out_ref.at[block, WARPGROUPS - 1 - warpgroup]
        interpreted = interpret is not None
        l2_policy.load_to_leave(source, buffer.at[warpgroup], full.at[warpgroup], interpret=interpreted)
        plgpu.barrier_wait(full.at[warpgroup])
        l2_policy.store_to_stay(buffer.at[warpgroup], target, interpret=interpreted)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, *x.shape[2:]), x.dtype, transforms=swizzled()),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ],
        interpret=interpret,
    )(x)


Copy = Callable[..., jax.Array]
COPIES = [(reversed_rows, (BLOCKS,)), (swapped, (BLOCKS, WARPGROUPS))]  # the last axis of these is turned round
copies = pytest.mark.parametrize(("copy", "leading"), COPIES, ids=["lane", "warpgroup"])
widths = pytest.mark.parametrize("width", [64, 128])


@copies
@widths
@pytest.mark.parametrize("interpret", [plgpu.InterpretGPUParams(), pytest.param(None, marks=pytest.mark.gpu)])
def test_copies(copy: Copy, leading: tuple[int, ...], width: int, interpret: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (*leading, 64, width), jnp.float16)
    got = jax.jit(functools.partial(copy, interpret=interpret))(x)
    np.testing.assert_array_equal(got, jnp.flip(x, len(leading) - 1))


@copies
@widths
def test_lowers_for_cuda(copy: Copy, leading: tuple[int, ...], width: int, patch_programs: Any) -> None:
    """With the policy, and the copies that have none are gone, but for the first kernel's store."""
    policies: list[tuple[bool, int]] = []
    replace = l2_policy._replace

    def heard(operation: Any, policy: str) -> None:
        policies.append((operation.name == STORE, l2_policy._POLICIES[policy]))
        replace(operation, policy)

    patch_programs(l2_policy, "_replace", heard)
    x = jax.ShapeDtypeStruct((*leading, 64, width), jnp.float16)
    text = jax.jit(copy).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("L2::cache_hint") == (1 if copy is reversed_rows else 2)
    assert text.count("cp.async.bulk.tensor") == 2
    first, last = 0x12F0000000000000, 0x14F0000000000000  # as createpolicy makes them
    assert policies == [(False, first), (True, last)][: 1 if copy is reversed_rows else 2]
    assert (STORE in text) == (copy is reversed_rows)
