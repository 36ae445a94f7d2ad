"""Blocks selected by a kernel from stored scores: exactly those that XLA ranks and selects, ties and all."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.block_ranking import Kept, Ranking, ranked_blocks, supports_ranking
from smcjax.pallas.sparse.grouped_attention import compressed_slots, span_tasks
from smcjax.pallas.sparse.grouped_attention_sm90 import grouped_scores_mosaic
from smcjax.pallas.sparse.grouped_shares import Tuning
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse.nsa import NSA

# As one program: its single operations would be compiled one by one.
_span_tasks = jax.jit(span_tasks, static_argnames=("groups", "page_size", "unit", "sets", "most_slots", "rows"))

INTERPRET = plgpu.InterpretGPUParams()
DIVISOR = 8.0


class Case(NamedTuple):
    """Requests whose queries stand at `positions`, the last of them behind a sequence that ends earlier."""

    kind: NSA
    groups: QueryGroups
    positions: tuple[int, ...]
    sets: int
    heads: int  # of a set
    blocks: int
    requests: int = 2
    levels: int | None = None  # that the products of a block's slots have, all alike; None: each its own

    @property
    def ranking(self) -> Ranking:
        kind = self.kind
        sizes = (kind.num_blocks, kind.init_blocks, kind.local_blocks)
        stride = kind.kernel_stride
        return Ranking(self.blocks, *sizes, kind.block_size // stride, kind.kernel_size // stride)


PAPER = NSA(num_blocks=6)
CASES = {
    # A query that sees no token, ones with fewer blocks than it selects, padded heads, an order, a group of one.
    "ties": Case(PAPER, QueryGroups((3, 0, 2, 4, 1), 2), (30, 31, 200, 2900, 4000), 2, 3, 64, levels=3),
    "several turns": Case(PAPER, QueryGroups((0, 1), 2), (16_000, 17_000), 1, 8, 270, requests=1),
    "long tokens": Case(
        NSA(kernel_size=64, num_blocks=5, init_blocks=0, local_blocks=0), QueryGroups((0, 1), 1), (63, 3000), 1, 2, 48
    ),
}


def positions_of(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions, and the first and last slot that queries see."""
    at = jnp.tile(jnp.asarray(case.positions, jnp.int32), (case.requests, 1))
    seen = at.at[-1, -1].add(-77)  # beyond what is there
    kind = case.kind
    return at, *compressed_slots(seen, kernel_size=kind.kernel_size, kernel_stride=kind.kernel_stride)


