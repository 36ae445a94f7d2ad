"""The plan of shared reads against its definition, on random trees of sharing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.attention.prefix_plan import Sharing, find_sharing, parts_of
from smcjax.pallas.attention.prefix_plan_kernel import find_sharing_mosaic, supports_sharing

GROUPS, ROWS, WIDTH = 2, 5, 6


def family_table(rng: np.random.Generator, lengths: np.ndarray, page_size: int) -> np.ndarray:
    """[R, M]: a row names the pages of an earlier one of its group up to some place, then its own; trash at the end."""
    rows = len(lengths)
    table = 1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH)
    for row in range(rows):
        if row % ROWS:
            parent, shared = rng.integers(row - row % ROWS, row), rng.integers(0, WIDTH + 1)
            table[row, :shared] = table[parent, :shared]
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = 0
    return table


def random_history(rng: np.random.Generator, page_size: int) -> tuple[jax.Array, ...]:
    """A table, lengths of which some are 0 or all alike, and how much of each is immutable."""
    lengths = rng.integers(0, WIDTH * page_size + 1, GROUPS * ROWS) * rng.integers(0, 2, GROUPS * ROWS)
    if rng.random() < 0.5:
        lengths[:] = lengths.max()
    num_immutable = np.maximum(lengths - rng.integers(1, 9, lengths.shape), 0)
    table = family_table(rng, lengths, page_size)
    return tuple(jnp.asarray(x, jnp.int32) for x in (table, lengths, num_immutable))


plan = jax.jit(find_sharing, static_argnames=("rows", "queries", "page_size", "chunk", "tiles"))


TERMS = [(4, 16, 64, 2), (36, 16, 32, 1), (36, 64, 64, 2), (48, 64, 32, 1)]


@pytest.mark.parametrize(("queries", "page_size", "chunk", "tiles"), TERMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_visible_slot_is_read_once(queries: int, page_size: int, chunk: int, tiles: int, seed: int) -> None:
    """In each part, each of its rows' slots lies in exactly one task of that row, on the row's own page; what two rows
    both read by chunks or both by pieces is not read twice; of a chunk every slot is immutable for all of its rows."""
    history = random_history(np.random.default_rng(seed), page_size)
    found = jax.tree.map(
        np.asarray, plan(*history, rows=ROWS, queries=queries, page_size=page_size, chunk=chunk, tiles=tiles)
    )
    table, lengths, num_immutable = map(np.asarray, history)
    span = min(page_size, chunk)
    assert found.piece == span

    for group in range(GROUPS):
        mine = range(group * ROWS, (group + 1) * ROWS)
        for index, part in enumerate(parts_of(ROWS, queries, tiles)):
            covered: dict[tuple[int, int], int] = {}
            kinds = (
                (found.chunks, found.num_chunks, chunk, True),
                (found.pieces, found.num_pieces, span, False),
            )
            for tasks, count, slots, whole in kinds:
                reads = set()
                numbers = []
                for *pages, number, members in tasks[group, index, : count[group, index]].tolist():
                    rows = [r for r in range(ROWS) if members >> r & 1]
                    assert set(rows) & set(part)
                    assert (number, tuple(pages)) not in reads
                    reads.add((number, tuple(pages)))
                    numbers.append((number, rows[0]))
                    for r in rows:
                        length, end = lengths[mine[r]], (number + 1) * slots
                        assert not whole or end <= num_immutable[mine[r]]
                        for slot in range(number * slots, min(end, length)):
                            assert table[mine[r], slot // page_size] == pages[(slot - number * slots) // span]
                            covered[r, slot] = covered.get((r, slot), 0) + 1
                assert numbers == sorted(numbers)
            assert set(covered.values()) <= {1}
            assert {(r, s) for r, s in covered if r in part} == {(r, s) for r in part for s in range(lengths[mine[r]])}


def same_tasks(found: Sharing, want: Sharing) -> None:
    """Asserts that both have equally many tasks, and equal ones in the same order."""
    for tasks, count, as_tasks, as_count in (
        (found.chunks, found.num_chunks, want.chunks, want.num_chunks),
        (found.pieces, found.num_pieces, want.pieces, want.num_pieces),
    ):
        assert tasks.shape == as_tasks.shape
        np.testing.assert_array_equal(count, as_count)
        for group, part in np.ndindex(*count.shape):
            number = count[group, part]
            np.testing.assert_array_equal(tasks[group, part, :number], as_tasks[group, part, :number])


@pytest.mark.slow
def test_the_kernel_finds_the_same() -> None:
    terms = {"rows": ROWS, "queries": 16, "page_size": 16, "chunk": 64, "tiles": 1}
    by_kernel = jax.jit(functools.partial(find_sharing_mosaic, **terms, interpret=plgpu.InterpretGPUParams()))
    arguments = random_history(np.random.default_rng(0), 16)
    same_tasks(by_kernel(*arguments), plan(*arguments, **terms))


def wide_history(seed: int, *, groups: int, rows: int, width: int) -> tuple[jax.Array, ...]:
    """Rows that branch off one another anywhere in a long table, one of them dead."""
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(groups * rows * width).reshape(groups * rows, width)
    for row in range(groups * rows):
        if row % rows:
            branch = rng.integers(width)
            table[row, :branch] = table[rng.integers(row - row % rows, row), :branch]
    lengths = rng.integers(width * 8, width * 16, groups * rows)
    lengths[1] = 0
    return tuple(jnp.asarray(x, jnp.int32) for x in (table, lengths, np.maximum(lengths - 9, 0)))


@pytest.mark.slow
def test_more_numbers_than_threads() -> None:
    """140 pages of 16 slots: two turns of pieces, where there are no chunks."""
    terms = {"rows": 3, "queries": 8, "page_size": 16, "chunk": 64, "tiles": 2}
    table, lengths, _ = wide_history(0, groups=1, rows=3, width=140)
    by_kernel = jax.jit(functools.partial(find_sharing_mosaic, **terms, interpret=plgpu.InterpretGPUParams()))
    same_tasks(by_kernel(table, lengths, None), plan(table, lengths, None, **terms))


@pytest.mark.parametrize(("rows", "queries", "tiles"), [(8, 36, 3), (16, 4, 1)])
def test_the_kernel_lowers_for_cuda(rows: int, queries: int, tiles: int) -> None:
    terms = {"rows": rows, "queries": queries, "page_size": 16, "chunk": 64, "tiles": tiles}
    arguments = (jnp.zeros((2 * rows, 2048), jnp.int32), *(jnp.zeros(2 * rows, jnp.int32) for _ in range(2)))
    kernel = jax.jit(functools.partial(find_sharing_mosaic, **terms))
    text = kernel.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_the_kernel_compares_pairs_of_few_rows() -> None:
    assert supports_sharing(rows=16)
    assert not supports_sharing(rows=17)
    rows = jnp.zeros(32)
    with pytest.raises(ValueError, match="31 bits"):
        find_sharing(jnp.zeros((32, 2), jnp.int32), rows, rows, rows=32, queries=1, page_size=16, chunk=64)


@pytest.mark.gpu
@pytest.mark.parametrize("has_immutable", [True, False])
@pytest.mark.parametrize(
    ("groups", "rows", "width"), [(1, 8, 272), (1, 8, 2064), (32, 8, 80), (2, 16, 300), (3, 2, 64)]
)
def test_the_kernel_on_a_gpu(groups: int, rows: int, width: int, has_immutable: bool) -> None:
    for queries, tiles in ((36, 3), (4, 1)):
        terms = {"rows": rows, "queries": queries, "page_size": 16, "chunk": 64, "tiles": tiles}
        table, lengths, num_immutable = wide_history(groups, groups=groups, rows=rows, width=width)
        arguments = (table, lengths, num_immutable if has_immutable else None)
        found = jax.jit(functools.partial(find_sharing_mosaic, **terms))(*arguments)
        same_tasks(found, jax.jit(functools.partial(find_sharing, **terms))(*arguments))


def test_a_common_prompt_is_read_once() -> None:
    """Eight rows of 200 slots, 128 of them common, 191 immutable: two chunks of all rows, then each row's own pages."""
    table = np.zeros((8, 16), np.int32)
    table[:, :8] = np.arange(1, 9)
    table[:, 8:13] = np.arange(9, 49).reshape(8, 5)
    lengths = jnp.full(8, 200)
    terms = {"rows": 8, "queries": 4, "page_size": 16, "chunk": 64, "tiles": 2}
    found = plan(jnp.asarray(table), lengths, lengths - 9, **terms)
    assert found.num_chunks.tolist() == [[2]]
    assert found.chunks[0, 0, :2].tolist() == [[1, 2, 3, 4, 0, 255], [5, 6, 7, 8, 1, 255]]
    assert found.num_pieces.tolist() == [[8 * 5]]
    assert found.pieces[0, 0, :2].tolist() == [[9, 8, 1], [14, 8, 2]]
    by_pieces = plan(jnp.asarray(table), lengths, None, **terms)
    assert by_pieces.num_chunks.tolist() == [[0]]
    assert by_pieces.num_pieces.tolist() == [[8 + 8 * 5]]
    assert by_pieces.pieces[0, 0, :2].tolist() == [[1, 0, 255], [2, 1, 255]]


def test_parts() -> None:
    """288 queries of 8 rows in parts of 128: a row may belong to two of them."""
    assert parts_of(8, 4) == [range(8)]
    assert parts_of(8, 36) == [range(4), range(3, 8), range(7, 8)]
    assert parts_of(8, 36, 1) == [range(2), range(1, 4), range(3, 6), range(5, 8), range(7, 8)]
