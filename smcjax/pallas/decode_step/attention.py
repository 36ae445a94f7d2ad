"""Attention inside the persistent decode step (`kernel.py`): a block's share of one (group, KV head).

A share is every S-th of the group's tasks (`attention/prefix_plan.py`), first its chunks, then its pieces, packed to
chunks. Chunks hold nothing that the cycle writes, so they come through the weights' ring, long before the queries do;
pieces come through a ring of their own once the barrier is open. The consumer takes the online softmax of all the
group's queries of that head over them. When the blocks of the pair have met, each merges some of the queries.

The tensor core wants 64 rows. Where queries are half as many, the upper 32 rows read one chunk and the lower 32, the
same queries again, the next: two products with all 64 rows each, of which half is kept, but one softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.decode_step.operands import BlockPart
from smcjax.pallas.decode_step.shape import CHUNK, StageIndex
from smcjax.pallas.mosaic import l2_policy, online_softmax
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.online_softmax import Piece, Softmax
from smcjax.pallas.mosaic.tiles import exp2, of_layer
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Ref, product_of

HALF = QUERIES // 2
Unit = tuple[jax.Array, ...]  # (takes part, group, KV head, which of its splits, its chunks, its chunks of pieces)


class Attention(BlockPart):
    """One block's part in the attention of every layer."""

    def _product(self, acc: jax.Array | None, *factors: tuple[jax.Array | Ref, Ref]) -> jax.Array:
        return product_of(self._interpret)(acc, *factors)

    def _exp2(self, x: jax.Array) -> jax.Array:
        return exp2(x, interpret=self._interpret)

    def _unit(self) -> Unit:
        """Finds the (group, KV head) that this block serves, and how many of its chunks it reads.

        Chunks go round the splits, and the chunks of pieces go on where they stop.
        """
        shape, g = self._shape, self._g
        # Blocks of one (group, KV head) are neighbours, S of them; blocks behind the last have no part in attention.
        active = self._block < shape.attention_blocks
        pair = lax.div(self._block, shape.splits)
        group, head = lax.div(pair, shape.kv_heads), lax.rem(pair, shape.kv_heads)
        # An inactive block's look-ups must stay within the plan, too.
        group = lax.min(group, shape.groups - 1)
        split = lax.rem(self._block, shape.splits)

        def before(number: jax.Array) -> jax.Array:
            """Counts the items of this split among the first `number`."""
            return lax.div(number - split + (shape.splits - 1), shape.splits)

        chunks = g.num_chunks[group, 0] if shape.prefetches else jnp.int32(0)
        packed = lax.div(g.num_pieces[group, 0] + (shape.pieces_per_chunk - 1), shape.pieces_per_chunk)
        own = before(chunks) if shape.prefetches else jnp.int32(0)
        return active, group, head, split, own, before(chunks + packed) - own

    # The weights' warpgroup.

    def first_chunk(self) -> tuple[Unit, list[jax.Array]]:
        """Loads what every layer's `send` begins with: `_unit`, and the pages of the first chunk."""
        unit = self._unit()
        return unit, self._pages(unit, jnp.int32(0))

    def _pages(self, unit: Unit, number: jax.Array) -> list[jax.Array]:
        """Looks up the pages of the block's `number`-th chunk; behind the last those of the last one."""
        _, group, _, split, own, _ = unit
        at = split + lax.clamp(0, number, lax.max(own - 1, 0)) * self._shape.splits
        at = jnp.where(own > 0, at, 0)
        return [self._g.chunks[group, 0, at, j] for j in range(self._shape.pieces_per_chunk)]

    def send(
        self,
        layer: jax.Array,
        half: StageIndex,
        start: tuple[Unit, list[jax.Array]],
        t: jax.Array,
        arrived: jax.Array,
        wait: Callable[[jax.Array, jax.Array, int], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Sends for the block's chunks in a layer's first half; keys and values take one place of the ring or two.

        `t` counts the ring's places that were sent for and `arrived` those waited for; `wait(t, arrived, most)` makes
        place t free and leaves fewer than `most` on their way.
        """
        shape, s = self._shape, self._s
        unit, pages = start
        active, _, head, _, own, _ = unit
        tiles, page_size = shape.tiles_per_chunk, shape.page_size

        def chunk(number: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            t, arrived, pages = carry
            # Loaded from GMEM while this chunk's places become free.
            upcoming = self._pages(unit, number + 1)
            for kind, refs in enumerate((self._g.keys, self._g.values)):
                # A place of the ring is 16 KB: with D = 64 keys and values of 64 slots share one, with D = 128 they
                # take two.
                place, side = (t, kind) if tiles == 1 else (t + kind, 0)
                slot = lax.rem(place, shape.ring)
                # Claims each place once.
                if kind < tiles:
                    arrived = wait(place, arrived, shape.kv_in_flight)
                # One copy a page and kind; their lines leave the L2 first.
                with of_layer(refs, layer, interpret=self._interpret) as ref:
                    for j, page in enumerate(pages):
                        target = s["chunk_smem"].at[slot, side, pl.ds(j * page_size, page_size)]
                        full = s["w_full"].at[slot]
                        l2_policy.load_to_leave(ref.at[page, :, head], target, full, interpret=self._interpret)
            for place in range(tiles):
                # `w_full` counts as many arrivals for every place, of weights or KV; what copies lack is made up here.
                for _ in range(shape.tile_arrivals - 2 * len(pages) // tiles):
                    plgpu.barrier_arrive(s["w_full"].at[lax.rem(t + place, shape.ring)])
            return t + tiles, arrived, upcoming

        t, arrived, _ = lax.fori_loop(0, jnp.where(active & (half == 0), own, 0), chunk, (t, arrived, pages))
        return t, arrived

    # The loader's warpgroup.

    def first_pieces(self) -> tuple[Unit, list[jax.Array]]:
        """Loads what `load` begins with: `_unit`, and the pages of the first chunk of pieces."""
        unit = self._unit()
        return unit, self._pages_of_pieces(unit, jnp.int32(0))

    def _pages_of_pieces(self, unit: Unit, number: jax.Array) -> list[jax.Array]:
        return [self._piece(unit, number, part)[0] for part in range(self._shape.pieces_per_chunk)]

    def load(self, layer: jax.Array, unit: Unit, pages: list[jax.Array]) -> None:
        """Loads the queries, then the pieces of `unit` chunk by chunk; `pages` are those of the first chunk."""
        shape = self._shape
        active, group, head, _, own, packed = unit

        @pl.when(active & (own + packed > 0))
        def _load() -> None:
            # The rows of this (group, KV head) lie together in the query buffer. Many blocks have stored them in the
            # stage before; the loader has waited for all of these.
            rows = shape.query_rows
            start = pl.multiple_of((head * shape.tokens + group * shape.group_tokens) * shape.q_step, 8)
            # Where two chunks are multiplied at once the same queries stand in both halves of the 64 rows, a copy each.
            for first in (0, HALF) if shape.paired else (0,):
                plgpu.copy_gmem_to_smem(
                    self._g.q.at[pl.ds(start, rows)], self._s["q_smem"].at[pl.ds(first, rows)], self._s["q_full"]
                )

            def chunk(i: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
                # Keys and values of a chunk of pieces have a slot each in rings of `kv_ring` slots.
                slot, again = lax.rem(i, shape.kv_ring), i >= shape.kv_ring
                upcoming = self._pages_of_pieces(unit, lax.min(i + 1, packed - 1))
                for refs, kind in ((self._g.keys, "k"), (self._g.values, "v")):
                    free = self._s[kind + "_empty"].at[slot]
                    # The consumer arrives when its product has read the slot, `kv_ring` chunks ago.
                    pl.when(again)(functools.partial(plgpu.barrier_wait, free))
                    with of_layer(refs, layer, interpret=self._interpret) as ref:
                        for j, page in enumerate(pages):
                            # A page a copy, `pieces_per_chunk` arrivals; missing pieces are read as an existing page
                            # and masked.
                            target = self._s[kind + "_smem"].at[slot, pl.ds(j * shape.page_size, shape.page_size)]
                            plgpu.copy_gmem_to_smem(ref.at[page, :, head], target, self._s[kind + "_full"].at[slot])
                return upcoming

            lax.fori_loop(0, packed, chunk, pages)

    def _piece(self, unit: Unit, number: jax.Array, part: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Looks up (page, first slot, rows that read it) of a part of the block's `number`-th chunk of pieces.

        Behind the last piece no row reads it.
        """
        shape, g = self._shape, self._g
        _, group, _, split, own, _ = unit
        # Numbers of all chunks run on from those of tasks to those of pieces.
        chunk = split + (own + number) * shape.splits
        if shape.prefetches:
            chunk -= g.num_chunks[group, 0]
        at = chunk * shape.pieces_per_chunk + part
        valid = at < g.num_pieces[group, 0]
        at = jnp.where(valid, at, 0)
        page, place, members = (g.pieces[group, 0, at, field] for field in range(3))
        return page, place * shape.page_size, jnp.where(valid, members, 0)

    # The consumer's warpgroup.

    def places(self) -> jax.Array:
        """Counts the places of the weights' ring that this block's chunks of a layer take."""
        active, *_, own, _ = self._unit()
        return jnp.where(active, own, 0) * self._shape.tiles_per_chunk

    def attend(self, t: jax.Array, when_idle: Callable[[], None]) -> None:
        """Attends to this block's share of the tasks of its (group, KV head); calls `when_idle()` if that is empty.

        `t` counts places of the weights' ring.
        """
        shape, s, g = self._shape, self._s, self._g
        unit = self._unit()
        active, group, _, _, own, packed = unit

        @pl.when(active & (own + packed <= 0))
        def _nothing() -> None:
            # Others wait for what their loader fetches after its own wait. Without one this block would run ahead: its
            # signal would open a barrier, or its share be cleared, before blocks that are still at work.
            when_idle()
            nothing = jnp.full((QUERIES,), -jnp.inf, jnp.float32)
            g.partial_lse[self._block] = plgpu.layout_cast(nothing, online_softmax.row_layout())

        @pl.when(active & (own + packed > 0))
        def _some() -> None:
            # Tables hold K steps; this step's entry of the group.
            now = self._step * shape.groups + group
            # A number a query: how many slots it sees, times 32, and its row of the group.
            limits = plgpu.load(g.limits.at[now], layout=online_softmax.row_layout(), optimized=False)
            lengths = [g.lengths[now * shape.rows + r] for r in range(shape.rows)]
            # The first chunk's rows and pieces are looked up in front of the wait, those of the others a turn ahead.
            first = self._members(unit, jnp.int32(0)) if shape.prefetches else []
            pieces = self._pieces(unit, jnp.int32(0))
            # The loader sends for the queries behind the grid's barrier; no score of this layer is computed before.
            with jax.named_scope("wait q"):
                plgpu.barrier_wait(s["q_full"])
            softmax = online_softmax.nothing_yet(shape.dim)
            if shape.prefetches:
                softmax = self._over_chunks(unit, t, limits & 31, first, softmax)
            softmax = self._over_pieces(unit, limits, lengths, pieces, softmax)
            # O/Σ [64, D] and log2 Σ exp [64] in f32; −∞ for queries that saw nothing.
            g.partial[self._block], g.partial_lse[self._block] = online_softmax.result(softmax, -jnp.inf)

    @property
    def _scale(self) -> float:
        return math.log2(math.e) / math.sqrt(self._shape.dim)

    def _members(self, unit: Unit, turn: jax.Array) -> list[jax.Array]:
        """Looks up the rows that read each chunk of a turn: one chunk, or two of which the second may be missing."""
        shape = self._shape
        _, group, _, split, own, _ = unit
        chunks = [turn * 2, turn * 2 + 1] if shape.paired else [turn]
        found = []
        for number in chunks:
            # Behind the last chunk another one is looked up, and no row reads it.
            at = jnp.where(number < own, split + number * shape.splits, 0)
            words = self._g.chunks[group, 0, at, shape.pieces_per_chunk + 1]
            found.append(jnp.where(number < own, words, 0))
        return found

    def _over_chunks(
        self, unit: Unit, t: jax.Array, row: jax.Array, first: list[jax.Array], softmax: Softmax
    ) -> Softmax:
        """Attends to the chunks in the weights' ring, in which only whole rows are masked."""
        shape, s = self._shape, self._s
        own, tiles = unit[4], shape.tiles_per_chunk
        advance = functools.partial(online_softmax.advance, exp2=self._exp2, scale=self._scale)

        def places(number: jax.Array) -> list[jax.Array]:
            return [lax.rem(t + number * tiles + place, shape.ring) for place in range(tiles)]

        def keys(at: list[jax.Array]) -> Ref:
            # [D, 64] as the second factor: keys are in the chunk's first place.
            return s["chunk_smem"].at[at[0], 0].transpose((1, 0))

        def values(at: list[jax.Array]) -> Ref:
            # [64, D]: values are in the second half of the only place, or in the second place.
            return s["chunk_smem"].at[at[-1], 2 // tiles - 1]

        def wait(at: list[jax.Array]) -> None:
            with jax.named_scope("wait chunk"):
                for place in at:
                    plgpu.barrier_wait(s["w_full"].at[place])

        def free(at: list[jax.Array]) -> None:
            for place in at:
                plgpu.barrier_arrive(s["w_empty"].at[place])

        def bias_of(members: jax.Array) -> jax.Array:
            # 0 for queries whose row reads the chunk, `MASKED` for the others.
            return jnp.where(((members >> row) & 1) != 0, 0.0, MASKED)

        def one(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            softmax, members = state
            upcoming = self._members(unit, turn + 1)  # a load from memory takes as long as a chunk
            at = places(turn)
            wait(at)
            # S = Q·Kᵀ [64, 64], softmax, O += P·V [64, D]; P goes from registers.
            softmax, p = advance(softmax, self._product(None, (s["q_smem"], keys(at))), bias=bias_of(*members))
            acc = self._product(softmax.acc, (p, values(at)))
            # Both products are done: the weights' warpgroup may fill the places again.
            free(at)
            return softmax._replace(acc=acc), upcoming

        def two(turn: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            softmax, members = state
            upcoming = self._members(unit, turn + 1)
            # Two chunks a turn. If there is no second chunk, the first stands in for it, and no row reads it there, so
            # all of it is masked.
            number = turn * 2
            both = number + 1 < own
            at, other = places(number), places(number + both.astype(jnp.int32))
            # Rows 0 … 31 are the queries for the first chunk, rows 32 … 63 the same queries for the second.
            upper = plgpu.broadcasted_iota(jnp.int32, (QUERIES, CHUNK), 0, layout=plgpu.Layout.WGMMA) < HALF
            upper_row = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=online_softmax.row_layout()) < HALF
            wait(at)
            # [64, 64] of the first chunk; its upper half is kept.
            scores = self._product(None, (s["q_smem"], keys(at)))
            # Only if there is a second chunk: each phase of a barrier is waited for once.
            pl.when(both)(lambda: wait(other))
            # The lower half comes from the second chunk, so one softmax takes both.
            scores = jnp.where(upper, scores, self._product(None, (s["q_smem"], keys(other))))
            above, below = (bias_of(of_half) for of_half in members)
            softmax, p = advance(softmax, scores, bias=jnp.where(upper_row, above, below))
            # P with one half zeroed for each product, so that rows take values of their own chunk only.
            nothing = jnp.zeros_like(p)
            acc = self._product(softmax.acc, (jnp.where(upper, p, nothing), values(at)))
            acc = self._product(acc, (jnp.where(upper, nothing, p), values(other)))
            # All four products are done; a place is freed once, also where it served as both.
            free(at)
            pl.when(both)(lambda: free(other))
            return softmax._replace(acc=acc), upcoming

        turns, turn = (lax.div(own + 1, 2), two) if shape.paired else (own, one)
        return lax.fori_loop(0, turns, turn, (softmax, first))[0]

    def _pieces(self, unit: Unit, number: jax.Array) -> list[Piece]:
        """Looks up the pieces of a chunk."""
        return [Piece(*self._piece(unit, number, part)[1:]) for part in range(self._shape.pieces_per_chunk)]

    def _over_pieces(
        self, unit: Unit, limits: jax.Array, lengths: list[jax.Array], first: list[Piece], softmax: Softmax
    ) -> Softmax:
        """Attends to the pieces; a query sees those of its row, and of these no slot beyond itself."""
        shape, s = self._shape, self._s
        packed, width = unit[5], shape.page_size

        def used(i: jax.Array, slot: jax.Array, kind: str) -> None:
            # Only if the loader will wait for the slot, so that each arrival meets a wait.
            pl.when(i + shape.kv_ring < packed)(lambda: plgpu.barrier_arrive(s[kind + "_empty"].at[slot]))

        def chunk(i: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            softmax, pieces = state
            slot = lax.rem(i, shape.kv_ring)
            # Up to which column of the chunk this query sees each piece.
            visible = online_softmax.visible_ends(pieces, width, limits >> 5, limits & 31)
            upcoming = self._pieces(unit, lax.min(i + 1, packed - 1))
            with jax.named_scope("wait k"):
                plgpu.barrier_wait(s["k_full"].at[slot])
            # [64, 64], scaled to base 2 here, and masked one by one: pieces have rows and ends of their own.
            scores = self._product(None, (s["q_smem"], s["k_smem"].at[slot].transpose((1, 0)))) * self._scale
            softmax, p = online_softmax.advance(softmax, online_softmax.masked(scores, visible, width), self._exp2)
            # The product has read the keys.
            used(i, slot, "k")
            with jax.named_scope("wait v"):
                plgpu.barrier_wait(s["v_full"].at[slot])
            values = s["v_smem"].at[slot]
            # Slots that no row of a piece holds may be NaN, and 0 · NaN is NaN: zeroed before the product.
            online_softmax.clean(values, pieces, width, lengths, interpret=self._interpret)
            softmax = softmax._replace(acc=self._product(softmax.acc, (p, values)))
            # The product has read the values.
            used(i, slot, "v")
            return softmax, upcoming

        return lax.fori_loop(0, packed, chunk, (softmax, first))[0]

    def merge(self) -> None:
        """Weighs the splits' outputs by their log-sum-exp, each block a share of its (group, KV head)'s queries.

        128 elements, one or two query heads, at a time.
        """
        shape, g = self._shape, self._g
        active, group, head, *_ = self._unit()
        pair, split = lax.div(self._block, shape.splits), lax.rem(self._block, shape.splits)
        # A thread has one of 128 elements: one query head of D = 128, or two of D = 64.
        together = 128 // shape.dim
        vectors = shape.queries // together
        # An equal part of the pair's queries for each of its S blocks.
        first, last = lax.div(split * vectors, shape.splits), lax.div((split + 1) * vectors, shape.splits)
        flat = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        # The lower 32 rows are the same queries over other chunks, so they count as splits of their own.
        halves = (0, HALF) if shape.paired else (0,)

        def vector(number: jax.Array, _: None) -> None:
            query = number * together
            lane = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=flat)
            lses, outs = [], []
            # All splits in a fixed order, so results have the same bits run after run.
            for split in range(shape.splits):
                block = pair * shape.splits + split
                for half in halves:
                    lse = jnp.broadcast_to(g.partial_lse[block, half + query], (128,))
                    if together == 2:
                        other = jnp.broadcast_to(g.partial_lse[block, half + query + 1], (128,))
                        # Elements of the second head have that head's weight.
                        lse = jnp.where(lane < shape.dim, lse, other)
                    lses.append(lse)
                    outs.append(jnp.reshape(g.partial[block, pl.ds(half + query, together)], (128,)))
            # Finite even if all splits saw nothing, so no ∞ − ∞; the output is then 0.
            top = jnp.maximum(functools.reduce(jnp.maximum, lses), MASKED)
            weights = [jnp.exp2(lse - top) for lse in lses]
            total = jnp.maximum(functools.reduce(jnp.add, weights), 1e-30)
            # A split without tasks has written no output: whatever lies there may be NaN.
            terms = [jnp.where(weight > 0, weight * out, 0.0) for weight, out in zip(weights, outs, strict=True)]
            out = functools.reduce(jnp.add, terms) / total
            # Back to rows of tokens and columns of heads, as o reads them, rounded to bf16.
            token = group * shape.group_tokens + lax.div(query, shape.per_kv_head)
            column = (head * shape.per_kv_head + lax.rem(query, shape.per_kv_head)) * shape.dim
            g.attended[token, pl.ds(pl.multiple_of(column, 64), 128)] = out.astype(g.attended.dtype)

        pl.when(active)(lambda: lax.fori_loop(first, last, vector, None))
