"""Attention inside the persistent decode step (`decode_kernel.py`): a block's share of one (group, KV head).

A share is every S-th chunk of 64 slots of the group's tasks (`sharing.py`): a chunk holds one task, or several of
single pages. The loader fills a ring of chunks by TMA, the consumer takes the online softmax of all the group's queries
of that head over them, and when the blocks of the pair have met each merges some of the queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas import lanes
from smcjax.pallas.decode_operands import Operands
from smcjax.pallas.decode_shape import CHUNK, Shape
from smcjax.pallas.products import MASKED, QUERIES, Ref, across, interpreted_product, tensor_core_product


class Attention:
    """One block's part in the attention of every layer. `scratch` are references in shared memory, by name."""

    def __init__(
        self,
        shape: Shape,
        operands: Operands,
        scratch: dict[str, Ref],
        *,
        block: jax.Array,
        step: jax.Array,
        interpret: bool,
    ) -> None:
        self._shape, self._g, self._s, self._interpret = shape, operands, scratch, interpret
        self._block, self._step = block, step
        self._product = interpreted_product if interpret else tensor_core_product

    # The loader's warpgroup.

    def _unit(self) -> tuple[jax.Array, ...]:
        """(takes part, group, KV head, which of its splits, chunks of that).

        A split has every S-th chunk, because the last ones are masked and take longer.
        """
        shape = self._shape
        active = self._block < shape.attention_blocks
        pair = lax.div(self._block, shape.splits)
        group, head = lax.div(pair, shape.kv_heads), lax.rem(pair, shape.kv_heads)
        group = lax.min(group, shape.groups - 1)
        count = lax.div(self._g.count[group, 0] + (shape.tasks_per_chunk - 1), shape.tasks_per_chunk)
        split = lax.rem(self._block, shape.splits)
        return active, group, head, split, lax.div(count - split + (shape.splits - 1), shape.splits)

    def start(self) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
        """`_unit`, and the pages of its first chunk."""
        unit = self._unit()
        _, group, _, split, _ = unit
        return unit, self._pages_of(group, split)

    def _pages_of(self, group: jax.Array, chunk: jax.Array) -> list[jax.Array]:
        return [page for part in range(self._shape.tasks_per_chunk) for page in self._task(group, chunk, part)[0]]

    def load(self, layer: jax.Array, unit: tuple[jax.Array, ...], pages: list[jax.Array]) -> None:
        """The queries, and the chunks of `unit` one after the other; `pages` are the first one's (`start`)."""
        shape = self._shape
        active, group, head, split, chunks = unit

        @pl.when(active & (chunks > 0))
        def _load() -> None:
            rows = shape.group_tokens * shape.q_step
            start = pl.multiple_of((head * shape.tokens + group * shape.group_tokens) * shape.q_step, 8)
            plgpu.copy_gmem_to_smem(
                self._g.q.at[pl.ds(start, rows)], self._s["q_smem"].at[pl.ds(0, rows)], self._s["q_full"]
            )

            def chunk(i: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
                slot, again = lax.rem(i, shape.kv_ring), i >= shape.kv_ring
                upcoming = self._pages_of(group, split + lax.min(i + 1, chunks - 1) * shape.splits)
                for refs, kind in ((self._g.keys, "k"), (self._g.values, "v")):
                    free = self._s[kind + "_empty"].at[slot]
                    pl.when(again)(functools.partial(plgpu.barrier_wait, free))
                    with lanes.of_layer(refs, layer, interpret=self._interpret) as ref:
                        for j, page in enumerate(pages):
                            target = self._s[kind + "_smem"].at[slot, pl.ds(j * shape.page_size, shape.page_size)]
                            plgpu.copy_gmem_to_smem(ref.at[page, :, head], target, self._s[kind + "_full"].at[slot])
                return upcoming

            lax.fori_loop(0, chunks, chunk, pages)

    def _task(self, group: jax.Array, chunk: jax.Array, part: int) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """(pages, first slot, rows that read it) of a part of a chunk; nobody reads what lies behind the last task."""
        number = chunk * self._shape.tasks_per_chunk + part
        valid = number < self._g.count[group, 0]
        number = jnp.where(valid, number, 0)
        *pages, place, members = (self._g.tasks[group, 0, number, field] for field in range(self._g.tasks.shape[3]))
        return pages, place * self._shape.task_slots, jnp.where(valid, members, 0)

    # The consumer's warpgroup.

    def attend(self, when_idle: Callable[[], None]) -> None:
        """Softmax over this block's share of the tasks of its (group, KV head); `when_idle()` if that is empty."""
        shape, s = self._shape, self._s
        active, group, _, split, chunks = self._unit()
        scale = math.log2(math.e) / math.sqrt(shape.dim)
        rows = plgpu.Layout.WGMMA.reduce(1)

        @pl.when(active & (chunks <= 0))
        def _nothing() -> None:
            # Others wait for what their loader fetches after its own wait. Without one this block would run ahead: its
            # signal would open a barrier, or its share be cleared, before blocks that are still at work.
            when_idle()
            nothing = jnp.full((QUERIES,), -jnp.inf, jnp.float32)
            self._g.partial_lse[self._block] = plgpu.layout_cast(nothing, rows)

        @pl.when(active & (chunks > 0))
        def _some() -> None:
            now = self._step * shape.groups + group
            limits = plgpu.load(self._g.limits.at[now], layout=rows, optimized=False)
            sees, row = limits >> 5, limits & 31
            lengths = [self._g.lengths[now * shape.rows + r] for r in range(shape.rows)]
            width = shape.task_slots

            def read(i: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
                number = split + lax.min(i, chunks - 1) * shape.splits
                return [self._task(group, number, part)[1:] for part in range(shape.tasks_per_chunk)]

            def by_part(key: jax.Array, ends: Sequence[jax.Array]) -> jax.Array:
                """The end of the part that each of a chunk's slots lies in."""
                out = ends[-1]
                for part in reversed(range(shape.tasks_per_chunk - 1)):
                    out = jnp.where(key < (part + 1) * width, ends[part], out)
                return out

            # What pays with many chunks costs with few: a loop of its own for those that all queries see whole, and
            # scores computed a chunk ahead.
            many = shape.task_slots == CHUNK
            masked_from = jnp.int32(0)
            if many:
                masked_from = lax.min(
                    lax.div(self._g.clear[group, 0] - split + (shape.splits - 1), shape.splits), chunks
                )
            first_tasks = read(masked_from)
            with jax.named_scope("wait q"):
                plgpu.barrier_wait(s["q_full"])
            q = s["q_smem"]

            def slot_of(i: jax.Array) -> jax.Array:
                return lax.rem(i, shape.kv_ring)

            def keys(i: jax.Array) -> Ref:
                return s["k_smem"].at[slot_of(i)].transpose((1, 0))

            def arrived(i: jax.Array) -> None:
                with jax.named_scope("wait k"):
                    plgpu.barrier_wait(s["k_full"].at[slot_of(i)])

            def scores_of(i: jax.Array) -> jax.Array:
                arrived(i)
                return self._product(None, q, keys(i))

            def used(i: jax.Array, kind: str) -> None:
                pl.when(i + shape.kv_ring < chunks)(lambda: plgpu.barrier_arrive(s[kind + "_empty"].at[slot_of(i)]))

            def limits_of(tasks: list[tuple[jax.Array, jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
                """Where, in each part of the chunk, what each query sees ends, and where what anyone sees does."""
                visible, end = [], []
                for part, (base, members) in enumerate(tasks):
                    start = part * width
                    visible.append(jnp.where(((members >> row) & 1) != 0, sees - base + start, 0))
                    longest = [jnp.where(((members >> r) & 1) != 0, n, 0) for r, n in enumerate(lengths)]
                    end.append(lax.clamp(start, functools.reduce(lax.max, longest) - base + start, start + width))
                return visible, end

            def clean(slot: jax.Array, end: list[jax.Array]) -> None:
                """0 · NaN is NaN: slots that hold nothing must be zeros."""
                full = functools.reduce(jnp.logical_and, [x == (part + 1) * width for part, x in enumerate(end)])

                @pl.when(jnp.logical_not(full))
                def _clean() -> None:
                    v = plgpu.layout_cast(s["v_smem"][slot], plgpu.Layout.WGMMA)
                    at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
                    s["v_smem"][slot] = jnp.where(at < by_part(at, end), v, jnp.zeros_like(v))
                    plgpu.commit_smem()

            def softmax(
                scores: jax.Array, acc: jax.Array, m: jax.Array, mass: jax.Array, visible: list[jax.Array]
            ) -> tuple[jax.Array, ...]:
                """Rescaled acc, new m and mass, weights; `visible` is empty where all is."""
                scores = scores * scale
                if visible:
                    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
                    ends = by_part(key, [across(of_part, scores.shape) for of_part in visible])
                    scores = jnp.where(key < ends, scores, MASKED)
                new_m = jnp.maximum(m, scores.max(axis=1))
                alpha = jnp.exp2(m - new_m)
                p = lanes.exp2(scores - across(new_m, scores.shape), interpret=self._interpret)
                if visible:
                    p = jnp.where(scores == MASKED, 0.0, p)  # a row of another branch sees nothing
                mass = mass * alpha + p.sum(axis=1)
                return acc * across(alpha, acc.shape), new_m, mass, p.astype(q.dtype)

            def chunk(i: jax.Array, carry: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
                """Where there are many, the chunk whose scores are in `carry`; the next ones' come meanwhile."""
                acc, m, mass, scores, tasks = carry
                visible: list[jax.Array] = []
                if masked:
                    visible, end = limits_of(tasks)
                    tasks = read(i + 1)  # a load from memory takes as long as a chunk
                if not many:
                    scores = scores_of(i)
                    acc, m, mass, p = softmax(scores, acc, m, mass, visible)
                elif self._interpret:
                    pl.when(i + 1 < chunks)(lambda: arrived(i + 1))
                    acc, m, mass, p = softmax(scores, acc, m, mass, visible)
                    scores = self._product(None, q, keys(i + 1))
                else:
                    pl.when(i + 1 < chunks)(lambda: arrived(i + 1))

                    def overlapped(upcoming: Ref) -> tuple[jax.Array, ...]:
                        plgpu.wgmma(upcoming, q, keys(i + 1))
                        done = lax.optimization_barrier(softmax(scores, acc, m, mass, visible))
                        return (*done, upcoming[...])

                    acc, m, mass, p, scores = pl.run_scoped(overlapped, plgpu.ACC((QUERIES, CHUNK), jnp.float32))
                used(i + int(many), "k")
                with jax.named_scope("wait v"):
                    plgpu.barrier_wait(s["v_full"].at[slot_of(i)])
                if masked:
                    clean(slot_of(i), end)
                acc = self._product(acc, p, s["v_smem"].at[slot_of(i)])
                used(i, "v")
                return acc, m, mass, scores if many else None, tasks

            carry: tuple[Any, ...] = (
                plgpu.layout_cast(jnp.zeros((QUERIES, shape.dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((QUERIES,), MASKED, jnp.float32), rows),
                plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), rows),
                scores_of(jnp.int32(0)) if many else None,
                first_tasks,
            )
            if many:
                used(jnp.int32(0), "k")
                carry = lax.fori_loop(0, masked_from, functools.partial(chunk, masked=False), carry)
            carry = lax.fori_loop(masked_from, chunks, functools.partial(chunk, masked=True), carry)
            acc, m, mass, *_ = carry
            seen = mass > 0
            mass = jnp.where(seen, mass, 1.0)
            self._g.partial[self._block] = acc / across(mass, acc.shape)
            self._g.partial_lse[self._block] = jnp.where(seen, m + jnp.log2(mass), -jnp.inf)

    def merge(self) -> None:
        """Weighs the splits' outputs by their log-sum-exp, each block a share of its (group, KV head)'s queries.

        128 elements, one or two query heads, at a time.
        """
        shape, g = self._shape, self._g
        active, group, head, _, _ = self._unit()
        pair, split = lax.div(self._block, shape.splits), lax.rem(self._block, shape.splits)
        together = 128 // shape.dim
        vectors = shape.queries // together
        first, last = lax.div(split * vectors, shape.splits), lax.div((split + 1) * vectors, shape.splits)
        flat = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

        def vector(number: jax.Array, _: None) -> None:
            query = number * together
            lane = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=flat)
            lses, outs = [], []
            for split in range(shape.splits):
                block = pair * shape.splits + split
                lse = jnp.broadcast_to(g.partial_lse[block, query], (128,))
                if together == 2:
                    other = jnp.broadcast_to(g.partial_lse[block, query + 1], (128,))
                    lse = jnp.where(lane < shape.dim, lse, other)
                lses.append(lse)
                outs.append(jnp.reshape(g.partial[block, pl.ds(query, together)], (128,)))
            top = jnp.maximum(functools.reduce(jnp.maximum, lses), MASKED)
            weights = [jnp.exp2(lse - top) for lse in lses]
            total = jnp.maximum(functools.reduce(jnp.add, weights), 1e-30)
            # A split without tasks has written no output: whatever lies there may be NaN.
            terms = [jnp.where(weight > 0, weight * out, 0.0) for weight, out in zip(weights, outs, strict=True)]
            out = functools.reduce(jnp.add, terms) / total
            token = group * shape.group_tokens + lax.div(query, shape.per_kv_head)
            column = (head * shape.per_kv_head + lax.rem(query, shape.per_kv_head)) * shape.dim
            g.attended[token, pl.ds(pl.multiple_of(column, 64), 128)] = out.astype(g.attended.dtype)

        pl.when(active)(lambda: lax.fori_loop(first, last, vector, None))
