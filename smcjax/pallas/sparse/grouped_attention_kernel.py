"""Attention of query groups to their tasks (Mosaic, Hopper).

A *line* is what is read for one softmax: the tasks of a group, one set's key-value head and a branch, gathered to
chunks of 64 slots. The rows of a group (C·G: G heads a set of each query) are *tiles* of 64, a warpgroup's product:

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V        for every chunk

Of a group of one tile the computing warpgroups take a line's chunks in turn. In larger groups a line is for as many
tiles as there are such warpgroups, each of which takes every chunk for its own.

The chunks of all lines, one line after the other, are cut into as many equal shares as there are multiprocessors, and
one block has one share (`grouped_shares.py`): a *segment* of each line that its share touches. So all blocks are done
at about the same time whatever the tasks are, and none begins anew for another line: two warpgroups, one for keys and
one for values, look tasks up, fill a ring in shared memory unit by unit, by TMA, and run ahead into the next segment
while the others, which compute, finish one.

A query sees a slot where its bit of the task is set and the slot lies between its bounds. In a chunk that some query
does not see whole, V is zeroed where nobody looks, since 0 · NaN is NaN. A second launch merges the segments of each
line in a fixed order (`grouped_merge.py`).

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

from smcjax.pallas.attention.prefix_shared import HALF, MOST_F16
from smcjax.pallas.mosaic import l2_policy, online_softmax
from smcjax.pallas.mosaic.bitmask import WORD
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref, across, of_part, product_of
from smcjax.pallas.sparse import grouped_shares
from smcjax.pallas.sparse.grouped_attention import CHUNK
from smcjax.pallas.sparse.grouped_shares import LOADERS, Counts, Segment, Tuning, note, share_of
from smcjax.pallas.sparse.kept_scores import store_by_slot

AT_ONCE = 4  # queries whose bounds are asked for together, as each answer takes half a microsecond


class Refs(NamedTuple):
    """A branch in GMEM, G = R·g groups."""

    keys: Ref  # [P, B, Hkv, D]
    values: Ref  # [P, B, Hkv, D]
    unit: Ref  # [G, S, K] int32
    place: Ref  # [G, S, K] int32
    queries: Ref  # [G, S, K·words] int32
    number: Ref  # [G, S] int32
    bounds: Ref  # [G, 2, width] int32: the first and last slot that a row sees
    inner: Ref  # [G, 3] int32: what every query of the group sees lies between; how many there are


class Task(NamedTuple):
    """One task of a chunk, as its queries must know it."""

    first: jax.Array  # slot
    words: tuple[jax.Array, ...]  # those that the line's queries are in, a bit each; 0 where there is no task


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
        """Lines of a group, set and branch."""
        return -(-self.rows // (self.together * QUERIES))

    @property
    def tiles(self) -> int:
        """Products' widths of a group's rows."""
        return -(-self.rows // QUERIES)

    @property
    def stored(self) -> int:
        """Rows of a tile whose results are stored: of an only tile those that a query has, in whole eights."""
        return min(QUERIES, -(-self.rows // 8) * 8)

    @property
    def width(self) -> int:
        """Rows of a group's lines, those of a last tile that has none included."""
        return self.lines * self.together * QUERIES

    @property
    def in_tile(self) -> int:
        """Queries of a tile."""
        return QUERIES // self.group_heads

    @property
    def in_line(self) -> int:
        """Queries of a line."""
        return self.in_tile * self.together

    @property
    def words(self) -> int:
        """Words of a mask that a line's queries are in."""
        return -(-self.in_line // WORD)

    @property
    def has_one_line(self) -> bool:
        """True where a request's set and branch are one line."""
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
    size = len(Refs._fields)
    inputs, (parts_ref, lse_ref, notes_ref, *kept) = refs[: size * len(shape.units)], refs[size * len(shape.units) :]
    branches = [Refs(*inputs[i : i + size]) for i in range(0, len(inputs), size)]
    product = product_of(interpret)
    dim, heads_of_set = q_ref.shape[2], shape.group_heads
    stages, subs = tuning.stages, tuning.subs
    q_rows, q_smem, out_smem = warpgroup_smem
    ring_smem, share_smem = ring_and_share_smem
    copies = max(CHUNK // unit for unit in shape.units)  # arrivals that a buffer waits for
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    counts = [Counts(of.number, unit) for of, unit in zip(branches, shape.units, strict=True)]
    copy = plgpu.copy_gmem_to_smem
    of_one_head = shape.sets == branches[0].keys.shape[2]
    # What one line alone reads. With scores that are kept it took longer (dev/LOG.md).
    if shape.has_one_line and of_one_head and not kept:
        copy = functools.partial(l2_policy.load_to_leave, interpret=interpret)

    def buffers_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The places in the ring to which keys and values of the share's `number`-th chunk come."""
        stage = lax.rem(number, stages)
        return 2 * stage, 2 * stage + 1

    def load(which: int, of: Refs, unit: int, segment: Segment) -> None:
        """Fills the ring with keys or values; the next chunk's units are looked up while a buffer becomes free."""
        source = (of.keys, of.values)[which]
        per, (_, page_size, kv_heads, _) = CHUNK // unit, of.keys.shape
        in_page, last = page_size // unit, of.unit.shape[2] - 1
        head = lax.div(segment.of_set * kv_heads, shape.sets)

        def look_up(chunk: jax.Array) -> list[jax.Array]:
            # Not asking how many tasks there are: behind the last, unit 0 may be read, and nobody sees it.
            at = chunk * per
            return [of.unit[segment.group, segment.of_set, lax.min(at + j, last)] for j in range(per)]

        def fill(chunk: jax.Array, units: list[jax.Array]) -> list[jax.Array]:
            following = look_up(chunk + 1)
            number = segment.number + (chunk - segment.begin)
            buffer = buffers_of(number)[which]
            pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, used.at[buffer]))
            for j, name in enumerate(units):
                page = name if in_page == 1 else lax.div(name, in_page)
                start = 0 if in_page == 1 else pl.multiple_of(lax.rem(name, in_page) * unit, unit)
                target = ring_smem.at[buffer, pl.ds(j * unit, unit)]
                copy(source.at[page, pl.ds(start, unit), head], target, ready.at[buffer])
            for _ in range(copies - per):
                plgpu.barrier_arrive(ready.at[buffer])
            return following

        lax.fori_loop(segment.begin, segment.end, fill, look_up(segment.begin))

    def drain(which: int, number: jax.Array, _: None) -> None:
        plgpu.barrier_wait(used.at[buffers_of(number)[which]])

    def compute(of: Refs, unit: int, segment: Segment) -> None:
        per, sub, size = CHUNK // unit, warpgroup, of.unit.shape[2]
        group, of_set = segment.group, segment.of_set
        line_query = segment.number_of_line * shape.in_line  # the line's first of the group
        tile = segment.number_of_line * shape.together + (sub if shape.together > 1 else 0)
        words = of.queries.shape[2] // size
        first_query = lax.rem(group, shape.groups) * shape.queries + tile * shape.in_tile
        # Behind the group's last query come others' or zeros.
        own_pairs = pl.ds(lax.div(group, shape.groups) * shape.of_request + first_query, shape.in_tile)
        own_heads = pl.ds(of_set * heads_of_set, heads_of_set)
        for j in range(dim // HALF):
            source = q_ref.at[own_pairs, own_heads, pl.ds(j * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, q_rows.at[sub, j], q_ready.at[sub])
        # What is read from here to the queries' arrival takes as long as they do.
        own, apart = jnp.int32(0), 1  # the warpgroup's first chunk of the segment, and how far it is to its next
        if shape.together == 1:
            own, apart = lax.rem(sub + subs - lax.rem(segment.number, subs), subs), subs
        turns = lax.div(lax.max(segment.end - segment.begin - own, 0) + (apart - 1), apart)
        first_word = lax.min(lax.div(line_query, WORD), words - 1)

        def tasks(turn: jax.Array) -> list[Task]:
            """The tasks of a turn's chunk."""
            found, begin = [], (segment.begin + own + turn * apart) * per
            for j in range(per):
                at = lax.min(begin + j, size - 1)
                named = [
                    of.queries[group, of_set, at * words + lax.min(first_word + w, words - 1)]
                    for w in range(min(shape.words, words))
                ]
                there = begin + j < size
                # The last line may have fewer words, whose last one is then read again.
                bits = tuple(
                    jnp.where(there & (first_word + w < words) if w else there, word, 0) for w, word in enumerate(named)
                )
                found.append(Task(of.place[group, of_set, at] * unit, bits))
            return found

        tile_rows = pl.ds(tile * QUERIES, QUERIES)
        low, high = (
            plgpu.layout_cast(
                plgpu.load(of.bounds.at[group, i, tile_rows], optimized=False), online_softmax.row_layout()
            )
            for i in range(2)
        )
        inner = of.inner[group, 0], of.inner[group, 1]
        upcoming = tasks(jnp.int32(0))
        row = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=online_softmax.row_layout())
        query = row >> int(math.log2(heads_of_set))
        in_words = lax.rem(line_query, WORD) if shape.in_line < WORD else jnp.int32(0)  # of the line's first query
        of_tile = in_words + (tile * shape.in_tile - line_query)  # of the tile's
        query = query + of_tile

        def bit(task: Task, number: jax.Array) -> jax.Array:
            """1 where a task is that of query `number`, counted from the line's first word's."""
            word: Any = task.words[0]
            for w, following in enumerate(task.words[1:], 1):
                word = jnp.where(number >= w * WORD, following, word)
            return (word >> (number & (WORD - 1))) & 1

        with jax.named_scope("wait q"):
            plgpu.barrier_wait(q_ready.at[sub])
        if interpret:
            q_smem[sub] = q_rows[sub].reshape(dim // HALF, QUERIES, HALF)
        # Not held in registers, which was no faster, and wrong of 64 dimensions (dev/LOG.md).
        halves = [q_smem.at[sub, j] for j in range(dim // HALF)]

        def softmax_over(
            scores: jax.Array, so_far: online_softmax.Softmax, now: list[Task]
        ) -> tuple[online_softmax.Softmax, jax.Array]:
            def masked(scores: jax.Array) -> jax.Array:
                begins, ends = [], []
                for j, task in enumerate(now):
                    place = task.first - j * unit
                    begins.append(low - place)
                    ends.append(jnp.where(bit(task, query) != 0, high - place, -1))
                return online_softmax.between(scores, begins, ends, unit, shape.scale)

            scores = lax.cond(is_everyones(now), lambda scores: scores, masked, scores)
            return online_softmax.advance(so_far, scores, jnp.exp2, scale=shape.scale)

        def lies_within(task: Task) -> jax.Array:
            """True for a task from whose first to its last slot all queries of the group see, if it is theirs."""
            return (task.first >= inner[0]) & (task.first + (unit - 1) <= inner[1])

        def is_everyones(now: list[Task]) -> jax.Array:
            """True where all queries of the tile see a chunk whole."""
            there = lax.clamp(0, of.inner[group, 2] - tile * shape.in_tile, shape.in_tile)

            def below(number: jax.Array, w: int) -> jax.Array:
                """The bits of word w of queries before a number."""
                number = lax.clamp(0, number - w * WORD, WORD)
                return jnp.where(number < WORD, (jnp.int32(1) << number) - 1, -1)

            all_of_it = jnp.bool_(True)
            for w in range(min(shape.words, words)):
                bits = below(of_tile + there, w) & ~below(of_tile, w)
                for task in now:
                    all_of_it = all_of_it & ((task.words[w] & bits) == bits) & lies_within(task)
            return all_of_it

        def is_seen_whole(now: list[Task]) -> jax.Array:
            """True where every task of a chunk is seen from end to end by all of its queries, of which it has some."""
            whole = jnp.bool_(True)
            for task in now:
                someone = functools.reduce(jnp.bitwise_or, task.words) != 0
                whole = whole & someone & lies_within(task)
            return whole

        def clean(values: Ref, now: list[Task]) -> None:
            """Zeros in the slots of a chunk that no query of the line sees; every warpgroup of the line writes them."""
            slot = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=online_softmax.row_layout())
            at = slot + of_part(slot, [task.first - j * unit for j, task in enumerate(now)], unit)

            # Bounds that are known would have the loop unrolled, which is seldom run.
            count = lax.clamp(0, of.inner[group, 2] - line_query, shape.in_line)

            def look(turn: jax.Array, seen: jax.Array) -> jax.Array:
                """Takes in some queries, whose bounds are on their way together."""
                numbers = [lax.min(turn * AT_ONCE + i, count - 1) for i in range(AT_ONCE)]
                bounds = [
                    [of.bounds[group, i, (line_query + number) * heads_of_set] for i in range(2)] for number in numbers
                ]
                for number, (first, last) in zip(numbers, bounds, strict=True):
                    reads = of_part(slot, [bit(task, in_words + number) for task in now], unit)
                    seen = jnp.where((at >= first) & (at <= last), seen | reads, seen)
                return seen

            nobody = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), online_softmax.row_layout())
            seen = lax.fori_loop(0, lax.div(count + (AT_ONCE - 1), AT_ONCE), look, nobody)
            found = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
            values[...] = jnp.where(across(seen, found.shape) != 0, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            softmax, now = state
            upcoming = tasks(turn + 1)  # takes as long as a chunk
            k_buffer, v_buffer = buffers_of(segment.number + own + turn * apart)
            with jax.named_scope("wait k"):
                plgpu.barrier_wait(ready.at[k_buffer])
            # Halves of D, whose products add up to the scores.
            keys = (ring_smem.at[k_buffer, :, pl.ds(j * HALF, HALF)].transpose((1, 0)) for j in range(dim // HALF))
            scores = product(None, *zip(halves, keys, strict=True))
            plgpu.barrier_arrive(used.at[k_buffer])
            for scores_ref in kept:
                first_row = ((group * shape.sets + of_set) * shape.tiles + tile) * QUERIES
                parts = [bit(task, query) for task in now]
                firsts = [task.first for task in now]
                store = functools.partial(store_by_slot, scores_ref, first_row, firsts, parts, scores)
                store(group_heads=heads_of_set, interpret=interpret)
            softmax, p = softmax_over(scores, softmax, now)
            with jax.named_scope("wait v"):
                plgpu.barrier_wait(ready.at[v_buffer])
            values = ring_smem.at[v_buffer]
            pl.when(jnp.logical_not(is_seen_whole(now)))(lambda: clean(values, now))
            softmax = softmax._replace(acc=product(softmax.acc, (p, values)))
            plgpu.barrier_arrive(used.at[v_buffer])
            return softmax, upcoming

        softmax, _ = lax.fori_loop(0, turns, step, (online_softmax.nothing_yet(dim), upcoming))
        place = (segment.line + block, sub)
        pl.when(sub == 0)(lambda: note(notes_ref, segment, block, interpret=interpret))
        with jax.named_scope("result"):
            result, lse_ref.at[place][...] = online_softmax.result(softmax, 2 * MASKED)
            out_smem[sub] = jnp.clip(result.astype(out_smem.dtype), -MOST_F16, MOST_F16)
            plgpu.commit_smem()
            rows = pl.ds(0, shape.stored)
            l2_policy.store_to_stay(out_smem.at[sub, rows], parts_ref.at[*place, rows], interpret=interpret)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def walk(run: Callable[[Refs, int, Segment], None], read: Callable[[], None]) -> jax.Array:
        """Runs for each segment of the block's share, whose words have been `read`; returns the share's chunks."""
        shares = {"lines": shape.lines, "blocks": tuning.blocks}
        share = share_of(block, counts, share_smem, interpret=interpret, **shares)
        read()
        visit = [functools.partial(run, of, unit) for of, unit in zip(branches, shape.units, strict=True)]
        return grouped_shares.walk(share, block, counts, visit, lines=shape.lines)

    def has_read() -> None:
        # Loads of the share's words may still be under way, but copies come a thousand cycles later: behind the
        # others' arrivals, a fence, and two loads from GMEM.
        plgpu.barrier_arrive(share_read)

    def begin_ring() -> None:
        """Waits until nobody needs the words in whose place the ring comes."""
        has_read()
        plgpu.barrier_wait(share_read)
        plgpu.commit_smem()

    for which in range(LOADERS):

        @pl.when(warpgroup == subs + which)
        def _load(which: int = which) -> None:
            if not interpret:
                plgpu.set_max_registers(tuning.registers.loading, action="decrease")
            with jax.named_scope("load"):
                chunks = walk(functools.partial(load, which), begin_ring)
                lax.fori_loop(lax.max(chunks - stages, 0), chunks, functools.partial(drain, which), None)

    @pl.when(warpgroup < subs)
    def _compute() -> None:
        if not interpret:
            plgpu.set_max_registers(tuning.registers.computing, action="increase")
        with jax.named_scope("compute"):
            walk(compute, has_read)
