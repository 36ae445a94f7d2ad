"""The page allocator against a plain Python model: who owns what, and what every row reads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smcjax.kv import (
    TRASH,
    CacheSpec,
    Copies,
    KVCache,
    PageArray,
    PagePool,
    allocate,
    drop,
    fan_out,
    keep,
    make_room,
    page_of,
    pages_for,
    rebind,
    release,
)
from tests.helpers import assert_pages_sound

GROUPS, FAN_OUT, CAPACITY, WIDTH = 2, 3, 23, 4
ROWS = GROUPS * FAN_OUT

_allocate, _rebind, _release = jax.jit(allocate), jax.jit(rebind), jax.jit(release)
_keep, _drop = jax.jit(keep), jax.jit(drop)
_make_room = jax.jit(make_room, static_argnames=("page_size", "max_width", "group"))


class Pages(RuleBasedStateMachine):
    """Groups come, fork, grow and go. A row's tokens are unique tags; `target` and `draft` are what the slots hold.

    As in decoding, the newest token (the frontier) has no KV; the draft lacks the token before it too, and writes it
    together with the frontier, possibly into a page that siblings share.
    """

    copy_on_write = True

    @initialize(page_size=st.sampled_from([1, 2, 3, 7, 16, 64]))
    def begin(self, page_size: int) -> None:
        self.page_size = page_size
        self.width = pages_for(CAPACITY, page_size)
        num_pages = ROWS * self.width + 1
        self.pool = PagePool.create(num_pages)
        self.table = np.full((ROWS, self.width), TRASH, np.int32)
        self.rows: list[list[int] | None] = [None] * ROWS
        self.prompt = [0] * GROUPS
        self.target = np.full((num_pages, page_size), -1)
        self.draft = self.target.copy()
        self.tags = iter(range(1, 10**6))

    def members(self, group: int) -> list[int]:
        return list(range(group * FAN_OUT, (group + 1) * FAN_OUT))

    def write(self, cache: np.ndarray, row: int, position: int, tag: int) -> None:
        cache[self.table[row, position // self.page_size], position % self.page_size] = tag

    def read(self, cache: np.ndarray, row: int, length: int) -> list[int]:
        return cache[self.table[row]].reshape(-1)[: max(length, 0)].tolist()

    @rule(group=st.integers(0, GROUPS - 1), length=st.integers(1, CAPACITY - 2))
    def admit(self, group: int, length: int) -> None:
        if self.rows[group * FAN_OUT] is not None:
            return
        prompt = [next(self.tags) for _ in range(length)]
        self.pool, pages = _allocate(self.pool, np.arange(self.width) * self.page_size < length)
        first = self.table.copy()
        first[group * FAN_OUT] = pages
        self.table[self.members(group)] = pages
        self.pool = _rebind(self.pool, first, self.table)
        self.prompt[group] = length
        for position, tag in enumerate(prompt):
            self.write(self.target, group * FAN_OUT, position, tag)
            self.write(self.draft, group * FAN_OUT, position, tag)
        for row in self.members(group):
            self.rows[row] = [*prompt, next(self.tags)]  # x₀, the first frontier, is each row's own

    @rule(live=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), width=st.integers(1, WIDTH))
    def grow(self, live: list[bool], width: int) -> None:
        """One block: `width` new tokens a live row, KV from the frontier on, cut at the capacity."""
        length = np.array([len(row) if row else 1 for row in self.rows])
        go = np.array(
            [row is not None and flag and len(row) < CAPACITY for row, flag in zip(self.rows, live, strict=True)]
        )
        # Siblings that share a page entered half-way are copies of each other and go together, as in decoding.
        twins = [(a, b) for a in range(ROWS) for b in range(ROWS) if self.rows[a] and self.rows[a] == self.rows[b]]
        for a, b in twins:
            go[b] = go[a] = go[a] or go[b]
        last = np.minimum(length - 1 + width - 1, CAPACITY - 1)
        self.pool, table, source, destination = _make_room(
            self.pool, self.table, length - 1, last, go, page_size=self.page_size, max_width=WIDTH, group=FAN_OUT
        )
        fresh = np.setdiff1d(table, self.table)
        copied = np.setdiff1d(source, [TRASH])
        assert not np.isin(copied, fresh).any(), "a page is copied from and written to at once"
        self.table = np.array(table)
        if self.copy_on_write:
            self.target[np.asarray(destination)] = self.target[np.asarray(source)]
            self.draft[np.asarray(destination)] = self.draft[np.asarray(source)]
        for row in np.flatnonzero(go):
            tokens = self.rows[row]
            assert tokens is not None
            at_start = len(tokens) == self.prompt[row // FAN_OUT] + 1
            if not at_start:
                self.write(self.draft, row, len(tokens) - 2, tokens[-2])
            tokens = tokens + [next(self.tags) for _ in range(width)]
            for position in range(length[row] - 1, last[row] + 1):
                self.write(self.target, row, position, tokens[position])
                if position < last[row] or position == length[row] - 1:
                    self.write(self.draft, row, position, tokens[position])
            self.rows[row] = tokens[:CAPACITY]

    @rule(group=st.integers(0, GROUPS - 1), ancestors=st.lists(st.integers(0, FAN_OUT - 1), min_size=3, max_size=3))
    def fork(self, group: int, ancestors: list[int]) -> None:
        if self.rows[group * FAN_OUT] is None:
            return
        source = np.arange(ROWS)
        source[self.members(group)] = group * FAN_OUT + np.asarray(ancestors)
        table = self.table[source]
        self.pool = _rebind(self.pool, self.table, table)
        self.table = table
        self.rows = [list(row) if (row := self.rows[s]) else None for s in source]

    @precondition(lambda self: any(self.rows))
    @rule(group=st.integers(0, GROUPS - 1), by_entry=st.booleans())
    def drop(self, group: int, by_entry: bool) -> None:
        table = self.table.copy()
        table[self.members(group)] = TRASH
        if by_entry:
            self.pool = _release(self.pool, self.table[self.members(group)])
        else:
            self.pool = _rebind(self.pool, self.table, table)
        self.table = table
        for row in self.members(group):
            self.rows[row] = None

    @invariant()
    def pages_are_sound(self) -> None:
        if hasattr(self, "pool"):
            assert_pages_sound(self.table, self.pool)

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for row, tokens in enumerate(getattr(self, "rows", [])):
            if tokens is not None:
                written = len(tokens) - 1
                assert self.read(self.target, row, written) == tokens[:written]
                drafted = max(written - 1, self.prompt[row // FAN_OUT])
                assert self.read(self.draft, row, drafted) == tokens[:drafted]


Pages.TestCase.settings = settings(max_examples=25, stateful_step_count=14, deadline=None, derandomize=True)
TestPages = pytest.mark.slow(Pages.TestCase)


def test_control_without_the_copy_rows_read_garbage() -> None:
    """Negative control: the same machine without copy-on-write fails."""

    class Careless(Pages):
        copy_on_write = False

    machine = Careless()
    machine.begin(page_size=4)
    machine.admit(group=0, length=6)
    machine.grow(live=[True] * ROWS, width=3)
    with pytest.raises(AssertionError):
        machine.every_row_reads_its_own_tokens()


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 7))
def test_allocate_grants_in_order_and_never_beyond(needed: list[bool], free: int) -> None:
    """With too few pages the last askers get the trash page and nothing else breaks."""
    pool = PagePool.create(8)
    pool, taken = _allocate(pool, jnp.arange(7) < 7 - free)
    pool, pages = _allocate(pool, jnp.asarray(needed))
    pages = np.asarray(pages)
    granted = pages[pages != TRASH]
    assert len(granted) == min(sum(needed), free)
    assert len(set(granted.tolist()) | set(np.asarray(taken).tolist())) == len(granted) + 7 - free + (free > 0)
    assert (np.flatnonzero(pages) == np.flatnonzero(needed)[: len(granted)]).all()
    assert_pages_sound(jnp.concatenate([taken, jnp.asarray(pages)]), pool)


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_copy_pages_copies_every_array_and_nothing_else(page_size: int) -> None:
    """Two rows take copies of one page, a third needs none. Arrays of unlike shapes are copied too."""
    spec = CacheSpec({"keys": PageArray(1, 2), "values": PageArray(1, 3), "blocks": PageArray(1, 2, page_size)})
    cache = KVCache.create([spec, spec], num_pages=5, page_size=page_size, dtype=jnp.float32)
    filled = jax.tree.unflatten(
        jax.tree.structure(cache),
        [x + 10 * i + jnp.arange(5.0)[:, None, None, None] for i, x in enumerate(jax.tree.leaves(cache))],
    )
    copies = Copies(jnp.asarray([2, 2, TRASH]), jnp.asarray([3, 4, TRASH]))
    copied = jax.jit(KVCache.copy_pages)(filled, copies)
    for i, pages in enumerate(jax.tree.leaves(copied)):
        assert (pages - 10 * i == jnp.asarray([0.0, 1.0, 2.0, 2.0, 2.0])[:, None, None, None]).all()


def test_a_page_that_a_row_at_rest_names_is_kept_by_nobody_else() -> None:
    """Rows 1 and 2 go on, row 0 has finished: its page stays as it is, and both others get copies."""
    pool = PagePool.create(5)
    pool, page = _allocate(pool, jnp.asarray([True]))
    table = jnp.tile(page, (3, 1))
    pool = _rebind(pool, jnp.zeros_like(table).at[0, 0].set(page[0]), table)
    where = functools.partial(jnp.full, (3,))
    live = jnp.asarray([False, True, True])
    room: Any = _make_room(pool, table, where(1), where(2), live, page_size=4, max_width=2, group=len(table))
    assert room.copy_from.tolist() == [TRASH, int(page[0]), int(page[0])]
    assert len(set(room.block_table[:, 0].tolist())) == 3
    assert_pages_sound(room.block_table, room.pool)


@given(st.integers(1, 200), st.integers(1, 64))
def test_pages_for_is_the_ceiling(tokens: int, page_size: int) -> None:
    pages = pages_for(tokens, page_size)
    assert (pages - 1) * page_size < tokens <= pages * page_size
    assert pages_for(0, page_size) == 0


def test_page_of_clips() -> None:
    table = jnp.asarray([[5, 7, 9]])
    assert page_of(table, jnp.asarray([[-1, 0, 3, 4, 11, 12, 99]]), 4).tolist() == [[5, 5, 5, 7, 9, 9, 9]]


def test_two_sharers_take_turns_with_one_spare_page() -> None:
    """One of two rows that share their part-filled page keeps it, so they need one page more, not two."""
    pool = PagePool.create(3)
    pool, page = _allocate(pool, jnp.asarray([True]))
    table = jnp.tile(page, (2, 1))
    pool = _rebind(pool, jnp.asarray([[int(page[0])], [TRASH]]), table)
    where = functools.partial(jnp.full, (2,))
    room: Any = _make_room(pool, table, where(1), where(2), where(True), page_size=4, max_width=2, group=len(table))
    assert sorted(room.block_table[:, 0].tolist()) == [1, 2]
    assert room.copy_from.tolist() == [TRASH, int(page[0])]
    assert room.copy_to.tolist() == [TRASH, int(room.block_table[1, 0])]
    assert_pages_sound(room.block_table, room.pool)


@pytest.mark.parametrize("seed", range(5))
def test_a_fan_out_by_offspring_is_a_rebinding_to_the_ancestors_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, num_pages = 6, 4, 40
    pool = PagePool.create(num_pages)
    pool, table = _allocate(pool, jnp.asarray(rng.random((rows, width)) < 0.8))
    table = table.at[1].set(table[0])  # two rows that share
    pool = _rebind(pool, jnp.zeros_like(table), table)
    pool = _release(pool, table.at[1].set(TRASH))  # the references of `allocate`; row 1's were never counted there
    ancestors = rng.integers(0, rows, rows)
    new = table[ancestors]
    ours = fan_out(pool, table, jnp.asarray(np.bincount(ancestors, minlength=rows)))
    theirs = _rebind(pool, table, new)
    np.testing.assert_array_equal(ours.refcount, theirs.refcount)
    assert int(ours.num_free) == int(theirs.num_free)
    free = int(ours.num_free)
    assert set(ours.free[:free].tolist()) == set(theirs.free[:free].tolist())


@pytest.mark.parametrize("size", [7, 1024, 1500])
def test_allocation_is_in_order_however_many_ask(size: int) -> None:
    """Few entries are counted by comparing pairs, many by a scan."""
    needed = np.random.default_rng(size).random(size) < 0.5
    pool, pages = _allocate(PagePool.create(size + 1), jnp.asarray(needed))
    assert pages[needed].tolist() == list(range(1, 1 + needed.sum()))
    assert (np.asarray(pages)[~needed] == TRASH).all()
    assert int(pool.num_free) == size - needed.sum()


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), max_size=4, unique=True)), max_size=8))
def test_cache_slots_hold_references_of_their_own(history: list[tuple[bool, list[int]]]) -> None:
    pool, pages = _allocate(PagePool.create(8), jnp.ones(6, bool))
    cached, kept = jnp.zeros(6, jnp.int32), set()
    for adds, slots in history:
        if adds:
            fresh = [slot for slot in slots if slot not in kept]
            padded = jnp.asarray([*fresh, *[6] * (4 - len(fresh))])  # 6: no slot
            pool, cached = _keep(pool, cached, padded, pages[padded % 6])
            kept |= set(fresh)
        else:
            pool, cached = _drop(pool, cached, jnp.isin(jnp.arange(6), jnp.asarray(slots, jnp.int32)))
            kept -= set(slots)
        assert_pages_sound(jnp.concatenate([pages, cached]), pool)
        assert [slot for slot in range(6) if cached[slot] == pages[slot]] == sorted(kept)
    pool = _release(pool, pages)  # what slots alone name stays
    assert_pages_sound(cached, pool)
    assert int(pool.num_free) == 7 - len(kept)
