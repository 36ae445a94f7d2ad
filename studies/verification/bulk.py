"""Copies of any number of rows between GMEM and SMEM by the copy engine, inside a Mosaic kernel.

Pallas' own copies have sizes that are known when the kernel is compiled. The copies here are told theirs at run time
(the same instruction, `cp.async.bulk`), and several of them fill one buffer before its barrier opens. Rows are of a
multiple of 16 bytes and lie one after the other. The first thread of a warpgroup issues; interpreted, a copy has been
made when it is issued, and barriers need no waiting for.

    expect(barriers, slot, rows=3, of=buffer)     what is to arrive
    fetch(source, 7, buffer, 0, 2, barriers, slot)
    fetch(source, 40, buffer, 2, 1, barriers, slot)
    wait(barriers, slot, parity)                  parity: 0 the first time that a slot is used, then 1, then 0 …
    store(buffer, 0, target, 11, 3)               then `plgpu.commit_smem_to_gmem_group`, `plgpu.wait_smem_to_gmem`
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from smcjax.pallas.mosaic.compat import llvm, nvvm
from smcjax.pallas.mosaic.threads import WARPGROUP, Ref, i32, i64, scalar, scalar_layout, thread

REF = plgpu.RefType()


def barriers_type(count: int) -> Any:
    """Scratch for `count` barriers of 64 bits."""
    return plgpu.SMEM((2 * count,), jnp.uint32)


def initialize(barriers: Ref, first: jax.Array, count: int, *, interpret: bool) -> None:
    """Makes barriers first … first + count − 1, of this warpgroup alone. Its threads have to meet before they wait."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout()))
    def go(_: Any, barriers: ir.Value, first: Any) -> None:
        with mu.when(_is_first()):
            for i in range(count):
                slot = arith.addi(scalar(first), mu.c(i, i32()))
                nvvm.mbarrier_init(_barrier(barriers, slot).get_ptr(), mu.c(1, i32()))
            mu.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    go(barriers, jnp.asarray(first, jnp.int32))


def expect(barriers: Ref, slot: jax.Array, rows: jax.Array, *, of: Ref, interpret: bool) -> None:
    """Barrier `slot` opens when `rows` rows of a buffer `of` [rows, D] have arrived."""
    if interpret:
        return
    row_bytes = _row_bytes(of)

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout(), scalar_layout()))
    def go(_: Any, barriers: ir.Value, slot: Any, rows: Any) -> None:
        amount = arith.muli(scalar(rows), mu.c(row_bytes, i32()))
        with mu.when(_is_first()):
            _barrier(barriers, scalar(slot)).arrive_expect_tx(amount)

    go(barriers, slot, rows)


