"""The kernels that change block tables and counts, against `smcjax.kv`'s plain versions: whole histories of a batch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.kv import TRASH, PagePool, allocate, fork, make_room, pages_for, pages_touched, rebind, truncate_pages
from smcjax.pallas.cache.page_tables import fork_mosaic, make_room_mosaic, supports_page_tables, truncate_pages_mosaic
from smcjax.pallas.dispatch import implementations
from smcjax.smc.resampling import ancestors_from_counts
from tests.helpers import assert_pages_sound


class Shape(NamedTuple):
    groups: int
    n: int  # rows of a group
    page_size: int
    width: int  # tokens of a block
    prompt: int
    limit: int  # of a row


class Batch(NamedTuple):
    """Holds the part of a batch that the kernels see: page pool, table, tokens, log probabilities and lengths."""

    pool: PagePool
    table: Any
    tokens: Any
    logprobs: Any
    length: Any


_allocate, _rebind = jax.jit(allocate), jax.jit(rebind)
_ancestors = jax.jit(jax.vmap(ancestors_from_counts))
_make_room = jax.jit(make_room.reference, static_argnames=("page_size", "max_width", "group"))
_fork = jax.jit(fork.reference, static_argnames=("group",))
_our_make_room = jax.jit(make_room_mosaic, static_argnames=("page_size", "touched", "group", "interpret"))
_truncate_pages = jax.jit(truncate_pages.reference, static_argnames=("page_size", "max_width", "group"))
_our_truncate_pages = jax.jit(truncate_pages_mosaic, static_argnames=("page_size", "touched", "group", "interpret"))
_our_fork = jax.jit(fork_mosaic, static_argnames=("group", "interpret"))


def admitted(shape: Shape, rng: np.random.Generator, num_pages: int) -> Batch:
    """Prompts in pages that a group's rows share; the full pages of the first are those of the second group too."""
    rows, pages = shape.groups * shape.n, pages_for(shape.limit, shape.page_size)
    used = np.arange(pages) < pages_for(shape.prompt, shape.page_size)
    pool, own = _allocate(PagePool.create(num_pages), jnp.asarray(np.broadcast_to(used, (shape.groups, pages))))
    first = np.asarray(own)
    named = first.copy()
    named[1:2, : shape.prompt // shape.page_size] = named[0, : shape.prompt // shape.page_size]
    table = np.repeat(named, shape.n, axis=0)
    before = np.full_like(table, TRASH)
    before[:: shape.n] = first
    pool = _rebind(pool, jnp.asarray(before), jnp.asarray(table))
    tokens = np.zeros((rows, shape.limit + shape.width), np.int32)
    tokens[:, : shape.prompt + 1] = np.repeat(rng.integers(0, 99, (shape.groups, shape.prompt + 1)), shape.n, axis=0)
    return Batch(pool, table, tokens, np.zeros(tokens.shape, np.float32), np.full(rows, shape.prompt + 1, np.int32))


def grow(batch: Batch, shape: Shape, live: np.ndarray, rng: np.random.Generator, kernel: Any) -> Batch:
    """Room for a block of every live row, by `kernel` as by the reference."""
    first = batch.length - 1
    last = np.minimum(first + shape.width - 1, shape.limit - 1)
    touched = (shape.width + shape.page_size - 2) // shape.page_size + 1
    static = {"page_size": shape.page_size, "group": shape.n}
    room = _make_room(batch.pool, batch.table, first, last, live, max_width=shape.width, **static)
    counts, left, table, source, target = kernel(
        *(jnp.asarray(x) for x in (batch.pool.refcount, batch.pool.free, batch.pool.num_free)),
        *(jnp.asarray(x) for x in (batch.table, first, last, live)),
        touched=touched,
        **static,
    )
    np.testing.assert_array_equal(table, room.block_table)
    np.testing.assert_array_equal(counts, room.pool.refcount)
    np.testing.assert_array_equal(source, room.copy_from)
    np.testing.assert_array_equal(target, room.copy_to)
    assert int(left) == int(room.pool.num_free)
    assert_pages_sound(room.block_table, room.pool)

    tokens, logprobs, length = batch.tokens.copy(), batch.logprobs.copy(), batch.length.copy()
    for row in np.flatnonzero(live):
        new = min(shape.width, shape.limit - length[row])
        tokens[row, length[row] : length[row] + new] = rng.integers(0, 99, new)
        logprobs[row, length[row] : length[row] + new] = rng.normal(size=new)
        length[row] += new
    return Batch(room.pool, np.asarray(room.block_table), tokens, logprobs, length)


def resample(batch: Batch, shape: Shape, rng: np.random.Generator, kernel: Any) -> tuple[Batch, int]:
    """Some groups forked, by `kernel` as by the reference. Also returns how many pages became free."""
    counts = np.ones((shape.groups, shape.n), np.int32)
    for group in np.flatnonzero(rng.random(shape.groups) < 0.8):
        drawn = rng.choice(shape.n, shape.n, p=rng.dirichlet(np.full(shape.n, 0.3)))
        counts[group] = np.bincount(drawn, minlength=shape.n)
    within = np.asarray(_ancestors(jnp.asarray(counts)))
    source = (within + np.arange(shape.groups)[:, None] * shape.n).reshape(-1).astype(np.int32)
    begin = np.full(len(source), shape.prompt, np.int32)
    moved = (batch.tokens, batch.logprobs)
    args = tuple(jnp.asarray(x) for x in (source, counts.reshape(-1), begin, batch.length))
    pool, table, rows = _fork(batch.pool, batch.table, moved, *args, group=shape.n)
    ours = kernel(
        *(jnp.asarray(x) for x in (batch.pool.refcount, batch.pool.free, batch.pool.num_free, batch.table)),
        tuple(map(jnp.asarray, moved)),
        *args,
        group=shape.n,
    )
    refcount, free, left, our_table, our_rows = jax.tree.map(np.asarray, ours)
    pool, table, rows = jax.tree.map(np.asarray, (pool, table, rows))
    np.testing.assert_array_equal(our_table, table)
    np.testing.assert_array_equal(refcount, pool.refcount)
    assert int(left) == int(pool.num_free)
    assert set(free[: int(left)].tolist()) == set(pool.free[: int(left)].tolist())
    length = batch.length[source]
    for one, other in zip(our_rows, rows, strict=True):
        for row, end in enumerate(length):
            np.testing.assert_array_equal(one[row, :end], other[row, :end])
    assert_pages_sound(our_table, PagePool(refcount, free, left))
    freed = int(left) - int(batch.pool.num_free)
    return Batch(pool, np.asarray(table), np.asarray(rows[0]), np.asarray(rows[1]), length), freed


def history(shape: Shape, seed: int, rounds: int, interpret: Any, spare_pages: int | None = None) -> int:
    """Rounds of growing and resampling, every one compared. Returns how many pages forks gave back."""
    rng = np.random.default_rng(seed)
    rows, freed = shape.groups * shape.n, 0
    num_pages = 1 + rows * pages_for(shape.limit, shape.page_size)
    if spare_pages is not None:
        num_pages = 1 + shape.groups * pages_for(shape.prompt, shape.page_size) + spare_pages
    batch = admitted(shape, rng, num_pages)
    for _ in range(rounds):
        live = np.repeat(rng.random(shape.groups) < 0.9, shape.n)
        if rounds % 2:  # some siblings rest, and keep the page that they share with those that go
            live &= rng.random(rows) < 0.8
        live &= batch.length < shape.limit  # what has reached its limit is finished
        batch = grow(batch, shape, live, rng, functools.partial(_our_make_room, interpret=interpret))
        if spare_pages is None:
            batch, more = resample(batch, shape, rng, functools.partial(_our_fork, interpret=interpret))
            freed += more
    return freed


def agree(batch: Batch, shape: Shape, before: np.ndarray, goes: np.ndarray, rng: Any, kernel: Any) -> tuple[Batch, int]:
    """Groups keep a part of one row's block, by `kernel` as by the reference. Also returns how many pages became free.

    `before` are the rows' lengths before the block.
    """
    leader = np.arange(shape.groups)[:, None] * shape.n
    source = np.repeat(leader + rng.integers(0, shape.n, (shape.groups, 1)), shape.n, axis=1).reshape(-1)
    taken = np.repeat(rng.integers(0, shape.width + 1, shape.groups), shape.n)
    length = np.where(goes, np.minimum(before + taken, batch.length), before).astype(np.int32)
    args = [jnp.asarray(x, jnp.int32) for x in (source, before, length)]
    args[0] = args[0] if shape.n > 1 else None
    static = {"page_size": shape.page_size, "group": shape.n}
    pool, table = _truncate_pages(batch.pool, batch.table, *args, jnp.asarray(goes), max_width=shape.width, **static)
    counts, free, left, ours = kernel(
        *(jnp.asarray(x) for x in (batch.pool.refcount, batch.pool.free, batch.pool.num_free, batch.table)),
        *args,
        jnp.asarray(goes),
        touched=pages_touched(shape.width, shape.page_size),
        **static,
    )
    np.testing.assert_array_equal(ours, table)
    np.testing.assert_array_equal(counts, pool.refcount)
    assert int(left) == int(pool.num_free)
    assert set(np.asarray(free)[: int(left)].tolist()) == set(np.asarray(pool.free)[: int(left)].tolist())
    assert_pages_sound(ours, PagePool(counts, free, left))
    freed = int(left) - int(batch.pool.num_free)
    # Tokens do not matter to pages.
    return Batch(PagePool(counts, free, left), np.asarray(ours), batch.tokens, batch.logprobs, length), freed


def agreements(shape: Shape, seed: int, rounds: int, interpret: Any) -> int:
    """Rounds of growing and agreeing, every one compared. Returns how many pages were given back."""
    rng = np.random.default_rng(seed)
    batch = admitted(shape, rng, 1 + shape.groups * shape.n * pages_for(shape.limit, shape.page_size))
    freed = 0
    for _ in range(rounds):
        goes = np.repeat(rng.random(shape.groups) < 0.9, shape.n) & (batch.length < shape.limit)
        before = batch.length
        batch = grow(batch, shape, goes, rng, functools.partial(_our_make_room, interpret=interpret))
        batch, more = agree(
            batch, shape, before, goes, rng, functools.partial(_our_truncate_pages, interpret=interpret)
        )
        freed += more
    return freed


SHAPES = {
    "two groups": Shape(groups=2, n=4, page_size=4, width=3, prompt=6, limit=40),
    "pages of one token": Shape(groups=2, n=3, page_size=1, width=3, prompt=4, limit=30),
    "blocks over three pages": Shape(groups=3, n=2, page_size=2, width=5, prompt=5, limit=50),
    "more than 128 columns": Shape(groups=2, n=3, page_size=2, width=9, prompt=257, limit=290),
    "groups of one": Shape(groups=5, n=1, page_size=4, width=3, prompt=6, limit=30),
    "more than 128 rows": Shape(groups=33, n=4, page_size=4, width=4, prompt=5, limit=17),
}
MANY = {"more than 128 groups": Shape(groups=130, n=2, page_size=4, width=3, prompt=3, limit=9)}  # slow interpreted


@pytest.mark.parametrize("name", ["blocks over three pages", "more than 128 columns", "more than 128 rows"])
def test_every_round_equals_the_reference(name: str) -> None:
    rounds = 1 if name.startswith("more") else 3
    assert history(SHAPES[name], 0, rounds, plgpu.InterpretGPUParams()) > 0


@pytest.mark.slow
def test_every_agreement_equals_the_reference() -> None:
    assert agreements(SHAPES["two groups"], 0, 4, plgpu.InterpretGPUParams()) > 0


@pytest.mark.slow
def test_agreements_go_by_the_source() -> None:
    """Control: pages of another row than the one that was accepted are seen."""

    def other(*args: Any, **how: Any) -> Any:
        source, shape = args[4], SHAPES["two groups"]
        return _our_truncate_pages(*args[:4], source // shape.n * shape.n, *args[5:], **how)

    shape, rng = SHAPES["two groups"], np.random.default_rng(0)
    batch = admitted(shape, rng, 100)
    goes, before = np.ones(len(batch.length), bool), batch.length
    kernel = functools.partial(_our_make_room, interpret=plgpu.InterpretGPUParams())
    batch = grow(batch, shape, goes, rng, kernel)
    with pytest.raises(AssertionError):
        agree(batch, shape, before, goes, rng, functools.partial(other, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("n", [1, 4])
def test_a_row_alone_copies_no_page(n: int) -> None:
    """Prompts share full pages alone, so what a cycle enters half-way is its group's own (`reserve`). Control: four."""
    shape = Shape(groups=2, n=n, page_size=4, width=3, prompt=6, limit=40)
    batch = admitted(shape, np.random.default_rng(0), 100)
    first = batch.length - 1
    static = {"page_size": 4, "max_width": 3, "group": n}
    room = _make_room(batch.pool, batch.table, first, first + 2, np.ones(2 * n, bool), **static)
    assert (np.asarray(room.copy_from) != TRASH).any() == (n > 1)


def test_too_few_pages_leave_the_last_rows_without() -> None:
    history(SHAPES["two groups"], 1, 2, plgpu.InterpretGPUParams(), spare_pages=5)


def test_what_the_kernels_take() -> None:
    assert supports_page_tables(rows=256, group=8)
    assert not supports_page_tables(rows=2048, group=8)
    assert not supports_page_tables(rows=64, group=64)


@pytest.mark.parametrize("groups", [1, 32])
def test_lower_to_cuda_in_place(groups: int) -> None:
    """Three launches, and no table, count or token row is gathered or scattered by XLA."""
    shape = Shape(groups=groups, n=8, page_size=16, width=9, prompt=1024, limit=1280)
    rows, pages = groups * shape.n, 80
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = jax.eval_shape(lambda: PagePool.create(1 + rows * pages))
    words = (integers((rows, 1289)), jax.ShapeDtypeStruct((rows, 1289), jnp.float32))

    def both(pool: Any, table: Any, words: Any, one: Any) -> Any:
        room = make_room(pool, table, one, one, one > 0, page_size=16, max_width=9, group=shape.n)
        forked = fork(room.pool, room.block_table, words, one, one, one, one, group=shape.n)
        return room.copy_from, room.copy_to, forked

    with implementations("mosaic"):
        traced = jax.jit(both, donate_argnums=(0, 1, 2)).trace(pool, integers((rows, pages)), words, integers((rows,)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
    assert text.count("#stablehlo.output_operand_alias<") == 7  # counts and table twice, both token arrays, the stack
    assert "stablehlo.scatter" not in text
    assert "stablehlo.gather" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | MANY)
def test_every_round_equals_the_reference_on_a_gpu(name: str) -> None:
    shape = (SHAPES | MANY)[name]
    for seed in range(3):
        for rounds in (3, 4):
            assert (history(shape, seed, rounds, None) > 0) == (shape.n > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | MANY)
def test_every_agreement_equals_the_reference_on_a_gpu(name: str) -> None:
    for seed in range(3):
        assert agreements((SHAPES | MANY)[name], seed, 4, None) > 0


@pytest.mark.gpu
def test_thirty_two_requests_on_a_gpu() -> None:
    shape = Shape(groups=32, n=8, page_size=16, width=9, prompt=1024, limit=1280)
    assert history(shape, 0, 8, None) > 0
