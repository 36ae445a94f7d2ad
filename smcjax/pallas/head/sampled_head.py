"""The LM head of many rows and the draw from it in one kernel: no logit is written to memory.

    logit = x · Wᵀ / temperature, −∞ where forbidden;   token and log-probability by Gumbel-max (`mosaic/gumbel_max.py`)

The persistent step (`decode_step/kernel.py`) does so for few rows; this is for layers that are launched one by one. Of
P blocks each stays for the whole launch and takes every P-th tile of the vocabulary. A block has five warpgroups:

    0, 1   multiply: 64 rows by 128 ids each, and leave the sums in shared memory
    2, 3   draw from what 0 and 1 left, while these multiply the next tile
    4      loads tiles of W and x

With up to 64 rows a tile has 256 ids, if that divides the vocabulary. Otherwise a tile has 128 ids and 128 rows, and
blocks divide the rows among them. The noise takes 75 integer operations a logit, more time than the products, so what
counts is that the two run side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from smcjax.device import HOPPER
from smcjax.noise import gumbels, key_from
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.gumbel_max import (
    DTYPES,
    NO_ID,
    Candidates,
    Draw,
    initial,
    reduce_candidates,
    update,
    whole_words,
)
from smcjax.pallas.mosaic.online_softmax import row_layout
from smcjax.pallas.mosaic.wgmma import Ref, across, swizzled

ROWS = 64  # of a product
IDS = 128  # of a product
DEPTH = 64  # columns of x and W a step of the ring
WORD = 32  # ids to a word of flags
NARROW = 8  # ids that are drawn from at once
RING = 160 * 1024  # bytes
MIN_ROWS = 33  # fewer are drawn from as soon by XLA
MAX_ROWS = 256  # more have not been timed (docs/explanation/kernels.md)
MAX_PADDING = 32  # rows; with more of them XLA is the faster
REGISTERS = (104, 112, 40)  # a thread, of those that multiply, draw and load; the launch has 96 for each


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static choices."""

    rows: int  # of a tile: 64 or 128
    ids: int  # 256 or 128
    groups: int  # of rows
    programs: int  # blocks that share a group's ids
    stages: int  # of the ring

    @classmethod
    def of(cls, rows: int, vocab: int) -> Tiling:
        """Chooses the tiling for `rows` rows and `vocab` ids."""
        few = rows <= ROWS and vocab % (2 * IDS) == 0
        tile_rows, ids = (ROWS, 2 * IDS) if few else (2 * ROWS, IDS)
        groups = -(-rows // tile_rows)
        programs = max(1, min(vocab // ids, HOPPER.multiprocessors // groups))
        return cls(tile_rows, ids, groups, programs, RING // ((tile_rows + ids) * DEPTH * 2))

    @property
    def padded(self) -> int:
        """Rows of all tiles."""
        return self.rows * self.groups

    @property
    def halves(self) -> tuple[int, int]:
        """How many rows, and how many ids, lie between the two halves of a tile; one of them is 0."""
        return (0, IDS) if self.rows == ROWS else (ROWS, 0)

    @property
    def candidates(self) -> int:
        """Candidates that the blocks find for each row."""
        return self.programs * self.ids // IDS


def _kernel(
    x_ref: Ref,  # [M, E] bf16 GMEM, as all
    w_ref: Ref,  # [V, E] bf16
    forbidden_ref: Ref,  # [V / 32, M] uint32
    forbids_ref: Ref,  # [M] uint32: all bits where what is forbidden is, none elsewhere
    keys_ref: Ref,  # [2, M] uint32
    inverse_ref: Ref,  # [M] f32: 1 / temperature
    noise_ref: Ref,  # [M] f32: what the noise is multiplied by
    best_ref: Ref,  # [candidates, M], as all that follow
    id_ref: Ref,
    logit_ref: Ref,
    top_ref: Ref,
    mass_ref: Ref,
    *,
    x_smem: Ref,  # [stages, rows, DEPTH] SMEM
    w_smem: Ref,  # [stages, ids, DEPTH] SMEM
    logits_smem: Ref,  # [2, IDS / NARROW, ROWS, NARROW] f32 SMEM
    full: Ref,  # [stages] barriers
    empty: Ref,  # [stages] barriers
    made: Ref,  # [2] barriers
    taken: Ref,  # [2] barriers
    tiling: Tiling,
    interpret: bool,
) -> None:
    """Finds the candidates of one group of rows among every P-th tile of ids: the body of a block.

    Warpgroups h and 2 + h share half h of every tile: h multiplies it and 2 + h draws from it, and they pass
    `logits_smem[h]` to and fro by `made[h]` and `taken[h]`.
    """
    # A tile takes E / `DEPTH` steps; a step is one place of the ring.
    stages, steps = tiling.stages, x_ref.shape[1] // DEPTH
    # Where the second half of a tile begins: 64 rows or 128 ids behind the first.
    row_step, id_step = tiling.halves
    group, program = lax.axis_index("group"), lax.axis_index("program")
    warpgroup = lax.axis_index("warpgroup")
    # This block has tiles program, program + P, program + 2·P, … of the vocabulary.
    tiles = lax.div(w_ref.shape[0] // tiling.ids - 1 - program, tiling.programs) + 1
    # The ring runs on from one tile to the next: step s of the whole launch has place s mod `stages`.
    total = tiles * steps

    def first_id(number: jax.Array) -> jax.Array:
        return (program + number * tiling.programs) * tiling.ids

    def registers(which: int, action: Any) -> None:
        # All threads are launched with 96 registers; multiplying and drawing take what loading gives back.
        if not interpret:
            plgpu.set_max_registers(REGISTERS[which], action=action)

    @pl.when(warpgroup == 4)
    def _load() -> None:
        registers(2, "decrease")

        def load(step: jax.Array, _: None) -> None:
            slot = lax.rem(step, stages)
            # `empty` completes when both multiplying warpgroups have read the tiles that had this place. The first
            # round waits for nothing.
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            column = pl.ds(pl.multiple_of(lax.rem(step, steps) * DEPTH, DEPTH), DEPTH)
            # Two copies a step, W [ids, 64] and x [rows, 64], are the two arrivals of `full`. x comes again for every
            # tile.
            start = pl.multiple_of(first_id(lax.div(step, steps)), tiling.ids)
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(start, tiling.ids), column], w_smem.at[slot], full.at[slot])
            rows = pl.ds(pl.multiple_of(group * tiling.rows, tiling.rows), tiling.rows)
            plgpu.copy_gmem_to_smem(x_ref.at[rows, column], x_smem.at[slot], full.at[slot])

        lax.fori_loop(0, total, load, None)

    @pl.when(warpgroup < 2)
    def _multiply() -> None:
        registers(0, "increase")

        def tile(number: jax.Array, _: None) -> None:
            # [64, 128] f32 in registers over all of E: 64 rows of x against 128 ids of W.
            def sums(acc: Ref) -> jax.Array:
                def step(k: jax.Array, _: None) -> None:
                    now = number * steps + k
                    slot = lax.rem(now, stages)
                    # Both tiles of the step have come.
                    plgpu.barrier_wait(full.at[slot])
                    # This half: other rows of the same ids, or other ids of the same rows.
                    x = x_smem.at[slot, pl.ds(pl.multiple_of(warpgroup * row_step, ROWS), ROWS)]
                    w = w_smem.at[slot, pl.ds(pl.multiple_of(warpgroup * id_step, IDS), IDS)]
                    # The product is only begun here; it reads its operands from shared memory while the warpgroup goes
                    # on.
                    plgpu.wgmma(acc, x, w.transpose((1, 0)))
                    # At most this step's product is still running, so the one before has read its place of the ring.
                    plgpu.wgmma_wait(1)
                    release(now - 1, k > 0)

                lax.fori_loop(0, steps, step, None)
                # The last product of the tile ends, and with it the use of the last place.
                plgpu.wgmma_wait(0)
                release((number + 1) * steps - 1, True)
                return acc[...]

            acc = pl.run_scoped(sums, plgpu.ACC((ROWS, IDS), jnp.float32))
            # `logits_smem[h]` has one place. The draw of the tile before may still be reading it: it arrives at `taken`
            # when it has read all.
            pl.when(number > 0)(lambda: plgpu.barrier_wait(taken.at[warpgroup]))
            leave(logits_smem.at[warpgroup], acc)
            # The sums are stored: the drawing warpgroup of this half may begin, and this one multiplies the next tile.
            plgpu.barrier_arrive(made.at[warpgroup])

        def leave(place: Ref, sums: jax.Array) -> None:
            """Stores sums [64, 128] for the draw, cut into pieces of as many ids as are drawn from at once."""
            if interpret:
                place[...] = sums.reshape(ROWS, IDS // NARROW, NARROW).swapaxes(0, 1)
                return
            # [64, 128] becomes 16 pieces [64, 8], so that the draw loads each piece at a place known at run time.
            for part in range(IDS // NARROW):
                store(place.at[part], lax.slice(sums, (0, part * NARROW), (ROWS, (part + 1) * NARROW)))

        def release(step: jax.Array, due: Any) -> None:
            """Frees the place of a step's tiles in the ring, if the loader will wait for it."""
            # No load follows the last `stages` steps, so an arrival for them would be one that nothing waits for. `due`
            # is false at a tile's first step: the step before it was freed at the end of its own tile.
            pl.when((step + stages < total) & due)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(step, stages)]))

        lax.fori_loop(0, tiles, tile, None)

    @pl.when((warpgroup >= 2) & (warpgroup < 4))
    def _draw() -> None:
        registers(1, "increase")
        # The same half of rows or ids as warpgroup 0 or 1 has.
        half = warpgroup - 2
        rows = pl.ds(pl.multiple_of(group * tiling.rows + half * row_step, ROWS), ROWS)
        # A *place* is an element of [64, 8]: a row, and an id modulo 8. Each keeps a candidate over all ids that pass
        # it.
        shape = (ROWS, NARROW)

        def of_rows(ref: Ref) -> jax.Array:
            # One number a row, in the layout of the rows of a product.
            return plgpu.load(ref.at[rows], layout=row_layout(), optimized=False)

        # What a row draws with, [64] each, is repeated along the 8 ids once for all tiles.
        terms = (keys_ref.at[0], keys_ref.at[1], inverse_ref, noise_ref)
        draw = Draw(*(across(of_rows(ref), shape) for ref in terms))
        forbids = of_rows(forbids_ref)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

        def tile(number: jax.Array, found: Candidates) -> Candidates:
            # The sums of this half of the tile are in `logits_smem[half]`.
            plgpu.barrier_wait(made.at[half])

            def word(c: jax.Array, found: Candidates) -> Candidates:
                # 32 ids share a word of flags a row; a row whose `forbids` is 0 forbids nothing.
                start = first_id(number) + half * id_step + c * WORD
                flags = across(of_rows(forbidden_ref.at[lax.div(start, WORD)]) & forbids, shape)

                def part(number: jax.Array, found: Candidates) -> Candidates:
                    # [64, 8] sums come into registers in the layout of a product's result, as the rows' numbers above.
                    place = logits_smem.at[half, c * (WORD // NARROW) + number]
                    product = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
                    # Temperature, forbidden ids and noise come here; the logit goes into five numbers and is kept
                    # nowhere.
                    return update(found, product, column + number * NARROW, start, flags, draw)

                return lax.fori_loop(0, WORD // NARROW, part, found)

            found = lax.fori_loop(0, IDS // WORD, word, found)
            # All of the half has been read: the multiplying warpgroup may overwrite it. Behind the last tile nothing
            # waits for that.
            pl.when(number + 1 < tiles)(lambda: plgpu.barrier_arrive(taken.at[half]))
            return found

        def full_of(value: float | int, dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, dtype), plgpu.Layout.WGMMA)

        # Over all tiles of the block: [64, 8] candidates, of which each row's eight become one.
        best, ids, logit, top, mass = lax.fori_loop(0, tiles, tile, initial(full_of))
        most = best.max(axis=1)
        first = best == across(most, shape)
        # Of equal perturbed logits the lowest id wins, as everywhere (`gumbel_max.py`).
        token = jnp.where(first, ids, NO_ID).min(axis=1)
        chosen = jnp.where(first & (ids == across(token, shape)), logit, -jnp.inf).max(axis=1)
        highest = top.max(axis=1)
        # Each place's mass counts from its own top, so it shrinks to the row's.
        total_mass = (mass * jnp.exp(top - across(highest, shape))).sum(axis=1)
        # With halves of ids each half is a candidate of the same rows; with halves of rows each writes its own rows of
        # one candidate. The candidates of all blocks are compared behind the launch.
        candidate = program * (tiling.ids // IDS) + (half if id_step else 0)
        refs = (best_ref, id_ref, logit_ref, top_ref, mass_ref)
        for ref, value in zip(refs, (most, token, chosen, highest, total_mass), strict=True):
            store(ref.at[candidate, rows], value)


def supports(*, rows: int, hidden: int, vocab: int, dtype: Any) -> bool:
    """True for x [rows, hidden] and W [vocab, hidden] that the kernel takes, not slower than whole logits."""
    fits = jnp.dtype(dtype) == jnp.bfloat16 and hidden % DEPTH == 0 and vocab % IDS == 0
    few_padded = Tiling.of(rows, vocab).padded - rows <= MAX_PADDING
    return fits and MIN_ROWS <= rows <= MAX_ROWS and few_padded


def sampled_head_reference(
    x: Float[Array, "R E"],
    weight: Float[Array, "V E"],
    keys: UInt[Array, "R 2"],
    temperature: Float[Array, " R"],
    noise_scale: Float[Array, " R"],
    forbidden: UInt[Array, "words R"],
    forbids: Bool[Array, " R"],
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """A token a row from softmax(x · weightᵀ / temperature), and its log-probability (f32; NaN where a logit is).

    The noise is that of `smcjax.noise.gumbels` with the row's key times `noise_scale`, 1 or, of rows that take the
    likeliest token, 0. `forbidden` is impossible in rows that it `forbids`: 32 ids to a word, the first in the lowest
    bit. By whole logits.
    """
    logits = jnp.dot(x, weight.T, preferred_element_type=jnp.float32) / temperature[:, None]
    flags = (forbidden[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    flags = jnp.moveaxis(flags, 1, 0).reshape(logits.shape) != 0
    logits = jnp.where(flags & forbids[:, None], -jnp.inf, logits)
    noise = gumbels(key_from(keys), logits.shape[1:])
    token = jnp.argmax(logits + noise_scale[:, None] * noise, axis=1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=1)


@functools.partial(jax.jit, static_argnames=("interpret",))
def sampled_head_mosaic(
    x: Float[Array, "R E"],
    weight: Float[Array, "V E"],
    keys: UInt[Array, "R 2"],
    temperature: Float[Array, " R"],
    noise_scale: Float[Array, " R"],
    forbidden: UInt[Array, "words R"],
    forbids: Bool[Array, " R"],
    *,
    interpret: Any = None,
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Computes `sampled_head` by the kernel.

    `supports` must hold but for the rows: nothing here checks it. `interpret` is `plgpu.InterpretGPUParams()` to run on
    a CPU.

    A jit of its own, so that a cycle's steps trace and lower the kernel once.
    """
    rows, vocab = x.shape[0], weight.shape[0]
    tiling = Tiling.of(rows, vocab)

    def padded(array: jax.Array) -> jax.Array:
        """Appends zeros along the rows, its last axis."""
        widths = [(0, 0)] * (array.ndim - 1) + [(0, tiling.padded - rows)]
        return jnp.pad(array, widths)

    stages = tiling.stages
    found = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, interpret=interpret is not None),
        out_type=[jax.ShapeDtypeStruct((tiling.candidates, tiling.padded), dtype) for dtype in DTYPES],
        grid=(tiling.programs, tiling.groups),
        grid_names=("program", "group"),
        num_threads=5,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, tiling.rows, DEPTH), x.dtype, transforms=swizzled()),
            "w_smem": plgpu.SMEM((stages, tiling.ids, DEPTH), x.dtype, transforms=swizzled()),
            "logits_smem": plgpu.SMEM((2, IDS // NARROW, ROWS, NARROW), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "made": plgpu.Barrier(num_barriers=2),
            "taken": plgpu.Barrier(num_barriers=2),
        },
        interpret=interpret,
        kernel_name="sampled_head",
    )(
        jnp.pad(x, ((0, tiling.padded - rows), (0, 0))),
        weight,
        padded(forbidden),
        padded(whole_words(forbids)),
        padded(keys.T),
        padded(1.0 / temperature),
        padded(noise_scale),
    )
    return reduce_candidates(Candidates(*(each.T[:rows] for each in found)))


def _supports(x: Any, weight: Any, *_: Any) -> bool:
    """True by what shapes and dtypes say; the draws' terms are not read."""
    fits = weight.ndim == 2 and weight.dtype == x.dtype
    return fits and supports(rows=x.shape[0], hidden=x.shape[1], vocab=weight.shape[0], dtype=x.dtype)


sampled_head: Op[..., tuple[jax.Array, jax.Array]] = Op(sampled_head_reference)
sampled_head.register(Kernel(runs_mosaic, sampled_head_mosaic, _supports))
