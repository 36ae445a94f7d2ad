"""Copies of KV pages in many layers of a model at once: a Mosaic GPU kernel (Hopper) instead of a scatter a pool.

One block a row and half page: its share of the row's page goes from the source to the target of every pool in turn,
through a ring in shared memory, by TMA both ways. The reference is `copy_pages`, pool by pool.

A launch copies in 16 pools at most: their descriptors are its parameters, by value, for which LLVM takes a time that
goes by the square of their number (137 s for 192) and of which some 240 are all that fit.

The copy engine takes at most 256 numbers along an axis, so entries that are wider (an EAGLE-3 head's features, as wide
as its target) are seen as several heads of equal width, and of large ones a block copies fewer slots.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.cache.rotate_and_write import Copies, copy_pages
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic.compat import pl, plgpu

Pools = tuple[Float[Array, "P B Hkv D"], ...]
MAX_POOLS = 16  # of a launch
IN_FLIGHT = 4  # copies of a block that are under way
SLOTS = 8  # of a page, that a block copies at most
WIDEST = 256  # numbers along an axis of one copy
LARGEST = 48 * 1024  # bytes of one copy, of which IN_FLIGHT fit the shared memory

Ref = Any


def copy_all_pages_reference(pools: Pools, copies: Copies) -> Pools:
    """Page `copies.source[r]` into page `copies.target[r]` of every pool; rows that name one page twice copy nothing.

    No page is both a source and a target. In place where the caller gives the pools up.
    """
    return tuple(copy_pages(pages, copies) for pages in pools)


def pieces_of(pool: Any) -> tuple[int, int, int] | None:
    """Slots, heads and width of what a block copies of a pool at once; None where the copy engine takes none."""
    _, page_size, kv_heads, dim = pool.shape
    widths = [width for width in range(min(dim, WIDEST), 0, -1) if dim % width == 0]
    for width in widths:
        heads = kv_heads * (dim // width)
        for slots in (size for size in (SLOTS, SLOTS // 2, SLOTS // 4, 1) if page_size % size == 0):
            piece = slots * heads * width * pool.dtype.itemsize
            if heads <= WIDEST and width * pool.dtype.itemsize % 16 == 0 and piece <= LARGEST:
                return slots, heads, width
    return None


def _supports(pools: Pools, copies: Copies) -> bool:
    alike = all(pool.shape == pools[0].shape and pool.dtype == pools[0].dtype for pool in pools)
    return alike and pieces_of(pools[0]) is not None


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
    if pieces_of(pools[0]) is None:
        raise ValueError(f"no kernel copies pages of {pools[0].dtype}{list(pools[0].shape)}")
    groups = (pools[first : first + MAX_POOLS] for first in range(0, len(pools), MAX_POOLS))
    return tuple(pool for group in groups for pool in _copied(group, copies, interpret=interpret))


@functools.partial(jax.jit, static_argnames="interpret")
def _copied(pools: Pools, copies: Copies, *, interpret: Any) -> Pools:
    """The pools of one launch. A jit of its own, so that launches alike are traced and lowered once."""
    pieces, (pages, page_size, *own) = pieces_of(pools[0]), pools[0].shape
    assert pieces is not None
    slots, heads, width = pieces
    refs = [jax.new_ref(pool.reshape(pages, page_size, heads, width)) for pool in pools]
    plgpu.kernel(
        _kernel,
        out_type=(),
        grid=(copies.source.shape[0], page_size // slots),
        grid_names=("row", "piece"),
        scratch_types={
            "buffer": plgpu.SMEM((IN_FLIGHT, slots, heads, width), pools[0].dtype),
            "ready": plgpu.Barrier(num_arrivals=1, num_barriers=IN_FLIGHT),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="copy_pages",
    )(copies.source.astype(jnp.int32), copies.target.astype(jnp.int32), *refs)
    return tuple(jax.freeze(ref).reshape(pages, page_size, *own) for ref in refs)


copy_all_pages = Op(copy_all_pages_reference)
copy_all_pages.register(Kernel(runs_mosaic, copy_all_pages_mosaic, _supports))