def wait(barriers: Ref, slot: jax.Array, parity: jax.Array, *, interpret: bool) -> None:
    """Waits in every thread until barrier `slot` opens."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout(), scalar_layout()))
    def go(_: Any, barriers: ir.Value, slot: Any, parity: Any) -> None:
        odd = arith.cmpi(arith.CmpIPredicate.ne, scalar(parity), mu.c(0, i32()))
        _barrier(barriers, scalar(slot)).wait_parity(odd)

    go(barriers, slot, parity)


def fetch(
    source: Ref,  # [rows, D] GMEM
    row: jax.Array,
    buffer: Ref,  # [rows, D] SMEM
    at: jax.Array,
    rows: jax.Array,
    barriers: Ref,
    slot: jax.Array,
    *,
    interpret: bool,
) -> None:
    """Starts buffer[at : at + rows] = source[row : row + rows] for barrier `slot`; `rows` may be 0."""
    if interpret:
        _copy_rows(source, row, buffer, at, rows)
        return
    row_bytes = _row_bytes(source)

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout(), REF, scalar_layout(), scalar_layout(), REF, scalar_layout()))
    def go(_: Any, source: ir.Value, row: Any, buffer: ir.Value, at: Any, rows: Any, barriers: Any, slot: Any) -> None:
        _issue(
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4];",
            _starts(rows),
            _address(buffer, scalar(at), row_bytes),
            _address(source, scalar(row), row_bytes),
            arith.muli(scalar(rows), mu.c(row_bytes, i32())),
            _barrier(barriers, scalar(slot)).get_ptr(),
        )

    go(source, row, buffer, at, rows, barriers, slot)


def store(buffer: Ref, at: jax.Array, target: Ref, row: jax.Array, rows: jax.Array, *, interpret: bool) -> None:
    """Starts target[row : row + rows] = buffer[at : at + rows], into the open group; `rows` may be 0."""
    if interpret:
        _copy_rows(buffer, at, target, row, rows)
        return
    row_bytes = _row_bytes(target)

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout(), REF, scalar_layout(), scalar_layout()))
    def go(_: Any, buffer: ir.Value, at: Any, target: ir.Value, row: Any, rows: Any) -> None:
        _issue(
            "cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;",
            _starts(rows),
            _address(target, scalar(row), row_bytes),
            _address(buffer, scalar(at), row_bytes),
            arith.muli(scalar(rows), mu.c(row_bytes, i32())),
        )

    go(buffer, at, target, row, rows)


def prefetch(source: Ref, row: jax.Array, rows: jax.Array, *, interpret: bool) -> None:
    """Brings source[row : row + rows] into the L2; `rows` may be 0."""
    if interpret:
        return
    row_bytes = _row_bytes(source)

    @plgpu.inline_mgpu(arg_types=(REF, scalar_layout(), scalar_layout()))
    def go(_: Any, source: ir.Value, row: Any, rows: Any) -> None:
        _issue(
            "cp.async.bulk.prefetch.L2.global [$1], $2;",
            _starts(rows),
            _address(source, scalar(row), row_bytes),
            arith.muli(scalar(rows), mu.c(row_bytes, i32())),
        )

    go(source, row, rows)


def fill_with_zeros(buffer: Ref, *, interpret: bool) -> None:
    """buffer[...] = 0 by one warpgroup. What copies it has to come behind `plgpu.commit_smem`."""
    if interpret:
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
        return
    chunks = math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize // 16

    @plgpu.inline_mgpu(arg_types=(REF,))
    def go(_: Any, buffer: ir.Value) -> None:
        base = llvm.ptrtoint(i32(), mu.memref_ptr(buffer))
        zero = mu.c(0, i32())
        for start in range(0, chunks, WARPGROUP):
            chunk = arith.addi(thread(), mu.c(start, i32()))
            mu.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $1, $1, $1};",
                arith.addi(base, arith.muli(chunk, mu.c(16, i32()))),
                zero,
                predicate=arith.cmpi(arith.CmpIPredicate.ult, chunk, mu.c(chunks, i32())),
                has_side_effects=True,
            )

    go(buffer)


# -------------------------------------------------------------------------------------------------------------- within


def _row_bytes(ref: Ref) -> int:
    return ref.shape[-1] * jnp.dtype(ref.dtype).itemsize


def _copy_rows(source: Ref, row: jax.Array, target: Ref, at: jax.Array, rows: jax.Array) -> None:
    def one(i: jax.Array, _: None) -> None:
        target[at + i] = source[row + i]

    lax.fori_loop(0, rows, one, None)


def _is_first() -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, thread(), mu.c(0, i32()))


def _starts(rows: Any) -> ir.Value:
    return arith.andi(_is_first(), arith.cmpi(arith.CmpIPredicate.sgt, scalar(rows), mu.c(0, i32())))


def _barrier(barriers: ir.Value, slot: ir.Value) -> Any:
    no_phases: Any = None  # the caller gives the parity
    return mu.BarrierRef(mu.memref_ptr(barriers), slot, phases=no_phases, num_barriers=1)


def _address(ref: ir.Value, row: ir.Value, row_bytes: int) -> ir.Value:
    offset = arith.muli(arith.extui(i64(), row), mu.c(row_bytes, i64()))
    pointer = mu.memref_ptr(ref)
    return llvm.inttoptr(pointer.type, arith.addi(llvm.ptrtoint(i64(), pointer), offset))


def _issue(instruction: str, predicate: ir.Value, *operands: ir.Value) -> None:
    """A predicated copy instruction; addresses are 64 bits wide, sizes 32."""
    constraints = ["b", *("r" if operand.type == i32() else "l" for operand in operands)]
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [predicate, *operands],
        f"@$0 {instruction}",
        ",".join(constraints),
        has_side_effects=True,
    )
