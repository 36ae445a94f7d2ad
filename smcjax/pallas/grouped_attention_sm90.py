"""Attention of query groups to their tasks: two Mosaic GPU kernels (Hopper). Their reference: `grouped_attention.py`.

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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from smcjax.device import HOPPER
from smcjax.pallas import eviction, online_softmax
from smcjax.pallas.attention import divisor_of
from smcjax.pallas.dispatch import Kernel
from smcjax.pallas.grouped_attention import WORD, Branch, Part, Tasks, grouped_attention, grouped_branches
from smcjax.pallas.products import MASKED, QUERIES, SWIZZLED, Ref, across, of_part, product_of
from smcjax.pallas.query_groups import QueryGroups
from smcjax.pallas.shared_attention import HALF, MOST_F16, padded
from smcjax.pallas.shared_merge import UNIT, merged, units_of
from smcjax.pallas.shared_tuning import BESIDE, MOST_SHARES, Tuning, part_of_share

CHUNK = 64  # slots of a product
MOST_TILES = 8  # of 64 queries, of a group and set
MOST_STAGES = 6


class _Refs(NamedTuple):
    """A branch in GMEM, G = R·g groups."""

    keys: Ref  # [P, B, Hkv, D]
    values: Ref  # [P, B, Hkv, D]
    unit: Ref  # [G, S, K] int32
    place: Ref  # [G, S, K] int32
    queries: Ref  # [G, S, K·words] int32
    number: Ref  # [G, S] int32
    bounds: Ref  # [G, 2, tiles·64] int32: the first and last slot that a row sees
    inner: Ref  # [G, 3] int32: what every query of the group sees lies between; how many there are


class _Task(NamedTuple):
    """One task of a chunk, as its queries must know it."""

    first: jax.Array  # slot
    words: tuple[jax.Array, ...]  # of the tile's queries, a bit each; 0 where there is no task


class _Shape(NamedTuple):
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


def _kernel(
    q_ref: Ref,  # [R·M, H, D] GMEM, in the groups' order
    *refs: Ref,  # `_Refs` of each branch, then two results:
    # [G, shares, subs, S, 1, 64, D] f16 GMEM, [G, shares, subs, S, 1, 64] f32 GMEM
    warpgroup_smem: tuple[Ref, Ref, Ref],  # SMEM, the same bytes: queries as they come [subs, D/64, pairs, G, 64], as
    # products read them [subs, D/64, 64, 64], and the result [subs, 64, D] f16
    ring_smem: Ref,  # [2·stages, 64, D] SMEM
    q_ready: Ref,  # [subs] barriers
    ready: Ref,  # [2·stages] barriers
    used: Ref,  # [2·stages] barriers
    tuning: Tuning,
    shape: _Shape,
    interpret: bool,
) -> None:
    *inputs, parts_ref, lse_ref = refs
    size = len(_Refs._fields)
    branches = [_Refs(*inputs[i : i + size]) for i in range(0, len(inputs), size)]
    product = product_of(interpret)
    dim, heads_of_set = q_ref.shape[2], shape.group_heads
    stages, subs = tuning.stages, tuning.subs
    q_rows, q_smem, out_smem = warpgroup_smem
    copies = max(CHUNK // unit for unit in shape.units)  # arrivals that a buffer waits for
    group, of_set, share = lax.axis_index("group"), lax.axis_index("set"), lax.axis_index("share")
    warpgroup = lax.axis_index("warpgroup")

    part, index, splits = part_of_share(share, tuning.splits)  # a part is a tile of a branch
    branch, tile = lax.div(part, shape.tiles), lax.rem(part, shape.tiles)

    def number_of_chunks(of: _Refs, per: int) -> jax.Array:
        """Chunks of the share: every `splits`-th of `per` tasks each."""
        chunks = lax.div(of.number[group, of_set] + (per - 1), per)
        return lax.div(lax.max(chunks - index, 0) + (splits - 1), splits)

    def buffers_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The places in the ring to which keys and values of the share's `number`-th chunk come."""
        stage = lax.rem(number, stages)
        return 2 * stage, 2 * stage + 1

    def load(of: _Refs, unit: int) -> None:
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

    def compute(of: _Refs, unit: int) -> None:
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

        def tasks(turn: jax.Array) -> list[_Task]:
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
                found.append(_Task(of.place[group, of_set, at] * unit, bits))
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

        def bit(task: _Task, number: jax.Array) -> jax.Array:
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
            scores: jax.Array, so_far: online_softmax.Softmax, now: list[_Task]
        ) -> tuple[online_softmax.Softmax, jax.Array]:
            begins, ends = [], []
            for j, task in enumerate(now):
                place = task.first - j * unit
                begins.append(low - place)
                ends.append(jnp.where(bit(task, query) != 0, high - place, -1))
            scores = online_softmax.between(scores, begins, ends, unit, shape.scale)
            return online_softmax.advance(so_far, scores, jnp.exp2, scale=shape.scale)

        def is_seen_whole(now: list[_Task]) -> jax.Array:
            """True where every task of a chunk is seen from end to end by all of its queries, of which it has some."""
            whole = jnp.bool_(True)
            for task in now:
                someone = functools.reduce(jnp.bitwise_or, task.words) != 0
                whole = whole & someone & (task.first >= inner[0]) & (task.first + (unit - 1) <= inner[1])
            return whole

        def clean(values: Ref, now: list[_Task]) -> None:
            """Zeros in the slots of a chunk that no query of the tile sees."""
            slot = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=online_softmax.ROWS)
            at = slot + of_part(slot, [task.first - j * unit for j, task in enumerate(now)], unit)

            def look(number: jax.Array, seen: jax.Array) -> jax.Array:
                first, last = (of.bounds[group, i, tile * QUERIES + number * heads_of_set] for i in range(2))
                within = number + lax.rem(tile * shape.in_tile, WORD) if shape.in_tile < WORD else number
                reads = of_part(slot, [bit(task, within) for task in now], unit)
                return jnp.where((at >= first) & (at <= last), seen | reads, seen)

            nobody = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), online_softmax.ROWS)
            # Bounds that are known would have the loop unrolled, which is seldom run.
            count = lax.clamp(0, of.inner[group, 2] - tile * shape.in_tile, shape.in_tile)
            seen = lax.fori_loop(0, count, look, nobody)
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

    def for_branch(run: Callable[[_Refs, int], None]) -> None:
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


