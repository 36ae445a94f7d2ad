"""Epilogues of products, which take their sums inside the persistent decode step (`kernel.py`).

By the product: norm scale, rotary and KV write (qkv); norm scale and SwiGLU (gate_up); the residual, and that times the
next norm's weight (o, down); norm scale and what a token is drawn by (head). A unit's sums come as tiles of 16 features
of all tokens (`mosaic/tiles.py`). What an epilogue has to load comes by its `early_…` while the tensor core is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.collectives.peer_tiles import exchanged
from smcjax.pallas.decode_step.operands import BlockPart
from smcjax.pallas.decode_step.shape import TILE, StageIndex, when
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.gumbel_max import Candidates, Draw, initial, update
from smcjax.pallas.mosaic.tiles import gather, load_tile, scatter, scatter_to_slots, tile_layout
from smcjax.pallas.mosaic.wgmma import Ref


class Epilogue(BlockPart):
    """One block's, of every product."""

    def early_from_residual(self, half: StageIndex, unit: jax.Array) -> Any:
        """The angles that a unit of qkv is rotated by."""
        if isinstance(half, int) and half == 1:
            return None
        # Of gate_up too, which does not use it.
        _, column = self._place_in_head(unit)
        row = self._step * self._shape.tokens
        return self._gather(self._g.cos, row, 1, column), self._gather(self._g.sin, row, 1, column)

    def finish_from_residual(
        self,
        layer: Any,
        half: StageIndex,
        unit: jax.Array,
        first: jax.Array,
        loaded: Any,
        tiles: list[jax.Array],
        _: None,
    ) -> None:
        """Rotates sums of qkv into the queries or the KV pages; takes SwiGLU of those of gate_up."""
        a, b = (_round(tile) for tile in self._scaled(unit, first, tiles))
        when(half == 0, lambda: self._finish_qkv(layer, unit, loaded, a, b))
        when(half == 1, lambda: self._finish_gate_up(unit, a, b))

    def _finish_qkv(self, layer: Any, unit: jax.Array, angles: Any, a: jax.Array, b: jax.Array) -> None:
        shape, g = self._shape, self._g
        head, column = self._place_in_head(unit)
        cos, sin = angles

        def rotated() -> tuple[jax.Array, jax.Array]:
            return a * cos - b * sin, b * cos + a * sin

        @pl.when(head < shape.heads)
        def _query() -> None:
            kv_head, place = lax.div(head, shape.per_kv_head), lax.rem(head, shape.per_kv_head)
            row = kv_head * shape.tokens * shape.q_step + place
            for part, value in enumerate(rotated()):
                self._scatter(g.q, row, shape.q_step, column + part * shape.dim // 2, value)

        def write(refs: Sequence[Ref], kv_head: jax.Array, values: tuple[jax.Array, jax.Array]) -> None:
            for part, value in enumerate(values):
                at = column + part * shape.dim // 2
                first = self._step * shape.tokens
                scatter_to_slots(refs, layer, g.slots, first, kv_head, at, value, interpret=self._interpret)

        @pl.when((head >= shape.heads) & (head < shape.heads + shape.kv_heads))
        def _key() -> None:
            write(g.keys, head - shape.heads, rotated())

        @pl.when(head >= shape.heads + shape.kv_heads)
        def _value() -> None:
            write(g.values, head - shape.heads - shape.kv_heads, (a, b))

    def _finish_gate_up(self, unit: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        self._scatter(self._g.h, 0, 1, unit * TILE, gate / (1.0 + jnp.exp(-gate)) * up)

    def early_from_stage(self, layer: Any, half: StageIndex, unit: jax.Array) -> Any:
        """Loads, for each tile, its first row, the residual and the next norm's weight."""
        norm = 2 * layer + 1 + half
        starts = self._sites["from_stage"].products[0].tiles(unit)
        return [
            (norm, start, self._gather(self._g.x, 0, 1, start), self._gather(self._g.norms, norm, 0, start))
            for start in starts
        ]

    def finish_from_stage(
        self, unit: jax.Array, first: jax.Array, loaded: Any, tiles: list[jax.Array], _: None
    ) -> None:
        """Adds sums of o or down to the residual; writes that times the next norm's weight, too."""
        for tile, (norm, start, x, weight) in zip(tiles, loaded, strict=True):
            for addresses in self._g.peers:
                last = 2 * len(self._g.qkv)
                tile = exchanged(addresses, tile, lax.div(start, TILE), norm - 1, norm == last)
            x = _round(x.astype(jnp.float32) + _round(tile))
            self._scatter(self._g.x, 0, 1, start, x)
            self._scatter(self._g.xg, 0, 1, start, x * weight.astype(jnp.float32))

    def sampling(self) -> tuple[Candidates, Callable[..., Any], Callable[..., Any]]:
        """Returns the head's first candidates, its early loads, and the function that adds a unit's logits.

        Each tile element keeps a candidate of its own.
        """
        shape, g = self._shape, self._g
        layout = tile_layout(shape.tokens)
        now = self._step * shape.tokens
        key0, key1 = (self._gather(g.noise_keys, now, 1, word, column_step=0) for word in range(2))
        forbids = self._gather(g.forbids, now, 1, 0, column_step=0)
        inverse = self._gather(g.inverse_temperature, 0, 1, 0, column_step=0)
        noise_scale = self._gather(g.noise_scale, 0, 1, 0, column_step=0)
        draw = Draw(key0, key1, inverse, noise_scale)

        def tile_of(value: float | int, dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full((TILE, shape.tokens), value, dtype), layout)

        def early(unit: jax.Array) -> jax.Array:
            return self._gather(g.forbidden, 0, 1, unit, column_step=0) & forbids

        def finish(
            unit: jax.Array, first: jax.Array, words: jax.Array, tiles: list[jax.Array], found: Candidates
        ) -> Candidates:
            feature = plgpu.broadcasted_iota(jnp.int32, (TILE, shape.tokens), 0, layout=layout)
            for piece, tile in enumerate(self._scaled(unit, first, tiles)):
                found = update(found, tile, feature + piece * TILE, unit * 32, words, draw)
            return found

        return initial(tile_of), early, finish

    def found(self, state: Candidates) -> None:
        """Writes what `sampling` ended with."""
        for ref, value in zip(self._g.found, state, strict=True):
            self._scatter(ref, 0, 1, self._block * TILE, value)

    # What they have in common.

    def _scaled(self, unit: jax.Array, first: jax.Array, tiles: list[jax.Array]) -> list[jax.Array]:
        """The tiles times 1/rms of their tokens."""

        @pl.when(unit == first)
        def _arrived() -> None:
            plgpu.barrier_wait(self._s["scale_ready"])

        scale = load_tile(self._s["scale_smem"])
        return [tile * scale for tile in tiles]

    def _gather(self, ref: Ref, row: Any, row_step: int, column: Any, column_step: int = 1) -> jax.Array:
        return gather(
            ref, row, row_step, column, column_step=column_step, tokens=self._shape.tokens, interpret=self._interpret
        )

    def _scatter(self, ref: Ref, row: Any, row_step: int, column: Any, value: jax.Array) -> None:
        scatter(ref, row, row_step, column, value, interpret=self._interpret)

    def _place_in_head(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(head, column of its first half) of a unit of the qkv product."""
        first, _ = self._sites["from_residual"].products[0].tiles(unit)
        return lax.div(first, self._shape.dim), lax.rem(first, self._shape.dim)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bf16, and returns f32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
