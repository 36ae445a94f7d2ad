"""Rotation, page copies and KV writes as one Triton kernel, for GPUs from Ampere on. Its reference is in
`rotate_and_write.py`.

One block serves some heads of one new token, or of one slot of one page to copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from smcjax.pallas.triton.launch import launch, power_of_two

BLOCK = 16  # heads
MAX_WIDTH = 16384  # of a residual stream whose norm is pending
DTYPES = (jnp.bfloat16, jnp.float32)


def supports(write: Any) -> bool:
    """True for a `Write` that the kernel takes: alike dtypes, heads of a power of two, norms a head."""
    dim, norms, pending = write.key_pages.shape[3], write.norms, write.pending
    arrays = [write.qkv, write.key_pages, write.value_pages, *(() if norms is None else (norms.q, norms.k))]
    return (
        {array.dtype for array in arrays} == {write.qkv.dtype}
        and write.qkv.dtype in DTYPES
        and dim in (16, 32, 64, 128, 256)
        and (norms is None or {norms.q.size, norms.k.size} == {dim})
        and (pending is None or pending.x.shape[-1] <= MAX_WIDTH)
    )


def rotate_and_write_triton(write: Any, *, interpret: Any = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `rotate_and_write` of such arguments by the kernel; copies only beside few columns (`MAX_COLUMNS`)."""
    from smcjax.pallas.cache.rotate_and_write_triton_kernel import rotate_and_write

    rows, columns, _, dim = write.qkv.shape
    _, page_size, kv_heads, _ = write.key_pages.shape
    heads = write.qkv.shape[2] - 2 * kv_heads
    copies, norms, pending = write.copies, write.norms, write.pending
    none, width = write.slots, 1 if pending is None else pending.x.shape[-1]
    return launch(
        rotate_and_write,
        *(write.qkv, write.cos, write.sin, write.pages, write.slots),
        *((none, none) if copies is None else copies),
        none if pending is None else pending.x,
        *((none, none) if norms is None else (norms.q, norms.k)),
        *(write.key_pages, write.value_pages),
        out=(
            jax.ShapeDtypeStruct((rows, columns, heads, dim), write.qkv.dtype),
            jax.ShapeDtypeStruct(write.key_pages.shape, write.key_pages.dtype),
            jax.ShapeDtypeStruct(write.value_pages.shape, write.value_pages.dtype),
        ),
        grid=(rows, columns + (0 if copies is None else page_size), -(-(heads + 2 * kv_heads) // BLOCK)),
        warps=4,
        stages=1,
        aliases={10: 1, 11: 2},
        interpret=interpret,
        COLUMNS=columns,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        PAGE=page_size,
        WIDTH=width,
        PADDED_WIDTH=power_of_two(width),
        PENDING_EPS=None if pending is None else pending.eps,
        EPS=None if norms is None else norms.eps,
        BLOCK=BLOCK,
    )
