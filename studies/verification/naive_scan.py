"""The acceptance scan with a thread a row, which stops at the mismatch: what the study's finding 2 is about.

Lanes of a warp wait for the one that scans furthest, so its time grows with the acceptance rate. For comparison only
(`bench.py`); the study's own scan is `acceptance.py`. It has no interpreted version.
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


def _program(
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


def _kernel(draft: Ref, target: Ref, *outs: Ref) -> None:
    program = functools.partial(_program, ids=draft.shape)
    threads.run(program, draft, target, *outs, lax.axis_index("block"), interpret=False)


@jax.jit
def naive_scan(draft: jax.Array, target: jax.Array) -> list[jax.Array]:
    """Lengths, has_mismatch, next tokens."""
    rows = draft.shape[0]
    return plgpu.kernel(
        _kernel,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32)],
        grid=(-(-rows // WARPGROUP),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="naive_scan",
    )(draft, target)
