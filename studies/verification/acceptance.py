"""The acceptance scan of batched speculative decoding: how much of every row's draft the target agrees with.

    k_i = min{ j : draft_ij ≠ target_ij },  γ if there is none            accepted tokens of row i
    next_i = target_i,k_i                                                 the correction, or the bonus
    offset_i = k_0 + … + k_{i−1}                                          where its KV goes when packed

(Greedy acceptance, source 004.) The lanes of a warp share a row and take the least position that disagrees, so the time
does not depend on where that is. One block scans a small batch and sums the lengths; a large one is divided among
blocks. Packing (`verify_pack`) uses the same programs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from smcjax.device import HOPPER
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, Ref, Threads

WARPGROUPS = 4  # of a block
MAX_RECOMPUTED = 8192  # ids b·γ that one block may scan alone
MAX_ROWS = 1024  # b: what a warp sums
MAX_GAMMA = 1024
LOADS = 16  # pairs of ids that a thread has asked for before it looks at the first


class Acceptance(NamedTuple):
    """Result of scanning drafted and predicted tokens."""

    lengths: Int[Array, " b"]  # k, from 0 to γ
    has_mismatch: Bool[Array, " b"]  # k < γ
    next_tokens: Int[Array, " b"]  # target[i, k_i]
    offsets: Int[Array, " b"]  # exclusive sums of `lengths`: where a row's KV begins in the packed array


# --------------------------------------------------------------------------------------------------------- references


def op_by_op(draft: Int[Array, "b g"], target: Int[Array, "b g1"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lengths, has_mismatch, next tokens as one writes them first: an array operation after the other.

    Not compiled as a whole, each is a launch: the baseline of the study.
    """
    rows, gamma = draft.shape
    mismatch = draft != target[:, :gamma]
    has_mismatch = mismatch.any(axis=1)
    first = jnp.argmax(mismatch, axis=1).astype(jnp.int32)
    lengths = jnp.where(has_mismatch, first, gamma)
    return lengths, has_mismatch, target[jnp.arange(rows), lengths]


def acceptance_scan_reference(draft: Int[Array, "b g"], target: Int[Array, "b g1"]) -> Acceptance:
    """Accepted lengths, mismatches, next tokens and packed offsets: the smallest position of each row that disagrees.

    Raises ValueError unless `target` has one column more than `draft`.
    """
    rows, gamma = draft.shape
    if target.shape != (rows, gamma + 1):
        raise ValueError(
            f"draft is [b, γ] = {draft.shape}, so target must be [b, γ + 1] = {(rows, gamma + 1)}, "
            f"the bonus position included; got {target.shape}."
        )
    position = jnp.where(draft != target[:, :gamma], jnp.arange(gamma, dtype=jnp.int32)[None], gamma)
    lengths = position.min(axis=1, initial=gamma)
    following = jnp.take_along_axis(target, lengths[:, None], axis=1)[:, 0]
    return Acceptance(lengths, lengths < gamma, following, jnp.cumsum(lengths, dtype=jnp.int32) - lengths)


# ---------------------------------------------------------------------------------------------- programs of a warpgroup


