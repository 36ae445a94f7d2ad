"""The study's kernels that lose, for comparison only (`bench.py`).

The scan with a thread a row stops at the mismatch (finding 2). Lanes of a warp wait for the one that scans furthest, so
its time grows with the acceptance rate. It has no interpreted version. The study's own scan is `acceptance.py`.

The packer with a block a row (finding 4) copies element by element with 256 threads, as many blocks as rows. The
study's caller also waited on the host for the number of packed rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import scf

from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.threads import WARPGROUP, Ref, Threads


def _scan_program(
    t: Threads,
    draft: Ref,  # [b, γ] GMEM, as all
    target: Ref,  # [b, γ + 1]
    lengths: Ref,  # [b]
    has_mismatch: Ref,  # [b]
    next_tokens: Ref,  # [b]
    block: Any,
    *,
    ids: tuple[int, int],
) -> None:
    rows, gamma = ids
    row = t.minimum(t.index + block * WARPGROUP, rows - 1)
    loop = scf.WhileOp([threads.i32()], [mu.c(0, threads.i32())])
    before = loop.before.blocks.append(threads.i32())
    with ir.InsertionPoint.at_block_begin(before):
        position = threads.word(before.arguments[0])
        inside = t.minimum(position, gamma - 1)
        differs = t.load(draft, row * gamma + inside) != t.load(target, row * (gamma + 1) + inside)
        # One comparison for both ends: a position beyond the last differs.
        at = t.where(differs, gamma, position)
        scf.condition((at < gamma).value, [before.arguments[0]])
    after = loop.after.blocks.append(threads.i32())
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_([(threads.word(after.arguments[0]) + 1).value])
    length = threads.word(loop.results[0])
    t.store(lengths, row, length)
    t.store(has_mismatch, row, length < gamma)
    t.store(next_tokens, row, t.load(target, row * (gamma + 1) + length))


def _scan_kernel(draft: Ref, target: Ref, *outs: Ref) -> None:
    program = functools.partial(_scan_program, ids=draft.shape)
    threads.run(program, draft, target, *outs, lax.axis_index("block"), interpret=False)


@jax.jit
def naive_scan(draft: jax.Array, target: jax.Array) -> list[jax.Array]:
    """Lengths, has_mismatch, next tokens."""
    rows = draft.shape[0]
    return plgpu.kernel(
        _scan_kernel,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32)],
        grid=(-(-rows // WARPGROUP),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="naive_scan",
    )(draft, target)


COPIERS = 2  # warpgroups of a block, 256 threads


def _copy_program(t: Threads, kv: Ref, packed: Ref, source: Any, target: Any, warpgroup: Any, *, dim: int) -> None:
    for start in range(0, dim, COPIERS * WARPGROUP):
        column = t.index + warpgroup * WARPGROUP + start
        inside = t.minimum(column, dim - 1)
        t.store(packed, target * dim + inside, t.load(kv, source * dim + inside), only=column < dim)


def _zero_program(t: Threads, packed: Ref, target: Any, warpgroup: Any, *, dim: int) -> None:
    for start in range(0, dim, COPIERS * WARPGROUP):
        column = t.index + warpgroup * WARPGROUP + start
        t.store(packed, target * dim + t.minimum(column, dim - 1), t.constant(0.0), only=column < dim)


def _pack_kernel(
    kv: Ref,  # [b γ, D] GMEM, as all that follow
    lengths: Ref,  # [b]
    ends: Ref,  # [b]
    packed: Ref,  # [b γ, D]
    *,
    interpret: bool,
) -> None:
    rows, dim = lengths.shape[0], kv.shape[1]
    gamma = kv.shape[0] // rows
    row, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    length, offset = lengths[row], ends[row] - lengths[row]
    # What rows before this one rejected stands before its zeros.
    tail = ends[rows - 1] + row * gamma - offset
    copy, zero = (functools.partial(program, dim=dim) for program in (_copy_program, _zero_program))

    def copied(j: jax.Array, _: None) -> None:
        threads.run(copy, kv, packed, row * gamma + j, offset + j, warpgroup, interpret=interpret)

    def zeroed(j: jax.Array, _: None) -> None:
        threads.run(zero, packed, tail + j, warpgroup, interpret=interpret)

    lax.fori_loop(0, length, copied, None)
    lax.fori_loop(0, gamma - length, zeroed, None)


@functools.partial(jax.jit, static_argnames=("interpret",))
def pack_by_rows(kv: jax.Array, lengths: jax.Array, *, interpret: Any = None) -> jax.Array:
    """The packed rows, by a block for each row of the batch; XLA sums the lengths in a launch before."""
    rows, gamma, dim = kv.shape
    flat = kv.reshape(rows * gamma, dim)
    return plgpu.kernel(
        functools.partial(_pack_kernel, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(rows,),
        grid_names=("block",),
        num_threads=COPIERS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="pack_by_rows",
    )(flat, lengths, jnp.cumsum(lengths, dtype=jnp.int32))


def pack_after_a_wait(kv: jax.Array, lengths: jax.Array) -> jax.Array:
    """Packs as `pack_by_rows` does, after the host has read the number of packed rows."""
    int(lengths.sum())
    return pack_by_rows(kv, lengths)
