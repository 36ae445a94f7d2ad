"""A block's products inside the persistent decode step (`kernel.py`): how they divide, and their sums.

A product is split among blocks by rows of W only, so no sum crosses blocks, every sum has a fixed order and a step is
repeatable. The tensor core wants 64 rows, and a *unit* has 16 or 32. So the inner dimension is cut into s = 4 or 2
parts that are multiplied at once: 64 rows, s parts of each row of W, against s·M columns, s parts of each token of x.
Of the s × s blocks of sums the s diagonal ones, part q of W times part q of x, are kept and added.

Weights come through a ring in shared memory, tile by tile. x comes once for all units, or streams past a single one.
With int8 weights the consumer multiplies the first half of each tile's columns and an assistant the second; the
consumer adds both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.decode_step.operands import BlockPart
from smcjax.pallas.decode_step.shape import DEPTH, TILE, StageIndex, StagePair, when
from smcjax.pallas.mosaic import int8
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.tiles import gather, load_tile
from smcjax.pallas.mosaic.wgmma import Ref, of_part


class Products(BlockPart):
    """The products of one block: which units it has, their sums, and who frees what it read."""

    def units(self, site: str, half: StageIndex) -> tuple[jax.Array, jax.Array]:
        """Returns the block's first unit, and the one behind its last.

        Blocks with a unit more than others lie apart: where they were the first ones, a step took longer (dev/LOG.md).
        """
        units, blocks = self._sites[site].pick(half, lambda product: product.units), self._shape.blocks
        return lax.div(self._block * units, blocks), lax.div((self._block + 1) * units, blocks)

    def x_slots(self, site: str) -> int:
        """How many tiles of x shared memory has room for."""
        return self._shape.x_rows // (self._sites[site].split * self._shape.tokens)

    def multiply(
        self,
        site: str,
        layer: Any,
        half: StageIndex,
        finish: Callable[..., Any],
        t: jax.Array,
        state: Any,
        early: Callable[[jax.Array], Any],
    ) -> tuple[jax.Array, Any]:
        """Multiplies all units of this block: `finish(unit, first of them, early(unit), tiles, state)` takes each.

        `early` loads what `finish` needs while the tensor core is at work.
        """
        product = self._sites[site]
        first, last = self.units(site, half)
        steps = product.pick(half, lambda product: product.steps)

        def unit(index: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            t, state = carry
            if self._shape.int8:
                # The assistant may store this unit's halves from now on. Attention has used the same bytes before the
                # stage's first unit, and the consumer has that behind it here.
                plgpu.barrier_arrive(self._s["half_empty"])  # whatever the unit before it left has been added
            # Loads from GMEM that the epilogue will want: they come while the tensor core works.
            loaded = early(index)
            scales = self._scales(site, layer, half, index) if self._shape.int8 else None
            # [64, s·M] in a product's layout; then tiles [16, M] in the tile layout of epilogues (`mosaic/tiles.py`).
            sums = self._accumulate(site, half, index == first, t, 0)
            tiles = self._fold(product, sums)
            if scales is not None:
                tiles = [tile * scale for tile, scale in zip(tiles, scales, strict=True)]
            with jax.named_scope("finish"):
                # A unit has taken `steps` places of the ring, whatever its epilogue does.
                return t + steps, finish(index, first, loaded, tiles, state)

        return lax.fori_loop(first, last, unit, (t, state))

    def _accumulate(self, site: str, half: StageIndex, fresh: Any, t: jax.Array, part: int) -> jax.Array:
        """Returns the sums [64, s·M] of a unit; with int8 weights those of half `part` of each tile's columns.

        `t` counts the places of the ring before this unit's. `fresh`: this is the stage's first unit, which awaits x.
        """
        product, x_tiles = self._sites[site], self._shape.x_tiles
        steps, x_steps = (product.pick(half, of) for of in (lambda p: p.steps, lambda p: p.x_steps))
        # x lies in shared memory as tiles [s·M, 128], s parts of each token; if all fit they stay for all units.
        slots, ring = self.x_slots(site), self._shape.ring
        rows = product.split * self._shape.tokens
        # With at most one unit a block, x may have fewer slots than tiles and streams through them.
        single = product.single(self._shape.blocks)

        def free_w(number: jax.Array) -> None:
            # One arrival of each multiplying warpgroup: with int8 weights consumer and assistant both read the place,
            # so the weights' warpgroup waits for two.
            plgpu.barrier_arrive(self._s["w_empty"].at[lax.rem(t + number, ring)])

        def free_x(number: jax.Array) -> None:
            if single:
                # With int8 weights a tile of weights faces two of x, one for each warpgroup, which has slots of its
                # own.
                x_number = number * x_tiles + part

                # Only if the loader will wait for the slot: each arrival must meet a wait.
                @pl.when(x_number + slots < x_steps)
                def _free() -> None:
                    plgpu.barrier_arrive(self._s["x_empty"].at[lax.rem(x_number, slots)])

        def free(number: jax.Array) -> None:
            free_w(number)
            free_x(number)

        def factors(number: jax.Array) -> tuple[Ref, Ref]:
            slot, x_slot = lax.rem(t + number, ring), lax.rem(number * x_tiles + part, slots)
            # `x_full` completes when all parts of the tile have come. x that stays is waited for once, by the stage's
            # first unit; x that streams at each step.
            with jax.named_scope("wait x"):
                when(single or fresh, functools.partial(plgpu.barrier_wait, self._s["x_full"].at[x_slot]))
            # `w_full` completes when the four copies of 16 rows each, which make a tile [64, columns], have come.
            with jax.named_scope("wait w"):
                plgpu.barrier_wait(self._s["w_full"].at[slot])
            return self._s["w_smem"].at[slot], self._s["x_smem"].at[pl.ds(pl.multiple_of(x_slot * rows, 8), rows)]

        def accumulate(acc: Ref) -> jax.Array:
            def step(number: jax.Array, _: None) -> None:
                w, x = factors(number)
                # [64, 128] · [128, s·M], begun and left running.
                plgpu.wgmma(acc, w, x.transpose((1, 0)))
                # At most this product still runs, so the one before has read its tiles and their places become free.
                plgpu.wgmma_wait(1)
                pl.when(number > 0)(lambda: free(number - 1))

            lax.fori_loop(0, steps, step, None)
            # Reading the accumulator waits for the last product, so the last places are free as well.
            sums = acc[...]
            free(jnp.asarray(steps - 1, jnp.int32))
            return sums

        def accumulate_int8(acc: Ref) -> jax.Array:
            """Columns are converted while those before them are multiplied, or while the other warpgroup's are.

            Nothing multiplies from one step to the next, when its registers would be written. A place of the ring is
            free when products have begun with all that was loaded from it: an arrival alone does not wait for loads
            under way, which other warps' products can hold up until the next copy overtakes them.
            """

            def step(number: jax.Array, sums: Any) -> Any:
                w, x = factors(number)
                # This warpgroup's half of the tile: `DEPTH` of its 2·`DEPTH` columns.
                columns = w.at[:, pl.ds(part * DEPTH, DEPTH)]
                # Each block of columns is converted to bf16 in registers, the first factor of a product with as many
                # columns of x.
                for place, a in enumerate(int8.operands(columns, DEPTH // 2, interpret=self._interpret)):
                    b = x.at[:, pl.ds(place * DEPTH // 2, DEPTH // 2)].transpose((1, 0))
                    if self._interpret:  # knows no product with a factor in registers
                        sums += jnp.dot(a, b[...], preferred_element_type=jnp.float32)
                    else:
                        plgpu.wgmma(acc, a, b)
                # All loads from the place have been used by products that have begun (see above).
                free_w(number)
                # x is read by the products themselves, until they are done; so are the registers of their first
                # factors.
                if not self._interpret:
                    plgpu.wgmma_wait(0)
                free_x(number)
                return sums

            start = jnp.zeros((64, rows), jnp.float32) if self._interpret else None
            sums = lax.fori_loop(0, steps, step, start)
            return sums if self._interpret else acc[...]

        body = accumulate_int8 if self._shape.int8 else accumulate
        return pl.run_scoped(body, plgpu.ACC((64, rows), jnp.float32))

    def _scales(self, site: str, layer: Any, half: StageIndex, unit: jax.Array) -> list[jax.Array]:
        """Loads the int8 scales of the rows of each of a unit's tiles, [16, M] each."""
        shape, product = self._shape, self._sites[site]
        # All scales are one array: those of a layer's four matrices one after the other, layer by layer, then the
        # head's.
        places = shape.scale_places()
        # With one code for both halves of a layer the matrix is known at run time.
        starts = [places[name] for name in product.names]
        start: Any = starts[half] if isinstance(half, int) else jnp.where(half == 0, *starts)
        before = len(self._g.qkv) * places["head"] if site == "head" else layer * places["head"] + start
        return [
            gather(self._g.scales[0], 0, 0, before + row, tokens=shape.tokens, interpret=self._interpret)
            for row in product.rows(half, unit)
        ]

    def _fold(self, product: StagePair, sums: jax.Array) -> list[jax.Array]:
        """Adds the diagonal blocks of [64, s·M], and the assistant's with int8 weights, to the unit's tiles [16, M]."""
        # Through shared memory from a product's layout to that of tiles. Part q of tile p is the 16 rows from
        # 16·(q·pieces + p) on.
        store(self._s["fold_smem"], self._diagonal(product, sums))
        scratch = [self._s["fold_smem"]]
        if self._shape.int8:
            # The assistant has stored its half of this unit, in the same order of rows. It is then done with x and with
            # the ring's places too, so that a stage which the consumer signals is over for both.
            plgpu.barrier_wait(self._s["half_full"])
            scratch.append(self._s["half_smem"])
        tiles = []
        for piece in range(product.pieces):
            # Fixed order of addition: the parts of the consumer's half, then those of the assistant's.
            parts = [
                load_tile(ref.at[pl.ds((q * product.pieces + piece) * TILE, TILE)])
                for ref in scratch
                for q in range(product.split)
            ]
            tiles.append(functools.reduce(jnp.add, parts))
        return tiles

    def _diagonal(self, product: StagePair, sums: jax.Array) -> jax.Array:
        """Takes the s diagonal blocks out of [64, s·M], as one [64, M]."""
        tokens = self._shape.tokens
        # Rows of part q of W keep the M columns of part q of x; the other products have no meaning.
        row = plgpu.broadcasted_iota(jnp.int32, (64, tokens), 0, layout=plgpu.Layout.WGMMA)
        blocks = [sums[:, part * tokens : (part + 1) * tokens] for part in range(product.split)]
        return of_part(row, blocks, 64 // product.split)

    def leave_halves(self, site: str, half: StageIndex, t: jax.Array) -> jax.Array:
        """Multiplies the assistant's halves of this block's units, and leaves each where `_fold` finds it."""
        product = self._sites[site]
        first, last = self.units(site, half)
        steps = product.pick(half, lambda product: product.steps)

        def unit(index: jax.Array, t: jax.Array) -> jax.Array:
            # The assistant waits for the same places of the ring as the consumer, and frees them as well.
            diagonal = self._diagonal(product, self._accumulate(site, half, index == first, t, 1))
            # The consumer has begun this unit, so it has added the halves of the unit before.
            plgpu.barrier_wait(self._s["half_empty"])
            store(self._s["half_smem"], diagonal)
            # `_fold` waits for this arrival, one a unit.
            plgpu.barrier_arrive(self._s["half_full"])
            return t + steps

        return lax.fori_loop(first, last, unit, t)
