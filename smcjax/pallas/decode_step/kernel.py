"""One decode step of a whole decoder as one persistent Mosaic GPU kernel (Hopper): every layer, and the sampled token.

A step of few tokens is a chain of small dependent products whose time is the stream of their weights. Launched one by
one, every kernel waits for the last and starts the stream afresh. Here 132 blocks, one a multiprocessor, stay for the
whole step, and the warpgroups of each share the work:

    weights     streams the block's share of all weight matrices through a ring in shared memory, across the
                barriers between stages, because weights depend on no stage; neither do keys and values of earlier
                cycles, which come through the same ring in their turn where there are many (`Shape.prefetches`)
    loader      waits for the grid's barrier before each stage, then fetches its activations, queries, keys and values
    consumer    multiplies, finishes (norm scale, rotary, KV write, softmax, residual, SwiGLU, sampling), signals
    assistant   with int8 weights only, which take long to convert: multiplies a half of each tile's columns

Stages of a layer, a grid-wide barrier after each, except that between `attend` and `merge` only the blocks of one KV
head wait for each other:

    qkv       qkv·(x∘g), times 1/rms(x); rotary; q to a buffer, k and v to their KV pages
    attend    per (group, KV head, split): softmax over the split's share of the group's tasks
    merge     the splits' outputs, by their log-sum-exp
    o         x += o·attended;          x∘g for the next norm
    gate_up   silu(gate·(x∘g)/rms) ∘ (up·(x∘g)/rms)
    down      x += down·…;              x∘g for the next norm
    head      (after the last layer) logits by blocks of 32 ids; their Gumbel maximum and log-sum-exp, never stored

How products divide among blocks and add up: `products.py`.

Activations are bf16 as in `smcjax.model.decoder`, whose roundings it follows, except that x∘g is rounded before the
scale 1/rms instead of after. Gumbel noise has the bits of `smcjax.noise.gumbels` with the row's key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.decode_step.attention import Attention
from smcjax.pallas.decode_step.epilogue import Epilogue
from smcjax.pallas.decode_step.operands import Operands
from smcjax.pallas.decode_step.products import Products
from smcjax.pallas.decode_step.shape import CHUNK, DEPTH, TILE, Shape, StageIndex, StagePair, when
from smcjax.pallas.mosaic import l2_policy
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.tiles import inverse_rms, of_layer, proxy_fence
from smcjax.pallas.mosaic.wgmma import QUERIES, Ref, swizzled, swizzled_int8

LAUNCHED = 128  # registers of each thread of four warpgroups: all that there are
REGISTERS = (80, 104, 192, 136)  # what threads of each role, in the order above, have of them with int8 weights
LAYER_STAGES = ("qkv", "attend", "o", "gate_up", "down")
HALVES = (("qkv", "attend", "merge", "o"), ("gate_up", "down"))  # of a layer, which run through the same code


class _Body:
    """The kernel's body. It holds static facts and references as attributes, so that stages read as methods."""

    def __init__(self, shape: Shape, stages: tuple[str, ...], with_head: bool, interpret: bool) -> None:
        self.shape, self.stages, self.with_head, self.interpret = shape, stages, with_head, interpret
        self.sites = shape.sites()

    def __call__(self, g: Operands, *, ring_smem: Ref, turns_smem: Ref, **scratch: Ref) -> None:
        self.g = g
        of_products = ("x_smem", "scale_smem", "fold_smem", *(["half_smem"] if self.shape.int8 else []))
        self.s = dict(scratch)
        # Products and attention take turns in one region of shared memory. Only the loader and the consumer write there
        # (and the assistant, on the consumer's arrival). A stage's loads begin behind a barrier of the grid that waits
        # for this block's own consumer too, if it had part in the stage before.
        for names, refs in zip((of_products, ("k_smem", "v_smem", "q_smem")), turns_smem, strict=True):
            self.s.update(zip(names, refs, strict=True))
        # A place of the ring holds a tile of weights or keys and values of a chunk, whichever was sent for.
        if self.shape.prefetches:
            self.s["w_smem"], self.s["chunk_smem"] = ring_smem
        else:
            self.s["w_smem"] = ring_smem
        self.block = lax.axis_index("block")
        self.step = g.step[0]
        where: dict[str, Any] = {"block": self.block, "step": self.step, "interpret": self.interpret}
        self.attention = Attention(self.shape, g, self.s, **where)
        self.epilogue = Epilogue(self.shape, g, self.s, **where)
        self.products = Products(self.shape, g, self.s, **where)
        self.layers = max(len(g.qkv), len(g.keys))
        warpgroup = lax.axis_index("warpgroup")
        self.alone = len(self.stages) + self.with_head == 1  # one stage a launch: no barriers
        # One semaphore counts the signals of all stages, one for each (group, KV head) the blocks that share it. Both
        # only grow during a launch.
        if not self.alone:
            self.semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)
            self.pairs = pl.get_global(plgpu.SemaphoreType.REGULAR((self.shape.groups * self.shape.kv_heads,)))
        # A warpgroup has its role for the whole step.
        for role, work in enumerate(
            (self._weights, self._loader, self._consumer, self._assist)[: self.shape.warpgroups]
        ):
            pl.when(warpgroup == role)(functools.partial(self._play, role, work))

    def _play(self, role: int, work: Callable[[], None]) -> None:
        """Runs a role. Of four warpgroups those that multiply take registers that the others do not need."""
        if self.shape.int8 and not self.interpret:
            # The other action than its count asks for is an illegal instruction, which no compiler reports.
            count = REGISTERS[role]
            plgpu.set_max_registers(count, action="increase" if count > LAUNCHED else "decrease")
        work()

    # Order of stages, the same for all.

    def _over_halves(self, do: Callable[[Any, StageIndex, Any], Any], carry: Any) -> Any:
        """Calls `do(layer, half, carry)` for each half of each layer that has stages in this launch."""
        # Half 0 is attention, half 1 the MLP; a launch of one stage has one of them.
        halves = [half for half, names in enumerate(HALVES) if set(names) & set(self.stages)]
        if len(halves) == 1:
            return lax.fori_loop(0, self.layers, lambda layer, carry: do(layer, halves[0], carry), carry)
        if not halves:
            return carry
        # One loop over half layers, so that both halves run through one copy of the machine code.
        return lax.fori_loop(0, 2 * self.layers, lambda i, carry: do(i >> 1, i & 1, carry), carry)

    def _has(self, site: str, half: StageIndex) -> bool:
        """True where the launch has this stage."""
        names = self.sites[site].names
        return (names[half] if isinstance(half, int) else names[0]) in self.stages

    def _signals(self, name: str) -> int:
        """The number of blocks that take part in a stage."""
        shape = self.shape
        if name == "attend":
            return shape.attention_blocks
        return min(shape.blocks, shape.products()[name].units)

    def _await(self, layer: Any, site: str, half: StageIndex = 0) -> None:
        """Waits until every block has finished the stages before this one.

        Signals count for any stage. But a block takes part in one only after this wait, so none is given before all
        of the stages before are.
        """
        if self.alone:
            return
        # What the semaphore shows when all stages before this one are done: the signals of all earlier layers, and of
        # this layer's earlier stages.
        signals = [self._signals(stage) for stage in self.stages]
        names = self.sites[site].names if site in self.sites else (site,)
        before = [sum(signals[: self.stages.index(name)]) if name in self.stages else 0 for name in names]
        number = layer * sum(signals) + (before[half] if isinstance(half, int) else jnp.where(half == 0, *before))

        @pl.when(number > 0)
        def _wait() -> None:
            # No decrement: every block waits for the same count, each in its own time. The wait ends with an acquire
            # fence and a barrier of the warpgroup.
            plgpu.semaphore_wait(self.semaphore, number, decrement=False, memory_scope="gpu")

        # What other blocks stored by ordinary stores is read by the copy engine from here on, into shared memory that
        # this block has read and written by ordinary accesses.
        proxy_fence(interpret=self.interpret)

    def _finish(self, takes_part: jax.Array) -> None:
        """Signals to all blocks that this block has finished a stage, if it took part in it."""
        if self.alone:
            return
        with jax.named_scope("signal"):
            # A barrier of the consumer's warpgroup and one `red.release` at GPU scope: a block that sees the count sees
            # all that the consumer has stored.
            pl.when(takes_part)(lambda: plgpu.semaphore_signal(self.semaphore, 1, memory_scope="gpu"))

    def _meet(self, layer: jax.Array) -> None:
        """Waits until the blocks of this (group, KV head) have written their shares of the layer's attention."""
        shape = self.shape

        @pl.when(self.block < shape.attention_blocks)
        def _wait() -> None:
            # The blocks of one (group, KV head) are neighbours. The count grows by `splits` a layer, and no block
            # signals for the next layer before all have merged, as barriers of the grid lie between.
            pair = self.pairs.at[lax.div(self.block, shape.splits)]
            plgpu.semaphore_signal(pair, 1, memory_scope="gpu")
            plgpu.semaphore_wait(pair, (layer + 1) * shape.splits, decrement=False, memory_scope="gpu")

    # The weights' warpgroup.

    def _weights(self) -> None:
        # Names of the first chunk's pages are the same in every layer, so they are loaded once.
        attends = self.shape.prefetches and "attend" in self.stages
        prefetched = self.attention.first_chunk() if attends else None

        def half_layer(layer: Any, half: StageIndex, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            if self._has("from_residual", half):
                carry = self._stream("from_residual", (self.g.qkv, self.g.gate_up), layer, half, *carry)
            if prefetched is not None:
                # Chunks of KV come in the ring where the consumer will want them: behind qkv, in front of o. In half 1
                # none are sent.
                carry = self.attention.send(layer, half, prefetched, *carry, self._claim)
            if self._has("from_stage", half):
                carry = self._stream("from_stage", (self.g.o, self.g.down), layer, half, *carry)
            return carry

        carry = self._over_halves(half_layer, (jnp.int32(0), jnp.int32(0)))
        if self.with_head:
            carry = self._stream("head", (self.g.head,), jnp.int32(0), 0, *carry)
        # Wait until the ring has drained: a barrier must not die with an arrival to come.
        t, _ = carry
        ring = self.shape.ring

        def drain(i: jax.Array, _: None) -> None:
            # `_claim` has waited for all earlier places.
            plgpu.barrier_wait(self.s["w_empty"].at[lax.rem(i, ring)])

        lax.fori_loop(lax.max(t - ring, 0), t, drain, None)

    def _stream(
        self,
        site: str,
        matrices: Sequence[Sequence[Ref]],
        layer: jax.Array,
        half: StageIndex,
        t: jax.Array,
        arrived: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Sends for the block's tiles of a matrix; `t` counts places sent for in all, `arrived` those waited for."""
        shape = self.shape
        products = self.sites[site]
        first, last = self.products.units(site, half)
        steps = products.pick(half, lambda product: product.steps)
        # With one code for both halves the matrix is one of 2·L, chosen at run time: first all of half 0, then those of
        # half 1.
        if isinstance(half, int):
            refs, index = matrices[half], layer
        else:
            refs, index = [ref for each in matrices for ref in each], half * len(matrices[0]) + layer

        def tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            t, arrived = carry
            slot = lax.rem(t, shape.ring)
            # While a stage begins no warp waits for the ring to fill, but for small loads, which a queue delays.
            late = i >= shape.ring
            if site != "head":
                late &= jnp.bool_(site == "from_residual") & (half == 1)
            arrived = self._claim(t, arrived, jnp.where(late, shape.in_flight, shape.in_flight_early))
            # Four TMA copies of 16 rows each fill the 64 rows of a place, an arrival each; their lines leave the L2
            # first.
            with of_layer(refs, index, interpret=self.interpret) as ref:
                for target, row, column in self._tile(products, half, steps, first, i):
                    columns = pl.ds(pl.multiple_of(column, shape.tile_columns), shape.tile_columns)
                    source = ref.at[pl.ds(pl.multiple_of(row, TILE), TILE), columns]
                    target = self.s["w_smem"].at[slot, pl.ds(target, TILE)]
                    l2_policy.load_to_leave(source, target, self.s["w_full"].at[slot], interpret=self.interpret)
            # A chunk of KV may be more copies than four; a tile makes up the difference, as a barrier's count is
            # static.
            for _ in range(shape.tile_arrivals - 4):
                plgpu.barrier_arrive(self.s["w_full"].at[slot])
            return t + 1, arrived

        return lax.fori_loop(0, (last - first) * steps, tile, (t, arrived))

    def _claim(self, t: jax.Array, arrived: jax.Array, in_flight: jax.Array | int) -> jax.Array:
        """Waits until place t of the ring is free and fewer than `in_flight` are under way; returns those arrived."""
        ring = self.shape.ring
        # Waits for the oldest copies until fewer than `in_flight` remain. A long queue in front of the memory would
        # delay the small loads that a stage begins with.
        if not self.interpret:
            for _ in range(2):  # a place is taken at a time, so two converge; a loop would be unrolled further
                late = arrived <= t - in_flight
                pl.when(late)(functools.partial(plgpu.barrier_wait, self.s["w_full"].at[lax.rem(arrived, ring)]))
                arrived = arrived + late.astype(jnp.int32)

        @pl.when(t >= ring)
        def _free() -> None:
            # `w_empty` completes when every warpgroup that multiplies has read what lay here `ring` places ago.
            plgpu.barrier_wait(self.s["w_empty"].at[lax.rem(t, ring)])

        return arrived

    def _tile(
        self, site: StagePair, half: StageIndex, steps: Any, first: jax.Array, number: jax.Array
    ) -> list[tuple[int, jax.Array, jax.Array]]:
        """Lists the four 16-row parts of a weight tile: row among the tile's 64, then row and column in the matrix."""
        # Tiles come unit by unit and, of a unit, along the inner dimension: the order in which they are multiplied.
        unit, step = first + lax.div(number, steps), lax.rem(number, steps)
        part_length = site.pick(half, lambda product: product.part)
        # Row (part · pieces + piece) · 16 of the tile: part `part` of the inner dimension of the rows that `piece`
        # begins with.
        return [
            ((part * site.pieces + piece) * TILE, start, part * part_length + step * self.shape.tile_columns)
            for part in range(site.split)
            for piece, start in enumerate(site.rows(half, unit))
        ]

    # The loader's warpgroup.

    def _loader(self) -> None:
        def half_layer(layer: Any, half: StageIndex, _: None) -> None:
            # Waits for the stage before, then loads. The consumer needs no barrier of the grid: it waits for what is
            # loaded here.
            if self._has("from_residual", half):
                with jax.named_scope("barrier before qkv or gate_up"):
                    self._await(layer, "from_residual", half)
                with jax.named_scope("load for qkv or gate_up"):
                    self._load_x("from_residual", (self.g.xg, self.g.xg), half, scaled=True)
            if "attend" in self.stages:
                when(half == 0, functools.partial(attend, layer))
            if self._has("from_stage", half):
                with jax.named_scope("barrier before o or down"):
                    self._await(layer, "from_stage", half)
                with jax.named_scope("load for o or down"):
                    self._load_x("from_stage", (self.g.attended, self.g.h), half, scaled=False)

        def attend(layer: Any) -> None:
            # The plan of tasks depends on no stage, so it is read while others still work.
            start = self.attention.first_pieces()  # loads that take as long as a barrier
            with jax.named_scope("barrier before attend"):
                self._await(layer, "attend")
            with jax.named_scope("load for attend"):
                self.attention.load(layer, *start)

        self._over_halves(half_layer, None)
        if self.with_head:
            if self.stages:
                # Behind all stages of all layers, as if one more layer began.
                self._await(jnp.int32(self.layers), self.stages[0])
            self._load_x("head", (self.g.xg,), 0, scaled=True)

    def _load_x(self, site: str, sources: tuple[Ref, ...], half: StageIndex, *, scaled: bool) -> None:
        """Loads the activations of a product in tiles that face the weight tiles, and 1/rms where they are `scaled`."""
        products = self.sites[site]
        first, last = self.products.units(site, half)
        tokens, slots = self.shape.tokens, self.products.x_slots(site)
        # A tile of x is s parts of [M, 128], one for each part of the inner dimension, as the weight tile has them.
        rows = products.split * tokens
        part_length = products.pick(half, lambda product: product.part)
        if isinstance(half, int) or sources[0] is sources[-1]:
            refs, index = (sources[half if isinstance(half, int) else 0],), jnp.int32(0)
        else:
            refs, index = sources, half

        # A block without a unit of this product loads nothing, and its consumer waits for nothing.
        @pl.when(first < last)
        def _load() -> None:
            def tile(step: jax.Array, _: None) -> None:
                slot = lax.rem(step, slots)

                # Only if x streams: `x_empty` completes when the warpgroup that has the slot has multiplied its tile.
                @pl.when(step >= slots)
                def _free() -> None:
                    plgpu.barrier_wait(self.s["x_empty"].at[slot])

                # [M, 128] by one copy for each part, an arrival each at `x_full`.
                with of_layer(refs, index, interpret=self.interpret) as source:
                    for part in range(products.split):
                        columns = pl.ds(pl.multiple_of(part * part_length + step * DEPTH, DEPTH), DEPTH)
                        target = pl.ds(pl.multiple_of(slot * rows + part * tokens, 8), tokens)
                        plgpu.copy_gmem_to_smem(
                            source.at[:, columns], self.s["x_smem"].at[target], self.s["x_full"].at[slot]
                        )
                for _unused in range(4 - products.split):  # the barrier counts four arrivals whatever the split
                    plgpu.barrier_arrive(self.s["x_full"].at[slot])

            lax.fori_loop(0, products.pick(half, lambda product: product.x_steps), tile, None)
            if scaled:
                # 1/rms of the residual, [M] repeated to [16, M], by ordinary stores. The consumer waits at
                # `scale_ready` in the epilogue of its first unit, when the product has been made.
                inverse_rms(self.g.x, self.s["scale_smem"], self.shape.eps, interpret=self.interpret)
                plgpu.barrier_arrive(self.s["scale_ready"])

    # The consumer's warpgroup.

    def _consumer(self) -> None:
        attention, epilogue = self.attention, self.epilogue

        def half_layer(layer: Any, half: StageIndex, t: jax.Array) -> jax.Array:
            if self._has("from_residual", half):
                with jax.named_scope("qkv or gate_up"):
                    # qkv of half 0, gate_up of half 1. `t` counts the ring's places that the consumer has passed.
                    finish = functools.partial(epilogue.finish_from_residual, layer, half)
                    early = functools.partial(epilogue.early_from_residual, half)
                    t, _ = self.products.multiply("from_residual", layer, half, finish, t, None, early)
                first, last = self.products.units("from_residual", half)
                # All sums of the stage are stored: one signal, if the block had a unit.
                self._finish(first < last)
            if "attend" in self.stages:
                # Attention is in half 0 alone. Its prefetched chunks have taken places of the ring, which count in any
                # case.
                when(half == 0, lambda: attend(layer, t))
                t = t + jnp.where(half == 0, attention.places(), 0)
            if "merge" in self.stages:  # of its own where there are no semaphores
                attention.merge()
            if self._has("from_stage", half):
                with jax.named_scope("o or down"):
                    # o of half 0, down of half 1.
                    early = functools.partial(epilogue.early_from_stage, layer, half)
                    t, _ = self.products.multiply("from_stage", layer, half, epilogue.finish_from_stage, t, None, early)
                first, last = self.products.units("from_stage", half)
                self._finish(first < last)
            return t

        def attend(layer: Any, t: jax.Array) -> None:
            # This block's share of the tasks: O/Σ and log-sum-exp, in f32, to GMEM.
            with jax.named_scope("attend"):
                attention.attend(t, functools.partial(self._await, layer, "attend"))
            # The blocks of this (group, KV head) have stored theirs: each merges some of the queries. Other blocks need
            # not wait.
            if not self.alone:
                with jax.named_scope("meet"):
                    self._meet(layer)
                with jax.named_scope("merge"):
                    attention.merge()
            # o may begin when all blocks have merged.
            self._finish(self.block < self._signals("attend"))

        t = self._over_halves(half_layer, jnp.int32(0))
        if self.with_head:
            self._sample(t)

    def _sample(self, t: jax.Array) -> None:
        """Multiplies the head by this block's ids and writes the candidates for token and log-probability."""
        start, early, finish = self.epilogue.sampling()
        _, found = self.products.multiply("head", 0, 0, finish, t, start, early)
        self.epilogue.found(found)

    # The assistant's warpgroup, of int8 only.

    def _assist(self) -> None:
        """Multiplies the second half of each tile's columns."""

        def half_layer(layer: Any, half: StageIndex, t: jax.Array) -> jax.Array:
            # The same stages in the same order as the consumer, so that both pass the same places of the ring.
            if self._has("from_residual", half):
                t = self.products.leave_halves("from_residual", half, t)
            if "attend" in self.stages:
                # Whoever frees a place of the ring must know that it was filled, which KV does, too.
                chunks = jnp.where(half == 0, self.attention.places(), 0)

                def pass_by(i: jax.Array, _: None) -> None:
                    place = lax.rem(t + i, self.shape.ring)
                    plgpu.barrier_wait(self.s["w_full"].at[place])
                    # `w_empty` counts this warpgroup for every place, also where it reads nothing.
                    plgpu.barrier_arrive(self.s["w_empty"].at[place])

                lax.fori_loop(0, chunks, pass_by, None)
                t = t + chunks
            if self._has("from_stage", half):
                t = self.products.leave_halves("from_stage", half, t)
            return t

        t = self._over_halves(half_layer, jnp.int32(0))
        if self.with_head:
            self.products.leave_halves("head", 0, t)


def _scratch(shape: Shape) -> dict[str, Any]:
    copies = shape.pieces_per_chunk
    kv = (shape.kv_ring, CHUNK, shape.dim)
    # As many barriers as the product with the most tiles of x has: s is at least 2.
    x_slots = shape.x_rows // (2 * shape.tokens)
    bf16 = jnp.bfloat16
    dtype, transforms = (jnp.int8, swizzled_int8()) if shape.int8 else (bf16, swizzled())
    # A place is 16 KB: 64 rows of 128 bf16, or of 256 int8, or keys and values of a chunk where D is 64, or one of
    # both.
    ring = plgpu.SMEM((shape.ring, 64, shape.tile_columns), dtype, transforms=transforms)
    if shape.prefetches:
        chunks = plgpu.SMEM((shape.ring, 2 // shape.tiles_per_chunk, CHUNK, shape.dim), bf16, transforms=swizzled())
        ring = plgpu.RefUnion(ring, chunks)
    of_int8 = {"half_full": plgpu.Barrier(), "half_empty": plgpu.Barrier()} if shape.int8 else {}
    return {
        **of_int8,
        "ring_smem": ring,
        # x, 1/rms and the sums that are folded; or the rings of pieces, and the queries.
        "turns_smem": plgpu.RefUnion(
            (
                plgpu.SMEM((shape.x_rows, DEPTH), bf16, transforms=swizzled()),
                plgpu.SMEM((TILE, shape.tokens), jnp.float32),
                *(plgpu.SMEM((64, shape.tokens), jnp.float32) for _ in range(shape.x_tiles)),
            ),
            (
                plgpu.SMEM(kv, bf16, transforms=swizzled()),
                plgpu.SMEM(kv, bf16, transforms=swizzled()),
                plgpu.SMEM((QUERIES, shape.dim), bf16, transforms=swizzled()),
            ),
        ),
        # Arrivals: a copy each, or stand-ins up to the static count. `…_empty` count the warpgroups that read: consumer
        # and assistant both pass every place of the weights' ring.
        "w_full": plgpu.Barrier(num_arrivals=shape.tile_arrivals, num_barriers=shape.ring),
        "w_empty": plgpu.Barrier(num_arrivals=shape.x_tiles, num_barriers=shape.ring),
        "x_full": plgpu.Barrier(num_arrivals=4, num_barriers=x_slots),
        "x_empty": plgpu.Barrier(num_arrivals=1, num_barriers=x_slots),
        "scale_ready": plgpu.Barrier(num_arrivals=1),
        "q_full": plgpu.Barrier(num_arrivals=2 if shape.paired else 1),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=shape.kv_ring),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=shape.kv_ring),
        "k_empty": plgpu.Barrier(num_arrivals=1, num_barriers=shape.kv_ring),
        "v_empty": plgpu.Barrier(num_arrivals=1, num_barriers=shape.kv_ring),
    }


def launch(
    shape: Shape, operands: Operands, *, stages: tuple[str, ...], with_head: bool, interpret: Any = None
) -> None:
    """Runs these stages of every layer, then the head, in one kernel. What is written is `jax.new_ref`s."""
    fields = dataclasses.fields(Operands)
    # `plgpu.kernel` takes references one by one: lists are flattened here and put together again in the body.
    flat: list[Any] = []
    counts: list[int | None] = []
    for field in fields:
        value = getattr(operands, field.name)
        many = isinstance(value, list | tuple)
        counts.append(len(value) if many else None)
        flat += list(value) if many else [value]

    def body(*refs: Ref, **scratch: Ref) -> None:
        given: dict[str, Any] = {}
        at = 0
        for field, count in zip(fields, counts, strict=True):
            given[field.name] = refs[at] if count is None else refs[at : at + count]
            at += 1 if count is None else count
        _Body(shape, stages, with_head, interpret is not None)(Operands(**given), **scratch)

    plgpu.kernel(
        body,
        out_type=(),
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=shape.warpgroups,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="decode_step",
    )(*flat)
