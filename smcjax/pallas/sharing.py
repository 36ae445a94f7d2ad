"""Who shares which KV: the tasks of an attention that reads a chunk of slots once for all rows that name its pages.

The N rows of a group (the particles of a request) name mostly the same physical pages: all of them the prompt's, and
after resampling every branch of their family tree those of its own past. A *chunk* is C consecutive slots of a row. Two
rows share a chunk if the pages that it has in use are the same ones, and then read it in one *task*:

    leader(r, c) = lowest row of the group whose pages of chunk c are those of row r
    tasks        = the (c, r) with leader(r, c) = r, and the set of rows whose leader that is

Found from block tables alone, on the device, with static shapes: a list as long as without any sharing, and how much of
it counts. Tables change once a cycle, so one plan serves all forwards and layers of a cycle.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from smcjax.pallas.products import QUERIES

MAX_ROWS = 31  # of a group: the bits of an int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharing:
    """The tasks of each group and *part*: queries of a group that one block of the kernel serves.

    A task is W pages, its chunk's number and the set of its rows, a bit each. First come the *clear* tasks, of which
    every query of the part sees every slot.
    """

    tasks: Int[Array, "G parts tasks fields"]
    clear: Int[Array, "G parts"]  # how many of them are clear
    count: Int[Array, "G parts"]  # how many there are
    rows: int = dataclasses.field(metadata={"static": True})  # N
    queries: int = dataclasses.field(metadata={"static": True})  # of a row, for one key-value head: T·H/Hkv
    chunk: int = dataclasses.field(metadata={"static": True})  # C


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
    settled: Int[Array, " R"],
    *,
    rows: int,
    queries: int,
    page_size: int,
    chunk: int,
    tiles: int = 2,
) -> Sharing:
    """The plan for groups of N = `rows` consecutive rows with `queries` queries a row and key-value head.

    `lengths` is how many slots of each row hold KV, or will when the plan is last used: 0 for a row that reads
    nothing. `settled` is how many of them every query of every forward sees.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows a group; a set of rows has {MAX_ROWS} bits")
    groups = block_table.shape[0] // rows
    per_chunk, per_page = max(1, chunk // page_size), max(1, page_size // chunk)
    table = jnp.repeat(block_table, per_page, axis=1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_chunk)))
    pages = table.reshape(groups, rows, -1, per_chunk)
    chunks = pages.shape[2]
    lengths, settled = lengths.reshape(groups, rows), settled.reshape(groups, rows)

    # Pages beyond a row's end do not count: they become the trash page.
    start = np.arange(chunks)[:, None] * chunk + np.arange(per_chunk) * page_size
    pages = jnp.where(start < lengths[:, :, None, None], pages, 0)
    reads = start[:, 0] < lengths[:, :, None]  # [G, N, chunks]
    same = (pages[:, :, None] == pages[:, None]).all(-1) & reads[:, :, None] & reads[:, None]  # [G, N, N, chunks]
    bit = 1 << np.arange(rows, dtype=np.int32)
    members = jnp.sum(jnp.where(same, bit[:, None], 0), axis=2, dtype=jnp.int32)  # [G, N, chunks]
    leads = reads & ((members & (bit - 1)[:, None]) == 0)

    in_part = np.array([sum(1 << r for r in part) for part in parts_of(rows, queries, tiles)], np.int32)
    live = jnp.sum(jnp.where(lengths > 0, bit, 0), axis=1, dtype=jnp.int32)[:, None] & in_part  # [G, parts]
    member_of = np.array([[r in part for r in range(rows)] for part in parts_of(rows, queries, tiles)])
    certain = jnp.min(
        jnp.where(member_of & (lengths > 0)[:, None], settled[:, None], jnp.iinfo(jnp.int32).max), axis=2
    )  # [G, parts]: slots that all queries of a part see

    mine = leads[:, None] & ((members[:, None] & in_part[:, None, None]) != 0)  # [G, parts, N, chunks]
    whole = (members[:, None] & live[:, :, None, None]) == live[:, :, None, None]
    whole &= (np.arange(chunks) + 1) * chunk <= certain[:, :, None, None]

    # A task's place: after the clear ones if it is not, then by chunk, then by row. Sums over what comes before it as
    # one masked reduction each, where XLA makes a cumulative sum of many kernels.
    kinds = jnp.stack([mine & whole, mine & ~whole])  # [2, G, parts, N, chunks]
    row, number = np.arange(rows), np.arange(chunks)
    lower = (row[:, None] < row)[:, :, None]  # [N (summed), N, 1]
    within = jnp.sum(kinds[:, :, :, :, None] & lower, axis=3, dtype=jnp.int32)
    per_chunk_tasks = jnp.sum(kinds, axis=3, dtype=jnp.int32)  # [2, G, parts, chunks]
    before = jnp.sum(
        jnp.where(number[:, None] < number, per_chunk_tasks[..., None], 0), axis=3, dtype=jnp.int32
    )  # [2, G, parts, chunks]
    num_clear, num_other = jnp.sum(per_chunk_tasks, axis=3, dtype=jnp.int32)
    offset = jnp.stack([jnp.zeros_like(num_clear), num_clear])[..., None]
    place = jnp.sum(jnp.where(kinds, within + (before + offset)[:, :, :, None], 0), axis=0, dtype=jnp.int32)
    place = jnp.where(mine, place, chunks * rows)  # out of range: dropped

    fields = jnp.concatenate(
        [pages, jnp.broadcast_to(number[:, None], (*members.shape, 1)), members[..., None]], axis=3, dtype=jnp.int32
    )  # [G, N, chunks, W + 2]
    fields = jnp.broadcast_to(fields[:, None], (*place.shape, per_chunk + 2))
    group, part = np.ogrid[:groups, : len(in_part)]
    tasks = jnp.zeros((groups, len(in_part), chunks * rows, per_chunk + 2), jnp.int32)
    tasks = tasks.at[group[..., None, None], part[..., None, None], place].set(fields, mode="drop", unique_indices=True)
    return Sharing(tasks=tasks, clear=num_clear, count=num_clear + num_other, rows=rows, queries=queries, chunk=chunk)


def query_limits(
    positions: Int[Array, "R T"], lengths: Int[Array, " R"], *, rows: int, group: int, size: int
) -> Int[Array, "G size"]:
    """How many slots each query of a group sees, times 32, plus its row in the group; padded to `size`."""
    visible = jnp.minimum(positions + 1, lengths[:, None])  # [R, T]
    groups = visible.shape[0] // rows
    row = np.arange(visible.shape[0])[:, None] % rows
    packed = jnp.repeat((jnp.maximum(visible, 0) * 32 + row).reshape(groups, -1), group, axis=1)
    return jnp.pad(packed, ((0, 0), (0, size - packed.shape[1])), constant_values=31).astype(jnp.int32)
