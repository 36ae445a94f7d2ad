"""Attention of query groups to their tasks: the kernel and the one that merges (Mosaic, Hopper).

One block serves a group, one set's key-value head, one *tile* of the group's queries (C·G rows, G heads a set, packed
64 to a warpgroup's product) and one share of the tasks, gathered to chunks of 64 slots:

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V        for every chunk of the share

A warpgroup of its own looks tasks up and fills a ring in shared memory unit by unit, by TMA: K of a chunk, V of it, K
of the next. The others compute and take the chunks in turn. A query sees a slot where its bit of the task is set and
the slot lies between its bounds. In a chunk that some query does not see whole, V is zeroed where nobody looks, since
0 · NaN is NaN. A second launch merges the shares in a fixed order (`shared_merge.py`).

*Branches* (of Native Sparse Attention: compressed tokens, selected blocks, a window) are attentions of the same queries
to pages, tasks and bounds of their own, each with its own softmax. One launch takes several, so that all blocks of a
layer fill the GPU together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas import eviction, online_softmax
from smcjax.pallas.flags import WORD
from smcjax.pallas.grouped_attention import CHUNK
from smcjax.pallas.kept_scores import store_by_slot
from smcjax.pallas.products import MASKED, QUERIES, Ref, across, of_part, product_of
from smcjax.pallas.shared_attention import HALF, MOST_F16
from smcjax.pallas.shared_merge import UNIT, merged, units_of
from smcjax.pallas.shared_tuning import Tuning, part_of_share

AT_ONCE = 4  # queries whose bounds are asked for together, as each answer takes half a microsecond


class Refs(NamedTuple):
    """A branch in GMEM, G = R·g groups."""

    keys: Ref  # [P, B, Hkv, D]
    values: Ref  # [P, B, Hkv, D]
    unit: Ref  # [G, S, K] int32
    place: Ref  # [G, S, K] int32
    queries: Ref  # [G, S, K·words] int32
    number: Ref  # [G, S] int32
    bounds: Ref  # [G, 2, tiles·64] int32: the first and last slot that a row sees
    inner: Ref  # [G, 3] int32: what every query of the group sees lies between; how many there are


class Task(NamedTuple):
    """One task of a chunk, as its queries must know it."""

    first: jax.Array  # slot
    words: tuple[jax.Array, ...]  # of the tile's queries, a bit each; 0 where there is no task


class Shape(NamedTuple):
    """Static numbers of a launch."""

    queries: int  # C
    group_heads: int  # heads of a set, a power of two
    sets: int  # S
    groups: int  # g, of a request
    of_request: int  # M
    units: tuple[int, ...]  # slots, by branch
    scale: float  # of scores in base 2

    @property
    def rows(self) -> int:
        """Rows of a group: its queries' heads of a set."""
        return self.queries * self.group_heads

    @property
    def tiles(self) -> int:
        """Products' widths of a group's rows."""
        return -(-self.rows // QUERIES)

    @property
    def by_pair(self) -> bool:
        """True where what is merged at once lies within the heads of one query."""
        return self.group_heads % UNIT == 0

    @property
    def in_tile(self) -> int:
        """Queries of a tile."""
        return QUERIES // self.group_heads

    @property
    def words(self) -> int:
        """Words of a mask that a tile's queries are in."""
        return -(-self.in_tile // WORD)


def attend(
    q_ref: Ref,  # [R·M, H, D] GMEM, in the groups' order
    *refs: Ref,  # `Refs` of each branch, then results:
    # [G, shares, subs, S, 1, 64, D] f16 GMEM, [G, shares, subs, S, 1, 64] f32 GMEM,
    # and where scores of the only branch are kept [G, S, tiles·64, slots] f32 GMEM
    warpgroup_smem: tuple[Ref, Ref, Ref],  # SMEM, the same bytes: queries as they come [subs, D/64, pairs, G, 64], as
    # products read them [subs, D/64, 64, 64], and the result [subs, 64, D] f16
    ring_smem: Ref,  # [2·stages, 64, D] SMEM
    q_ready: Ref,  # [subs] barriers
    ready: Ref,  # [2·stages] barriers
    used: Ref,  # [2·stages] barriers
    tuning: Tuning,
    shape: Shape,
    interpret: bool,
) -> None:
    size = len(Refs._fields)
    inputs, (parts_ref, lse_ref, *kept) = refs[: size * len(shape.units)], refs[size * len(shape.units) :]
    branches = [Refs(*inputs[i : i + size]) for i in range(0, len(inputs), size)]
    product = product_of(interpret)
    dim, heads_of_set = q_ref.shape[2], shape.group_heads
    stages, subs = tuning.stages, tuning.subs
    q_rows, q_smem, out_smem = warpgroup_smem
    copies = max(CHUNK // unit for unit in shape.units)  # arrivals that a buffer waits for
    group, of_set, share = lax.axis_index("group"), lax.axis_index("set"), lax.axis_index("share")
    warpgroup = lax.axis_index("warpgroup")

    part, index, splits = part_of_share(share, tuning.splits)  # a part is a tile of a branch
    branch, tile = lax.div(part, shape.tiles), lax.rem(part, shape.tiles)

    def number_of_chunks(of: Refs, per: int) -> jax.Array:
        """Chunks of the share: every `splits`-th of `per` tasks each."""
        chunks = lax.div(of.number[group, of_set] + (per - 1), per)
        return lax.div(lax.max(chunks - index, 0) + (splits - 1), splits)

    def buffers_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The places in the ring to which keys and values of the share's `number`-th chunk come."""
        stage = lax.rem(number, stages)
        return 2 * stage, 2 * stage + 1

    def load(of: Refs, unit: int) -> None:
        """Fills the ring; the next chunk's units are looked up while this one's buffers become free."""
        per, (_, page_size, kv_heads, _) = CHUNK // unit, of.keys.shape
        in_page, last = page_size // unit, of.unit.shape[2] - 1
        head = lax.div(of_set * kv_heads, shape.sets)
        count = number_of_chunks(of, per)

        def look_up(number: jax.Array) -> list[jax.Array]:
            # Not asking how many tasks there are: behind the last, unit 0 may be read, and nobody sees it.
            at = (index + number * splits) * per
            return [of.unit[group, of_set, lax.min(at + j, last)] for j in range(per)]

        def fill(number: jax.Array, units: list[jax.Array]) -> list[jax.Array]:
            following = look_up(number + 1)
            for source, buffer in zip((of.keys, of.values), buffers_of(number), strict=True):
                pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, used.at[buffer]))
                for j, name in enumerate(units):
                    page = name if in_page == 1 else lax.div(name, in_page)
                    start = 0 if in_page == 1 else pl.multiple_of(lax.rem(name, in_page) * unit, unit)
                    target = ring_smem.at[buffer, pl.ds(j * unit, unit)]
                    plgpu.copy_gmem_to_smem(source.at[page, pl.ds(start, unit), head], target, ready.at[buffer])
                for _ in range(copies - per):
                    plgpu.barrier_arrive(ready.at[buffer])
            return following

        def drain(number: jax.Array, _: None) -> None:
            for buffer in buffers_of(number):
                plgpu.barrier_wait(used.at[buffer])

        lax.fori_loop(0, count, fill, look_up(jnp.int32(0)))
        lax.fori_loop(lax.max(count - stages, 0), count, drain, None)

    def compute(of: Refs, unit: int) -> None:
        per, sub, size = CHUNK // unit, warpgroup, of.unit.shape[2]
        words = of.queries.shape[2] // size
        first_query = lax.rem(group, shape.groups) * shape.queries + tile * shape.in_tile
        # Behind the group's last query come others' or zeros.
        own_pairs = pl.ds(lax.div(group, shape.groups) * shape.of_request + first_query, shape.in_tile)
        own_heads = pl.ds(of_set * heads_of_set, heads_of_set)
        for j in range(dim // HALF):
            source = q_ref.at[own_pairs, own_heads, pl.ds(j * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, q_rows.at[sub, j], q_ready.at[sub])
        # What is read from here to the queries' arrival takes as long as they do.
        count = number_of_chunks(of, per)
        turns = lax.div(lax.max(count - sub, 0) + (subs - 1), subs)
        first_word = lax.min(lax.div(tile * shape.in_tile, WORD), words - 1)

        def tasks(turn: jax.Array) -> list[Task]:
            """The tasks of a turn's chunk."""
            found, begin = [], (index + (turn * subs + sub) * splits) * per
            for j in range(per):
                at = lax.min(begin + j, size - 1)
                named = [
                    of.queries[group, of_set, at * words + lax.min(first_word + w, words - 1)]
                    for w in range(min(shape.words, words))
                ]
                there = begin + j < size
                bits = tuple(jnp.where(there, word, 0) for word in named)
                found.append(Task(of.place[group, of_set, at] * unit, bits))
            return found

        tile_rows = pl.ds(tile * QUERIES, QUERIES)
        low, high = (
            plgpu.layout_cast(plgpu.load(of.bounds.at[group, i, tile_rows], optimized=False), online_softmax.ROWS)
            for i in range(2)
        )
        inner = of.inner[group, 0], of.inner[group, 1]
        upcoming = tasks(jnp.int32(0))
        row = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=online_softmax.ROWS)
        query = row >> int(math.log2(heads_of_set))
        if shape.in_tile < WORD:
            query = query + lax.rem(tile * shape.in_tile, WORD)

        def bit(task: Task, number: jax.Array) -> jax.Array:
            """1 where a task is that of the tile's query `number`, counted from the first word's."""
            word: Any = task.words[0]
            for w, following in enumerate(task.words[1:], 1):
                word = jnp.where(number >= w * WORD, following, word)
            return (word >> (number & (WORD - 1))) & 1

        with jax.named_scope("wait q"):
            plgpu.barrier_wait(q_ready.at[sub])
        if interpret:
            q_smem[sub] = q_rows[sub].reshape(dim // HALF, QUERIES, HALF)
        halves: list[Any] = [q_smem.at[sub, j] for j in range(dim // HALF)]
        # Of 64 dimensions, held over several chunks, they came out wrong on an H200 (dev/LOG.md); of 128 they do not.
        if dim > HALF and tuning.holds_queries(dim=dim, chunk=CHUNK):
            halves = [plgpu.load(half, layout=plgpu.Layout.WGMMA, optimized=False) for half in halves]

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
            first = lax.rem(tile * shape.in_tile, WORD) if shape.in_tile < WORD else jnp.int32(0)
            there = lax.clamp(0, of.inner[group, 2] - tile * shape.in_tile, shape.in_tile)
            all_of_it = jnp.bool_(True)
            for w in range(min(shape.words, words)):
                number = lax.clamp(0, there - w * WORD, WORD)
                bits = jnp.where(number < WORD, (jnp.int32(1) << number) - 1, -1) << first
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
            """Zeros in the slots of a chunk that no query of the tile sees."""
            slot = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=online_softmax.ROWS)
            at = slot + of_part(slot, [task.first - j * unit for j, task in enumerate(now)], unit)

            # Bounds that are known would have the loop unrolled, which is seldom run.
            count = lax.clamp(0, of.inner[group, 2] - tile * shape.in_tile, shape.in_tile)

            def look(turn: jax.Array, seen: jax.Array) -> jax.Array:
                """Takes in some queries, whose bounds are on their way together."""
                numbers = [lax.min(turn * AT_ONCE + i, count - 1) for i in range(AT_ONCE)]
                bounds = [
                    [of.bounds[group, i, tile * QUERIES + number * heads_of_set] for i in range(2)]
                    for number in numbers
                ]
                for number, (first, last) in zip(numbers, bounds, strict=True):
                    within = number + lax.rem(tile * shape.in_tile, WORD) if shape.in_tile < WORD else number
                    reads = of_part(slot, [bit(task, within) for task in now], unit)
                    seen = jnp.where((at >= first) & (at <= last), seen | reads, seen)
                return seen

            nobody = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), online_softmax.ROWS)
            seen = lax.fori_loop(0, lax.div(count + (AT_ONCE - 1), AT_ONCE), look, nobody)
            found = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
            values[...] = jnp.where(across(seen, found.shape) != 0, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        def step(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            softmax, now = state
            upcoming = tasks(turn + 1)  # takes as long as a chunk
            k_buffer, v_buffer = buffers_of(turn * subs + sub)
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
        place = (group, share, sub, of_set, 0)
        with jax.named_scope("result"):
            result, lse_ref.at[place][...] = online_softmax.result(softmax, 2 * MASKED)
            out_smem[sub] = jnp.clip(result.astype(out_smem.dtype), -MOST_F16, MOST_F16)
            plgpu.commit_smem()
            eviction.store_to_stay(out_smem.at[sub], parts_ref.at[place], interpret=interpret)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def for_branch(run: Callable[[Refs, int], None]) -> None:
        for b, (of, unit) in enumerate(zip(branches, shape.units, strict=True)):
            pl.when(branch == b)(functools.partial(run, of, unit))

    @pl.when(warpgroup == subs)
    def _load() -> None:
        if tuning.registers and not interpret:
            plgpu.set_max_registers(tuning.registers.loading, action="decrease")
        with jax.named_scope("load"):
            for_branch(load)

    @pl.when(warpgroup < subs)
    def _compute() -> None:
        if tuning.registers and not interpret:
            plgpu.set_max_registers(tuning.registers.computing, action="increase")
        with jax.named_scope("compute"):
            for_branch(compute)


def merge(
    parts_ref: Ref,  # [G, shares, subs, S, 1, 64, D] f16 GMEM
    lse_ref: Ref,  # [G, shares, subs, S, 1, 64] f32 GMEM
    *results: Ref,  # f32 GMEM, of each branch outputs and log-sum-exps (`result_types`)
    tuning: Tuning,
    shape: Shape,
) -> None:
    """Merges a unit of four rows, branch by branch."""
    group, of_set, unit = (lax.axis_index(name) for name in ("group", "set", "unit"))
    row = unit * UNIT
    for b, (out_ref, sums_ref) in enumerate(zip(results[::2], results[1::2], strict=True)):
        parts = range(b * shape.tiles, (b + 1) * shape.tiles)
        found = merged(parts_ref, lse_ref, unit, group=group, head=of_set, tuning=tuning, parts=parts)
        lse = jnp.where(found.top > 1.5 * MASKED, (found.top + jnp.log2(found.mass)) * math.log(2), -jnp.inf)
        if not shape.by_pair:
            sums_ref[group, of_set, pl.ds(row, UNIT)] = lse
            out_ref[group, of_set, pl.ds(row, UNIT)] = found.out
            continue
        in_request = lax.rem(group, shape.groups) * shape.queries + lax.div(row, shape.group_heads)
        pair = lax.div(group, shape.groups) * shape.of_request + in_request
        heads = pl.ds(of_set * shape.group_heads + lax.rem(row, shape.group_heads), UNIT)

        @pl.when(in_request < shape.of_request)
        def _store(
            to: tuple[Ref, Ref] = (out_ref, sums_ref),
            at: tuple[Any, Any] = (pair, heads),
            found: tuple[Any, Any] = (found.out, lse),
        ) -> None:
            for ref, values in zip(to, found, strict=True):
                ref[at] = values


def result_types(shape: Shape, requests: int, dim: int) -> list[Any]:
    """Outputs and log-sum-exps of each branch: by pair where a unit lies within the heads of one, else by group.

    [R·M, S·G heads, D], or [G, S, units·4, D]; log-sum-exps without D. Each is an array of its own, which XLA need not
    cut.
    """
    lead: tuple[int, ...] = (requests * shape.of_request, shape.sets * shape.group_heads)
    if not shape.by_pair:
        lead = (requests * shape.groups, shape.sets, units_of(shape.rows) * UNIT)
    shapes = ((*lead, dim), lead) * len(shape.units)
    return [jax.ShapeDtypeStruct(one, jnp.float32) for one in shapes]
