"""Tasks of query groups that have one table, in one launch: a Mosaic GPU kernel (Hopper) of single threads (`simt.py`).

A block makes the tasks of a group and set. A thread takes neighbouring blocks of positions, counts those that anybody
has selected, and writes their units behind those of the threads before it. XLA makes seven launches of the same
(`grouped_attention.tasks_of_blocks_reference`), each of which waits for the one before.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from smcjax.pallas import simt
from smcjax.pallas.dispatch import Kernel
from smcjax.pallas.grouped_attention import Tasks, tasks_of_blocks
from smcjax.pallas.simt import WARPGROUP, WARPS, Ref, Threads, Word

MOST_UNITS = 64  # of a thread: they are written out in line
MOST_WORDS = 2  # of a mask, as are these: groups of 64


def _find(
    t: Threads,
    chosen: Ref,  # [G, S, blocks, words] int32 GMEM, as all but the last
    table: Ref,  # [R, pages]
    unit: Ref,  # [G, S, K]
    place: Ref,  # [G, S, K]
    queries: Ref,  # [G, S, K, words]
    number: Ref,  # [G, S]
    totals: Ref,  # [4] SMEM
    of: Word,  # the group and set
    request: Word,
    *,
    blocks: int,
    words: int,
    pages: int,
    width: int,  # K
    parts: int,
    in_page: int,
) -> None:
    """Makes the tasks of one group and set."""
    units, each, zero = min(blocks * parts, pages * in_page), -(-blocks // WARPGROUP), t.constant(0)

    masks, counts = [], []  # by the thread's blocks
    for j in range(each):
        block = t.index * each + j
        at = (of * blocks + t.minimum(block, blocks - 1)) * words
        mask = [t.load(chosen, at + w) for w in range(words)]
        some = functools.reduce(lambda a, b: a + b, [t.where(one != 0, t.constant(1), 0) for one in mask])
        some = t.where(block < blocks, some, 0)
        there = t.minimum(zero + units - block * parts, parts)
        masks.append(mask)
        counts.append(t.where(some != 0, there, 0))
    rank, total = simt.sums(t, functools.reduce(lambda a, b: a + b, counts), totals)
    total = t.minimum(total, width)
    for j, (mask, count) in enumerate(zip(masks, counts, strict=True)):
        for part in range(parts):
            here = (t.index * each + j) * parts + part
            page = t.load(table, request * pages + t.minimum(here // in_page, pages - 1))
            to, counted = rank + part, (zero + part < count) & (rank + part < width)
            t.store(unit, of * width + to, page * in_page + here % in_page, only=counted)
            t.store(place, of * width + to, here, only=counted)
            for w, one in enumerate(mask):
                t.store(queries, (of * width + to) * words + w, one, only=counted)
        rank = rank + count
    for first in range(0, width, WARPGROUP):
        behind = t.index + first
        nothing = (behind >= total) & (behind < width)
        t.store(unit, of * width + behind, zero, only=nothing)
        t.store(place, of * width + behind, zero, only=nothing)
        for w in range(words):
            t.store(queries, (of * width + behind) * words + w, zero, only=nothing)
    t.store(number, of, total, only=t.index == 0)


def tasks_of_blocks_mosaic(
    chosen: Shaped[Array, "R g S blocks words"],
    table: Int[Array, "R pages"],
    *,
    width: int,
    parts: int,
    in_page: int,
    interpret: Any = None,
) -> Tasks:
    """Computes `tasks_of_blocks`; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    requests, groups, sets, blocks, words = chosen.shape

    def kernel(*refs: Ref, totals: Ref) -> None:
        group, of_set = lax.axis_index("group"), lax.axis_index("set")
        sizes = {"blocks": blocks, "words": words, "pages": table.shape[1], "width": width}
        program = functools.partial(_find, parts=parts, in_page=in_page, **sizes)
        at = group * sets + of_set, lax.div(group, groups)
        simt.run(program, *refs, totals, *at, interpret=interpret is not None)

    shapes = ((width,), (width,), (width, words), ())
    found = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((requests * groups, sets, *shape), jnp.int32) for shape in shapes],
        grid=(requests * groups, sets),
        grid_names=("group", "set"),
        scratch_types={"totals": plgpu.SMEM((WARPS,), jnp.int32)},
        compiler_params=simt.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="tasks_of_blocks",
    )(
        lax.bitcast_convert_type(chosen, jnp.int32).reshape(requests * groups, sets, blocks, words),
        table.astype(jnp.int32),
    )
    return Tasks(*(x.reshape(requests, groups, *x.shape[1:]) for x in found))


def _supports(chosen: jax.Array, table: jax.Array, *, width: int, parts: int, in_page: int) -> bool:
    *_, blocks, words = chosen.shape
    is_inside = (blocks - 1) * parts < table.shape[1] * in_page  # a unit of every block has a page
    return is_inside and -(-blocks // WARPGROUP) * parts <= MOST_UNITS and words <= MOST_WORDS


tasks_of_blocks.register(Kernel("sm90", tasks_of_blocks_mosaic, _supports))
