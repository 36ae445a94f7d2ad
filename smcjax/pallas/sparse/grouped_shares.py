"""The cut of `grouped_attention_kernel.py`'s work into equal shares, one for each block, made by the blocks themselves.

    line = ((group · S + set) · branches + branch) · lines + number      of a group, set and branch, in chunks of tasks
    segment = (line, the chunks of it that a share has)

How many tasks a line has is known on the device alone. So every warpgroup adds up the *costs* of all (group, set)
*pairs*, those of lines and of their chunks, and finds its block's share, an equal part of all costs in the order of
lines, and the pairs that it touches. A chunk belongs to the share in which its cost begins, behind that of its line.
Blocks have nothing else in common: which chunks each has follows from the numbers of tasks.

No share is smaller than a chunk, so a line's segments are in blocks that follow one another. Results of segments lie
at line + block. From one segment to the next, in the order of lines and then of blocks, at least one of the two rises,
so that no two have the same place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.device import HOPPER
from smcjax.pallas.attention.shared_tuning import Registers
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import pl
from smcjax.pallas.mosaic.threads import WARPGROUP, WARPS, Threads, Word
from smcjax.pallas.mosaic.wgmma import Ref
from smcjax.pallas.sparse.grouped_attention import CHUNK

RING = 64 << 10  # bytes: with deeper rings some blocks get more than their share of the memory's time (dev/LOG.md)
# Costs, in 32nds of the time of a chunk of one task. A segment begins with answers from GMEM and ends with its result;
# of a line only the first segment counts, and of a share's other segments one alone begins within a line.
SEGMENT = 64
TASK = 0.5  # each of a chunk's
LOADERS = 2  # warpgroups, of keys and of values: one alone is the slower for units of 8 slots, of which a chunk has 16
REGISTERS = {1: Registers(232, 40), 2: Registers(216, 40)}  # by computing warpgroups
MAX_PAIRS = 64 * WARPGROUP  # of which each thread adds up the chunks of every 128th, written out


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    blocks: int = HOPPER.multiprocessors
    subs: int = 2  # warpgroups that compute
    stages: int = 2  # depth of the ring, in chunks; a multiple of `subs`

    def __post_init__(self) -> None:
        if self.stages % self.subs:
            raise ValueError(f"stages must be a multiple of subs, as warpgroups may take buffers in turn, got {self}.")

    @property
    def registers(self) -> Registers:
        """Registers of each warpgroup's threads after dealing."""
        return REGISTERS[self.subs]