def first_mismatches(
    t: Threads,
    draft: Ref,  # [b, γ] GMEM
    target: Ref,  # [b, γ + 1] GMEM
    lengths: Ref,  # [≥ count] SMEM
    first: Any,
    warpgroup: Any,
    *,
    ids: tuple[int, int],
    count: int,
    warpgroups: int,
) -> None:
    """lengths[i] = k of row first + i, for i < count, by all warpgroups of a block together.

    Lanes of a warp share a row, as many as there are positions, and take the least position that disagrees. Rows and
    positions beyond the end are the last ones once more, which changes no minimum.
    """
    rows, gamma = ids
    sharing = min(WARP, 1 << (gamma - 1).bit_length())  # lanes of a row
    thread = t.index + warpgroup * WARPGROUP
    at_once = warpgroups * WARPGROUP // sharing  # rows
    chunks = -(-gamma // sharing)
    turns = range(-(-count // at_once))
    together = max(1, LOADS // chunks)
    for start in turns[::together]:
        loaded = []
        for turn in turns[start : start + together]:
            local = t.minimum(thread // sharing + turn * at_once, count - 1)
            row = t.minimum(local + first, rows - 1)
            pairs = []
            for chunk in range(chunks):
                position = t.minimum(thread % sharing + chunk * sharing, gamma - 1)
                here = row * gamma + position
                pairs.append((position, t.load(draft, here), t.load(target, here + row)))
            loaded.append((local, pairs))
        for local, pairs in loaded:
            found = [t.where(ours != theirs, position, gamma) for position, ours, theirs in pairs]
            least = functools.reduce(t.minimum, found)
            distance = sharing // 2
            while distance:
                least = t.minimum(least, t.shuffle_xor(least, distance))
                distance //= 2
            t.store(lengths, local, least)


def lengths_a_lane(rows: int) -> int:
    """How many consecutive lengths a lane sums: an odd number, so that lanes do not meet in a bank."""
    return -(-rows // WARP) | 1


def inclusive_sums(t: Threads, lengths: Ref, ends: Ref, *, rows: int) -> None:
    """ends[i] = lengths[0] + … + lengths[i], both in SMEM, by every warp; a warpgroup's first one stores."""
    each = lengths_a_lane(rows)
    lane = t.index % WARP
    values = []
    for j in range(each):
        row = lane * each + j
        values.append(t.where(row < rows, t.load(lengths, row), 0))
    total = functools.reduce(lambda a, b: a + b, values)
    end = threads.warp_sums(t, total) - total
    for j, value in enumerate(values):
        end = end + value
        t.store(ends, lane * each + j, end, only=t.index < WARP)
    t.synchronize()


def write_acceptance(
    t: Threads,
    lengths: Ref,  # [≥ count] SMEM
    target: Ref,  # [b, γ + 1] GMEM
    lengths_out: Ref,  # [b] GMEM, as the next two
    has_mismatch_out: Ref,
    next_tokens_out: Ref,
    first: Any,
    warpgroup: Any,
    *,
    ids: tuple[int, int],
    count: int,
    warpgroups: int,
) -> None:
    """Writes the results of rows first … first + count − 1, by all warpgroups of a block."""
    rows, gamma = ids
    for turn in range(-(-count // (warpgroups * WARPGROUP))):
        local = t.minimum(t.index + warpgroup * WARPGROUP + turn * warpgroups * WARPGROUP, count - 1)
        row = t.minimum(local + first, rows - 1)
        length = t.load(lengths, row - first)
        t.store(lengths_out, row, length)
        t.store(has_mismatch_out, row, length < gamma)
        t.store(next_tokens_out, row, t.load(target, row * (gamma + 1) + length))


def write_offsets(
    t: Threads, lengths: Ref, ends: Ref, offsets_out: Ref, warpgroup: Any, *, rows: int, warpgroups: int
) -> None:
    """offsets = ends − lengths, by all warpgroups."""
    for turn in range(-(-rows // (warpgroups * WARPGROUP))):
        row = t.minimum(t.index + warpgroup * WARPGROUP + turn * warpgroups * WARPGROUP, rows - 1)
        t.store(offsets_out, row, t.load(ends, row) - t.load(lengths, row))


# ------------------------------------------------------------------------------------------------------------- kernel


def _scan_kernel(
    draft: Ref,  # [b, γ] GMEM, as all that follow
    target: Ref,  # [b, γ + 1]
    lengths_out: Ref,  # [b]
    has_mismatch_out: Ref,  # [b]
    next_tokens_out: Ref,  # [b]
    *offsets_out: Ref,  # [b], where one block has all rows
    lengths: Ref,
    ends: Ref,
    known: Ref,
    count: int,  # rows of a block
    warpgroups: int,
    interpret: bool,
) -> None:
    warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block") * count
    scan = functools.partial(first_mismatches, ids=draft.shape, count=count, warpgroups=warpgroups)
    write = functools.partial(write_acceptance, ids=draft.shape, count=count, warpgroups=warpgroups)
    threads.run(scan, draft, target, lengths, first, warpgroup, interpret=interpret)
    plgpu.barrier_arrive(known)
    plgpu.barrier_wait(known)
    outs = (lengths_out, has_mismatch_out, next_tokens_out)
    threads.run(write, lengths, target, *outs, first, warpgroup, interpret=interpret)
    for offsets in offsets_out:
        threads.run(functools.partial(inclusive_sums, rows=count), lengths, ends, interpret=interpret)
        offsets_program = functools.partial(write_offsets, rows=count, warpgroups=warpgroups)
        threads.run(offsets_program, lengths, ends, offsets, warpgroup, interpret=interpret)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports_scan(draft: jax.Array, target: jax.Array) -> bool:
    """True for int32 ids that fit each other, of rows as many and as long as the scan's kernel takes."""
    rows, gamma = draft.shape
    ids = draft.dtype == target.dtype == jnp.int32 and target.shape == (rows, gamma + 1)
    return ids and 0 < rows <= MAX_ROWS and 0 < gamma <= MAX_GAMMA


def acceptance_scan_mosaic(
    draft: Int[Array, "b g"],
    target: Int[Array, "b g1"],
    *,
    warpgroups: int = WARPGROUPS,
    most_recomputed: int = MAX_RECOMPUTED,
    interpret: Any = None,
) -> Acceptance:
    """One launch of one block up to `most_recomputed` ids; beyond, many blocks, and XLA sums the lengths.

    `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU, here and below.
    """
    if draft.size <= most_recomputed:
        return Acceptance(*_scan(draft, target, blocks=1, warpgroups=warpgroups, interpret=interpret))
    lengths, has_mismatch, next_tokens = scan_rows_mosaic(draft, target, warpgroups=warpgroups, interpret=interpret)
    return Acceptance(lengths, has_mismatch, next_tokens, jnp.cumsum(lengths, dtype=jnp.int32) - lengths)


def scan_rows_mosaic(
    draft: Int[Array, "b g"],
    target: Int[Array, "b g1"],
    *,
    blocks: int = HOPPER.multiprocessors,
    warpgroups: int = WARPGROUPS,
    interpret: Any = None,
) -> tuple[Int[Array, " b"], Bool[Array, " b"], Int[Array, " b"]]:
    """Lengths, has_mismatch and next tokens, by up to `blocks` blocks; no offsets, which need all rows."""
    lengths, has_mismatch, next_tokens, *_ = _scan(
        draft, target, blocks=blocks, warpgroups=warpgroups, interpret=interpret, offsets=False
    )
    return lengths, has_mismatch, next_tokens


@functools.partial(jax.jit, static_argnames=("blocks", "warpgroups", "interpret", "offsets"))
def _scan(
    draft: jax.Array, target: jax.Array, *, blocks: int, warpgroups: int, interpret: Any, offsets: bool = True
) -> list[jax.Array]:
    rows, gamma = draft.shape
    sharing = min(WARP, 1 << (gamma - 1).bit_length())
    at_once = warpgroups * WARPGROUP // sharing  # rows that a block's lanes hold
    count = rows if offsets else min(rows, -(-rows // (blocks * at_once)) * at_once)
    summed = WARP * lengths_a_lane(count)
    body = functools.partial(_scan_kernel, count=count, warpgroups=warpgroups, interpret=interpret is not None)
    return plgpu.kernel(
        body,
        out_type=acceptance_type(rows)[: 4 if offsets else 3],
        grid=(-(-rows // count),),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "lengths": plgpu.SMEM((summed,), jnp.int32),
            "ends": plgpu.SMEM((summed,), jnp.int32),
            "known": plgpu.Barrier(num_arrivals=warpgroups),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="acceptance_scan",
    )(draft, target)


acceptance_scan = Op(acceptance_scan_reference)
acceptance_scan.register(Kernel(runs_mosaic, acceptance_scan_mosaic, supports_scan))


def acceptance_type(rows: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the fields of `Acceptance`."""
    return [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32, jnp.int32)]
