"""The blocks that queries select, from stored scores of compressed tokens, in one launch: a Mosaic GPU kernel (Hopper).

    weight(slot) = Σ_heads exp(score − lse), 0 unless low ≤ slot ≤ high
    rank(block)  = Σ_i common_i · weight(block · strides + i)
    selected     = first and last blocks up to the query's own, then the highest ranks, of equal ones the earlier

`common_i` is what a compressed token and a block have in common, in strides. Scores come as `grouped_scores` keeps them
(`Kept`), so that they are read once and no other order of them is written.

A block of 128 threads serves a query and set (`mosaic/threads.py`). Threads read scores eight slots at a time and leave
weights in shared memory; each ranks every 128th block. Where n blocks are to be chosen by rank, each warp finds the n
best of what its threads hold, best first, by whole-warp maxima, and all warps find the n-th of those 4·n. What ranks
higher is selected, or as high and not later.

XLA's way is `smcjax.sparse.nsa.NSA.by_blocks` and `select`, which is the reference.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smcjax.pallas.attention.prefix_shared import padded
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, WARPS, Ref, Threads, Word
from smcjax.pallas.sparse.query_groups import QueryGroups

LOADS = 16  # of eight slots, that a thread waits for together
AT_ONCE = 8 * WARPGROUP  # slots that the threads load together
MAX_PER_THREAD = 64  # ranks, in registers
MAX_TURNS = 1024  # times a thread's ranks: they are written out in line
MAX_HEADS = 16  # of a set
MAX_SHARED_BYTES = 200 * 1024  # bytes
NEVER = -1  # the rank of blocks that are not chosen by rank: ranks are compared as their bits


class Kept(NamedTuple):
    """Scores of compressed tokens as the kernels of `grouped_scores` keep them."""

    products: Float[Array, "groups S rows slots"]  # q · k, f16; row c·padded heads + head of query c of a group
    lse: Float[Array, "R M H"]  # f32, of scores: products divided by `divisor`
    low: Int[Array, "R M"]  # the first slot that a query sees
    high: Int[Array, "R M"]  # the last one


class Ranking(NamedTuple):
    """How compressed tokens rank blocks, and how many blocks are selected.

    Slot s of compressed tokens is that of the token whose last stride is the sequence's stride s.
    """

    blocks: int  # of a sequence
    chosen: int  # n, those that are always selected among them
    first: int  # blocks that are always selected
    last: int  # blocks that are always selected, the query's own among them
    strides: int  # of a block
    of_token: int  # strides of a compressed token

    @property
    def common(self) -> tuple[float, ...]:
        """Strides that the token at each slot from a block's first on has in common with it."""
        found = np.convolve(np.ones(self.of_token), np.ones(self.strides))
        return tuple(float(weight) for weight in found)

    @property
    def free(self) -> int:
        """Blocks that a query chooses by rank: fewer where it has fewer than `chosen` up to its own."""
        return min(self.chosen - self.first - self.last, self.blocks)

    @property
    def each(self) -> int:
        """Ranks of a thread."""
        return -(-self.blocks // WARPGROUP)

    @property
    def slots(self) -> int:
        """Slots that have weights in shared memory."""
        return self.each * WARPGROUP * self.strides + -(-len(self.common) // 4) * 4


def supports_ranking(ranking: Ranking, *, heads: int, slots: int) -> bool:
    """True for sets of so many query heads, and stored scores of `slots` slots, that the kernel takes."""
    return (
        heads <= MAX_HEADS
        and slots % 8 == 0
        and ranking.each <= MAX_PER_THREAD
        and ranking.free > 0
        and ranking.free * max(ranking.each, WARPS) <= MAX_TURNS
        and 4 * (ranking.slots + 2 * WARPS * ranking.free) <= MAX_SHARED_BYTES
    )


def _weigh(
    t: Threads,
    products: Ref,  # [groups, S, rows, slots] f16 GMEM
    lse: Ref,  # [R, M, H] f32 GMEM
    weights: Ref,  # [slots] f32 SMEM
    turn: Word,
    first_row: Word,
    first_head: Word,
    low: Word,
    high: Word,
    *,
    heads: int,
    slots: int,
    size: int,  # of `weights`
    loads: int,
    scale: float,
) -> None:
    """Leaves the weights of `loads` times 1,024 slots of one query and set."""
    # Subtracting lse and scaling are one multiply-add a product, so −lse of every head of the set stays in a register.
    less = [t.constant(0.0) - t.load(lse, first_head + head) for head in range(heads)]
    # A thread has eight neighbouring slots of each 1,024: a warp loads 512 neighbouring bytes at once.
    starts = [(turn * loads + j) * AT_ONCE + t.index * 8 for j in range(loads)]
    # All loads are asked for before any result is waited for. A start behind the row's last slots is moved back onto
    # them; what is read there is no slot that the query sees, so it gets no weight below.
    found = [
        [t.load8(products, (first_row + head) * slots + t.minimum(start, slots - 8)) for head in range(heads)]
        for start in starts
    ]
    # [heads, 8] products become [8] weights, the sum over the heads in their order. A slot that the query does not see
    # gets 0 by selection and not by multiplication, since its product may be NaN.
    for start, of_heads in zip(starts, found, strict=True):
        sums = []
        for i in range(8):
            terms = [t.exp(t.multiply_add(eight[i], scale, one)) for eight, one in zip(of_heads, less, strict=True)]
            total = functools.reduce(lambda a, b: a + b, terms)
            sums.append(t.where((start + i >= low) & (start + i < high + 1), total, 0.0))
        # The ranks need weights of slots that other threads have, so weights go to shared memory, which may end within
        # a turn.
        for i in (0, 4):
            t.store4(weights, start + i, sums[i : i + 4], only=start + i < size)


def _best(t: Threads, ranks: list[Word], places: list[Word]) -> tuple[Word, Word, list[Word]]:
    """Returns the highest of a warp's ranks, its place, of equal ranks the first, and the ranks left without it."""
    # A thread's highest rank is found in registers, the warp's by one reduction of integers, which all 32 lanes get.
    top = t.warp_maximum(functools.reduce(t.maximum, ranks))
    # Of equal ranks the lowest place counts: a thread's lowest first, then the warp's.
    at = t.constant(2**30)
    for rank, place in zip(ranks, places, strict=True):
        at = t.where(rank == top, t.minimum(at, place), at)
    # One thread holds that place and takes its rank out. Where every rank is NEVER already, nothing changes.
    at = t.warp_minimum(at)
    return top, at, [t.where(place == at, NEVER, rank) for rank, place in zip(ranks, places, strict=True)]


def _choose(
    t: Threads,
    weights: Ref,  # [slots] f32 SMEM
    tops: Ref,  # [4 · n] int32 SMEM: the n best ranks of each warp
    at: Ref,  # [4 · n] int32 SMEM: where they stand
    chosen: Ref,  # [R, M, S, blocks] bool GMEM
    row: Word,
    own: Word,
    high: Word,
    *,
    ranking: Ranking,
) -> None:
    """Chooses the blocks of one query and set, of its slots' weights."""
    blocks, strides, common = ranking.blocks, ranking.strides, ranking.common
    # Phase 1: ranks. A thread has every 128th block, so that neighbouring threads read neighbouring weights.
    n, zero, one, warp, lane = ranking.free, t.constant(0), t.constant(1), t.index // WARP, t.index % WARP
    # The weights of a block's slots were stored by several threads, all of which must have done so.
    t.synchronize()
    ranks, always, places = [], [], [t.index + j * WARPGROUP for j in range(ranking.each)]
    for place in places:
        begin = place * strides
        # The slots of the block and of the tokens that reach into it: four at a time where each block's first slot is a
        # multiple of four, as a load of 16 bytes needs.
        if strides % 4:
            found = [t.load(weights, begin + i) for i in range(len(common))]
        else:
            found = [weight for i in range(0, len(common), 4) for weight in t.load4(weights, begin + i)]
        # Shared memory behind the last slot that the query sees may hold anything: no turn may have written there.
        terms = [t.where(begin + i < high + 1, weight, 0.0) for i, weight in enumerate(found[: len(common)])]
        # The first factor is always 1.
        rank = terms[0]
        for factor, term in zip(common[1:], terms[1:], strict=True):
            rank = t.multiply_add(term, factor, rank)
        # First and last blocks are selected whatever their rank, but none behind the query's own.
        forced = t.where(place < ranking.first, one, t.where(own < place + ranking.last, one, 0))
        always.append(t.where(place < own + 1, forced, 0))
        # A sum of weights is not negative, so its bits, taken as an integer, have its order, and NEVER = −1 is below
        # all of them. Blocks that are always selected, lie behind the query's own or do not exist take no part.
        ranks.append(t.where((place < own + 1) & (place < blocks), t.where(forced != 0, NEVER, t.bits(rank)), NEVER))

    # Phase 2: each warp by itself finds the n best of its threads' ranks, best first. The n best of all are among them.
    left = ranks
    for turn in range(n):
        top, place, left = _best(t, left, places)
        t.store(tops, warp * n + turn, top, only=lane == 0)
        t.store(at, warp * n + turn, place, only=lane == 0)
    # Every warp reads what the other three have found.
    t.synchronize()
    # Phase 3: every warp finds the n-th best of all 4 · n for itself, so that no further barrier is needed. [4, n]
    # ranks in shared memory become a list in registers, every 32nd a lane's; what lies behind the last is NEVER.
    numbers = [lane + first for first in range(0, WARPS * n, WARP)]
    inside = [number < WARPS * n for number in numbers]
    numbers = [t.minimum(number, WARPS * n - 1) for number in numbers]
    left = [t.where(there, t.load(tops, number), NEVER) for there, number in zip(inside, numbers, strict=True)]
    theirs = [t.load(at, number) for number in numbers]
    # The last of n turns leaves the rank and the place of the n-th best.
    least, last = zero, zero
    for _ in range(n):
        least, last, left = _best(t, left, theirs)
    # Phase 4: a thread decides on its own blocks. One is selected if its rank is higher, or as high and its place not
    # later. Blocks that took no part are decided by `forced`, also where fewer than n took part and `least` is NEVER.
    for rank, place, forced in zip(ranks, places, always, strict=True):
        is_chosen = t.where(least < rank, one, t.where((rank == least) & (place < last + 1), one, 0))
        is_chosen = t.where(rank == NEVER, forced, is_chosen)
        t.store(chosen, row * blocks + place, is_chosen != 0, only=place < blocks)


@functools.partial(jax.jit, static_argnames=("groups", "ranking", "block_size", "heads", "divisor", "interpret"))
def ranked_blocks(
    kept: Kept,
    positions: Int[Array, "R M"],
    groups: QueryGroups,
    ranking: Ranking,
    *,
    block_size: int,
    heads: int,
    divisor: float,
    interpret: Any = None,
) -> Bool[Array, "R M S blocks"]:
    """Returns the blocks that queries at `positions` select, for rankings that `supports_ranking` accepts.

    Products of slots that a query does not see may be anything. A jit of its own, so that a model's layers trace and
    lower the kernel once.

    Args:
        kept: what `grouped_scores` has kept.
        positions: of the queries, which say what block is their own.
        groups: those by which scores were kept.
        ranking: how blocks are ranked.
        block_size: l', positions of a block.
        heads: query heads of a set, without those that fill it up.
        divisor: what products are divided by to be scores.
        interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    requests, queries = positions.shape
    _, sets, rows, slots = kept.products.shape
    if not supports_ranking(ranking, heads=heads, slots=slots):
        raise ValueError(f"no kernel for {ranking} with {heads} heads a set and {slots} slots")
    # A thread waits for all heads of its slots together: the more heads, the fewer slots.
    loads = max(1, LOADS // heads)
    # `grouped_scores` keeps products by group: the place of a query in the order of groups says which group it is in
    # and which row of [S, rows] is its first head's.
    place = np.argsort(groups.order)
    stride = padded(heads)
    group = np.arange(requests)[:, None] * groups.number + place // groups.size
    first_row = group * (sets * rows) + place % groups.size * stride
    # Only turns up to the last slot that the query sees are made: what a query costs grows with its position.
    needed = -(-jnp.minimum(kept.high + 1, ranking.slots) // AT_ONCE)
    own = positions // block_size
    fields = [jnp.asarray(x, jnp.int32) for x in (first_row, kept.low, kept.high, own, needed)]

    def kernel(products: Ref, lse: Ref, of_query: Ref, chosen: Ref, weights: Ref, tops: Ref, at: Ref) -> None:
        query, of_set = lax.axis_index("query"), lax.axis_index("set")
        # Numbers of the query, the same in all threads.
        first, low, high, own, needed = (of_query[query, i] for i in range(len(fields)))
        inside, row = interpret is not None, query * sets + of_set
        sizes = {"heads": heads, "slots": slots, "size": ranking.slots}

        def weigh(begin: Any, end: Any, loads: int) -> None:
            """Turns of so many loads each."""
            program = functools.partial(_weigh, loads=loads, scale=float(np.float32(1 / divisor)), **sizes)

            def some(turn: jax.Array, _: None) -> None:
                of_here = first + of_set * rows, row * heads
                threads.run(program, products, lse, weights, turn, *of_here, low, high, interpret=inside)

            lax.fori_loop(begin, end, some, None)

        whole = lax.div(needed, loads)
        weigh(0, whole, loads)
        if loads > 1:
            weigh(whole * loads, needed, 1)  # a sequence that is a little longer than whole turns has no other one
        # The same threads go on, so the weights are where they were left, and `_choose` begins with the barrier
        # between.
        choose = functools.partial(_choose, ranking=ranking)
        threads.run(choose, weights, tops, at, chosen, row, own, high, interpret=inside)

    chosen = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((requests * queries, sets, ranking.blocks), jnp.bool_),
        grid=(requests * queries, sets),
        grid_names=("query", "set"),
        scratch_types={
            "weights": plgpu.SMEM((ranking.slots,), jnp.float32),
            "tops": plgpu.SMEM((WARPS * ranking.free,), jnp.int32),
            "at": plgpu.SMEM((WARPS * ranking.free,), jnp.int32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="ranked_blocks",
    )(kept.products, kept.lse, jnp.stack(fields, axis=-1).reshape(requests * queries, len(fields)))
    return chosen.reshape(requests, queries, sets, ranking.blocks)
