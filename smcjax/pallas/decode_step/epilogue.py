"""Epilogues of the products inside the persistent decode step (`kernel.py`): what is made of a unit's sums.

They depend on the product. qkv: norm scale, rotary embedding and KV write. gate_up: norm scale and SwiGLU. o and down:
the residual, and that times the next norm's weight. head: norm scale and the candidates that a token is drawn from. A
unit's sums come as tiles of 16 features of all tokens (`mosaic/tiles.py`). An epilogue's own operands are loaded by its
`early_…` while the tensor core is at work.
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
    """The epilogues of one block, for every product."""

    def early_from_residual(self, half: StageIndex, unit: jax.Array) -> Any:
        """Loads the cosines and sines that a unit of qkv is rotated by."""
        if isinstance(half, int) and half == 1:
            return None
        # Of gate_up too, which does not use it.
        _, column = self._place_in_head(unit)
        # Tables hold K steps of M tokens each; this step's rows begin here. A tile [16, M] of each, f32.
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
        """Rotates sums of qkv into the queries or the KV pages, or takes SwiGLU of sums of gate_up."""
        # A unit is two tiles: the two halves of a head that rotate together, or gate and up. Sums times 1/rms are
        # rounded to bf16, as the model rounds a product's result.
        a, b = (_round(tile) for tile in self._scaled(unit, first, tiles))
        # A branch at run time where both halves of a layer share the code.
        when(half == 0, lambda: self._finish_qkv(layer, unit, loaded, a, b))
        when(half == 1, lambda: self._finish_gate_up(unit, a, b))

    def _finish_qkv(self, layer: Any, unit: jax.Array, angles: Any, a: jax.Array, b: jax.Array) -> None:
        shape, g = self._shape, self._g
        # Heads of the product in their order: H of queries, Hkv of keys, Hkv of values. A unit lies within one head.
        head, column = self._place_in_head(unit)
        cos, sin = angles

        def rotated() -> tuple[jax.Array, jax.Array]:
            return a * cos - b * sin, b * cos + a * sin

        @pl.when(head < shape.heads)
        def _query() -> None:
            # The query buffer has rows (KV head, token, head of the KV head), so the rows of a group and KV head are
            # one TMA copy.
            kv_head, place = lax.div(head, shape.per_kv_head), lax.rem(head, shape.per_kv_head)
            row = kv_head * shape.tokens * shape.q_step + place
            for part, value in enumerate(rotated()):
                self._scatter(g.q, row, shape.q_step, column + part * shape.dim // 2, value)

        def write(refs: Sequence[Ref], kv_head: jax.Array, values: tuple[jax.Array, jax.Array]) -> None:
            for part, value in enumerate(values):
                # Straight to the pages: page and offset of each token's slot are known (`slots`).
                at = column + part * shape.dim // 2
                first = self._step * shape.tokens
                scatter_to_slots(refs, layer, g.slots, first, kv_head, at, value, interpret=self._interpret)

        @pl.when((head >= shape.heads) & (head < shape.heads + shape.kv_heads))
        def _key() -> None:
            # Keys are stored rotated, values as they are.
            write(g.keys, head - shape.heads, rotated())

        @pl.when(head >= shape.heads + shape.kv_heads)
        def _value() -> None:
            write(g.values, head - shape.heads - shape.kv_heads, (a, b))

    def _finish_gate_up(self, unit: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        # silu(gate) · up in f32, rounded to bf16 as it is stored.
        self._scatter(self._g.h, 0, 1, unit * TILE, gate / (1.0 + jnp.exp(-gate)) * up)

    def early_from_stage(self, layer: Any, half: StageIndex, unit: jax.Array) -> Any:
        """Loads, for each tile, its first row, the residual and the next norm's weight."""
        # Norms are numbered attention, MLP, attention …: behind o comes this layer's MLP norm, behind down the next.
        norm = 2 * layer + 1 + half
        starts = self._sites["from_stage"].products[0].tiles(unit)
        return [
            (norm, start, self._gather(self._g.x, 0, 1, start), self._gather(self._g.norms, norm, 0, start))
            for start in starts
        ]

    def finish_from_stage(
        self, unit: jax.Array, first: jax.Array, loaded: Any, tiles: list[jax.Array], _: None
    ) -> None:
        """Adds sums of o or down to the residual stream, and writes it and its product with the next norm's weight."""
        for tile, (norm, start, x, weight) in zip(tiles, loaded, strict=True):
            # Where devices divide the layers each has a part of the sum: it pushes its tile into the others' memory and
            # waits for theirs. `norm` − 1 counts the exchanges of a tile in this launch, two a layer.
            for addresses in self._g.peers:
                last = 2 * len(self._g.qkv)
                tile = exchanged(addresses, tile, lax.div(start, TILE), norm - 1, norm == last)
            # The product is rounded to bf16, added, and the sum rounded, as in the model.
            x = _round(x.astype(jnp.float32) + _round(tile))
            self._scatter(self._g.x, 0, 1, start, x)
            # x∘g is what the next product reads; its 1/rms is made of x by the loader of each block and multiplied with
            # that product's sums.
            self._scatter(self._g.xg, 0, 1, start, x * weight.astype(jnp.float32))

    def sampling(self) -> tuple[Candidates, Callable[..., Any], Callable[..., Any]]:
        """Returns the head's first candidates, its early loads, and the function that adds a unit's logits.

        Each element of a tile, a feature and a token, keeps a candidate over all units of the block.
        """
        shape, g = self._shape, self._g
        layout = tile_layout(shape.tokens)
        now = self._step * shape.tokens
        # Numbers of each token, repeated along the 16 features of a tile (`column_step` 0).
        key0, key1 = (self._gather(g.noise_keys, now, 1, word, column_step=0) for word in range(2))
        forbids = self._gather(g.forbids, now, 1, 0, column_step=0)
        inverse = self._gather(g.inverse_temperature, 0, 1, 0, column_step=0)
        noise_scale = self._gather(g.noise_scale, 0, 1, 0, column_step=0)
        draw = Draw(key0, key1, inverse, noise_scale)

        def tile_of(value: float | int, dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full((TILE, shape.tokens), value, dtype), layout)

        def early(unit: jax.Array) -> jax.Array:
            # A unit of the head is 32 ids, so one word of flags a token; tokens that forbid nothing have `forbids` 0.
            return self._gather(g.forbidden, 0, 1, unit, column_step=0) & forbids

        def finish(
            unit: jax.Array, first: jax.Array, words: jax.Array, tiles: list[jax.Array], found: Candidates
        ) -> Candidates:
            # Ids of a unit are unit · 32 + piece · 16 + feature.
            feature = plgpu.broadcasted_iota(jnp.int32, (TILE, shape.tokens), 0, layout=layout)
            for piece, tile in enumerate(self._scaled(unit, first, tiles)):
                found = update(found, tile, feature + piece * TILE, unit * 32, words, draw)
            return found

        return initial(tile_of), early, finish

    def found(self, state: Candidates) -> None:
        """Writes the candidates of this block, 16 a token."""
        for ref, value in zip(self._g.found, state, strict=True):
            # Each block has 16 columns of its own; `conclude.py` compares all of them.
            self._scatter(ref, 0, 1, self._block * TILE, value)

    # What they have in common.

    def _scaled(self, unit: jax.Array, first: jax.Array, tiles: list[jax.Array]) -> list[jax.Array]:
        """The tiles times 1/rms of their tokens."""

        @pl.when(unit == first)
        def _arrived() -> None:
            # Once a stage: the loader arrives when it has stored 1/rms of every token. Later units find it there.
            plgpu.barrier_wait(self._s["scale_ready"])

        # [16, M], the same for all features of a token.
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
        # The unit's first tile of qkv begins at this row of W: a head's first half, at a column of it.
        first, _ = self._sites["from_residual"].products[0].tiles(unit)
        return lax.div(first, self._shape.dim), lax.rem(first, self._shape.dim)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bf16, and returns f32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