def _merge_kernel(
    parts_ref: Ref,  # [G, shares, subs, S, 1, 64, D] f16 GMEM
    lse_ref: Ref,  # [G, shares, subs, S, 1, 64] f32 GMEM
    out_ref: Ref,  # [branches, R·M, S·G heads, D] f32 GMEM, or [branches, G, S, units·4, D] (`_result_types`)
    sums_ref: Ref,  # the same without D
    *,
    tuning: Tuning,
    shape: _Shape,
) -> None:
    """Merges a unit of four rows, branch by branch."""
    group, of_set, unit = (lax.axis_index(name) for name in ("group", "set", "unit"))
    row = unit * UNIT
    for b in range(len(shape.units)):
        parts = range(b * shape.tiles, (b + 1) * shape.tiles)
        found = merged(parts_ref, lse_ref, unit, group=group, head=of_set, tuning=tuning, parts=parts)
        lse = jnp.where(found.top > 1.5 * MASKED, (found.top + jnp.log2(found.mass)) * math.log(2), -jnp.inf)
        if not shape.by_pair:
            sums_ref[b, group, of_set, pl.ds(row, UNIT)] = lse
            out_ref[b, group, of_set, pl.ds(row, UNIT)] = found.out
            continue
        in_request = lax.rem(group, shape.groups) * shape.queries + lax.div(row, shape.group_heads)
        pair = lax.div(group, shape.groups) * shape.of_request + in_request
        heads = pl.ds(of_set * shape.group_heads + lax.rem(row, shape.group_heads), UNIT)

        @pl.when(in_request < shape.of_request)
        def _store(b: int = b, pair: Any = pair, heads: Any = heads, lse: Any = lse, out: Any = found.out) -> None:
            sums_ref[b, pair, heads] = lse
            out_ref[b, pair, heads] = out