def drawn(case: Case, seed: int = 0) -> Kept:
    """Products as they are kept, with anything but numbers where nobody may look."""
    rng, groups = np.random.default_rng(seed), case.groups
    strides = case.ranking.strides
    slots, padded = -(-case.blocks * strides // 64) * 64, 1 << (case.heads - 1).bit_length()
    rows = -(-groups.size * padded // 64) * 64
    shape = (case.requests * groups.number, case.sets, rows, slots)
    products = rng.normal(size=shape) * 3 * DIVISOR
    if case.levels is not None:
        levels = rng.integers(0, case.levels, (*shape[:2], slots // strides)) + rng.normal(size=(*shape[:2], 1))
        products = np.repeat(levels, strides, axis=-1)[:, :, None] * DIVISOR * np.ones(shape)
    kept = np.full(shape, np.nan, np.float32)
    _, low, high = positions_of(case)
    for request, query in np.ndindex(low.shape):
        place = groups.order.index(query)
        group, first = request * groups.number + place // groups.size, place % groups.size * padded
        seen = slice(int(low[request, query]), max(0, int(high[request, query]) + 1))
        rows_of = slice(first, first + case.heads)
        kept[group, :, rows_of] = rng.choice([np.inf, -np.inf, np.nan, 6e4], kept[group, :, rows_of].shape)
        kept[group, :, rows_of, seen] = products[group, :, rows_of, seen]
    rounded = jnp.asarray(kept.astype(np.float16))
    by_query = by_queries(rounded, case)
    slot = jnp.arange(slots)[None, None]
    seen_by = ((slot >= low[..., None]) & (slot <= high[..., None]))[:, :, None]
    lse = jax.nn.logsumexp(jnp.where(seen_by, by_query, -jnp.inf), axis=-1)
    return Kept(rounded, lse, low, high)


def by_queries(products: jax.Array, case: Case) -> jax.Array:
    """Scores [R, M, H, slots] of kept products."""
    groups, padded = case.groups, 1 << (case.heads - 1).bit_length()
    of = products[:, :, : groups.size * padded]
    of = of.reshape(case.requests, groups.number, case.sets, groups.size, padded, -1)[..., : case.heads, :]
    of = groups.join(jnp.moveaxis(of, 2, 3))
    return of.reshape(*of.shape[:2], -1, of.shape[-1]).astype(jnp.float32) / DIVISOR


def scores_by_xla(case: Case, kept: Kept) -> jax.Array:
    """Scores of blocks as a layer has them elsewhere."""
    slot = jnp.arange(kept.products.shape[-1])[None, None]
    seen = ((slot >= kept.low[..., None]) & (slot <= kept.high[..., None]))[:, :, None]
    weights = jnp.where(seen, jnp.exp(by_queries(kept.products, case) - kept.lse[..., None]), 0)
    of_sets = weights.reshape(*weights.shape[:2], case.sets, case.heads, -1).sum(axis=3)
    return case.kind.by_blocks(of_sets, case.blocks)


def by_kernel(case: Case, kept: Kept, interpret: Any = None) -> jax.Array:
    positions = positions_of(case)[0]
    sizes = {"block_size": case.kind.block_size, "heads": case.heads, "divisor": DIVISOR}
    return ranked_blocks(kept, positions, case.groups, case.ranking, **sizes, interpret=interpret)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_selects_what_xla_does(name: str) -> None:
    """Controls: products that are a slot late, and of equal ranks the later, select others."""
    case, kept = CASES[name], drawn(CASES[name])
    positions, n = positions_of(case)[0], case.kind.num_blocks
    got = by_kernel(case, kept, INTERPRET)
    scores = scores_by_xla(case, kept)
    with implementations("xla"):
        want = case.kind.select(scores, positions)
        ranks = case.kind.ranked(scores, positions)
        late = case.kind.select(scores_by_xla(case, kept._replace(products=jnp.roll(kept.products, 1, -1))), positions)
    np.testing.assert_array_equal(got, want)
    own = np.asarray(positions // case.kind.block_size)[..., None]
    np.testing.assert_array_equal(got.sum(axis=-1), np.broadcast_to(np.minimum(n, own + 1), got.shape[:3]))
    assert (late != want).any()
    if case.levels is not None:
        _, best = jax.lax.top_k(ranks[..., ::-1], n)
        later = jnp.any(best[..., None] == jnp.arange(case.blocks)[None, None, None, None], axis=-2)[..., ::-1] & (
            ranks != -jnp.inf
        )
        assert (later != want).any()


@pytest.mark.slow
def test_ranks_what_kernels_keep() -> None:
    """Products as the kernel keeps them, of three heads that it takes as four, in groups in an order.

    Control: the queries' own order.
    """
    rng, groups = np.random.default_rng(0), QueryGroups((3, 0, 2, 4, 1), 3)
    case = Case(NSA(num_blocks=5), groups, (1300, 1500, 1700, 1900, 2047), 2, 3, 32, requests=1)
    q = jnp.asarray(rng.standard_normal((1, 5, 6, 64)) * 2, jnp.bfloat16)
    pool = jnp.asarray(rng.standard_normal((2, 9, 16, 2, 64)), jnp.bfloat16)
    table = jnp.asarray(np.tile(1 + rng.permutation(8), (1, 5, 1)), jnp.int32)
    _, low, high = positions_of(case)
    tasks = _span_tasks(low, high, table, groups, page_size=16, unit=16, sets=2, most_slots=128)
    tuning = Tuning(blocks=2, subs=2, stages=2)
    options: Any = {"unit": 16, "slots": 128, "tuning": tuning, "interpret": INTERPRET}
    part, scores, products = grouped_scores_mosaic(q, *pool, tasks, groups, low, high, **options)
    kept = Kept(products, part.lse, low, high)
    np.testing.assert_array_equal(by_queries(products, case)[..., :16], scores[..., :16])
    in_order = case._replace(groups=QueryGroups(tuple(range(5)), 3))
    with implementations("xla"):
        want, other = (case.kind.select(scores_by_xla(of, kept), positions_of(of)[0]) for of in (case, in_order))
    np.testing.assert_array_equal(by_kernel(case, kept, INTERPRET), want)
    assert (other != want).any()


def test_supports_what_fits() -> None:
    """Blocks of 512 Ki positions, and nothing whose ranks or weights are more than a block of threads can hold."""
    ranking = Case(NSA(), QueryGroups((0,), 1), (0,), 1, 4, 8192).ranking
    assert supports_ranking(ranking, heads=4, slots=32_768)
    assert not supports_ranking(ranking._replace(blocks=8193), heads=4, slots=32_832)
    assert not supports_ranking(ranking, heads=32, slots=32_768)
    assert not supports_ranking(ranking, heads=4, slots=32_770)
    assert not supports_ranking(ranking._replace(chosen=64), heads=4, slots=32_768)
    assert not supports_ranking(ranking._replace(chosen=3), heads=4, slots=32_768)  # none is chosen by rank
    assert not supports_ranking(ranking._replace(strides=16), heads=4, slots=32_768)
    with pytest.raises(ValueError, match="no kernel for Ranking"):
        by_kernel(CASES["ties"]._replace(blocks=8193), drawn(CASES["ties"]))


@pytest.mark.parametrize("blocks", [1024, 8192])
def test_lowers_for_cuda(blocks: int) -> None:
    """At an 8B model's shapes, 64 Ki and 512 Ki positions."""
    case = Case(NSA(), QueryGroups(tuple(range(9)), 9), tuple(range(9)), 8, 4, blocks, 8)
    slots, numbers = blocks * 4, jax.ShapeDtypeStruct((8, 9), jnp.int32)
    products = jax.ShapeDtypeStruct((8, 8, 64, slots), jnp.float16)
    kept: Any = (products, jax.ShapeDtypeStruct((8, 9, 32), jnp.float32), numbers, numbers)
    traced = jax.jit(lambda *kept: by_kernel(case, Kept(*kept))).trace(*kept)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [None, 40])
def test_selects_what_xla_does_on_a_gpu(levels: int | None) -> None:
    """Around 64 Ki positions: the same sets where scores have few values; elsewhere none is worse but by rounding."""
    at = (31, 5000, 65_535, *range(65_547, 65_553))
    case = Case(NSA(), QueryGroups((8, *range(8)), 9), at, 8, 4, 1028, 8, levels)
    kept = drawn(case)
    positions = positions_of(case)[0]
    got = np.asarray(jax.jit(functools.partial(by_kernel, case))(kept))
    scores = jax.jit(functools.partial(scores_by_xla, case))(kept)
    want = np.asarray(case.kind.select(scores, positions))
    np.testing.assert_array_equal(got.sum(axis=-1), want.sum(axis=-1))
    ranks = np.asarray(case.kind.ranked(scores, positions))
    least = np.min(ranks, axis=-1, where=got, initial=np.inf)
    most = np.max(ranks, axis=-1, where=~got, initial=-np.inf)
    assert (least >= most * (1 - 1e-6)).all()
    unequal = (got != want).any(axis=-1)
    print(f"levels {levels}: {unequal.sum()} of {unequal.size} sets differ")
    assert unequal.mean() <= (0 if levels else 0.01)
