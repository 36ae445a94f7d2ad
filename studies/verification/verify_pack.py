"""The verification step of batched speculative decoding, and the packing of accepted KV: one Mosaic GPU kernel, or two.

    k_i = min{ j : draft_ij ≠ target_ij },  γ if there is none            accepted tokens of row i
    next_i = target_i,k_i                                                 the correction, or the bonus
    offset_i = k_0 + … + k_{i−1}
    packed[offset_i + j] = kv[i, j]  for j < k_i;  the rows behind the last are zero

(Greedy acceptance, source 004. The engine's paged KV needs none of this: there acceptance is `length += k + 1`.)

Both kernels end alike: a block knows every k_i, sums them, and fills tiles of *packed* rows, every so-manieth of them,
so that what was rejected is nobody's work. A tile comes from one run of accepted rows or from several; the copy engine
brings each run to its place in shared memory and takes the tile from there. What differs is how a block learns k: in
the fused kernel every block scans all ids itself, out of the L2; in the two-step version a kernel before has done so,
each block a few rows. Scanning is repeated work that grows with b·γ, and the second launch costs the same always, so
`verify_and_pack` takes the one or the other by b·γ (`MAX_RECOMPUTED`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Num

from smcjax.device import HOPPER
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, Ref, Threads
from studies.verification import bulk
from studies.verification.acceptance import (
    MAX_GAMMA,
    MAX_RECOMPUTED,
    MAX_ROWS,
    WARPGROUPS,
    Acceptance,
    acceptance_scan_reference,
    acceptance_type,
    first_mismatches,
    inclusive_sums,
    lengths_a_lane,
    scan_rows_mosaic,
    supports_scan,
    write_acceptance,
    write_offsets,
)

TILE_BYTES = 8192  # of one tile, where a row is not longer
LONGEST_ROW = 16384  # bytes
RING_BYTES = 49152  # tiles of one warpgroup that are under way
MAX_SLOTS = 8
TILES_EACH = 4  # at least, where there are so many rows: the last tiles then end together


# --------------------------------------------------------------------------------------------------------- references


def pack_reference(kv: Num[Array, "b g D"], lengths: Int[Array, " b"]) -> Num[Array, "bg D"]:
    """Packs the first `lengths[i]` ≤ γ entries of every row of `kv`, one after the other, and zeros behind them.

    packed[r] = kv[i, r − offset_i] for the row i whose run holds r.
    """
    rows, gamma, dim = kv.shape
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    packed_row = jnp.arange(rows * gamma, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, packed_row, side="right"), rows - 1)
    source = jnp.minimum(row * gamma + packed_row - (ends - lengths)[row], rows * gamma - 1)
    found = kv.reshape(rows * gamma, dim)[source]
    return jnp.where((packed_row < ends[-1])[:, None], found, jnp.zeros((), kv.dtype))  # selected: NaN does not leak


def verify_and_pack_reference(
    draft: Int[Array, "b g"], target: Int[Array, "b g1"], kv: Num[Array, "b g D"]
) -> tuple[Acceptance, Num[Array, "bg D"]]:
    """Scans the ids, then packs the KV of what is accepted.

    Raises ValueError where shapes do not fit each other.
    """
    if draft.shape != kv.shape[:2]:
        raise ValueError(f"draft has shape {draft.shape} and its KV {kv.shape}; the first two dimensions must agree.")
    acceptance = acceptance_scan_reference(draft, target)
    return acceptance, pack_reference(kv, acceptance.lengths)


# ------------------------------------------------------------------------------------------------------------ kernels


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How packing is divided; `plan` chooses."""

    blocks: int
    warpgroups: int
    tile: int  # packed rows
    slots: int  # tiles of a warpgroup that are under way
    ahead: int = 0  # positions of every row that the fused kernel brings into the L2 while it scans


