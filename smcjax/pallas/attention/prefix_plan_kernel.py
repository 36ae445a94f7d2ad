"""`prefix_plan.find_sharing` in one launch: a Mosaic GPU kernel (Hopper) of integer threads (`mosaic/threads.py`).

A block finds the chunks, or the pieces, of one group and part. A thread takes a number (slots from number · width on)
and compares the pages that the group's rows name there, pair by pair; where its tasks go is a sum over the threads
before it. XLA makes twenty launches of the same, among them scatters of 5 to 10 µs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from smcjax.pallas.attention.prefix_plan import Sharing, parts_of, piece_of
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.threads import WARPGROUP, WARPS, Ref, Threads, Word

MAX_ROWS = 16  # of a group: pairs of them are compared in line


def supports_sharing(*, rows: int) -> bool:
    """True for groups of N = `rows` that the kernel takes."""
    return rows <= MAX_ROWS


def _find(
    t: Threads,
    table: Ref,  # [R, M] GMEM, as all but the last two
    lengths: Ref,  # [R]
    begins: Ref,  # [R]: the first slot of each row that is in no chunk
    tasks: Ref,  # [G, parts, most, W + 2]
    found: Ref,  # [G, parts]
    totals: Ref,  # [4] SMEM
    so_far: Ref,  # [1] SMEM: tasks of the numbers before these
    leader: Word,  # the group's first row
    place: Word,  # of the group and part in `found`
    of_part: Word,  # the part's rows, a bit each
    number: Word,  # the first thread's
    *,
    shape: tuple[int, int],  # most, W + 2
    width: int,  # M
    rows: int,
    chunks: bool,
    slots: int,  # of a task
    piece: int,
    page_size: int,
) -> None:
    """Finds the tasks of 128 numbers."""
    most, fields = shape
    number = number + t.index
    first = number * slots
    zero = t.constant(0)

    pages, reads = [], []
    for n in range(rows):
        begin, end = t.load(begins, leader + n), t.load(lengths, leader + n)
        begin, end = (zero, begin) if chunks else (begin, end)
        reads.append((first >= begin) & (first < end))
        row = (leader + n) * width
        at = [t.minimum((first + j * piece) // page_size, width - 1) for j in range(fields - 2)]
        pages.append([t.load(table, row + column) for column in at])

    # Members of the tasks that each row leads; none where an earlier row does, or the part has none of them.
    members = []
    for n in range(rows):
        mine, led = zero, zero
        for m in range(rows):
            same = reads[n] & reads[m]
            for a, b in zip(pages[n], pages[m], strict=True) if m != n else ():
                same = same & (a == b)
            mine = mine + t.where(same, 1 << m, 0)
            if m < n:
                led = led + t.where(same, 1, 0)
        members.append(t.where(led == 0, t.where((mine & of_part) != 0, mine, 0), 0))

    counts = [t.where(mine != 0, t.constant(1), 0) for mine in members]
    before, total = threads.sums(t, functools.reduce(lambda a, b: a + b, counts), totals)
    done = t.load(so_far, zero)
    rank = done + before
    for mine, of_row, count in zip(members, pages, counts, strict=True):
        at = (place * most + rank) * fields
        for j, field in enumerate([*of_row, number, mine]):
            t.store(tasks, at + j, field, only=mine != 0)
        rank = rank + count
    t.synchronize()
    t.store(so_far, zero, done + total, only=t.index == 0)
    t.store(found, place, done + total, only=t.index == 0)
    t.synchronize()


def _begin(t: Threads, tasks: Ref, found: Ref, so_far: Ref, place: Word, *, shape: tuple[int, int]) -> None:
    """Begins with no tasks; what is read where there are none names the trash page."""
    zero = t.constant(0)
    most, fields = shape
    t.store(tasks, place * (most * fields) + t.index, zero, only=t.index < fields)
    t.store(found, zero + place, zero, only=t.index == 0)
    t.store(so_far, zero, zero, only=t.index == 0)
    t.synchronize()


def find_sharing_mosaic(
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    num_immutable: Int[Array, " R"] | None,
    *,
    rows: int,
    queries: int,
    page_size: int,
    chunk: int,
    tiles: int = 2,
    interpret: Any = None,
) -> Sharing:
    """The plan of `find_sharing`; behind the tasks that count may stand anything.

    `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    groups, piece = block_table.shape[0] // rows, piece_of(page_size, chunk)
    parts = [sum(1 << row for row in part) for part in parts_of(rows, queries, tiles)]
    numbers = -(-block_table.shape[1] * page_size // chunk)  # of chunks
    pieces = numbers * (chunk // piece)
    has_immutable = num_immutable is not None
    begin = (
        jnp.minimum(num_immutable, lengths) // chunk * chunk if num_immutable is not None else jnp.zeros_like(lengths)
    )

    def kernel(
        table: Ref,
        lengths: Ref,
        begins: Ref,
        chunk_tasks: Ref,
        num_chunks: Ref,
        piece_tasks: Ref,
        num_pieces: Ref,
        totals: Ref,
        so_far: Ref,
    ) -> None:
        group, part, kind = (lax.axis_index(name) for name in ("group", "part", "kind"))
        leader, place = group * rows, group * len(parts) + part
        of_part = jnp.int32(parts[0])
        for p, members in enumerate(parts):
            of_part = jnp.where(part == p, members, of_part)
        ends = [(begins[leader + n], lengths[leader + n]) for n in range(rows)]

        def find(tasks: Ref, found: Ref, slots: int, start: jax.Array, stop: jax.Array, *, chunks: bool) -> None:
            shape, inside = tasks.shape[2:], interpret is not None
            threads.run(functools.partial(_begin, shape=shape), tasks, found, so_far, place, interpret=inside)
            program = functools.partial(
                _find,
                shape=shape,
                width=table.shape[1],
                rows=rows,
                chunks=chunks,
                slots=slots,
                piece=piece,
                page_size=page_size,
            )

            def some(i: jax.Array, _: None) -> None:
                number = start + i * WARPGROUP
                args = (table, lengths, begins, tasks, found, totals, so_far, leader, place, of_part, number)
                threads.run(program, *args, interpret=inside)

            lax.fori_loop(0, lax.div(stop - start + (WARPGROUP - 1), WARPGROUP), some, None)

        @pl.when(kind == 0)
        def _chunks() -> None:
            stop = functools.reduce(lax.max, [begin for begin, _ in ends])
            find(chunk_tasks, num_chunks, chunk, jnp.int32(0), lax.div(stop, chunk), chunks=True)

        @pl.when(kind == 1)
        def _pieces() -> None:
            start = functools.reduce(lax.min, [jnp.where(begin < end, begin, 2**30) for begin, end in ends])
            stop = functools.reduce(lax.max, [end for _, end in ends])
            start = lax.div(lax.min(start, stop), piece)
            find(piece_tasks, num_pieces, piece, start, lax.div(stop + (piece - 1), piece), chunks=False)

    place = (groups, len(parts))
    chunk_tasks, num_chunks, piece_tasks, num_pieces = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((*place, rows * numbers if has_immutable else 1, chunk // piece + 2), jnp.int32),
            jax.ShapeDtypeStruct(place, jnp.int32),
            jax.ShapeDtypeStruct((*place, rows * pieces, 3), jnp.int32),
            jax.ShapeDtypeStruct(place, jnp.int32),
        ],
        grid=(*place, 2),
        grid_names=("group", "part", "kind"),
        scratch_types={"totals": plgpu.SMEM((WARPS,), jnp.int32), "so_far": plgpu.SMEM((1,), jnp.int32)},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="find_sharing",
    )(block_table, lengths, begin)
    return Sharing(chunk_tasks, num_chunks, piece_tasks, num_pieces, rows, queries, chunk, piece)
