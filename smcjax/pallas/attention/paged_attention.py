"""Attention over paged keys and values: the operation, and which kernel or reference computes it.

On Hopper rows that share pages are read together where a plan says so (`plan_sharing`, `prefix_shared.py`), else one by
one (`paged_attention_sm90.py`). Other GPUs have one Triton kernel for both, which Hopper has for windows and scales
(`paged_attention_triton.py`). Plain XLA goes block by block on a CPU, whose cost follows the real lengths, and densely
on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.device import on_cpu
from smcjax.pallas.attention.paged_attention_sm90 import paged_attention_mosaic, supports
from smcjax.pallas.attention.paged_attention_triton import paged_attention_triton
from smcjax.pallas.attention.paged_attention_triton import supports as triton_supports
from smcjax.pallas.attention.prefix_plan import CommonPrefix, Sharing, find_common_prefix, find_sharing
from smcjax.pallas.attention.prefix_plan_kernel import find_sharing_mosaic, supports_sharing
from smcjax.pallas.attention.prefix_shared import padded, shared_attention_mosaic, supports_plan
from smcjax.pallas.attention.prefix_shared import supports as shared_attention_supports
from smcjax.pallas.attention.reference import paged_attention_reference
from smcjax.pallas.attention.shared_tuning import NARROW, chunk_of, tiles_of
from smcjax.pallas.attention.xla_blockwise import blockwise_paged_attention
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic, runs_triton, runs_triton_beside_mosaic

Plan = Sharing | CommonPrefix


def paged_attention_xla(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    block_table: Int[Array, "R M"],
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    sharing: Plan | None = None,
    window: int | None = None,
    scale: float | None = None,
    first: int = 0,
) -> Float[Array, "R T H D"]:
    """Attends from query (r, t) to slots 0…positions[r, t] of row r's pages; of these, the first `lengths[r]` hold KV.

    With a `window` only to the last that many of them, and to none before `first`, whose slots hold finite numbers.
    Scores are multiplied by `scale` (None: 1/√D).
    `sharing`, the plan that `plan_sharing` made of this block table, lets a kernel read what rows share once. What a
    query at or beyond `lengths` returns means nothing. On a CPU blocks of slots are read one by one, as many as the
    lengths and the window need; elsewhere whole tables at once.
    """
    compute = blockwise_paged_attention if on_cpu() else paged_attention_reference
    return compute(q, key_pages, value_pages, block_table, positions, lengths, window=window, scale=scale, first=first)


def plan_sharing(
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    num_immutable: Int[Array, " R"],
    *,
    rows: int,
    window: int | None = None,
    scale: float | None = None,
    **shape: Any,
) -> Plan | None:
    """Finds what the rows of each group, N = `rows` consecutive ones, share: for `paged_attention` of such a `shape`.

    `shape` are the keywords of `supports`, T = `columns` the most new tokens of a row. `lengths` is how many slots of
    each row hold KV when the plan is last used, 0 for a row that reads nothing; `num_immutable` how many of them every
    query sees.
    Returns None where the kernel that reads each row by itself does better, or none applies: all from static shapes.
    More queries a row than Mosaic's takes are planned also where nothing can be shared, as of a prompt's chunk. For
    Triton's kernel the plan is each group's common prefix.
    """
    slots = block_table.shape[1] * shape["page_size"]
    by_row = rows == 1 or slots <= NARROW
    usual = find_tasks.has_kernel() and is_usual(window, scale, shape["head_dim"])
    if not (usual and shared_attention_supports(rows=rows, **shape)):
        kernel = _kernel_of_rows(window, scale, 0, **shape)
        by_row |= window is not None and window <= NARROW
        if by_row or kernel is None or kernel.run is not paged_attention_triton:
            return None
        return find_common_prefix(block_table, lengths, num_immutable, rows=rows, page_size=shape["page_size"])
    if supports(**shape) and by_row:
        return None
    queries = shape["columns"] * padded(shape["num_heads"] // shape["num_kv_heads"])
    return find_tasks(
        block_table,
        lengths,
        num_immutable,
        rows=rows,
        queries=queries,
        page_size=shape["page_size"],
        chunk=chunk_of(rows * queries, slots),
        tiles=tiles_of(rows * queries),
    )


def attends_by_kernels(*, window: int | None = None, scale: float | None = None, first: int = 0, **shape: Any) -> bool:
    """True where rows of such a `shape` (`supports`) are read by a kernel one by one."""
    planned = find_tasks.has_kernel() and is_usual(window, scale, shape["head_dim"]) and not first
    if planned and shared_attention_supports(rows=1, **shape):
        return True
    return _kernel_of_rows(window, scale, first, **shape) is not None


def _kernel_of_rows(
    window: int | None,
    scale: float | None,
    first: int,
    *,
    columns: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
) -> Kernel[..., jax.Array] | None:
    """The kernel that reads rows of such a shape one by one now; None: plain XLA does."""
    q = jax.ShapeDtypeStruct((1, columns, num_heads, head_dim), dtype)
    pages = jax.ShapeDtypeStruct((1, page_size, num_kv_heads, head_dim), dtype)
    whose = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1, columns), (1,)))
    arrays: Any = (q, pages, pages, *whose)
    return paged_attention.kernel_for(*arrays, window=window, scale=scale, first=first)


def is_usual(window: int | None, scale: float | None, head_dim: int) -> bool:
    """True for the attention that the Mosaic kernels compute: to all earlier slots, scores over √D."""
    return window is None and (scale is None or scale == 1 / math.sqrt(head_dim))


def _shape_where_usual(
    q: jax.Array, key_pages: jax.Array, value_pages: jax.Array, window: int | None, scale: float | None
) -> dict[str, Any] | None:
    """The keywords of `supports`, of attention that the Mosaic kernels compute; None of any other."""
    return _shape(q, key_pages, value_pages) if is_usual(window, scale, q.shape[3]) else None


def _shape(q: jax.Array, key_pages: jax.Array, value_pages: jax.Array) -> dict[str, Any] | None:
    """The keywords of `supports`; None where queries, keys and values differ."""
    if not (q.dtype == key_pages.dtype == value_pages.dtype and key_pages.shape == value_pages.shape):
        return None
    return {
        "columns": q.shape[1],
        "num_heads": q.shape[2],
        "num_kv_heads": key_pages.shape[2],
        "head_dim": q.shape[3],
        "page_size": key_pages.shape[1],
        "dtype": q.dtype,
    }


def _supports_rows(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    *_: Any,
    window: int | None = None,
    scale: float | None = None,
    **others: Any,
) -> bool:
    shape = _shape_where_usual(q, key_pages, value_pages, window, scale)
    return shape is not None and supports(**shape)


def _supports_tasks(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    *_: Any,
    sharing: Plan | None = None,
    window: int | None = None,
    scale: float | None = None,
    first: int = 0,
    **others: Any,
) -> bool:
    shape = _shape_where_usual(q, key_pages, value_pages, window, scale)
    if first or shape is None or not isinstance(sharing, Sharing):
        return False
    if not shared_attention_supports(rows=sharing.rows, **shape):
        return False
    return supports_plan(sharing, columns=q.shape[1], group=q.shape[2] // key_pages.shape[2])


def _supports_triton(q: jax.Array, key_pages: jax.Array, value_pages: jax.Array, *_: Any, **others: Any) -> bool:
    shape = _shape(q, key_pages, value_pages)
    return shape is not None and triton_supports(**shape)


def _supports_beside_mosaic(q: jax.Array, *arrays: Any, **others: Any) -> bool:
    """Float32 stays XLA's on Hopper, whose sums Triton's come near and no nearer."""
    return q.dtype != jnp.float32 and _supports_triton(q, *arrays, **others)


def _run_rows(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    first: int = 0,
    **supported: Any,
) -> jax.Array:
    return paged_attention_mosaic(q, key_pages, value_pages, block_table, positions, lengths, first=first)


def _run_tasks(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    sharing: Any = None,
    **supported: Any,
) -> jax.Array:
    return shared_attention_mosaic(q, key_pages, value_pages, sharing, positions, lengths)


paged_attention = Op(paged_attention_xla)
paged_attention.register(Kernel(runs_mosaic, _run_tasks, _supports_tasks))
paged_attention.register(Kernel(runs_mosaic, _run_rows, _supports_rows))
paged_attention.register(Kernel(runs_triton, paged_attention_triton, _supports_triton))
paged_attention.register(Kernel(runs_triton_beside_mosaic, paged_attention_triton, _supports_beside_mosaic))

find_tasks = Op(find_sharing)
find_tasks.register(Kernel(runs_mosaic, find_sharing_mosaic, lambda *_, rows, **terms: supports_sharing(rows=rows)))
