"""Tasks of query groups in one launch: a Mosaic GPU kernel (Hopper) of single threads (`mosaic/threads.py`).

A block makes the tasks of a group and set. A thread takes neighbouring blocks of positions, reads for each query of the
group which of them it has selected, four at a time, counts the pages of those that anybody has selected, one for all
queries or one for some of them each, and writes their units behind those of the threads before it. XLA makes many
launches of the same (`grouped_attention.tasks_of_blocks_reference`), each of which waits for the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from smcjax.pallas.dispatch import Kernel, runs_mosaic
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.bitmask import WORD
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.threads import WARPGROUP, WARPS, Ref, Threads, Word
from smcjax.pallas.sparse.grouped_attention import Tasks, tasks_of_blocks
from smcjax.pallas.sparse.query_groups import QueryGroups

FLAGS = 4  # blocks that a thread reads at once, a byte each
BYTE = 8  # queries whose flags are bits of one
AT_ONCE = 16  # units of a thread whose pages are loaded before the first is stored: loads do not pass stores
MAX_UNITS = 96  # of a thread, times pages at one place: they are written out in line
MAX_LOADS = 512  # of flags, by a thread, as are these
MAX_WORDS = 4  # of a mask, as are these: groups of 128


def _each(blocks: int) -> int:
    """Neighbouring blocks of a thread."""
    return -(-blocks // (FLAGS * WARPGROUP)) * FLAGS


def _masks(
    t: Threads,
    selected: Ref,  # [R, M, S, blocks] bool GMEM
    order: Ref | None,  # [M] int32 GMEM; None: queries are in order
    request: Word,
    group: Word,  # of the request
    of_set: Word,
    *,
    groups: QueryGroups,
    sets: int,
    blocks: int,
) -> list[list[Word]]:
    """Masks of a thread's blocks, a word for every 32 queries of the group.

    Flags of four blocks are the bytes of a word, so that eight queries' words are added up to four bytes of masks.
    """
    queries, each, zero = len(groups.order), _each(blocks), t.constant(0)
    begins = []
    for i in range(groups.size):
        place = group * groups.size + i
        query = t.minimum(place, queries - 1)
        query = query if order is None else t.load(order, query)
        begins.append((place, ((request * queries + query) * sets + of_set) * blocks))

    def flags(begin: Word, start: Word) -> Word:
        if blocks % FLAGS == 0:
            return t.load_bools(selected, begin + t.minimum(start, blocks - FLAGS))
        some = [t.load(selected, begin + t.minimum(start + i, blocks - 1)) for i in range(FLAGS)]
        return functools.reduce(lambda a, b: a + b, [one * (1 << BYTE * i) for i, one in enumerate(some)])

    masks = []
    for first in range(0, each, FLAGS):
        found = [(place, flags(begin, t.index * each + first)) for place, begin in begins]
        if queries % groups.size:  # places of the last group that no query has
            found = [(place, t.where(place < queries, word, zero)) for place, word in found]
        words = [word * (1 << i % BYTE) for i, (_, word) in enumerate(found)]
        of_bytes = [functools.reduce(lambda a, b: a + b, words[i : i + BYTE]) for i in range(0, len(words), BYTE)]
        for block in range(FLAGS):
            # The highest bit may be set, and divisions differ in what they shift in: above the byte that is kept.
            parts = [one // (1 << BYTE * block) & 255 for one in of_bytes]
            parts = [part * (1 << BYTE * (i % FLAGS)) for i, part in enumerate(parts)]
            by_word = [parts[i : i + FLAGS] for i in range(0, len(parts), FLAGS)]
            masks.append([functools.reduce(lambda a, b: a + b, of_word) for of_word in by_word])
    return masks


def _find(
    t: Threads,
    selected: Ref,  # [R, M, S, blocks] bool GMEM
    order: Ref | None,  # [M] int32 GMEM, as all that follow but the last
    pages: Ref,  # [R, pages], or where members count [G, units of a thread, N, 128]
    members: Ref | None,  # [G, units of a thread, N, words, 128]
    unit: Ref,  # [G, S, K]
    place: Ref,  # [G, S, K]
    queries: Ref,  # [G, S, K, words]
    number: Ref,  # [G, S]
    totals: Ref,  # [4] SMEM
    group: Word,  # of all requests
    of_set: Word,
    *,
    groups: QueryGroups,
    sets: int,
    blocks: int,
    per_table: int,  # pages
    most: int,  # N
    width: int,  # K
    parts: int,
    in_page: int,
) -> None:
    """Makes the tasks of one group and set."""
    units, each, zero = min(blocks * parts, per_table * in_page), _each(blocks), t.constant(0)
    request, of = group // groups.number, group * sets + of_set
    terms = (selected, order, request, group % groups.number, of_set)
    masks, words = _masks(t, *terms, groups=groups, sets=sets, blocks=blocks), _words(groups)

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

    def with_pages(entries: Iterable[tuple[int, int, int]]) -> list[tuple[Word, Word, list[Word], Word]]:
        """Returns what `wanted` does for each entry, but the page's number in place of where that stands."""
        found = [wanted(*entry) for entry in entries]
        return [(here, t.load(pages, at), mask, some) for here, at, mask, some in found]

    entries = [(j, part, k) for j in range(each) for part in range(parts) for k in range(most)]
    found = with_pages(entries[:AT_ONCE])
    later = entries[AT_ONCE:]
    some_of = [some for *_, some in found] + [wanted(*entry)[3] for entry in later]
    rank, total = threads.sums(t, functools.reduce(lambda a, b: a + b, some_of), totals)
    total = t.minimum(total, width)
    while found:
        for here, page, mask, some in found:
            to, counted = of * width + rank, t.where(rank < width, some, 0) != 0
            t.store(unit, to, page * in_page + here % in_page, only=counted)
            t.store(place, to, here, only=counted)
            for w, one in enumerate(mask):
                t.store(queries, to * words + w, one, only=counted)
            rank = rank + some
        found, later = with_pages(later[:AT_ONCE]), later[AT_ONCE:]
    for first in range(0, width, WARPGROUP):
        behind = t.index + first
        nothing = (behind >= total) & (behind < width)
        t.store(unit, of * width + behind, zero, only=nothing)
        t.store(place, of * width + behind, zero, only=nothing)
        for w in range(words):
            t.store(queries, (of * width + behind) * words + w, zero, only=nothing)
    t.store(number, of, total, only=t.index == 0)


