"""Tasks of query groups in one launch: a Mosaic GPU kernel (Hopper) of single threads (`simt.py`).

A block makes the tasks of a group and set. A thread takes neighbouring blocks of positions, counts the pages of those
that anybody has selected, one for all queries or one for some of them each, and writes their units behind those of the
threads before it. XLA makes many launches of the same (`grouped_attention.tasks_of_blocks_reference`), each of which
waits for the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from smcjax.pallas import simt
from smcjax.pallas.dispatch import Kernel
from smcjax.pallas.grouped_attention import Tasks, tasks_of_blocks
from smcjax.pallas.simt import WARPGROUP, WARPS, Ref, Threads, Word

MOST_UNITS = 64  # of a thread, times pages at one place: they are written out in line
MOST_WORDS = 4  # of a mask, as are these: groups of 128


def _find(
    t: Threads,
    chosen: Ref,  # [G, S, blocks, words] int32 GMEM, as all but the last
    pages: Ref,  # [R, pages], or where members count [G, units of a thread, N, 128]
    members: Ref | None,  # [G, units of a thread, N, words, 128]
    unit: Ref,  # [G, S, K]
    place: Ref,  # [G, S, K]
    queries: Ref,  # [G, S, K, words]
    number: Ref,  # [G, S]
    totals: Ref,  # [4] SMEM
    of: Word,  # the group and set
    group: Word,
    request: Word,
    *,
    blocks: int,
    words: int,
    per_table: int,  # pages
    most: int,  # N
    width: int,  # K
    parts: int,
    in_page: int,
) -> None:
    """Makes the tasks of one group and set."""
    units, each, zero = min(blocks * parts, per_table * in_page), -(-blocks // WARPGROUP), t.constant(0)

    masks = []  # by the thread's blocks
    for j in range(each):
        at = (of * blocks + t.minimum(t.index * each + j, blocks - 1)) * words
        masks.append([t.load(chosen, at + w) for w in range(words)])

    def wanted(j: int, part: int, k: int) -> tuple[Word, Word, list[Word], Word]:
        """A unit's place, where its page stands, those who read it, and 1 where there are some."""
        block = t.index * each + j
        here, mask = block * parts + part, masks[j]
        if members is None:
            at = request * per_table + t.minimum(here // in_page, per_table - 1)
        else:  # by thread, so that a warp's are neighbours in memory
            entry = group * (each * parts * most) + ((j * parts + part) * most + k)
            at = entry * WARPGROUP + t.index
            mask = [one & t.load(members, (entry * words + w) * WARPGROUP + t.index) for w, one in enumerate(mask)]
        some = functools.reduce(lambda a, b: a + b, [t.where(one != 0, t.constant(1), 0) for one in mask])
        some = t.where(block < blocks, t.where(here < units, some, 0), 0)
        return here, at, mask, t.where(some != 0, t.constant(1), 0)

    entries = [(j, part, k) for j in range(each) for part in range(parts) for k in range(most)]
    count = functools.reduce(lambda a, b: a + b, [wanted(*entry)[3] for entry in entries])
    rank, total = simt.sums(t, count, totals)
    total = t.minimum(total, width)
    for entry in entries:
        here, at, mask, some = wanted(*entry)
        to, counted = of * width + rank, t.where(rank < width, some, 0) != 0
        t.store(unit, to, t.load(pages, at) * in_page + here % in_page, only=counted)
        t.store(place, to, here, only=counted)
        for w, one in enumerate(mask):
            t.store(queries, to * words + w, one, only=counted)
        rank = rank + some
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
    pages: Int[Array, "R _ pages N"],
    members: Shaped[Array, "R g pages N words"] | None,
    *,
    width: int,
    parts: int,
    in_page: int,
    interpret: Any = None,
) -> Tasks:
    """Computes `tasks_of_blocks`; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    requests, groups, sets, blocks, words = chosen.shape
    per_table, most = pages.shape[2:]

    def kernel(chosen: Ref, pages: Ref, *refs: Ref, totals: Ref) -> None:
        group, of_set = lax.axis_index("group"), lax.axis_index("set")
        sizes = {"blocks": blocks, "words": words, "per_table": per_table, "most": most, "width": width}
        find = functools.partial(_find, parts=parts, in_page=in_page, **sizes)
        program = find if members is not None else _without_members(find)
        at = group * sets + of_set, group, lax.div(group, groups)
        simt.run(program, chosen, pages, *refs, totals, *at, interpret=interpret is not None)

    of_group = lax.bitcast_convert_type(chosen, jnp.int32).reshape(requests * groups, sets, blocks, words)
    inputs = [of_group, pages[:, 0].astype(jnp.int32)]
    if members is not None:
        of_tables = pages, lax.bitcast_convert_type(members, jnp.int32)
        inputs[1:] = [_by_thread(x.reshape(-1, *x.shape[2:]), blocks, parts, in_page) for x in of_tables]
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
    )(*inputs)
    return Tasks(*(x.reshape(requests, groups, *x.shape[1:]) for x in found))


def _by_thread(
    x: Int[Array, "G pages N *rest"], blocks: int, parts: int, in_page: int
) -> Int[Array, "G _ N *rest 128"]:
    """Lays out by thread what stands at pages: that of each thread's units, one after the other."""
    each = -(-blocks // WARPGROUP) * parts
    unit = np.arange(each)[:, None] + each * np.arange(WARPGROUP)
    return jnp.moveaxis(x[:, np.minimum(unit // in_page, x.shape[1] - 1)], 2, -1)


def _without_members(program: Callable[..., None]) -> Callable[..., None]:
    """The program where all queries have one page."""
    return lambda t, chosen, pages, *rest: program(t, chosen, pages, None, *rest)


def _supports(
    chosen: jax.Array, pages: jax.Array, members: jax.Array | None, *, width: int, parts: int, in_page: int
) -> bool:
    *_, blocks, words = chosen.shape
    *_, per_table, most = pages.shape
    is_inside = (blocks - 1) * parts < per_table * in_page  # a unit of every block has a page
    return is_inside and -(-blocks // WARPGROUP) * parts * most <= MOST_UNITS and words <= MOST_WORDS


tasks_of_blocks.register(Kernel("sm90", tasks_of_blocks_mosaic, _supports))