def _result_types(shape: _Shape, requests: int, dim: int) -> list[Any]:
    """Outputs and log-sum-exps: by pair where a unit lies within the heads of one, else by group."""
    lead: tuple[int, ...] = (requests * shape.of_request, shape.sets * shape.group_heads)
    if not shape.by_pair:
        lead = (requests * shape.groups, shape.sets, units_of(shape.rows) * UNIT)
    lead = (len(shape.units), *lead)
    return [jax.ShapeDtypeStruct((*lead, dim), jnp.float32), jax.ShapeDtypeStruct(lead, jnp.float32)]


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports(
    *,
    size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sets: int,
    page_size: int,
    unit: int,
    dtype: Any,
) -> bool:
    """True for groups of C = `size` queries that the kernels take; `page_size` and `unit` of every branch."""
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and head_dim in (64, 128)
        and sets % num_kv_heads == 0
        and num_heads % sets == 0
        and padded(num_heads // sets) <= QUERIES
        and unit % 8 == 0
        and CHUNK % unit == 0
        and page_size % unit == 0
        and 1 <= size * padded(num_heads // sets) <= MOST_TILES * QUERIES
    )


def default_tuning(*, blocks: int, tiles: int, chunks: tuple[int, ...], dim: int) -> Tuning:
    """Shares to fill the GPU once where (group, set) pairs, `blocks` of them, do not.

    Each branch has some by how many chunks it has at most, `chunks`, and no more than that.
    """
    subs = 2
    free = max(len(chunks), min(HOPPER.multiprocessors // (blocks * tiles), MOST_SHARES // subs * len(chunks)))
    splits = [1] * len(chunks)
    for _ in range(free - len(chunks)):
        busiest = max(range(len(chunks)), key=lambda b: chunks[b] / splits[b])
        if splits[busiest] < min(chunks[busiest], MOST_SHARES // subs):
            splits[busiest] += 1
    ring = HOPPER.shared_memory - BESIDE - subs * QUERIES * dim * 2
    stages = min(MOST_STAGES, ring // (4 * CHUNK * dim))
    return Tuning(
        splits=tuple(split for split in splits for _ in range(tiles)), subs=subs, stages=stages // subs * subs
    )


def grouped_attention_mosaic(
    q: Float[Array, "R M H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    tasks: Tasks,
    groups: QueryGroups,
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    *,
    unit: int,
    scale: float | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Part:
    """Computes `grouped_attention` by the kernels; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    branch = Branch(key_pages, value_pages, tasks, low, high)
    (part,) = grouped_branches_mosaic(
        q, (branch,), groups, units=(unit,), scale=scale, tuning=tuning, interpret=interpret
    )
    return part


@functools.partial(jax.jit, static_argnames=("groups", "units", "scale", "tuning", "interpret"))
def grouped_branches_mosaic(
    q: Float[Array, "R M H D"],
    branches: tuple[Branch, ...],
    groups: QueryGroups,
    *,
    units: tuple[int, ...],
    scale: float | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Part, ...]:
    """Attention of the same queries to each branch, of tasks of `units` slots, in one launch and one that merges.

    All branches have as many sets. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.

    A jit of its own, so that a model's layers trace and lower the kernels once.
    """
    requests, queries, heads, dim = q.shape
    sets = branches[0].tasks.unit.shape[2]
    if not _supports_branches(q, branches, groups, units=units):
        pages = [list(branch.key_pages.shape) for branch in branches]
        raise ValueError(
            f"no kernel for q {q.dtype}{list(q.shape)} in groups of {groups.size} over pages {pages} in units {units}"
        )
    of_set = heads // sets
    if lacking := padded(of_set) - of_set:
        by_set = jnp.pad(q.reshape(requests, queries, sets, of_set, dim), ((0, 0),) * 3 + ((0, lacking), (0, 0)))
        filled = by_set.reshape(requests, queries, -1, dim)
        parts = grouped_branches_mosaic(
            filled, branches, groups, units=units, scale=scale, tuning=tuning, interpret=interpret
        )

        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:2], sets, of_set + lacking, *x.shape[3:])[:, :, :, :of_set]
            return x.reshape(*x.shape[:2], heads, *x.shape[4:])

        return tuple(Part(*map(cut, part)) for part in parts)

    shape = _Shape(
        queries=groups.size,
        group_heads=of_set,
        sets=sets,
        groups=groups.number,
        of_request=queries,
        units=units,
        scale=math.log2(math.e) / divisor_of(scale, dim),
    )
    all_groups = requests * groups.number
    if tuning is None:
        chunks = tuple(
            -(-branch.tasks.unit.shape[3] * unit // CHUNK) for branch, unit in zip(branches, units, strict=True)
        )
        tuning = default_tuning(blocks=all_groups * sets, tiles=shape.tiles, chunks=chunks, dim=dim)
    if len(tuning.splits) != len(branches) * shape.tiles or tuning.tiles != 1 or tuning.stages % tuning.subs:
        raise ValueError(
            f"{shape.tiles} tiles of each of {len(branches)} branches must have splits of their own, blocks one tile, "
            f"and warpgroups that take turns divide stages: {tuning}"
        )

    order = np.asarray(groups.order)
    reordered = bool((order != np.arange(queries)).any())
    pairs = (q[:, order] if reordered else q).reshape(-1, heads, dim)
    if interpret:  # which, unlike the copy engine, gives no zeros for what lies behind the last query
        pairs = jnp.pad(pairs, ((0, groups.size + QUERIES), (0, 0), (0, 0)))
    operands = [
        x.reshape(all_groups, *x.shape[2:]) if x.ndim > 2 and i > 1 else x
        for branch in branches
        for i, x in enumerate(_operands(branch, groups, shape))
    ]
    place = (all_groups, tuning.shares, tuning.subs, sets, 1, QUERIES)
    halves = (tuning.subs, dim // HALF)
    scratch: dict[str, Any] = {
        "warpgroup_smem": plgpu.RefUnion(
            plgpu.SMEM((*halves, QUERIES // of_set, of_set, HALF), q.dtype, transforms=SWIZZLED[1:]),
            plgpu.SMEM((*halves, QUERIES, HALF), q.dtype, transforms=SWIZZLED),
            plgpu.SMEM((tuning.subs, QUERIES, dim), jnp.float16, transforms=SWIZZLED),
        ),
        "ring_smem": plgpu.SMEM((2 * tuning.stages, CHUNK, dim), q.dtype, transforms=SWIZZLED),
        "q_ready": plgpu.Barrier(num_arrivals=dim // HALF, num_barriers=tuning.subs),
        "ready": plgpu.Barrier(num_arrivals=CHUNK // min(units), num_barriers=2 * tuning.stages),
        "used": plgpu.Barrier(num_arrivals=1, num_barriers=2 * tuning.stages),
    }
    shares, sums = plgpu.kernel(
        functools.partial(_kernel, tuning=tuning, shape=shape, interpret=bool(interpret)),
        out_type=[jax.ShapeDtypeStruct((*place, dim), jnp.float16), jax.ShapeDtypeStruct(place, jnp.float32)],
        grid=(all_groups, sets, tuning.shares),
        grid_names=("group", "set", "share"),
        num_threads=tuning.subs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="grouped_attention",
    )(pairs, *operands)
    out, lse = plgpu.kernel(
        functools.partial(_merge_kernel, tuning=tuning, shape=shape),
        out_type=_result_types(shape, requests, dim),
        grid=(all_groups, sets, units_of(shape.rows)),
        grid_names=("group", "set", "unit"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="grouped_attention_merge",
    )(shares, sums)

    def by_query(x: jax.Array) -> jax.Array:
        """[R, M, H, …] of a branch's results."""
        if not shape.by_pair:
            x = x[:, :, : shape.rows].reshape(requests, groups.number, sets, groups.size, of_set, *x.shape[3:])
            x = jnp.moveaxis(x, 2, 3).reshape(requests, -1, heads, *x.shape[5:])[:, :queries]
        x = x.reshape(requests, queries, heads, *x.shape[2 if shape.by_pair else 3 :])
        return x[:, np.argsort(order)] if reordered else x

    return tuple(Part(by_query(out[b]), by_query(lse[b])) for b in range(len(branches)))


def _operands(branch: Branch, groups: QueryGroups, shape: _Shape) -> _Refs:
    """A branch as the kernel reads it, by request and group."""
    tasks, present = branch.tasks, groups.present
    low, high = groups.split(branch.low), groups.split(branch.high)  # [R, g, C]
    count = jnp.broadcast_to(present.sum(axis=1), low.shape[:2])
    inner = jnp.stack([jnp.max(low, axis=2), jnp.min(high, axis=2), count], axis=2)
    lacking = shape.tiles * QUERIES - shape.rows

    def by_row(x: jax.Array, nothing: int) -> jax.Array:
        rows = jnp.repeat(jnp.where(present, x, nothing), shape.group_heads, axis=2)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, lacking)), constant_values=nothing)

    bounds = jnp.stack([by_row(low, 0), by_row(high, -1)], axis=2)
    queries = tasks.queries.reshape(*tasks.unit.shape[:3], -1)
    arrays = (tasks.unit, tasks.place, queries, tasks.number, bounds, inner)
    return _Refs(branch.key_pages, branch.value_pages, *(x.astype(jnp.int32) for x in arrays))


def _supports_branches(
    q: jax.Array, branches: tuple[Branch, ...], groups: QueryGroups, *, units: tuple[int, ...], **options: Any
) -> bool:
    sets = branches[0].tasks.unit.shape[2]

    def is_supported(branch: Branch, unit: int) -> bool:
        _, page_size, kv_heads, _ = branch.key_pages.shape
        alike = q.dtype == branch.key_pages.dtype == branch.value_pages.dtype
        alike = alike and branch.key_pages.shape == branch.value_pages.shape and branch.tasks.unit.shape[2] == sets
        return alike and supports(
            size=groups.size,
            num_heads=q.shape[2],
            num_kv_heads=kv_heads,
            head_dim=q.shape[3],
            sets=sets,
            page_size=page_size,
            unit=unit,
            dtype=q.dtype,
        )

    return all(map(is_supported, branches, units))


def _supports(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    tasks: Tasks,
    groups: QueryGroups,
    low: jax.Array,
    high: jax.Array,
    *,
    unit: int,
    **options: Any,
) -> bool:
    return _supports_branches(q, (Branch(key_pages, value_pages, tasks, low, high),), groups, units=(unit,))


grouped_attention.register(Kernel("sm90", grouped_attention_mosaic, _supports))
grouped_branches.register(Kernel("sm90", grouped_branches_mosaic, _supports_branches))