def _words(groups: QueryGroups) -> int:
    """Words of a mask."""
    return -(-groups.size // WORD)


def tasks_of_blocks_mosaic(
    selected: Bool[Array, "R M S blocks"],
    pages: Int[Array, "R _ pages N"],
    members: Shaped[Array, "R g pages N words"] | None,
    groups: QueryGroups,
    *,
    width: int,
    parts: int,
    in_page: int,
    interpret: Any = None,
) -> Tasks:
    """Computes `tasks_of_blocks`; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    (requests, _, sets, blocks), (per_table, most) = selected.shape, pages.shape[2:]
    is_ordered = groups.order == tuple(range(len(groups.order)))
    of_tables = [pages[:, 0].astype(jnp.int32)]
    if members is not None:
        both = pages, lax.bitcast_convert_type(members, jnp.int32)
        of_tables = [_by_thread(x.reshape(-1, *x.shape[2:]), blocks, parts, in_page) for x in both]
    sizes = {"sets": sets, "blocks": blocks, "per_table": per_table, "most": most, "width": width}
    find: Callable[..., None] = functools.partial(_find, groups=groups, parts=parts, in_page=in_page, **sizes)

    def program(t: Threads, *refs: Ref) -> None:
        args: list[Any] = list(refs)
        if is_ordered:
            args.insert(1, None)
        if members is None:
            args.insert(3, None)
        find(t, *args)

    def kernel(*refs: Ref, totals: Ref) -> None:
        at = lax.axis_index("group"), lax.axis_index("set")
        threads.run(program, *refs, totals, *at, interpret=interpret is not None)

    shapes = ((width,), (width,), (width, _words(groups)), ())
    found = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((requests * groups.number, sets, *shape), jnp.int32) for shape in shapes],
        grid=(requests * groups.number, sets),
        grid_names=("group", "set"),
        scratch_types={"totals": plgpu.SMEM((WARPS,), jnp.int32)},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="tasks_of_blocks",
    )(selected, *([] if is_ordered else [jnp.asarray(groups.order, jnp.int32)]), *of_tables)
    return Tasks(*(x.reshape(requests, groups.number, *x.shape[1:]) for x in found))


def _by_thread(
    x: Int[Array, "G pages N *rest"], blocks: int, parts: int, in_page: int
) -> Int[Array, "G _ N *rest 128"]:
    """Lays out by thread what stands at pages: that of each thread's units, one after the other."""
    each = _each(blocks) * parts
    unit = np.arange(each)[:, None] + each * np.arange(WARPGROUP)
    return jnp.moveaxis(x[:, np.minimum(unit // in_page, x.shape[1] - 1)], 2, -1)


def _supports(
    selected: jax.Array,
    pages: jax.Array,
    members: jax.Array | None,
    groups: QueryGroups,
    *,
    width: int,
    parts: int,
    in_page: int,
) -> bool:
    blocks, (per_table, most) = selected.shape[3], pages.shape[2:]
    each = _each(blocks)
    return (
        (blocks - 1) * parts < per_table * in_page  # a unit of every block has a page
        and selected.size < 2**31
        and each * parts * most <= MAX_UNITS
        and (each // FLAGS if blocks % FLAGS == 0 else each) * groups.size <= MAX_LOADS
        and _words(groups) <= MAX_WORDS
    )


tasks_of_blocks.register(Kernel(runs_mosaic, tasks_of_blocks_mosaic, _supports))
