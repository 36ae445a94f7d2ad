"""Scores of a chunk of tasks stored by slot, in a Mosaic kernel: each row of a product those of its own tasks.

Where queries have tables of their own, several tasks stand at one place of the sequence, each for some of the queries.
Rows of one product are rows of one place in memory, so a row that has no part in a task must leave its place alone:
another task, of another block perhaps, has what belongs there. Pallas stores whole tiles; here every thread stores the
pairs of neighbouring scores that a product has left it, where its row has a part.

Scores are kept in float16, half the bytes of f32: 11 bits say as much as products of bfloat16, of 8 bits, are good for.
Scores beyond 65,504 are infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.mosaic.compat import arith, ir, llvm, mgpu, mu, pl, plgpu
from smcjax.pallas.mosaic.online_softmax import row_layout
from smcjax.pallas.mosaic.threads import WARP, i32, i64, scalar, scalar_layout, thread
from smcjax.pallas.mosaic.wgmma import QUERIES, Ref

BYTES = 2  # of a score
NARROW = 8  # columns of which a product leaves each thread a pair in two rows, 8 apart


def store_by_slot(
    kept: Ref,
    row: jax.Array,
    firsts: Sequence[jax.Array],
    parts: Sequence[jax.Array],
    scores: jax.Array,
    *,
    group_heads: int,
    interpret: bool,
) -> None:
    """Stores the columns of each task at its slots, in the rows that have a part in it.

    Args:
        kept: [G, S, tiles·64, slots] f16 GMEM.
        row: the place of the product's first row among all G·S·tiles·64.
        firsts: the first slot of each task of the chunk; multiples of 2.
        parts: [64] int32 each, 0 for rows that have no part in the task; alike for the heads of a query.
        scores: [64, 64] f32, the tasks' slots one after the other, as products leave them.
        group_heads: rows of a query.
        interpret: runs on a CPU.
    """
    width, unit = kept.shape[-1], scores.shape[1] // len(firsts)
    if interpret:
        _interpreted(kept, row, firsts, parts, scores, unit, group_heads)
        return

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            scalar_layout(),
            (scalar_layout(),) * len(firsts),
            (row_layout(),) * len(parts),
            plgpu.Layout.WGMMA,
        )
    )
    def go(
        _: Any,
        kept: ir.Value,
        row: Any,
        firsts: tuple[Any, ...],
        parts: tuple[mgpu.FragmentedArray, ...],
        scores: mgpu.FragmentedArray,
    ) -> None:
        def times(value: ir.Value, by: int) -> ir.Value:
            return arith.muli(value, mu.c(by, value.type))

        # A product [64, 64] leaves each thread, for every eight columns, a pair of neighbours in row 16·warp + lane/4
        # and one in the row 8 below; the pair is at column 2·(lane mod 4).
        warp, lane = arith.divui(thread(), mu.c(WARP, i32())), arith.remui(thread(), mu.c(WARP, i32()))
        own = arith.addi(times(warp, 16), arith.divui(lane, mu.c(4, i32())))
        column = times(arith.remui(lane, mu.c(4, i32())), 2)
        own_row = arith.extui(i64(), arith.addi(scalar(row), own))
        # In 64 bits, since rows times slots may exceed 32.
        element = arith.addi(times(own_row, width), arith.extui(i64(), column))
        mine = arith.addi(llvm.ptrtoint(i64(), mu.memref_ptr(kept)), times(element, BYTES))
        pairs = scores.registers.reshape(-1, 2)  # by eight columns, then by row
        for task, (first, has_part) in enumerate(zip(firsts, parts, strict=True)):
            # Slots of the task begin at its first slot in every row of the array.
            place = arith.addi(mine, times(arith.extui(i64(), scalar(first)), BYTES))
            # The row layout gives a thread the flags of exactly its two rows.
            flags = [llvm.extractelement(flag, mu.c(0, i32())) for flag in has_part.registers.flat]
            takes = [arith.cmpi(arith.CmpIPredicate.ne, flag, mu.c(0, i32())) for flag in flags]
            for i in range(unit // NARROW):
                for half, take in enumerate(takes):
                    pair = pairs[task * (unit // NARROW) + i, half]
                    low, high = (llvm.extractelement(pair, mu.c(j, i32())) for j in range(2))
                    mu.inline_ptx(
                        "st.global.b32 [$0], $1;",
                        arith.addi(place, mu.c(BYTES * (NARROW * i + half * NARROW * width), i64())),
                        mu.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result_types=i32()),
                        predicate=take,
                        has_side_effects=True,
                    )

    go(kept, row.astype(jnp.int32), tuple(firsts), tuple(parts), scores)


def _interpreted(
    kept: Ref,
    row: jax.Array,
    firsts: Sequence[jax.Array],
    parts: Sequence[jax.Array],
    scores: jax.Array,
    unit: int,
    group_heads: int,
) -> None:
    """Stores scores query by query, as interpretation stores whole slices: other queries' places stay as they are."""
    _, sets, rows, _ = kept.shape
    group, of_set, first_row = lax.div(row, sets * rows), lax.rem(lax.div(row, rows), sets), lax.rem(row, rows)
    for task, (first, has_part) in enumerate(zip(firsts, parts, strict=True)):
        columns = scores[:, task * unit : (task + 1) * unit]

        def store(
            query: jax.Array,
            _: None,
            at: jax.Array = first,
            flags: jax.Array = has_part,
            columns: jax.Array = columns,
        ) -> None:
            begin = query * group_heads

            @pl.when(lax.dynamic_index_in_dim(flags, begin, keepdims=False) != 0)
            def _store() -> None:
                own = lax.dynamic_slice_in_dim(columns, begin, group_heads)
                kept[group, of_set, pl.ds(first_row + begin, group_heads), pl.ds(at, unit)] = own.astype(kept.dtype)

        lax.fori_loop(0, QUERIES // group_heads, store, None)
