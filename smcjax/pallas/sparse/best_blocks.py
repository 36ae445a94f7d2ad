"""The best n blocks of each query, in one launch: a Mosaic GPU kernel (Hopper) of single threads (`mosaic/threads.py`).

    best_blocks(ranks, n): True for the n highest ranks of a row, of equal ones the earlier; never for −∞

A block of 128 threads serves a row. A thread holds neighbouring ranks; n times all threads find the highest of those
that are left, by shuffles within warps and through shared memory between them. XLA's own selection takes 45 µs of 72
rows of 1,024 (2026-11-26, H200).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, WARPS, Ref, Threads, Word

MAX_PER_THREAD = 32  # ranks, in registers
MAX_CHOSEN = 64  # turns, which are written out in line


def best_blocks_reference(ranks: Float[Array, "*rows blocks"], n: int) -> Bool[Array, "*rows blocks"]:
    """True for the `n` highest ranks of each row, of equal ones the earlier; never for −∞."""
    _, best = jax.lax.top_k(ranks, min(n, ranks.shape[-1]))
    return jnp.any(
        best[..., None] == jax.lax.broadcasted_iota(best.dtype, (*[1] * best.ndim, ranks.shape[-1]), best.ndim), axis=-2
    ) & (ranks != -jnp.inf)


def _choose(
    t: Threads,
    ranks: Ref,  # [rows, blocks] f32 GMEM
    chosen: Ref,  # [rows, blocks] bool GMEM
    tops: Ref,  # [2, 4] f32 SMEM: the highest rank of each warp, of even and of odd turns
    places: Ref,  # [2, 4] int32 SMEM: where they stand
    row: Word,
    *,
    blocks: int,
    n: int,
) -> None:
    """Chooses the blocks of one row."""
    each = -(-blocks // WARPGROUP)
    nothing, nowhere, zero = t.constant(-math.inf), t.constant(blocks), t.constant(0)
    mine = [t.index * each + j for j in range(each)]
    left = [
        t.where(place < blocks, t.load(ranks, row * blocks + t.minimum(place, blocks - 1)), nothing) for place in mine
    ]
    taken = [zero for _ in mine]

    def better(a: tuple[Word, Word], b: tuple[Word, Word]) -> tuple[Word, Word]:
        """Returns the higher of two ranks with its place, of equal ones the earlier."""
        second = t.where(b[0] == a[0], t.where(b[1] < a[1], t.constant(1), 0), t.where(a[0] < b[0], t.constant(1), 0))
        return t.where(second != 0, b[0], a[0]), t.where(second != 0, b[1], a[1])

    for turn in range(n):
        top, at = functools.reduce(better, zip(left, mine, strict=True))
        for distance in (1, 2, 4, 8, 16):
            top, at = better((top, at), (t.shuffle_xor(top, distance), t.shuffle_xor(at, distance)))
        first = turn % 2 * WARPS  # who is a turn ahead writes elsewhere
        t.store(tops, t.index // WARP + first, top, only=t.index % WARP == 0)
        t.store(places, t.index // WARP + first, at, only=t.index % WARP == 0)
        t.synchronize()
        found = [(t.load(tops, zero + first + warp), t.load(places, zero + first + warp)) for warp in range(WARPS)]
        top, at = functools.reduce(better, found)
        at = t.where(top == nothing, nowhere, at)
        for j, place in enumerate(mine):
            is_it = place == at
            taken[j] = t.where(is_it, t.constant(1), taken[j])
            left[j] = t.where(is_it, nothing, left[j])
    for place, one in zip(mine, taken, strict=True):
        t.store(chosen, row * blocks + place, one != 0, only=place < blocks)


def best_blocks_mosaic(
    ranks: Float[Array, "*rows blocks"], n: int, *, interpret: Any = None
) -> Bool[Array, "*rows blocks"]:
    """Computes `best_blocks`; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.

    Ranks must hold no NaN, and 0 equals −0: the reference ranks both by their bits, NaN first and −0 behind 0.
    """
    blocks = ranks.shape[-1]
    rows = math.prod(ranks.shape[:-1])

    def kernel(ranks: Ref, chosen: Ref, tops: Ref, places: Ref) -> None:
        program = functools.partial(_choose, blocks=blocks, n=min(n, blocks))
        threads.run(program, ranks, chosen, tops, places, lax.axis_index("row"), interpret=interpret is not None)

    chosen = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, blocks), jnp.bool_),
        grid=(rows,),
        grid_names=("row",),
        scratch_types={
            "tops": plgpu.SMEM((2, WARPS), jnp.float32),
            "places": plgpu.SMEM((2, WARPS), jnp.int32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="best_blocks",
    )(ranks.reshape(rows, blocks))
    return chosen.reshape(ranks.shape)


def _supports(ranks: jax.Array, n: int) -> bool:
    blocks = ranks.shape[-1]
    return ranks.dtype == jnp.float32 and min(n, blocks) <= MAX_CHOSEN and blocks <= MAX_PER_THREAD * WARPGROUP


best_blocks = Op(best_blocks_reference)
best_blocks.register(Kernel(runs_mosaic, best_blocks_mosaic, _supports))
