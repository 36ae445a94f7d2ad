"""The body of the kernel in which groups of queries attend to their tasks (Mosaic, Hopper).

A *line* is what is read for one softmax: the tasks of a group, one set's key-value head and a branch, gathered to
chunks of 64 slots. The rows of a group (C·G: G heads a set of each query) form *tiles* of 64, a warpgroup's product:

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V        for every chunk

Where a group is one tile, the computing warpgroups take a line's chunks in turn. Where a group is larger, a line serves
as many tiles as there are computing warpgroups, and each warpgroup takes every chunk for its own tile.

The chunks of all lines, one line after the other, are cut into as many equal shares as there are multiprocessors, and
one block has one share (`grouped_shares.py`): a *segment* of each line that its share touches. So all blocks are done
at about the same time whatever the tasks are, and none begins anew for another line: two warpgroups, one for keys and
one for values, look tasks up, fill a ring in shared memory unit by unit, by TMA, and run ahead into the next segment
while the others, which compute, finish one.

A query sees a slot if its bit of the task is set and the slot lies between its bounds. A slot that no query of the line
sees may hold NaN, and 0 · NaN is NaN, so the values of such slots are zeroed in shared memory. A second launch merges
the segments of each line in a fixed order (`grouped_merge.py`).

*Branches* (of Native Sparse Attention: compressed tokens, selected blocks, a window) are attentions of the same queries
to pages, tasks and bounds of their own, each with its own softmax. One launch takes several, so that a layer begins
once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.attention.prefix_shared import HALF, MAX_F16
from smcjax.pallas.mosaic import l2_policy, online_softmax
from smcjax.pallas.mosaic.bitmask import WORD
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref, across, of_part, product_of
from smcjax.pallas.sparse import grouped_shares
from smcjax.pallas.sparse.grouped_attention import CHUNK
from smcjax.pallas.sparse.grouped_shares import LOADERS, Counts, Segment, Tuning, note, share_of
from smcjax.pallas.sparse.stored_scores import store_by_slot

AT_ONCE = 4  # queries whose bounds are asked for together, as each answer takes half a microsecond


class Refs(NamedTuple):
    """The operands of one branch in GMEM, of G = R·g groups."""

    keys: Ref  # [P, B, Hkv, D]
    values: Ref  # [P, B, Hkv, D]
    unit: Ref  # [G, S, K] int32
    place: Ref  # [G, S, K] int32
    queries: Ref  # [G, S, K·words] int32
    number: Ref  # [G, S] int32
    bounds: Ref  # [G, 2, width] int32: the first and last slot that a row sees
    inner: Ref  # [G, 3] int32: what every query of the group sees lies between; how many there are


class Task(NamedTuple):
    """The part of one task of a chunk by which a computing warpgroup masks scores."""

    first: jax.Array  # slot
    words: tuple[jax.Array, ...]  # the mask's words with the line's queries, a bit each; 0 where there is no task


class Shape(NamedTuple):
    """Static numbers of a launch."""

    queries: int  # C
    group_heads: int  # heads of a set, a power of two
    sets: int  # S
    groups: int  # g, of a request
    of_request: int  # M
    units: tuple[int, ...]  # slots, by branch
    scale: float  # of scores in base 2
    together: int  # tiles of a line: 1, or one for each warpgroup that computes

    @property
    def rows(self) -> int:
        """Rows of a group: its queries' heads of a set."""
        return self.queries * self.group_heads

    @property
    def lines(self) -> int:
        """Number of lines that the tiles of one group, set and branch make."""
        return -(-self.rows // (self.together * QUERIES))

    @property
    def tiles(self) -> int:
        """Number of tiles of 64 rows that a group's rows fill."""
        return -(-self.rows // QUERIES)

    @property
    def stored(self) -> int:
        """Rows of the output tile to store; a single tile stores only rows with a query, rounded up to 8."""
        return min(QUERIES, -(-self.rows // 8) * 8)

    @property
    def width(self) -> int:
        """Rows of all tiles of a group's lines, rows without a query included."""
        return self.lines * self.together * QUERIES

    @property
    def in_tile(self) -> int:
        """Queries whose heads of a set fill one tile."""
        return QUERIES // self.group_heads

    @property
    def in_line(self) -> int:
        """Queries that one line serves."""
        return self.in_tile * self.together

    @property
    def words(self) -> int:
        """Words of a task's mask that hold the bits of a line's queries."""
        return -(-self.in_line // WORD)

    @property
    def has_one_line(self) -> bool:
        """True if a request has one line for each set and branch, so that no other line reads the same pages."""
        return self.groups == self.lines == 1


def attend(
    q_ref: Ref,  # [R·M, H, D] GMEM, in the groups' order
    *refs: Ref,  # `Refs` of each branch, then results:
    # [lines + blocks, subs, 64, D] f16 GMEM, [lines + blocks, subs, 64] f32 GMEM, [lines, 2] int32 GMEM (`merge`),
    # and where scores of the only branch are kept [G, S, tiles·64, slots] f16 GMEM
    warpgroup_smem: tuple[Ref, Ref, Ref],  # SMEM, the same bytes: queries as they come [subs, D/64, pairs, G, 64], as
    # products read them [subs, D/64, 64, 64], and the result [subs, 64, D] f16
    ring_and_share_smem: tuple[Ref, Ref],  # SMEM, the same bytes: [2·stages, 64, D], and int32 words of `share_of`
    q_ready: Ref,  # [subs] barriers
    ready: Ref,  # [2·stages] barriers
    used: Ref,  # [2·stages] barriers
    share_read: Ref,  # barrier of all warpgroups
    tuning: Tuning,
    shape: Shape,
    interpret: bool,
) -> None:
    """Attends to one share of all lines' chunks: the body of a block that stays until its share is done.

    Warpgroups 0 … `subs` − 1 compute, warpgroup `subs` loads keys and warpgroup `subs` + 1 values. For each segment of
    the share a computing warpgroup leaves O/Σ and log2 Σ exp of its tile at place (line + block, warpgroup).
    """
    # Operands arrive flat: the fields of each branch one after the other, then the results.
    size = len(Refs._fields)
    inputs, (parts_ref, lse_ref, notes_ref, *kept) = refs[: size * len(shape.units)], refs[size * len(shape.units) :]
    branches = [Refs(*inputs[i : i + size]) for i in range(0, len(inputs), size)]
    product = product_of(interpret)
    dim, heads_of_set = q_ref.shape[2], shape.group_heads
    stages, subs = tuning.stages, tuning.subs
    # One region of shared memory holds, one after the other, the queries as TMA writes them, the same bytes as products
    # read them, and the result. Each computing warpgroup has a part of its own, so no other warpgroup has to be asked.
    q_rows, q_smem, out_smem = warpgroup_smem
    # The ring takes the place of the words of `share_of`: `share_read` keeps the loaders from the first copy until
    # every warpgroup has its words in registers.
    ring_smem, share_smem = ring_and_share_smem
    # A barrier's count is static, so `ready` counts the arrivals of the branch with the smallest units; a chunk of
    # larger units has fewer copies, and its loader makes up the difference.
    copies = max(CHUNK // unit for unit in shape.units)  # arrivals that a buffer waits for
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    counts = [Counts(of.number, unit) for of, unit in zip(branches, shape.units, strict=True)]
    copy = plgpu.copy_gmem_to_smem
    # What one line alone reads. With scores that are kept it took longer (dev/LOG.md).
    if shape.has_one_line and not kept:
        copy = functools.partial(l2_policy.load_to_leave, interpret=interpret)

    def buffers_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The places in the ring to which keys and values of the share's `number`-th chunk come."""
        # Even places are for keys and odd ones for values. `number` counts the chunks of the whole share, so the ring
        # goes on from one segment to the next.
        stage = lax.rem(number, stages)
        return 2 * stage, 2 * stage + 1

    def load(which: int, of: Refs, unit: int, segment: Segment) -> None:
        """Fills the ring with a segment's keys or values; looks the next chunk up while a buffer becomes free."""
        # A chunk is `per` units, a page `in_page` units, and the pages of a set are those of its key-value head.
        source = (of.keys, of.values)[which]
        per, page_size = CHUNK // unit, of.keys.shape[1]
        in_page, last = page_size // unit, of.unit.shape[2] - 1
        head = segment.of_set

        def look_up(chunk: jax.Array) -> list[jax.Array]:
            # Not asking how many tasks there are: behind the last, unit 0 may be read, and its result is not stored.
            at = chunk * per
            return [of.unit[segment.group, segment.of_set, lax.min(at + j, last)] for j in range(per)]

        def fill(chunk: jax.Array, units: list[jax.Array]) -> list[jax.Array]:
            # Loads from GMEM, issued before the wait: they come while the buffer becomes free.
            following = look_up(chunk + 1)
            number = segment.number + (chunk - segment.begin)
            buffer = buffers_of(number)[which]
            # The chunk `stages` before this one had the same buffer. `used` completes when every warpgroup that reads
            # it has arrived behind its product: one if warpgroups take chunks in turn, all of them otherwise. The first
            # round of the ring has nothing to wait for.
            pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, used.at[buffer]))
            # [unit, D] of one key-value head come by one TMA copy each, to the slots j·unit … of the chunk. Each copy
            # is one arrival at `ready`, complete when its bytes are.
            for j, name in enumerate(units):
                page = name if in_page == 1 else lax.div(name, in_page)
                start = 0 if in_page == 1 else pl.multiple_of(lax.rem(name, in_page) * unit, unit)
                target = ring_smem.at[buffer, pl.ds(j * unit, unit)]
                copy(source.at[page, pl.ds(start, unit), head], target, ready.at[buffer])
            # The arrivals that a branch of smaller units would have made by copies.
            for _ in range(copies - per):
                plgpu.barrier_arrive(ready.at[buffer])
            return following

        # The units of the segment's first chunk are looked up in front of the loop, those of each other chunk one turn
        # ahead.
        lax.fori_loop(segment.begin, segment.end, fill, look_up(segment.begin))

    def drain(which: int, number: jax.Array, _: None) -> None:
        # `fill` has waited for all but the last `stages` chunks. With these waits the loader ends only when no arrival
        # at its barriers is still to come.
        plgpu.barrier_wait(used.at[buffers_of(number)[which]])

    def compute(of: Refs, unit: int, segment: Segment) -> None:
        # Which rows these are: line `number_of_line` of the group serves tiles number_of_line·together …, and this
        # warpgroup computes one of them. If `together` is 1, all warpgroups compute the same tile, of different chunks.
        per, sub, size = CHUNK // unit, warpgroup, of.unit.shape[2]
        group, of_set = segment.group, segment.of_set
        line_query = segment.number_of_line * shape.in_line  # the line's first of the group
        tile = segment.number_of_line * shape.together + (sub if shape.together > 1 else 0)
        # `queries` is [K, words] flattened: a task has as many words as the group's queries need.
        words = of.queries.shape[2] // size
        first_query = lax.rem(group, shape.groups) * shape.queries + tile * shape.in_tile
        # Rows of q are (query, head) pairs with G heads of the set each, so 64/G queries make the 64 rows of a tile,
        # the heads of a query next to each other.
        # Behind the group's last query come others' or zeros.
        own_pairs = pl.ds(lax.div(group, shape.groups) * shape.of_request + first_query, shape.in_tile)
        own_heads = pl.ds(of_set * heads_of_set, heads_of_set)
        # The copy engine swizzles at most 64 numbers of a row at once, so D of 128 comes in two halves, each an arrival
        # at `q_ready`. The previous segment's result had these bytes: this warpgroup has waited until its store had
        # read them.
        for j in range(dim // HALF):
            source = q_ref.at[own_pairs, own_heads, pl.ds(j * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, q_rows.at[sub, j], q_ready.at[sub])
        # What is read from here to the queries' arrival takes as long as they do.
        own, apart = jnp.int32(0), 1  # the warpgroup's first chunk of the segment, and how far it is to its next
        if shape.together == 1:
            # Chunk n of the share is that of warpgroup n mod subs, whatever segment it is in. `stages` is a multiple of
            # `subs`, so a warpgroup always meets the same buffers and waits for every phase of their barriers.
            own, apart = lax.rem(sub + subs - lax.rem(segment.number, subs), subs), subs
        turns = lax.div(lax.max(segment.end - segment.begin - own, 0) + (apart - 1), apart)
        # A line's queries may begin behind the mask's first word; bits are counted from the line's first word on.
        first_word = lax.min(lax.div(line_query, WORD), words - 1)

        def tasks(turn: jax.Array) -> list[Task]:
            """Looks up the tasks of the chunk that this warpgroup takes at a turn."""
            found, begin = [], (segment.begin + own + turn * apart) * per
            for j in range(per):
                # Clamped, as the last chunk may have fewer tasks than places: what is read there is dropped through
                # `there`.
                at = lax.min(begin + j, size - 1)
                named = [
                    of.queries[group, of_set, at * words + lax.min(first_word + w, words - 1)]
                    for w in range(min(shape.words, words))
                ]
                # Behind the last of `number` tasks the plan itself names no query, and behind the K-th task nothing is
                # read.
                there = begin + j < size
                # The last line may have fewer words, whose last one is then read again.
                bits = tuple(
                    jnp.where(there & (first_word + w < words) if w else there, word, 0) for w, word in enumerate(named)
                )
                # Places of the sequence are counted in units; masks want slots.
                found.append(Task(of.place[group, of_set, at] * unit, bits))
            return found

        # Bounds of each of the 64 rows, one number a row in the layout that a product's rows have when reduced. Rows
        # without a query have bounds 0 … −1 and see nothing.
        tile_rows = pl.ds(tile * QUERIES, QUERIES)
        low, high = (
            plgpu.layout_cast(
                plgpu.load(of.bounds.at[group, i, tile_rows], optimized=False), online_softmax.row_layout()
            )
            for i in range(2)
        )
        # What all queries of the group see, if a task is theirs: from the largest first slot to the smallest last one.
        inner = of.inner[group, 0], of.inner[group, 1]
        # The first chunk's tasks; each turn of the loop looks up those of the next.
        upcoming = tasks(jnp.int32(0))
        # The query of each row, as the number of its bit counted from the line's first word. G is a power of two. A
        # line of fewer than 32 queries may begin inside a word.
        row = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=online_softmax.row_layout())
        query = row >> int(math.log2(heads_of_set))
        in_words = lax.rem(line_query, WORD) if shape.in_line < WORD else jnp.int32(0)  # of the line's first query
        of_tile = in_words + (tile * shape.in_tile - line_query)  # of the tile's
        query = query + of_tile

        def bit(task: Task, number: jax.Array) -> jax.Array:
            """Returns 1 if a task is query `number`'s, counted from the first query of the line's first word."""
            # Selects the word without indexing, which registers do not offer, then shifts the bit down. `number` may be
            # one scalar or a number a row.
            word: Any = task.words[0]
            for w, following in enumerate(task.words[1:], 1):
                word = jnp.where(number >= w * WORD, following, word)
            return (word >> (number & (WORD - 1))) & 1

        # Waits for the copies that this warpgroup sent for above. No other warpgroup uses this barrier.
        with jax.named_scope("wait q"):
            plgpu.barrier_wait(q_ready.at[sub])
        # On a GPU q_smem has the bytes of q_rows already: [pairs, G, 64] is [64, 64] with a pair and its heads as one
        # axis, and both are swizzled alike. Interpreted, the members of a union are arrays of their own.
        if interpret:
            q_smem[sub] = q_rows[sub].reshape(dim // HALF, QUERIES, HALF)
        # Not held in registers, which was no faster, and wrong of 64 dimensions (dev/LOG.md).
        halves = [q_smem.at[sub, j] for j in range(dim // HALF)]

        def softmax_over(
            scores: jax.Array, so_far: online_softmax.Softmax, now: list[Task]
        ) -> tuple[online_softmax.Softmax, jax.Array]:
            def masked(scores: jax.Array) -> jax.Array:
                # Piece j takes the columns j·unit … of the chunk, so slot s of the sequence is column s − place. Bounds
                # become columns; a row whose query has no part in the task gets the end −1, before every column.
                begins, ends = [], []
                for j, task in enumerate(now):
                    place = task.first - j * unit
                    begins.append(low - place)
                    ends.append(jnp.where(bit(task, query) != 0, high - place, -1))
                return online_softmax.between(scores, begins, ends, unit, shape.scale)

            # The condition is one scalar for the warpgroup, so this is a branch. Masking costs 470 of 1,150
            # instructions between products in units of 8 (dev/LOG.md).
            scores = lax.cond(is_everyones(now), lambda scores: scores, masked, scores)
            # The scale, which holds log2(e) as well, is applied here: masked scores are `MASKED` only after it.
            return online_softmax.advance(so_far, scores, jnp.exp2, scale=shape.scale)

        def lies_within(task: Task) -> jax.Array:
            """True if every query of the group whose task this is sees all of its slots."""
            # Bounds are positions of the sequence, as a task's first slot is.
            return (task.first >= inner[0]) & (task.first + (unit - 1) <= inner[1])

        def is_everyones(now: list[Task]) -> jax.Array:
            """True if all queries of the tile see the whole chunk, so that its scores need no mask."""
            # How many queries this tile has: of_tile … of_tile + there − 1 are the bits that must be set.
            there = lax.clamp(0, of.inner[group, 2] - tile * shape.in_tile, shape.in_tile)

            def below(number: jax.Array, w: int) -> jax.Array:
                """Returns word w of a mask with the bits of all queries before `number`."""
                # A shift by 32 has no defined result in MLIR, so a whole word is written as −1, all bits.
                number = lax.clamp(0, number - w * WORD, WORD)
                return jnp.where(number < WORD, (jnp.int32(1) << number) - 1, -1)

            all_of_it = jnp.bool_(True)
            for w in range(min(shape.words, words)):
                # In word w the bits of this tile's queries, which may be none.
                bits = below(of_tile + there, w) & ~below(of_tile, w)
                for task in now:
                    all_of_it = all_of_it & ((task.words[w] & bits) == bits) & lies_within(task)
            return all_of_it

        def is_seen_whole(now: list[Task]) -> jax.Array:
            """True if every task has a query and its queries see it from end to end: then V has no unseen slot."""
            whole = jnp.bool_(True)
            for task in now:
                # The words are those of the line: a task of other lines' queries alone, or the filling behind the last
                # task, has none of them, and its values are zeroed.
                someone = functools.reduce(jnp.bitwise_or, task.words) != 0
                whole = whole & someone & lies_within(task)
            return whole

        def clean(values: Ref, now: list[Task]) -> None:
            """Zeroes the slots of a chunk that no query of the line sees; every warpgroup of the line does so."""
            # One number a slot, in the layout of a product's rows: V in registers has its slots as rows. `at` is a
            # slot's place in the sequence.
            slot = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=online_softmax.row_layout())
            at = slot + of_part(slot, [task.first - j * unit for j, task in enumerate(now)], unit)

            # Bounds that are known would have the loop unrolled, which is seldom run.
            count = lax.clamp(0, of.inner[group, 2] - line_query, shape.in_line)

            def look(turn: jax.Array, seen: jax.Array) -> jax.Array:
                """Marks the slots that the next `AT_ONCE` queries see; their bounds are loaded together."""
                # Behind the last query the last one is looked at again, which changes nothing.
                numbers = [lax.min(turn * AT_ONCE + i, count - 1) for i in range(AT_ONCE)]
                bounds = [
                    [of.bounds[group, i, (line_query + number) * heads_of_set] for i in range(2)] for number in numbers
                ]
                for number, (first, last) in zip(numbers, bounds, strict=True):
                    # 1 in the slots of the tasks that are this query's; a slot counts as seen within its bounds too.
                    reads = of_part(slot, [bit(task, in_words + number) for task in now], unit)
                    seen = jnp.where((at >= first) & (at <= last), seen | reads, seen)
                return seen

            # No slot is seen yet.
            nobody = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), online_softmax.row_layout())
            seen = lax.fori_loop(0, lax.div(count + (AT_ONCE - 1), AT_ONCE), look, nobody)
            # V goes through registers and back to the same place. Where two warpgroups share the chunk, both write the
            # same numbers, so it does not matter that one may still be writing when the other multiplies.
            found = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
            store(values, jnp.where(across(seen, found.shape) != 0, found, jnp.zeros_like(found)))
            plgpu.commit_smem()

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            # One chunk: S = Q·Kᵀ [64, 64], mask and softmax, O += P·V [64, D]. `now` are this chunk's tasks, which the
            # turn before has looked up.
            softmax, now = state
            upcoming = tasks(turn + 1)  # takes as long as a chunk
            k_buffer, v_buffer = buffers_of(segment.number + own + turn * apart)
            # `ready` of this buffer completes when all units of the chunk's keys have come. The loader of keys is up to
            # `stages` chunks ahead.
            with jax.named_scope("wait k"):
                plgpu.barrier_wait(ready.at[k_buffer])
            # Halves of D, whose products add up to the scores.
            keys = (ring_smem.at[k_buffer, :, pl.ds(j * HALF, HALF)].transpose((1, 0)) for j in range(dim // HALF))
            scores = product(None, *zip(halves, keys, strict=True))
            # `product` returns when the tensor core is done, so nothing reads these keys any longer: their loader may
            # write the next ones while the softmax goes on.
            plgpu.barrier_arrive(used.at[k_buffer])
            # Where scores are kept, the raw products are stored by slot, before scale and mask. Only rows with a part
            # in a task store, since several tasks may stand at one place, for different queries.
            for scores_ref in kept:
                first_row = ((group * shape.sets + of_set) * shape.tiles + tile) * QUERIES
                parts = [bit(task, query) for task in now]
                firsts = [task.first for task in now]
                store_scores = functools.partial(store_by_slot, scores_ref, first_row, firsts, parts, scores)
                store_scores(group_heads=heads_of_set, interpret=interpret)
            # P [64, 64] stays in registers as bf16, in the layout in which the next product takes its first factor. O
            # and Σ are rescaled to the new maximum here.
            softmax, p = softmax_over(scores, softmax, now)
            # Values have a loader and barriers of their own, so they may come later than the keys without a stall.
            with jax.named_scope("wait v"):
                plgpu.barrier_wait(ready.at[v_buffer])
            values = ring_smem.at[v_buffer]
            # P is 0 where a query does not look, but 0 · NaN is NaN: slots that no query of the line sees are zeroed in
            # the ring before the product reads them.
            pl.when(jnp.logical_not(is_seen_whole(now)))(lambda: clean(values, now))
            # The last use of P's registers in this turn: products end before the next turn writes them
            # (dev/LOG.md).
            softmax = softmax._replace(acc=product(softmax.acc, (p, values)))
            # As for keys: the product is done, and the loader of values may overwrite the buffer.
            plgpu.barrier_arrive(used.at[v_buffer])
            return softmax, upcoming

        # A warpgroup without a chunk of this segment makes no turn; it leaves 0 and the log-sum-exp `2 · MASKED`, which
        # the merge weighs by 0.
        softmax, _ = lax.fori_loop(0, turns, step, (online_softmax.nothing_yet(dim), upcoming))
        # From one segment to the next line + block rises (`grouped_shares.py`), so no two segments have one place, and
        # the merge finds a line's segments one behind the other.
        place = (segment.line + block, sub)
        # One warpgroup writes where the line's segments begin and how many there are, for the merge.
        pl.when(sub == 0)(lambda: note(notes_ref, segment, block, interpret=interpret))
        with jax.named_scope("result"):
            # O/Σ [64, D] f32 and log2 Σ exp [64]; a row that saw nothing has 0 and `2 · MASKED`.
            result, lse = online_softmax.result(softmax, 2 * MASKED)
            store(lse_ref.at[place], lse)
            # The result takes the bytes of the queries, which the last product of this segment has read. f16 is
            # clipped, so no value becomes infinite.
            store(out_smem.at[sub], jnp.clip(result.astype(out_smem.dtype), -MAX_F16, MAX_F16))
            # The copy engine must see what ordinary stores have just written to shared memory.
            plgpu.commit_smem()
            rows = pl.ds(0, shape.stored)
            # The merge reads this soon, so its lines are to stay in the L2.
            l2_policy.store_to_stay(out_smem.at[sub, rows], parts_ref.at[*place, rows], interpret=interpret)
            # Only until the store has read shared memory: the next segment's queries come to these bytes. That the
            # results are in GMEM is for the end of the launch.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def walk(run: Callable[[Refs, int, Segment], None], read: Callable[[], None]) -> jax.Array:
        """Finds the share, calls `read` when its words are loaded and `run` for each segment; returns its chunks."""
        # All warpgroups find the same share by themselves, each with all of its 128 threads, in the same words of
        # shared memory: they write the same numbers.
        shares = {"lines": shape.lines, "blocks": tuning.blocks}
        # The share's words are scalars in registers from here on.
        share = share_of(block, counts, share_smem, interpret=interpret, **shares)
        read()
        # One function for each branch, as references and units are static.
        visit = [functools.partial(run, of, unit) for of, unit in zip(branches, shape.units, strict=True)]
        return grouped_shares.walk(share, block, counts, visit, lines=shape.lines)

    def has_read() -> None:
        # Loads of the share's words may still be under way, but copies come a thousand cycles later: behind the
        # others' arrivals, a fence, and two loads from GMEM.
        plgpu.barrier_arrive(share_read)

    def begin_ring() -> None:
        """Waits until all warpgroups have loaded the share's words, whose bytes the ring then takes."""
        has_read()
        # All warpgroups arrive here, loaders included; loaders alone wait, since they alone write to the ring.
        plgpu.barrier_wait(share_read)
        # Ordinary accesses to these bytes come before the copy engine's writes to them.
        plgpu.commit_smem()

    # Both loaders walk the same segments as the computing warpgroups, and run ahead of them by up to the ring's depth.
    for which in range(LOADERS):

        @pl.when(warpgroup == subs + which)
        def _load(which: int = which) -> None:
            # A loader needs few registers; those that it gives back are what the computing warpgroups take.
            if not interpret:
                plgpu.set_max_registers(tuning.registers.loading, action="decrease")
            with jax.named_scope("load"):
                chunks = walk(functools.partial(load, which), begin_ring)
                lax.fori_loop(lax.max(chunks - stages, 0), chunks, functools.partial(drain, which), None)

    @pl.when(warpgroup < subs)
    def _compute() -> None:
        # Waits until the loaders have given theirs back.
        if not interpret:
            plgpu.set_max_registers(tuning.registers.computing, action="increase")
        with jax.named_scope("compute"):
            # A computing warpgroup arrives for its words and goes on to its queries, which have bytes of their own.
            walk(compute, has_read)
