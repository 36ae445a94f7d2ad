"""Copies of KV pages in all layers of a model at once: one Mosaic GPU kernel (Hopper) instead of a scatter a pool.

One block a row and half page: its share of the row's page goes from the source to the target of every pool in turn,
through a ring in shared memory, by TMA both ways. The reference is `copy_pages`, pool by pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from smcjax.pallas.dispatch import Kernel, Op
from smcjax.pallas.kv_write import Copies, copy_pages

Pools = tuple[Float[Array, "P B Hkv D"], ...]
IN_FLIGHT = 4  # copies of a block that are under way
SLOTS = 8  # of a page, that a block copies
LARGEST = 48 * 1024  # bytes of one copy, of which IN_FLIGHT fit the shared memory

Ref = Any


def copy_all_pages_reference(pools: Pools, copies: Copies) -> Pools:
    """Page `copies.source[r]` into page `copies.target[r]` of every pool; rows that name one page twice copy nothing.

    No page is both a source and a target. In place where the caller gives the pools up.
    """
    return tuple(copy_pages(pages, copies) for pages in pools)


def _supports(pools: Pools, copies: Copies) -> bool:
    _, page_size, kv_heads, dim = pools[0].shape
    piece = min(SLOTS, page_size) * kv_heads * dim * pools[0].dtype.itemsize
    alike = all(pool.shape == pools[0].shape and pool.dtype == pools[0].dtype for pool in pools)
    return alike and page_size % min(SLOTS, page_size) == 0 and piece % 16 == 0 and piece <= LARGEST and kv_heads <= 256


def _kernel(source_ref: Ref, target_ref: Ref, *pools: Ref, buffer: Ref, ready: Ref) -> None:
    row, piece = lax.axis_index("row"), lax.axis_index("piece")
    source, target = source_ref[row], target_ref[row]
    slots = pl.ds(pl.multiple_of(piece * buffer.shape[1], buffer.shape[1]), buffer.shape[1])

    def fetch(number: int) -> None:
        slot = number % IN_FLIGHT
        plgpu.copy_gmem_to_smem(pools[number].at[source, slots], buffer.at[slot], ready.at[slot])

    @pl.when(source != target)
    def _copy() -> None:
        for number in range(min(IN_FLIGHT, len(pools))):
            fetch(number)
        for number in range(len(pools)):
            slot = number % IN_FLIGHT
            plgpu.barrier_wait(ready.at[slot])
            plgpu.copy_smem_to_gmem(buffer.at[slot], pools[number].at[target, slots])
            refilled = number - 1  # its slot's last store has had a turn to finish
            if refilled >= 0 and refilled + IN_FLIGHT < len(pools):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(refilled + IN_FLIGHT)
        plgpu.wait_smem_to_gmem(0)


def copy_all_pages_mosaic(pools: Pools, copies: Copies, *, interpret: Any = None) -> Pools:
    """Computes `copy_all_pages` by the kernel; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    _, page_size, kv_heads, dim = pools[0].shape
    slots = min(SLOTS, page_size)
    refs: Sequence[Ref] = [jax.new_ref(pages) for pages in pools]
    plgpu.kernel(
        _kernel,
        out_type=(),
        grid=(copies.source.shape[0], page_size // slots),
        grid_names=("row", "piece"),
        scratch_types={
            "buffer": plgpu.SMEM((IN_FLIGHT, slots, kv_heads, dim), pools[0].dtype),
            "ready": plgpu.Barrier(num_arrivals=1, num_barriers=IN_FLIGHT),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="copy_pages",
    )(copies.source.astype(jnp.int32), copies.target.astype(jnp.int32), *refs)
    return tuple(map(jax.freeze, refs))


copy_all_pages = Op(copy_all_pages_reference)
copy_all_pages.register(Kernel("sm90", copy_all_pages_mosaic, _supports))