def plan(
    rows: int, gamma: int, row_bytes: int, *, blocks: int = HOPPER.multiprocessors, warpgroups: int = WARPGROUPS
) -> Tuning:
    """Tiles of up to 8 KB, smaller where few rows are to reach all multiprocessors; no block without a tile."""
    packed = rows * gamma
    tile = min(-(-packed // (blocks * warpgroups * TILES_EACH)), max(1, TILE_BYTES // row_bytes))
    tiles = -(-packed // tile)
    blocks = min(blocks, -(-tiles // warpgroups))
    of_a_warpgroup = -(-tiles // (blocks * warpgroups))
    slots = max(2, min(MAX_SLOTS, RING_BYTES // (tile * row_bytes), of_a_warpgroup))
    return Tuning(blocks, warpgroups, tile, slots)


def _scratch(tuning: Tuning, rows: int, dim: int, dtype: Any) -> dict[str, Any]:
    summed = WARP * lengths_a_lane(rows)
    tiles = tuning.warpgroups * tuning.slots
    return {
        "lengths": plgpu.SMEM((summed,), jnp.int32),
        "ends": plgpu.SMEM((summed,), jnp.int32),
        "nothing": plgpu.SMEM((tuning.tile, dim), dtype),
        "buffer": plgpu.SMEM((tiles * tuning.tile, dim), dtype),
        "ready": bulk.barriers_type(tiles),
        "known": plgpu.Barrier(num_arrivals=tuning.warpgroups),
    }


class _Packing:
    """A block's share of packing, in the order in which its methods stand."""

    def __init__(self, kv: Ref, packed: Ref, rows: int, scratch: dict[str, Ref], tuning: Tuning, interpret: bool):
        self.kv, self.packed, self.rows, self.tuning, self.interpret = kv, packed, rows, tuning, interpret
        self.lengths, self.ends, self.nothing = scratch["lengths"], scratch["ends"], scratch["nothing"]
        self.buffer, self.ready, self.known = scratch["buffer"], scratch["ready"], scratch["known"]
        self.warpgroup = lax.axis_index("warpgroup")
        self.number = lax.axis_index("block") + self.warpgroup * tuning.blocks  # of this warpgroup among all
        self.is_last_block = lax.axis_index("block") == tuning.blocks - 1  # which has the fewest tiles

    def prepare(self) -> None:
        """Prepares all that does not depend on the lengths."""
        bulk.initialize(self.ready, self._slot(0), self.tuning.slots, interpret=self.interpret)

        @pl.when(self.warpgroup == 0)
        def _zero() -> None:
            bulk.fill_with_zeros(self.nothing, interpret=self.interpret)
            plgpu.commit_smem()

    def look_ahead(self) -> None:
        """Asks for the first positions of all rows, which are likely to be accepted."""
        positions = self.tuning.ahead
        each = pl.cdiv(self.rows * positions, self.tuning.blocks * self.tuning.warpgroups)
        for i in range(each):
            index = self.number * each + i
            row, position = index // max(positions, 1), index % max(positions, 1)
            is_one = (row < self.rows).astype(jnp.int32)
            source = row * (self.kv.shape[0] // self.rows) + position
            bulk.prefetch(self.kv, source, is_one, interpret=self.interpret)

    def sum_lengths(self) -> None:
        """After this warpgroup's part of `lengths` is written."""
        plgpu.barrier_arrive(self.known)
        plgpu.barrier_wait(self.known)
        threads.run(
            functools.partial(inclusive_sums, rows=self.rows), self.lengths, self.ends, interpret=self.interpret
        )
        self.accepted = self.ends[self.rows - 1]

    def begin(self) -> None:
        """Asks for the first tiles."""
        lax.fori_loop(0, self.tuning.slots, lambda n, _: self._fetch(n), None)

    def finish(self) -> None:
        """Stores tiles as they arrive, and asks for the next ones."""

        def turn(n: jax.Array, _: None) -> None:
            first, count, valid = self._tile(n)
            at = self._slot(n % self.tuning.slots)

            @pl.when(valid > 0)
            def _arrived() -> None:
                bulk.wait(self.ready, at, n // self.tuning.slots % 2, interpret=self.interpret)

            start = at * self.tuning.tile
            bulk.store(self.buffer, start, self.packed, first, valid, interpret=self.interpret)
            zero = jnp.int32(0)
            bulk.store(self.nothing, zero, self.packed, first + valid, count - valid, interpret=self.interpret)
            plgpu.commit_smem_to_gmem_group()

            @pl.when(n > 0)
            def _refill() -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the turn before has been read from its slot
                self._fetch(n - 1 + self.tuning.slots)

        everyone = self.tuning.blocks * self.tuning.warpgroups
        tiles = pl.cdiv(self.packed.shape[0], self.tuning.tile)
        lax.fori_loop(0, lax.div(tiles - self.number + everyone - 1, everyone), turn, None)
        plgpu.wait_smem_to_gmem(0)

    def _slot(self, slot: Any) -> jax.Array:
        return self.warpgroup * self.tuning.slots + slot

    def _tile(self, n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First packed row of this warpgroup's n-th tile, its rows, and how many of them hold accepted KV."""
        first = (self.number + n * (self.tuning.blocks * self.tuning.warpgroups)) * self.tuning.tile
        count = jnp.clip(self.packed.shape[0] - first, 0, self.tuning.tile)
        return first, count, jnp.clip(self.accepted - first, 0, count)

    def _fetch(self, n: jax.Array) -> None:
        """Asks for the accepted rows of the n-th tile, run by run; there may be no such tile."""
        first, _, valid = self._tile(n)
        stop = first + valid
        slot = self._slot(n % self.tuning.slots)
        gamma = self.kv.shape[0] // self.rows

        @pl.when(valid > 0)
        def _ask() -> None:
            bulk.expect(self.ready, slot, valid, of=self.buffer, interpret=self.interpret)

            def run(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                row, at = carry
                end = self.ends[row]
                count = jnp.minimum(end, stop) - at
                source = row * gamma + at - (end - self.lengths[row])
                target = slot * self.tuning.tile + at - first
                bulk.fetch(self.kv, source, self.buffer, target, count, self.ready, slot, interpret=self.interpret)
                return row + 1, at + count

            lax.while_loop(lambda carry: carry[1] < stop, run, (self._row_of(first), first))

    def _row_of(self, packed_row: jax.Array) -> jax.Array:
        """The first row whose run ends behind `packed_row`, an accepted one: as many rows end before."""
        row = jnp.int32(0)
        step = 1 << (self.rows.bit_length() - 1)
        while step:
            further = row + step
            ended = self.ends[jnp.minimum(further, self.rows) - 1] <= packed_row
            row = jnp.where(jnp.logical_and(further < self.rows, ended), further, row)
            step //= 2
        return row


def _fused_kernel(
    draft: Ref,  # [b, γ] GMEM, as all that follow
    target: Ref,  # [b, γ + 1]
    kv: Ref,  # [b γ, D]
    lengths_out: Ref,  # [b]
    has_mismatch_out: Ref,  # [b]
    next_tokens_out: Ref,  # [b]
    offsets_out: Ref,  # [b]
    packed: Ref,  # [b γ, D]
    *,
    tuning: Tuning,
    interpret: bool,
    **scratch: Ref,
) -> None:
    rows, warpgroups = draft.shape[0], tuning.warpgroups
    work = _Packing(kv, packed, rows, scratch, tuning, interpret)
    scan = functools.partial(first_mismatches, ids=draft.shape, count=rows, warpgroups=warpgroups)
    write = functools.partial(write_acceptance, ids=draft.shape, count=rows, warpgroups=warpgroups)
    offsets_program = functools.partial(write_offsets, rows=rows, warpgroups=warpgroups)

    work.prepare()
    work.look_ahead()
    threads.run(scan, draft, target, work.lengths, 0, work.warpgroup, interpret=interpret)
    work.sum_lengths()
    work.begin()

    @pl.when(work.is_last_block)
    def _write() -> None:
        outs = (lengths_out, has_mismatch_out, next_tokens_out)
        threads.run(write, work.lengths, target, *outs, 0, work.warpgroup, interpret=interpret)
        threads.run(offsets_program, work.lengths, work.ends, offsets_out, work.warpgroup, interpret=interpret)

    work.finish()


def _pack_kernel(
    kv: Ref,  # [b γ, D] GMEM, as all that follow
    given: Ref,  # [b]
    offsets_out: Ref,  # [b]
    packed: Ref,  # [b γ, D]
    *,
    tuning: Tuning,
    interpret: bool,
    **scratch: Ref,
) -> None:
    rows, warpgroups = given.shape[0], tuning.warpgroups
    work = _Packing(kv, packed, rows, scratch, tuning, interpret)
    take = functools.partial(_take_lengths, rows=rows, warpgroups=warpgroups)
    offsets_program = functools.partial(write_offsets, rows=rows, warpgroups=warpgroups)

    work.prepare()
    threads.run(take, given, work.lengths, work.warpgroup, interpret=interpret)
    work.sum_lengths()
    work.begin()

    @pl.when(work.is_last_block)
    def _write() -> None:
        threads.run(offsets_program, work.lengths, work.ends, offsets_out, work.warpgroup, interpret=interpret)

    work.finish()


def _take_lengths(t: Threads, given: Ref, lengths: Ref, warpgroup: Any, *, rows: int, warpgroups: int) -> None:
    """lengths[i] = given[i]: from GMEM to SMEM, by all warpgroups."""
    for turn in range(-(-rows // (warpgroups * WARPGROUP))):
        row = t.minimum(t.index + warpgroup * WARPGROUP + turn * warpgroups * WARPGROUP, rows - 1)
        t.store(lengths, row, t.load(given, row))


# ----------------------------------------------------------------------------------------------------------- wrappers


def _supports_pack(kv: jax.Array, lengths: Any) -> bool:
    """True where a row of KV is some multiple of 16 bytes (bf16: D % 8 == 0), which the copy engine needs."""
    rows, gamma, dim = kv.shape
    row_bytes = dim * kv.dtype.itemsize
    shapes = 0 < rows <= MAX_ROWS and 0 < gamma <= MAX_GAMMA and 0 < row_bytes <= LONGEST_ROW
    return shapes and row_bytes % 16 == 0


def _supports_both(draft: jax.Array, target: jax.Array, kv: jax.Array) -> bool:
    return draft.shape == kv.shape[:2] and supports_scan(draft, target) and _supports_pack(kv, None)


def _supports_fused(draft: jax.Array, target: jax.Array, kv: jax.Array) -> bool:
    """True where few ids are scanned repeatedly, which is what fusing costs.

    The study's rule would compare expected bytes of KV with a threshold, because its fused kernel is one block.
    """
    return draft.size <= MAX_RECOMPUTED and _supports_both(draft, target, kv)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def pack_mosaic(
    kv: Num[Array, "b g D"], lengths: Int[Array, " b"], *, tuning: Tuning | None = None, interpret: Any = None
) -> tuple[Num[Array, "bg D"], Int[Array, " b"]]:
    """The packed rows, and their offsets, which the kernel finds anyway."""
    rows, gamma, dim = kv.shape
    tuning = tuning or plan(rows, gamma, dim * kv.dtype.itemsize)
    flat = kv.reshape(rows * gamma, dim)
    offsets, packed = _launch(_pack_kernel, "pack", tuning, interpret, flat, rows, acceptance_type(rows)[3:])(
        flat, lengths.astype(jnp.int32)
    )
    return packed, offsets


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def verify_and_pack_mosaic(
    draft: Int[Array, "b g"],
    target: Int[Array, "b g1"],
    kv: Num[Array, "b g D"],
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Acceptance, Num[Array, "bg D"]]:
    """One launch."""
    rows, gamma, dim = kv.shape
    tuning = tuning or plan(rows, gamma, dim * kv.dtype.itemsize)
    flat = kv.reshape(rows * gamma, dim)
    *acceptance, packed = _launch(
        _fused_kernel, "verify_and_pack", tuning, interpret, flat, rows, acceptance_type(rows)
    )(draft, target, flat)
    return Acceptance(*acceptance), packed


@functools.partial(jax.jit, static_argnames=("interpret",))
def scan_then_pack_mosaic(
    draft: Int[Array, "b g"], target: Int[Array, "b g1"], kv: Num[Array, "b g D"], *, interpret: Any = None
) -> tuple[Acceptance, Num[Array, "bg D"]]:
    """Two launches: the two-step version."""
    lengths, has_mismatch, next_tokens = scan_rows_mosaic(draft, target, interpret=interpret)
    packed, offsets = pack_mosaic(kv, lengths, interpret=interpret)
    return Acceptance(lengths, has_mismatch, next_tokens, offsets), packed


def _launch(
    kernel: Any, name: str, tuning: Tuning, interpret: Any, flat: jax.Array, rows: int, small: list[Any]
) -> Any:
    return plgpu.kernel(
        functools.partial(kernel, tuning=tuning, interpret=interpret is not None),
        out_type=[*small, jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups,
        thread_name="warpgroup",
        scratch_types=_scratch(tuning, rows, flat.shape[1], flat.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name=name,
    )


pack = Op(pack_reference)
pack.register(Kernel(runs_mosaic, lambda kv, lengths: pack_mosaic(kv, lengths)[0], _supports_pack))

verify_and_pack = Op(verify_and_pack_reference)
verify_and_pack.register(Kernel(runs_mosaic, verify_and_pack_mosaic, _supports_fused))
verify_and_pack.register(Kernel(runs_mosaic, scan_then_pack_mosaic, _supports_both))
