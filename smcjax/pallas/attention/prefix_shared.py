"""Paged attention that reads what rows of a group share once: two Mosaic GPU kernels (Hopper) over a plan of tasks.

The reference is `reference.py`, the plan `prefix_plan.py`. One block serves a group, one key-value head, one part
of the group's queries (all rows' T·G queries of a head, packed 64 to a warpgroup's product) and one share of the part's
chunks: first the chunks that are tasks, then those into which the part's pieces are packed (`shared_dealing.py`).

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V        for every chunk of the share

One warpgroup walks the chunks and fills a ring in shared memory page by page, by TMA: K of a chunk, V of it, K of the
next. The others compute: `subs` warpgroups for every 64 queries (a *tile*) of the part, which take the block's chunks
in turn. The softmax's instructions take more of a block's time than the products, so chunks are as wide as registers
allow; to run a warpgroup's softmax beside its own products does not pay (dev/LOG.md). Each computing warpgroup leaves
log2 of Σ exp in f32 and O/Σ in f16, which rounds an eighth as much as bf16 does in the end; a second kernel merges them
in a fixed order (`shared_merge.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from smcjax.pallas.attention.prefix_plan import MAX_ROWS, PACKED, Sharing, query_limits
from smcjax.pallas.attention.shared_dealing import AHEAD, FIELDS, Assignment, assignments, skipped_rounds_of
from smcjax.pallas.attention.shared_merge import by_pair, merge_unit, result_type, units_of
from smcjax.pallas.attention.shared_tuning import Tuning, default_tuning, part_of_share, tiles_of
from smcjax.pallas.mosaic import l2_policy, online_softmax
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.online_softmax import Piece, Softmax
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref, of_part, product_of, swizzled

MAX_TILES = 64  # of 64 queries, of a group and key-value head
HALF = 64  # of D: bf16 that the copy engine swizzles at once
MAX_F16 = 65504.0  # the largest float16; no model's values come near


Lengths = list[jax.Array] | None  # of a group's rows; None where a chunk is a task


class Place(NamedTuple):
    """Where a piece lies in the pool: a page, or a part of a larger page."""

    page: jax.Array
    number: jax.Array | None = None  # of the part in its sequence: first slot over slots of a part


def _kernel(
    q_ref: Ref,  # [R·T, H, D] GMEM
    keys_ref: Ref,  # [P, B, Hkv, D] GMEM
    values_ref: Ref,  # [P, B, Hkv, D] GMEM
    chunks_ref: Ref,  # [G, parts, chunks, W + 2] int32 GMEM: pages, number, rows
    pieces_ref: Ref,  # [G, parts, pieces, 3] int32 GMEM: page, number, rows
    assignments_ref: Ref,  # [G, shares, F] int32 GMEM: what `assignments` says
    limits_ref: Ref,  # [G, parts·tiles·64] int32 GMEM: slots that a query sees · 32 + its row in the group
    lengths_ref: Ref,  # [R] int32 GMEM
    parts_ref: Ref,  # [G, shares, subs, Hkv, tiles of a block, 64, D] f16 GMEM
    lse_ref: Ref,  # [G, shares, subs, Hkv, tiles of a block, 64] f32 GMEM
    *,
    warpgroup_smem: tuple[Ref, Ref, Ref],  # SMEM, the same bytes: queries as they come [warpgroups, D/64, pairs, H/Hkv,
    # 64], as products read them [warpgroups, D/64, 64, 64], and the result [warpgroups, 64, D] f16
    ring_smem: Ref,  # [2·stages, C, D] SMEM: keys of a task, its values, keys of the next
    q_ready: Ref,  # [warpgroups] barriers
    ready: Ref,  # [2·stages] barriers
    used: Ref,  # [2·stages] barriers of the warpgroups of a task
    tuning: Tuning,
    rows: int,
    columns: int,
    chunk: int,
    piece: int,
    interpret: bool,
) -> None:
    """Attends to one share of a part's tasks, for one group and key-value head: the body of a block.

    Warpgroups 0 … tiles·subs − 1 compute, warpgroup w for tile w mod `tiles` of the part; the last warpgroup loads.
    """
    product = product_of(interpret)
    _, heads, dim = q_ref.shape
    _, page_size, kv_heads, _ = keys_ref.shape
    group_heads = heads // kv_heads
    # A chunk is `per_chunk` copies of a piece each; packed pieces fill 64 slots of a buffer, whatever its width.
    per_chunk, packed = chunk // piece, PACKED // piece  # pages, or parts of one, of a task
    fields_of_chunk = chunks_ref.shape[3]
    # One region of shared memory holds, one after the other, the queries as TMA writes them, the same bytes as products
    # read them, and the result. Each computing warpgroup has a part of its own.
    q_rows, q_smem, out_smem = warpgroup_smem
    stages, subs, tiles, warpgroups = tuning.stages, tuning.subs, tuning.tiles, tuning.warpgroups
    group, head, share = lax.axis_index("group"), lax.axis_index("head"), lax.axis_index("share")
    warpgroup = lax.axis_index("warpgroup")

    # Blocks of one (group, key-value head) are numbered part by part: which part of the queries, which block of that
    # part, and how many the part has.
    part, index, splits = part_of_share(share, tuning.splits)

    def read_assignment() -> Assignment:
        """Reads how many chunks and packed pieces the share has, and which."""
        # The first `AHEAD` chunks stand in front of the counts in the same record, so both come by few loads.
        fields = {name: assignments_ref[group, share, AHEAD * fields_of_chunk + i] for i, name in enumerate(FIELDS)}
        return Assignment(block=index, splits=splits, **fields, skipped_rounds=skipped_rounds_of(chunk))

    def ahead(number: jax.Array | int, field: int) -> jax.Array:
        """Reads a field of one of the share's first `AHEAD` chunks; -1 if the share has no such chunk."""
        return assignments_ref[group, share, number * fields_of_chunk + field]

    def place_of(own: Assignment, number: jax.Array) -> jax.Array:
        """Finds the share's `number`-th chunk in the part's list; behind the last chunk it names an existing one."""
        # Look-ups run one task ahead, so they ask behind the last chunk; what they find there is never used.
        within = own.chunk(lax.clamp(0, number, lax.max(own.chunks - 1, 0)))
        return jnp.where(own.chunks > 0, within, 0)

    def piece_of(own: Assignment, number: jax.Array, place: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Reads (page, number, rows) of a piece of the share's `number`-th task; no rows behind the last piece."""
        # Pieces of a part are packed in the order of its list, `packed` to a task; tasks go round the part's blocks.
        at = own.packed_at(number) * packed + place
        valid = (at >= 0) & (at < own.pieces)
        at = jnp.where(valid, at, 0)
        # A piece that is not there is read as piece 0 with no rows, so every query masks it.
        page, where, members = (pieces_ref[group, part, at, field] for field in range(3))
        return page, where, jnp.where(valid, members, 0)

    def buffers_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The places in the ring to which keys and values of the share's `number`-th task come."""
        # Even places are for keys, odd ones for values.
        stage = lax.rem(number, stages)
        return 2 * stage, 2 * stage + 1

    def load() -> None:
        """Fills the ring with the share's tasks; looks the next one's pages up while a buffer becomes free."""

        def places(field: Callable[[int], jax.Array]) -> list[Place]:
            """Names where the pieces of a chunk lie, given a function that reads a field of it."""
            # A page that is one piece is copied from its beginning. A larger page holds several pieces, so a copy must
            # know which one: the chunk's number times its pieces, plus j.
            names = [field(j) for j in range(per_chunk)]
            if piece == page_size:
                return [Place(name) for name in names]
            number = field(per_chunk) * per_chunk
            return [Place(name, number + j) for j, name in enumerate(names)]

        own = read_assignment()
        # Tasks 0 … settled_stop − 1 are chunks, those up to `stop` packed pieces.
        settled_stop, stop = own.chunks, own.all

        def look_up_chunk(number: jax.Array) -> list[Place]:
            at = place_of(own, number)
            return places(lambda j: chunks_ref[group, part, at, j])

        def look_up_pieces(number: jax.Array) -> list[Place]:
            found = [piece_of(own, number, j) for j in range(packed)]
            return [Place(page) if piece == page_size else Place(page, where) for page, where, _ in found]

        def fetch(source: Ref, buffer: jax.Array, pages: list[Place]) -> None:
            # [piece, D] of one key-value head by one TMA copy each; each is an arrival at `ready` of the buffer.
            for j, (name, number) in enumerate(pages):
                target = ring_smem.at[buffer, pl.ds(j * piece, piece)]
                start = 0 if number is None else pl.multiple_of(lax.rem(number * piece, page_size), piece)
                plgpu.copy_gmem_to_smem(source.at[name, pl.ds(start, piece), head], target, ready.at[buffer])
            # `ready` counts as many arrivals as a chunk has copies. Packed pieces in the buffers of wide chunks are
            # fewer.
            for _ in range(per_chunk - len(pages)):
                plgpu.barrier_arrive(ready.at[buffer])

        def fill(number: jax.Array, pages: list[Place], *, look_up: Callable[[jax.Array], list[Place]]) -> list[Place]:
            # Loads from GMEM, issued before the waits: they come while buffers become free.
            following = look_up(number + 1)
            for source, buffer in zip((keys_ref, values_ref), buffers_of(number), strict=True):
                # The task `stages` before this one had the same buffer. `used` completes when all tiles' warpgroups of
                # its turn have arrived behind the product that reads it. The first round of the ring waits for nothing.
                pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, used.at[buffer]))
                fetch(source, buffer, pages)
            return following

        def drain(number: jax.Array, _: None) -> None:
            # `fill` has waited for all but the last `stages` tasks. With these waits the loader ends only when no
            # arrival is still to come.
            for buffer in buffers_of(number):
                plgpu.barrier_wait(used.at[buffer])

        # What comes with the assignment is sent for before anything is looked up. Whether it is there is asked of all
        # its fields, as the compiler would else load these behind the answer.
        first = [[ahead(n, j) for j in range(per_chunk + 1)] for n in range(AHEAD)]
        sent = functools.reduce(jnp.add, [jnp.where(functools.reduce(jnp.bitwise_or, x) >= 0, 1, 0) for x in first])

        def send(number: jax.Array, _: None) -> None:
            # No wait for `used`: these are at most `AHEAD` tasks, and the ring has at least as many stages. The loop's
            # number selects among registers.
            pages = places(lambda j: of_part(number, [fields[j] for fields in first], 1))
            for source, buffer in zip((keys_ref, values_ref), buffers_of(number), strict=True):
                fetch(source, buffer, pages)

        # Three loops over one sequence of tasks: chunks named by the assignment, other chunks, packed pieces.
        lax.fori_loop(0, sent, send, None)
        settled, over_pieces = (functools.partial(fill, look_up=of) for of in (look_up_chunk, look_up_pieces))
        pages, pieces = look_up_chunk(sent), look_up_pieces(settled_stop)  # which take as long as a chunk
        lax.fori_loop(sent, settled_stop, settled, pages)
        lax.fori_loop(settled_stop, stop, over_pieces, pieces)
        lax.fori_loop(lax.max(stop - stages, 0), stop, drain, None)

    def compute() -> None:
        # A lane is a tile of the part; `subs` warpgroups of a lane take its tasks in turn, task n that of sub n mod
        # subs. `stages` is a multiple of `subs`, so a warpgroup meets the same buffers again and waits for every phase
        # of their barriers.
        lane, sub = lax.rem(warpgroup, tiles), lax.div(warpgroup, tiles)
        tile = part * tiles + lane
        # The last part may have fewer tiles than the others. Its warpgroups without a tile make no turn, and leave an
        # empty result behind the group's last query, which no merge reads.
        idle = jnp.bool_(False)
        if tuning.last_tiles:
            last = part == len(tuning.splits) - 1
            idle = last & (lane >= tuning.last_tiles)

        def leave(buffer: jax.Array) -> None:
            """Frees a buffer for the loader, which waits for `tiles` arrivals even if fewer warpgroups read it."""
            # Called when a product has returned, so the tensor core no longer reads the buffer.
            plgpu.barrier_arrive(used.at[buffer])
            if tuning.last_tiles:
                # In the last part the first lane arrives for idle lanes as well, since the barrier's count is static.
                for _ in range(tiles - tuning.last_tiles):
                    pl.when(last & (lane == 0))(lambda: plgpu.barrier_arrive(used.at[buffer]))

        # Rows of a tile are (row, column) pairs with their heads of this key-value head next to each other.
        in_tile = QUERIES // group_heads  # (row, column) pairs, each with `group_heads` queries of this head
        own_pairs = pl.ds(group * rows * columns + tile * in_tile, in_tile)  # beyond the group's, others' or zeros
        own_heads = pl.ds(head * group_heads, group_heads)
        for j in range(dim // HALF):
            # The copy engine swizzles 64 numbers at once, so D of 128 comes in two halves, an arrival each.
            source = q_ref.at[own_pairs, own_heads, pl.ds(j * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, q_rows.at[warpgroup, j], q_ready.at[warpgroup])
        # What is read from here to the queries' arrival takes as long as they do.
        own = read_assignment()
        settled_stop, stop = own.chunks, own.all
        tile_rows = pl.ds(tile * QUERIES, QUERIES)
        # One number a query, in the layout of a product's rows when reduced: how many slots it sees, times 32, and its
        # row of the group, which is its bit of a task's set.
        limits = plgpu.layout_cast(
            plgpu.load(limits_ref.at[group, tile_rows], optimized=False),
            online_softmax.row_layout(),
        )
        # Scores are in base 2.
        scale = math.log2(math.e) / math.sqrt(dim)

        def turns(end: jax.Array) -> jax.Array:
            """Counts those of the share's tasks before `end` that this warpgroup takes."""
            return lax.max(lax.div(end - sub + (subs - 1), subs), 0)

        total = jnp.where(idle, 0, turns(stop))

        def number_of(turn: jax.Array) -> jax.Array:
            """Returns the number, among the share's tasks, of the task that this warpgroup takes at a turn."""
            return turn * subs + sub

        def members(turn: jax.Array) -> jax.Array:
            """Looks up which rows read the chunk of a turn, a bit each."""
            return chunks_ref[group, part, place_of(own, number_of(turn)), per_chunk + 1]

        def pieces(turn: jax.Array) -> list[Piece]:
            """Looks up the first slot and the rows of each piece that a turn multiplies."""
            found = [piece_of(own, number_of(turn), j) for j in range(packed)]
            return [Piece(number * piece, rows_of) for _, number, rows_of in found]

        def softmax_over_chunk(scores: jax.Array, so_far: Softmax, rows_of: jax.Array) -> tuple[Softmax, jax.Array]:
            # Every query of a row that has the chunk sees it whole, so one bias a row of the tile is the mask: 0, or
            # `MASKED` for the other rows. No slot of a chunk is unwritten, so nothing needs zeros.
            bias = jnp.where(((rows_of >> (limits & 31)) & 1) != 0, 0.0, MASKED)
            return online_softmax.advance(so_far, scores, jnp.exp2, scale=scale, bias=bias)

        def softmax_over_pieces(scores: jax.Array, so_far: Softmax, tasks: list[Piece]) -> tuple[Softmax, jax.Array]:
            # Pieces have rows and ends of their own: for each piece, up to which column of the chunk this query sees
            # it.
            visible = online_softmax.visible_ends(tasks, piece, limits >> 5, limits & 31)
            scores = online_softmax.masked(scores, visible, piece, scale)
            return online_softmax.advance(so_far, scores, jnp.exp2, scale=scale)

        settled_turns = lax.min(turns(settled_stop), total)
        # A warpgroup's first chunk is the share's number `sub`, which the assignment has if there is one (subs ≤
        # `AHEAD`).
        first_members = ahead(sub, per_chunk + 1)
        # Waits for this warpgroup's own copies; no other warpgroup uses its barrier.
        with jax.named_scope("wait q"):
            plgpu.barrier_wait(q_ready.at[warpgroup])
        # On a GPU these are the same bytes: [pairs, heads, 64] is [64, 64] with a pair and its heads as one axis.
        # Interpreted, members of a union are arrays of their own.
        if interpret:
            q_smem[warpgroup] = q_rows[warpgroup].reshape(dim // HALF, QUERIES, HALF)
        halves: list[Any] = [q_smem.at[warpgroup, j] for j in range(dim // HALF)]
        # With room in registers the first factor of S = Q·Kᵀ is loaded once for all tasks.
        if tuning.holds_queries(dim=dim, chunk=chunk):
            halves = [plgpu.load(half, layout=plgpu.Layout.WGMMA, optimized=False) for half in halves]

        def step(turn: jax.Array, state: tuple[Any, ...], *, lengths: Lengths = None) -> tuple[Any, ...]:
            """Attends to a chunk that is a task or, with rows' `lengths`, to packed pieces, which may lack slots."""
            # `tasks` is what the turn before has looked up for this one: the chunk's rows, or its pieces.
            softmax, tasks = state
            upcoming = (members if lengths is None else pieces)(turn + 1)  # takes as long as a chunk
            k_buffer, v_buffer = buffers_of(number_of(turn))
            # Packed pieces are 64 slots, the first of the buffer.
            slots = pl.ds(0, chunk if lengths is None else PACKED)
            # `ready` completes when all copies of the keys have written their bytes.
            with jax.named_scope("wait k"):
                plgpu.barrier_wait(ready.at[k_buffer])
            # Halves of D, whose products add up to the scores.
            keys = (ring_smem.at[k_buffer, slots, pl.ds(j * HALF, HALF)].transpose((1, 0)) for j in range(dim // HALF))
            scores = product(None, *zip(halves, keys, strict=True))
            # The product is done when it returns: the loader may overwrite the keys while the softmax goes on.
            leave(k_buffer)
            # Scores [64, slots] become P in bf16, in registers, as the next product's first factor; O and Σ are
            # rescaled to the new maximum.
            softmax, p = (softmax_over_chunk if lengths is None else softmax_over_pieces)(scores, softmax, tasks)
            # Values of the task come behind its keys, and have a barrier of their own.
            with jax.named_scope("wait v"):
                plgpu.barrier_wait(ready.at[v_buffer])
            values = ring_smem.at[v_buffer, slots]
            # Slots that no row of a piece holds may have NaN, and P of 0 would not help: 0 · NaN is NaN. They are
            # zeroed in the buffer. With several tiles each warpgroup stores the same zeros.
            if lengths is not None:
                online_softmax.clean(values, tasks, piece, lengths, interpret=interpret)
            # O += P·V [64, D]; it ends before the next turn writes P's registers (dev/LOG.md).
            softmax = softmax._replace(acc=product(softmax.acc, (p, values)))
            leave(v_buffer)
            return softmax, upcoming

        # First the chunks that are tasks, whose mask is cheap.
        start = (online_softmax.nothing_yet(dim), first_members)
        softmax, _ = lax.fori_loop(0, settled_turns, step, start)
        # Read only now: held through the first loop, these would be registers that it does not have.
        over_pieces = functools.partial(step, lengths=[lengths_ref[group * rows + r] for r in range(rows)])
        # Then the packed pieces: the same softmax goes on with masks of every score. Turns go on counting, so the
        # ring's order is that of the loader.
        softmax, _ = lax.fori_loop(settled_turns, total, over_pieces, (softmax, pieces(settled_turns)))
        # Each (share, sub) of a tile leaves a result; the merge weighs those that saw nothing by 0.
        place = (group, share, sub, head, lane)
        with jax.named_scope("result"):
            # O/Σ [64, D] and log2 Σ exp [64], finite also for rows that saw nothing: no ∞ − ∞ in the merge.
            values, lse = online_softmax.result(softmax, 2 * MASKED)
            store(lse_ref.at[place], lse)
            # The result takes the bytes of the queries, which the last product has read; clipped, so f16 has no ∞.
            store(out_smem.at[warpgroup], jnp.clip(values.astype(out_smem.dtype), -MAX_F16, MAX_F16))
            # The copy engine must see what ordinary stores have written to shared memory.
            plgpu.commit_smem()
            # The merge reads this next, so its lines are to stay in the L2.
            l2_policy.store_to_stay(out_smem.at[warpgroup], parts_ref.at[place], interpret=interpret)
            # The block must not end before the store has read shared memory; the end of the launch waits for the write
            # itself.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == warpgroups)
    def _load() -> None:
        # A loader gives registers back, of which the computing warpgroups take more.
        if tuning.registers and not interpret:
            plgpu.set_max_registers(tuning.registers.loading, action="decrease")
        with jax.named_scope("load"):
            load()

    @pl.when(warpgroup < warpgroups)
    def _compute() -> None:
        # Waits until the loader has given its registers back.
        if tuning.registers and not interpret:
            plgpu.set_max_registers(tuning.registers.computing, action="increase")
        with jax.named_scope("compute"):
            compute()


def _merge_kernel(parts_ref: Ref, lse_ref: Ref, out_ref: Ref, *, tuning: Tuning) -> None:
    group, head, unit = (lax.axis_index(name) for name in ("group", "head", "unit"))
    merge_unit(out_ref, parts_ref, lse_ref, unit, group=group, head=head, tuning=tuning)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports(
    *, rows: int, columns: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any
) -> bool:
    """True for groups of N = `rows` rows of T = `columns` new tokens that the kernels take."""
    group = num_heads // num_kv_heads
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and head_dim in (64, 128)
        and num_heads % num_kv_heads == 0
        and group <= QUERIES
        and page_size % 8 == 0
        and (64 % page_size == 0 or page_size % 64 == 0)
        and 1 <= rows <= MAX_ROWS
        and rows * columns * padded(group) <= MAX_TILES * QUERIES
    )


def padded(group: int) -> int:
    """Queries that a token has of one key-value head: its H/Hkv = `group` and zeros, so that they divide 64."""
    return 1 << (group - 1).bit_length()


def supports_plan(sharing: Sharing, *, columns: int, group: int) -> bool:
    """True for a plan of T = `columns` tokens a row and `group` query heads to a key-value head."""
    queries = columns * padded(group)
    parts = -(-sharing.rows * queries // (tiles_of(sharing.rows * queries) * QUERIES))
    same = sharing.queries == queries
    return sharing.num_pieces.shape[1] == parts and (same or parts == 1)


def _scratch(tuning: Tuning, sharing: Sharing, group_heads: int, dim: int, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of `_kernel`: a warpgroup's queries and results, the ring of chunks."""
    halves = (tuning.warpgroups, dim // HALF)
    return {
        "warpgroup_smem": plgpu.RefUnion(
            plgpu.SMEM((*halves, QUERIES // group_heads, group_heads, HALF), dtype, transforms=swizzled()[1:]),
            plgpu.SMEM((*halves, QUERIES, HALF), dtype, transforms=swizzled()),
            plgpu.SMEM((tuning.warpgroups, QUERIES, dim), jnp.float16, transforms=swizzled()),
        ),
        "ring_smem": plgpu.SMEM((2 * tuning.stages, sharing.chunk, dim), dtype, transforms=swizzled()),
        "q_ready": plgpu.Barrier(num_arrivals=dim // HALF, num_barriers=tuning.warpgroups),
        "ready": plgpu.Barrier(num_arrivals=sharing.chunk // sharing.piece, num_barriers=2 * tuning.stages),
        "used": plgpu.Barrier(num_arrivals=tuning.tiles, num_barriers=2 * tuning.stages),
    }


@functools.partial(jax.jit, static_argnames=("interpret", "tuning"))
def shared_attention_mosaic(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    sharing: Sharing,
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "R T H D"]:
    """Query (r, t) attends to slots 0…positions[r, t], as far as below `lengths[r]`, of the rows that were planned.

    `sharing` is the plan that `find_sharing` made of the rows' block table for this many queries a row; it must cover
    `lengths`, and its immutable slots must be seen by every query of their rows. What a query at or beyond `lengths`
    returns means nothing, but is finite. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.

    A jit of its own, so that a model's layers trace and lower the kernels once.
    """
    all_rows, columns, heads, dim = q.shape
    kv_heads = key_pages.shape[2]
    rows, chunk = sharing.rows, sharing.chunk
    groups, group_heads = all_rows // rows, heads // kv_heads
    if lacking := padded(group_heads) - group_heads:
        by_kv_head = jnp.pad(q.reshape(all_rows, columns, kv_heads, -1, dim), ((0, 0),) * 3 + ((0, lacking), (0, 0)))
        filled = by_kv_head.reshape(all_rows, columns, -1, dim)
        out = shared_attention_mosaic(
            filled, key_pages, value_pages, sharing, positions, lengths, tuning=tuning, interpret=interpret
        )
        return out.reshape(by_kv_head.shape)[..., :group_heads, :].reshape(q.shape)
    queries = rows * columns * group_heads
    if tuning is None:
        tuning = default_tuning(groups=groups, queries=queries, kv_heads=kv_heads, dim=dim, chunk=chunk)
    if len(tuning.splits) != sharing.num_pieces.shape[1]:
        raise ValueError(f"{sharing.num_pieces.shape[1]} parts in the plan, {len(tuning.splits)} in {tuning}")
    if tuning.stages % tuning.subs:
        raise ValueError(f"warpgroups that take turns must divide stages: {tuning}")
    if not tuning.subs <= AHEAD <= tuning.stages:
        raise ValueError(f"{AHEAD} chunks are known before the others, for as many turns and stages: {tuning}")

    size = len(tuning.splits) * tuning.tiles * QUERIES
    limits = query_limits(positions, lengths, rows=rows, group=group_heads, size=size)
    shares = tuning.shares
    place = (groups, shares, tuning.subs, kv_heads, tuning.tiles, QUERIES)
    dealt = assignments(sharing, tuning.splits)
    pairs = q.reshape(-1, heads, dim)
    if interpret:  # which, unlike the copy engine, gives no zeros for what lies behind the last query
        pairs = jnp.pad(pairs, ((0, size // group_heads), (0, 0), (0, 0)))
    parts, lse = plgpu.kernel(
        functools.partial(
            _kernel,
            tuning=tuning,
            rows=rows,
            columns=columns,
            chunk=chunk,
            piece=sharing.piece,
            interpret=bool(interpret),
        ),
        out_type=[
            jax.ShapeDtypeStruct((*place, dim), jnp.float16),
            jax.ShapeDtypeStruct(place, jnp.float32),
        ],
        grid=(groups, kv_heads, shares),
        grid_names=("group", "head", "share"),
        num_threads=tuning.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(tuning, sharing, group_heads, dim, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="shared_attention",
    )(pairs, key_pages, value_pages, sharing.chunks, sharing.pieces, dealt, limits, lengths)
    merged = plgpu.kernel(
        functools.partial(_merge_kernel, tuning=tuning),
        out_type=result_type(
            groups=groups, kv_heads=kv_heads, group_heads=group_heads, pairs=rows * columns, dim=dim, dtype=q.dtype
        ),
        grid=(groups, kv_heads, units_of(queries)),
        grid_names=("group", "head", "unit"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="shared_attention_merge",
    )(parts, lse)
    return by_pair(merged, pairs=rows * columns, heads=heads).reshape(q.shape)
