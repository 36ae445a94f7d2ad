"""Attention over paged keys and values as Triton kernels, for GPUs from Ampere on. Its reference: `reference.py`.

One block serves a tile of queries of one key-value head and a share of the slots that they see, block of slots by block
of slots, whose pages it finds in the table:

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V

Tiles are of one row, T·H/Hkv queries a key-value head. Where a plan says that the rows of a group share their first
pages (`CommonPrefix`), other blocks with tiles of all rows' queries read those, and the blocks of single rows begin
behind them. With several shares each leaves O/Σ and log2 of Σ exp, which a second kernel merges in a fixed order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.device import HOPPER, SHARED_MEMORY, this_device
from smcjax.pallas.attention.prefix_plan import CommonPrefix
from smcjax.pallas.triton import launch as triton

MAX_SHARES = 32  # of a query's slots
MIN_STEPS = 4  # of a share: fewer take less time than merging one share more
BLOCKS_IN_FLIGHT = 2  # of a multiprocessor
PROMPT = 512  # queries of a row and key-value head from which on they are a prompt's
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    queries: int  # of a tile: a power of two, at least 16
    slots: int  # of a step: a power of two, at least 16
    splits: int  # shares of a row's slots, behind what its group shares
    shared_splits: int  # shares of what a group's rows share; 0: they share nothing
    warps: int
    stages: int
    settled: bool  # whether slots that all queries of a tile see are read without masks, in a loop of their own


def supports(*, columns: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> bool:
    """True for shapes that the kernels take, T = `columns` new tokens a row among them."""
    return (
        jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16, jnp.float32)
        and head_dim % 16 == 0
        and 16 <= head_dim <= 256
        and num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads <= 64
        and 1 <= columns <= 1024
        and page_size >= 1
    )


def default_tuning(
    *, rows: int, columns: int, group: int, kv_heads: int, dim: int, slots: int, itemsize: int, in_group: int
) -> Tuning:
    """Tiles of a row's or group's queries, steps that fit the shared memory, and shares that fill the GPU.

    Args:
        rows: R.
        columns: T.
        group: H/Hkv.
        kv_heads: Hkv.
        dim: D.
        slots: that a row sees at most: of its table, or of a window.
        itemsize: bytes of a number in pages.
        in_group: N, rows that share their first pages; 1: none do.
    """
    padded, capability = triton.power_of_two(dim), triton.target_capability()
    shared_memory = SHARED_MEMORY.get(f"sm{capability}", min(SHARED_MEMORY.values()))
    multiprocessors = this_device().multiprocessors or HOPPER.multiprocessors
    prompt = columns * group >= PROMPT
    queries = min(max(triton.power_of_two(in_group * columns * group), 16), 64)
    step, stages, warps = 64, 3, 4 if padded <= 128 else 8
    if itemsize == 4:  # products in three parts take registers
        queries, step, stages = 16, 32, 2
    elif prompt and padded <= 128:  # products take longer than memory
        queries, warps = 128, 8
    elif queries == 64 and not 90 <= capability < 120:  # tensor cores that read operands from registers alone
        step = 32
    # Keys and values of every stage, and the tile's queries or weights.
    while step > 16 and (2 * stages * step * padded + queries * max(padded, step)) * itemsize > shared_memory:
        step //= 2

    def shares(tiles: int, blocks: int, available: int) -> int:
        """As many for each tile as fill the GPU with the others' blocks, of `MIN_STEPS` steps where all are seen."""
        wanted = max(1, BLOCKS_IN_FLIGHT * blocks // (tiles * kv_heads))
        return max(1, min(wanted, MAX_SHARES, available // (MIN_STEPS * step)))

    tiles = -(-columns * group // queries)
    shared_tiles = rows // in_group * -(-in_group * columns * group // queries)
    return Tuning(
        queries=queries,
        slots=step,
        splits=shares(rows * tiles, multiprocessors // (1 if in_group == 1 else 2), slots),
        shared_splits=0 if in_group == 1 else shares(shared_tiles, multiprocessors, slots),
        warps=warps,
        stages=stages,
        settled=prompt,
    )


def paged_attention_triton(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    block_table: Int[Array, "R M"],
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    sharing: Any = None,
    window: int | None = None,
    scale: float | None = None,
    first: int = 0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "R T H D"]:
    """Computes `paged_attention` by the kernels. A plan that is no `CommonPrefix` is left aside."""
    from smcjax.pallas.attention.paged_attention_triton_kernel import attend, merge

    rows, columns, heads, dim = q.shape
    _, page_size, kv_heads, _ = key_pages.shape
    group, table_width = heads // kv_heads, block_table.shape[1]
    prefix = sharing if isinstance(sharing, CommonPrefix) else None
    in_group = 1 if prefix is None else prefix.rows
    if tuning is None:
        slots = table_width * page_size
        tuning = default_tuning(
            rows=rows,
            columns=columns,
            group=group,
            kv_heads=kv_heads,
            dim=dim,
            slots=slots if window is None else min(slots, window + columns - 1),
            itemsize=q.dtype.itemsize,
            in_group=in_group,
        )
    tiles, shared_tiles = (-(-count * columns * group // tuning.queries) for count in (1, in_group))
    shares = tuning.splits + tuning.shared_splits
    units = rows // in_group * shared_tiles * tuning.shared_splits + rows * tiles * tuning.splits
    part_dtype = q.dtype if shares == 1 else jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    sums = (shares, rows, columns, heads) if shares > 1 else (1,)
    parts, lse = triton.launch(
        attend,
        *(q, key_pages, value_pages, block_table, positions, lengths),
        *((lengths, lengths) if prefix is None else (prefix.slots, prefix.leaders)),
        out=(
            jax.ShapeDtypeStruct((shares, *q.shape), part_dtype),
            jax.ShapeDtypeStruct(sums, jnp.float32),
        ),
        grid=(units, kv_heads),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
        ROWS=rows,
        COLUMNS=columns,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED=triton.power_of_two(dim),
        TABLE=table_width,
        PAGE=page_size,
        IN_GROUP=in_group,
        FIRST=first,
        WINDOW=window or 0,
        SCALE=LOG2_E * (1 / math.sqrt(dim) if scale is None else scale),
        QUERIES=tuning.queries,
        SLOTS=tuning.slots,
        SHARED_TILES=shared_tiles,
        SHARED_SPLITS=tuning.shared_splits,
        TILES=tiles,
        SPLITS=tuning.splits,
        SETTLED=tuning.settled and window is None,
        MERGED=shares > 1,
        PRECISION="tf32x3",  # of float32: three products of tensor cores, exact to some 2⁻²¹
    )
    if shares == 1:
        return parts[0]
    count, block = rows * columns * heads, 4
    return triton.launch(
        merge,
        *(parts, lse),
        out=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(-(-count // block),),
        warps=4,
        stages=1,
        interpret=interpret,
        QUERIES=count,
        DIM=dim,
        PADDED=triton.power_of_two(dim),
        SHARES=shares,
        PADDED_SHARES=triton.power_of_two(shares),
        BLOCK=block,
    )