def default_tuning(dim: int) -> Tuning:
    """The tuning for heads of `dim` numbers."""
    return Tuning(stages=RING // (4 * CHUNK * dim))


class Counts(NamedTuple):
    """The input from which shares are computed: how many tasks each line of a branch has, and of how many slots."""

    number: Ref  # [G, S] int32 GMEM
    unit: int  # slots of a task


class Share(NamedTuple):
    """A block's share, in costs of all lines in their order."""

    first_pair: jax.Array
    end_pair: jax.Array  # behind the last pair that the share touches
    before: jax.Array  # the cost of the pairs before the first
    size: jax.Array  # of a share: the block's is what costs size·block … size·(block + 1)


class Segment(NamedTuple):
    """The part of one line that one share has."""

    group: jax.Array
    of_set: jax.Array
    number_of_line: jax.Array  # of its group, set and branch
    line: jax.Array  # of all
    begin: jax.Array  # chunks of the line
    end: jax.Array
    number: jax.Array  # chunks of the share before it
    segments: jax.Array  # of the line, in all shares, if this is the first of them


def chunks_of(tasks: jax.Array, unit: int) -> jax.Array:
    """Returns how many chunks of 64 slots so many tasks of `unit` slots make."""
    per = CHUNK // unit
    return lax.div(tasks + (per - 1), per)


def chunk_cost(unit: int) -> int:
    """Returns the cost of a chunk of tasks of `unit` slots."""
    return 32 + int(TASK * (CHUNK // unit))


def scratch_words(pairs: int) -> int:
    """Words of shared memory in which `share_of` adds up the costs of so many pairs and leaves a share."""
    return len(Share._fields) + (1 + -(-pairs // WARPGROUP)) * WARPS


def share_of(
    block: jax.Array, counts: Sequence[Counts], scratch: Ref, *, lines: int, blocks: int, interpret: bool
) -> Share:
    """Finds a block's share.

    Every warpgroup calls it for itself, with the same `scratch`, int32 SMEM of `scratch_words`: all write the same.
    """
    groups, sets = counts[0].number.shape
    units = tuple(one.unit for one in counts)
    program = functools.partial(_find, pairs=groups * sets, units=units, lines=lines, blocks=blocks)
    threads.run(program, block, scratch, *(one.number for one in counts), interpret=interpret)
    return Share(*(scratch[i] for i in range(len(Share._fields))))


def _find(
    t: Threads,
    block: Word,
    scratch: Ref,
    *number: Ref,
    pairs: int,
    units: tuple[int, ...],
    lines: int,
    blocks: int,
) -> None:
    """Writes a `Share` at the beginning of `scratch`; a thread has one pair of every 128."""
    assert len(Share._fields) == WARPS, "the words of a share take the place of one turn of sums"
    # More pairs than threads take several turns: thread i has pairs i, i + 128, i + 256, …
    turns = -(-pairs // WARPGROUP)

    def cost_of_turn(turn: int) -> Word:
        pair, cost = t.index + turn * WARPGROUP, t.constant(0)
        for ref, unit in zip(number, units, strict=True):
            per = CHUNK // unit
            # All lines of a pair and branch have the same tasks, so the same chunks. A line without tasks costs
            # nothing.
            chunks = (t.load(ref, t.minimum(pair, pairs - 1)) + (per - 1)) // per
            cost = cost + t.where(chunks == 0, 0, (chunks * chunk_cost(unit) + SEGMENT) * lines)
        # Behind the last pair the last one was loaded again; it must not count twice.
        return t.where(pair < pairs, cost, 0)

    # All turns, and then again each by itself: many words of a thread would not stay in its registers.
    mine = functools.reduce(lambda a, b: a + b, map(cost_of_turn, range(turns)))
    # First the total of all costs, then the share: what costs size · block … size · (block + 1). Its words take the
    # place of turn 0 of the sums, so these begin at turn 1.
    before, total = threads.sums(t, mine, scratch, 1)
    # No smaller than any chunk, so that a line's segments are in consecutive blocks.
    size = t.maximum((total + (blocks - 1)) // blocks, max(map(chunk_cost, units)))
    first = block * size
    end = t.minimum(first + size, total)
    of_turns = t.constant(0)
    for turn in range(turns):
        cost = mine
        # Prefix sums within this turn's 128 pairs, behind all pairs of the turns before.
        if turns > 1:
            cost = cost_of_turn(turn)
            before, of_turn = threads.sums(t, cost, scratch, 2 + turn)
            before, of_turns = of_turns + before, of_turns + of_turn
        # Exactly one pair has `first` within its costs, and one has `end`; the threads that hold them store. A share
        # behind all costs has no pairs: 0 … 0.
        pair, ends = t.index + turn * WARPGROUP, before + cost
        some, nothing = first < end, (end < first + 1) & (pair == 0)
        begins_here, ends_here = (before < first + 1) & (first < ends), (before < end) & (end < ends + 1)
        t.store(scratch, t.constant(0), pair, only=begins_here & some)
        t.store(scratch, t.constant(1), pair + 1, only=ends_here & some)
        t.store(scratch, t.constant(2), before, only=begins_here & some)
        for place in range(3):
            t.store(scratch, t.constant(place), t.constant(0), only=nothing)
    t.store(scratch, t.constant(3), size, only=t.index == 0)
    # The words are in shared memory for all threads of this warpgroup; every warpgroup has stored the same ones.
    t.synchronize()


def walk(
    share: Share,
    block: jax.Array,
    counts: Sequence[Counts],
    visit: Sequence[Callable[[Segment], None]],
    *,
    lines: int,
) -> jax.Array:
    """Calls `visit[b]` for each segment of branch b in a block's share, in their order; returns the share's chunks."""
    sets = counts[0].number.shape[1]
    # Walks the pairs that the share touches and cuts each line at the share's two ends. All warpgroups walk alike.
    first, end = block * share.size, (block + 1) * share.size

    def of_pair(pair: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        group, of_set = lax.div(pair, sets), lax.rem(pair, sets)
        chunks_of_branches = [chunks_of(number[group, of_set], unit) for number, unit in counts]  # asked for together
        for branch, of_branch in enumerate(chunks_of_branches):

            def of_line(
                which: jax.Array,
                so_far: tuple[jax.Array, jax.Array],
                branch: int = branch,
                chunks: jax.Array = of_branch,
                cost: int = chunk_cost(counts[branch].unit),
            ) -> tuple[jax.Array, jax.Array]:
                before, number = so_far
                # A line costs `SEGMENT` and then its chunks.
                chunks_at = before + SEGMENT
                # The first chunk whose cost begins at or behind a bound: a chunk belongs to the share in which its cost
                # begins.
                here, behind = (
                    lax.min(lax.div(lax.max(bound - chunks_at, 0) + (cost - 1), cost), chunks) for bound in (first, end)
                )
                line = (pair * len(counts) + branch) * lines + which
                # If this is a line's first segment, its last one is in the share in which its last chunk begins.
                segments = lax.div(chunks_at + (chunks - 1) * cost, share.size) - block + 1
                segment = Segment(group, of_set, which, line, here, behind, number, segments)
                # A share that has only the line's own cost, but none of its chunks, has no segment of it.
                pl.when(here < behind)(functools.partial(visit[branch], segment))
                # Costs before the next line, and the chunks that the share has had so far.
                return before + jnp.where(chunks > 0, SEGMENT + chunks * cost, 0), number + (behind - here)

            so_far = of_line(jnp.int32(0), so_far) if lines == 1 else lax.fori_loop(0, lines, of_line, so_far)
        return so_far

    return lax.fori_loop(share.first_pair, share.end_pair, of_pair, (share.before, jnp.int32(0)))[1]


def note(notes: Ref, segment: Segment, block: jax.Array, *, interpret: bool) -> None:
    """Writes, for a line's first segment, that this block has it, and how many segments the line has.

    `notes` is [lines, 2] int32 GMEM.
    """
    # The first segment has the line's first chunk; it alone writes, so each line is written once.
    is_first = jnp.where(segment.begin == 0, 1, 0)
    threads.run(_note, notes, segment.line, block, segment.segments, is_first, interpret=interpret)


def _note(t: Threads, notes: Ref, line: Word, block: Word, segments: Word, is_first: Word) -> None:
    only = (t.index == 0) & (is_first == 1)
    t.store(notes, line * 2, block, only=only)
    t.store(notes, line * 2 + 1, segments, only=only)
