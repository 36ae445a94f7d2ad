"""Who shares which KV: the tasks of an attention that reads slots once for all rows that name their pages.

The N rows of a group (the particles of a request) name mostly the same physical pages: all of them the prompt's, and
after resampling every branch of their family tree those of its own past. Rows that name the same pages for the same
slots read them in one *task*:

    leader(r, s) = lowest row of the group whose pages of slots s are those of row r
    tasks        = the (s, r) with leader(r, s) = r, and the set of rows whose leader that is

There are two kinds. A *chunk* is C consecutive slots that all queries of its rows see, written before the cycle began:
nothing in it is masked and it may be fetched at any time. What is left of a row is less than C slots and what the cycle
itself writes: *pieces* of a page each, or of 64 slots of a larger one, which a kernel packs, as many as make 64 slots.

Found from block tables alone, on the device, with static shapes: lists as long as without any sharing, and how much of
them counts. Tables change once a cycle, so one plan serves all forwards and layers of a cycle. This is the plain
version; `prefix_plan_kernel.py` is the one launch that finds the same on a GPU.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from smcjax.pallas.mosaic.wgmma import QUERIES

MAX_ROWS = 31  # of a group: the bits of an int32
PACKED = 64  # slots of pieces that a kernel reads at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharing:
    """The tasks of each group and *part*: queries of a group that one block of the kernel serves.

    A task is W pages, or parts of them as long as a piece, its number (first slot over slots a task) and the set of its
    rows, a bit each.
    """

    chunks: Int[Array, "G parts chunks W+2"]
    num_chunks: Int[Array, "G parts"]  # how many of them there are
    pieces: Int[Array, "G parts pieces 3"]
    num_pieces: Int[Array, "G parts"]
    rows: int = dataclasses.field(metadata={"static": True})  # N
    queries: int = dataclasses.field(metadata={"static": True})  # of a row, for one key-value head: T·H/Hkv
    chunk: int = dataclasses.field(metadata={"static": True})  # C
    piece: int = dataclasses.field(metadata={"static": True})  # slots of a piece: `piece_of`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CommonPrefix:
    """The first slots that all live rows of a group name the same pages for, and that every query of them sees."""

    slots: Int[Array, " G"]  # how many; whole pages
    leaders: Int[Array, " G"]  # a row of each group, by its number in the batch, whose table names them
    rows: int = dataclasses.field(metadata={"static": True})  # N


def find_common_prefix(
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    num_immutable: Int[Array, " R"],
    *,
    rows: int,
    page_size: int,
) -> CommonPrefix:
    """The common prefix of each group of N = `rows` consecutive rows; arguments are those of `find_sharing`.

    What only some of the rows share, as branches of a family tree do, is not looked for.
    """
    table, live = block_table.reshape(-1, rows, block_table.shape[1]), lengths.reshape(-1, rows) > 0
    leader = jnp.argmax(live, axis=1)  # the first one that is live
    names = jnp.take_along_axis(table, leader[:, None, None], axis=1)
    same = ((table == names) | ~live[..., None]).all(axis=1)  # [G, M]
    pages = jnp.min(jnp.where(same, table.shape[2], np.arange(table.shape[2])), axis=1)
    seen = jnp.minimum(num_immutable, lengths).reshape(-1, rows)
    seen = jnp.min(jnp.where(live, seen, jnp.max(seen, axis=1, keepdims=True)), axis=1)
    return CommonPrefix(
        slots=(jnp.minimum(pages, seen // page_size) * page_size).astype(jnp.int32),
        leaders=(leader + np.arange(table.shape[0]) * rows).astype(jnp.int32),
        rows=rows,
    )


def piece_of(page_size: int, chunk: int) -> int:
    """Slots of a piece: of a page, but no more than are packed or chunks have."""
    return min(page_size, PACKED, chunk)


def parts_of(rows: int, queries: int, tiles: int = 2) -> list[range]:
    """The rows that the queries of each part belong to: `queries` of each row, T·H/Hkv, 64·`tiles` to a part."""
    width = tiles * QUERIES
    return [
        range(start // queries, (min(start + width, rows * queries) - 1) // queries + 1)
        for start in range(0, rows * queries, width)
    ]


def find_sharing(
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    num_immutable: Int[Array, " R"] | None,
    *,
    rows: int,
    queries: int,
    page_size: int,
    chunk: int,
    tiles: int = 2,
) -> Sharing:
    """The plan for groups of N = `rows` consecutive rows with `queries` queries a row and key-value head.

    `lengths` is how many slots of each row hold KV, or will when the plan is last used: 0 for a row that reads
    nothing. `num_immutable` is how many of them every query of every forward sees; None makes pieces of everything.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows a group; a set of rows has {MAX_ROWS} bits")
    groups, piece = block_table.shape[0] // rows, piece_of(page_size, chunk)
    table = jnp.repeat(block_table, page_size // piece, axis=1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (chunk // piece))))
    pages = table.reshape(groups, rows, -1)
    in_parts = [np.array([row in part for row in range(rows)]) for part in parts_of(rows, queries, tiles)]
    begin = jnp.zeros((groups, rows), jnp.int32)  # the first slot of each row that is in no chunk
    lengths = lengths.reshape(groups, rows)
    chunks, num_chunks = jnp.zeros((groups, len(in_parts), 1, chunk // piece + 2), jnp.int32), None
    if num_immutable is not None:
        begin = jnp.minimum(num_immutable.reshape(groups, rows), lengths) // chunk * chunk
        chunks, num_chunks = _tasks(pages.reshape(groups, rows, -1, chunk // piece), 0 * begin, begin, chunk, in_parts)
    pieces, num_pieces = _tasks(pages[..., None], begin, lengths, piece, in_parts)
    return Sharing(
        chunks=chunks,
        num_chunks=jnp.zeros_like(num_pieces) if num_chunks is None else num_chunks,
        pieces=pieces,
        num_pieces=num_pieces,
        rows=rows,
        queries=queries,
        chunk=chunk,
        piece=piece,
    )


def _tasks(
    pages: Int[Array, "G N tasks W"],
    begin: Int[Array, "G N"],
    end: Int[Array, "G N"],
    slots: int,
    in_parts: list[np.ndarray],
) -> tuple[Int[Array, "G parts NTasks W+2"], Int[Array, "G parts"]]:
    """Each row's tasks of `slots` slots that hold some of `begin` to `end`, once for all rows with the same pages."""
    groups, rows, count, _ = pages.shape
    number = np.arange(count)
    first = jnp.asarray(number * slots)[None, None]
    reads = (first >= begin[..., None]) & (first < end[..., None])  # [G, N, tasks]
    same = (pages[:, :, None] == pages[:, None]).all(-1) & reads[:, :, None] & reads[:, None]  # [G, N, N, tasks]
    bit = 1 << np.arange(rows, dtype=np.int32)
    members = jnp.sum(jnp.where(same, bit[None, None, :, None], 0), axis=2, dtype=jnp.int32)  # [G, N, tasks]
    leads = reads & ((members & (bit - 1)[None, :, None]) == 0)
    of_part = np.array([bit[in_part].sum() for in_part in in_parts], np.int32)
    mine = leads[:, None] & ((members[:, None] & of_part[None, :, None, None]) != 0)  # [G, parts, N, tasks]
    place, found = _places(mine)
    fields = jnp.concatenate(
        [pages, jnp.broadcast_to(number[:, None], (*members.shape, 1)), members[..., None]], axis=3, dtype=jnp.int32
    )  # [G, N, tasks, W + 2]
    fields = jnp.broadcast_to(fields[:, None], (*place.shape, fields.shape[3]))
    group, part = np.ogrid[:groups, : len(in_parts)]
    tasks = jnp.zeros((groups, len(in_parts), rows * count, fields.shape[4]), jnp.int32)
    tasks = tasks.at[group[..., None, None], part[..., None, None], place].set(fields, mode="drop", unique_indices=True)
    return tasks, found


def _places(mine: Bool[Array, "G parts N tasks"]) -> tuple[Int[Array, "G parts N tasks"], Int[Array, "G parts"]]:
    """The place of each task, by its number and then its row, out of range where there is none; and how many there are.

    Sums over what comes before it as one masked reduction each, where XLA makes a cumulative sum of many kernels.
    """
    _, _, rows, count = mine.shape
    row, number = np.arange(rows), np.arange(count)
    lower = (row[:, None] < row)[None, None, :, :, None]  # [1, 1, N (summed), N, 1]
    within = jnp.sum(mine[:, :, :, None] & lower, axis=2, dtype=jnp.int32)
    by_number = jnp.sum(mine, axis=2, dtype=jnp.int32)  # [G, parts, tasks]
    before = jnp.sum(jnp.where(number[:, None] < number, by_number[..., None], 0), axis=2, dtype=jnp.int32)
    place = jnp.where(mine, within + before[:, :, None], rows * count)
    return place, jnp.sum(by_number, axis=2, dtype=jnp.int32)


def query_limits(
    positions: Int[Array, "R T"], lengths: Int[Array, " R"], *, rows: int, group: int, size: int
) -> Int[Array, "G size"]:
    """The number of slots that each query of a group sees, times 32, plus its row in the group; padded to `size`."""
    visible = jnp.minimum(positions + 1, lengths[:, None])  # [R, T]
    groups = visible.shape[0] // rows
    row = np.arange(visible.shape[0])[:, None] % rows
    packed = jnp.repeat((jnp.maximum(visible, 0) * 32 + row).reshape(groups, -1), group, axis=1)
    return jnp.pad(packed, ((0, 0), (0, size - packed.shape[1])), constant_values=31).astype(jnp.int32)
