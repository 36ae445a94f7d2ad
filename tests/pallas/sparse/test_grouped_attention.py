"""Grouped attention: tasks against sets in plain Python, attention against each query by itself, and golden rows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.pallas.mosaic.bitmask import WORD, places_of
from smcjax.pallas.sparse.grouped_attention import (
    Part,
    Tasks,
    compressed_slots,
    group_tasks,
    grouped_attention,
    masked_attention,
    merged_parts,
    span_tasks,
    tasks_of_blocks_reference,
    unit_slots,
)
from smcjax.pallas.sparse.query_groups import QueryGroups

# As one program each: their single operations would be compiled one by one.
_span_tasks = jax.jit(span_tasks, static_argnames=("groups", "page_size", "unit", "sets", "most_slots", "rows"))
_group_tasks = jax.jit(group_tasks, static_argnames=("groups", "page_size", "block_size", "most_blocks", "rows"))


_grouped_attention = jax.jit(grouped_attention, static_argnums=4, static_argnames="unit")

GOLDEN = Path(__file__).parents[2] / "data" / "nsa_golden" / "paged_rows.npz"
HEADS, KV_HEADS, DIM = 4, 2, 4


class Case(NamedTuple):
    """Shapes of requests: N rows of T columns, tables of so many pages, sets of at most n blocks."""

    rows: int
    columns: int
    pages: int
    page_size: int
    block_size: int
    size: int  # C
    requests: int = 2
    most: int = 3

    @property
    def queries(self) -> int:
        return self.rows * self.columns

    @property
    def blocks(self) -> int:
        return -(-self.pages * self.page_size // self.block_size)


CASES = [
    Case(1, 6, 5, 4, 4, 4),
    Case(1, 5, 9, 2, 4, 1),  # the last block has one page
    Case(3, 3, 3, 8, 4, 4),
    Case(4, 10, 4, 2, 2, 37, requests=1),  # two words of queries
    Case(2, 2, 3, 4, 2, 9),  # a group larger than a request
]


class Drawn(NamedTuple):
    """Arrays of a case; rows share pages up to where each has its own, and all else is NaN."""

    selected: np.ndarray
    table: np.ndarray
    groups: QueryGroups
    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def drawn(case: Case, seed: int) -> Drawn:
    rng, (rows, pages, requests) = np.random.default_rng(seed), (case.rows, case.pages, case.requests)
    table = 1 + rng.permutation(requests * rows * pages).reshape(requests, rows, pages)
    for request in table:
        for row in request[1:]:
            shared = rng.integers(0, pages + 1)
            row[:shared] = request[rng.integers(0, rows), :shared]
    table = table.repeat(case.columns, axis=1)
    slots = pages * case.page_size
    high = rng.integers(0, slots, table.shape[:2])
    low = rng.integers(0, 2, high.shape) * rng.integers(0, high + 1)
    ranked = rng.random((*high.shape, KV_HEADS, case.blocks))
    best = np.argsort(ranked)[..., : case.most]
    chosen = (best[..., None] == np.arange(case.blocks)).any(axis=-2)
    selected = chosen & (rng.random(ranked.shape) < rng.choice([0.5, 1]))
    pool = rng.standard_normal((2, 1 + requests * rows * pages, case.page_size, KV_HEADS, DIM)).astype(np.float32)
    keys, values = pool
    groups = QueryGroups(tuple(rng.permutation(case.queries).tolist()), case.size)
    q = rng.standard_normal((*high.shape, HEADS, DIM)).astype(np.float32)
    return Drawn(selected, table, groups, q, keys, values, low, high)


@functools.partial(jax.jit, static_argnums=0)
def _tasks(case: Case, order: jax.Array, selected: jax.Array, table: jax.Array) -> Tasks:
    """Tasks of queries in any order, which is data here that programs be few: the identity groups what is reordered."""
    groups = QueryGroups(tuple(range(case.queries)), case.size)
    shape = {"page_size": case.page_size, "block_size": case.block_size, "most_blocks": case.most, "rows": case.rows}
    return group_tasks(selected[:, order], table[:, order], groups, **shape)


def tasks_of(case: Case, d: Drawn) -> Tasks:
    return jax.tree.map(np.asarray, _tasks(case, jnp.asarray(d.groups.order), d.selected, d.table))


@functools.partial(jax.jit, static_argnums=0)
def _attend(case: Case, tasks: Tasks, d: Any) -> Part:
    groups = QueryGroups(tuple(range(case.queries)), case.size)
    unit = unit_slots(case.page_size, case.block_size)
    return grouped_attention(d.q, d.keys, d.values, tasks, groups, d.low, d.high, unit=unit)


def attended(case: Case, tasks: Tasks, d: Drawn) -> Part:
    order = np.array(d.groups.order)
    ordered = d._replace(groups=None, q=d.q[:, order], low=d.low[:, order], high=d.high[:, order])
    inverse = np.argsort(order)
    return Part(*(np.asarray(x)[:, inverse] for x in _attend(case, tasks, ordered)[:2]))


def plainly(case: Case, d: Drawn, request: int, group: int, of: int) -> list[tuple[int, int, set[int]]]:
    """The tasks of a group and set: unit, place, and queries by their place in the group."""
    unit = min(case.page_size, case.block_size)
    found: dict[tuple[int, int], set[int]] = {}
    order = d.groups.order[group * case.size : (group + 1) * case.size]
    for bit, query in enumerate(order):
        for block in np.flatnonzero(d.selected[request, query, of]):
            for place in range(block * case.block_size // unit, (block + 1) * case.block_size // unit):
                if place * unit < case.pages * case.page_size:
                    page = d.table[request, query, place * unit // case.page_size]
                    physical = page * (case.page_size // unit) + place * unit % case.page_size // unit
                    found.setdefault((place, int(physical)), set()).add(bit)
    return [(physical, place, queries) for (place, physical), queries in found.items()]


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_tasks_are_unions_of_sets(case: Case, seed: int) -> None:
    """Each unit once a group, of all queries that have selected it, in the order of the sequence; else nothing."""
    d = drawn(case, seed)
    tasks = tasks_of(case, d)
    for request, group, of in np.ndindex(*tasks.number.shape):
        at, number = (request, group, of), int(tasks.number[request, group, of])
        words = tasks.queries[at].view(np.uint32)
        bits = [{bit for bit in range(case.size) if mask[bit // WORD] >> (bit % WORD) & 1} for mask in words]
        got = list(zip(tasks.unit[at].tolist(), tasks.place[at].tolist(), bits, strict=True))
        assert sorted(got[:number], key=str) == sorted(plainly(case, d, *at), key=str)
        assert all(task == (0, 0, set()) for task in got[number:])
        assert [place for _, place, _ in got[:number]] == sorted(place for _, place, _ in got[:number])


def test_tasks_are_found_without_sorting_and_without_the_host() -> None:
    """At the paper's sizes and 64 Ki positions, as lowered, nor by scatters and sums; control: a sort is seen."""
    groups = QueryGroups.of_rows(1, 9, "dfs", 4)
    build = functools.partial(group_tasks, groups=groups, page_size=16, block_size=64, most_blocks=16)
    shapes = jax.ShapeDtypeStruct((1, 9, 8, 1024), bool), jax.ShapeDtypeStruct((1, 9, 4096), jnp.int32)
    lowered = jax.jit(build).lower(*shapes)
    assert lowered.out_info.unit.shape == (1, 3, 8, 4 * 16 * 64 // 16)
    costly = ("stablehlo.sort", "stablehlo.scatter", "reduce_window", "custom_call", "callback")
    assert not {word for word in costly if word in lowered.as_text()}
    assert "stablehlo.sort" in jax.jit(jnp.sort).lower(shapes[1]).as_text()


@pytest.mark.parametrize("size", [1, 33, 40_000])
def test_places_of_flags(size: int) -> None:
    """Few and many flags, of lengths that take up to four levels of counts, and none; rows are apart."""
    rng, width = np.random.default_rng(size), min(size, 300)
    flags = rng.random((4, size)) < np.array([0, 1, 0.3, 100 / size])[:, None]
    places, number = map(np.asarray, places_of(jnp.asarray(flags), width))
    for row, found, many in zip(flags, places, number, strict=True):
        want = np.flatnonzero(row)[:width]
        assert many == len(want)
        np.testing.assert_array_equal(found[:many], want)
        assert ((found >= 0) & (found < size)).all()


def alone(case: Case, d: Drawn) -> Part:
    """Each query by itself, in float64."""
    shape = d.q.shape[:3]
    out, lse = np.zeros((*shape, DIM)), np.full(shape, -np.inf)
    for request, query, head in np.ndindex(*shape):
        slots = np.arange(int(d.low[request, query]), int(d.high[request, query]) + 1)
        slots = slots[d.selected[request, query, head * KV_HEADS // HEADS][slots // case.block_size]]
        if len(slots):
            at = d.table[request, query, slots // case.page_size], slots % case.page_size, head * KV_HEADS // HEADS
            scores = d.keys[at].astype(np.float64) @ d.q[request, query, head] / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[request, query, head] = weights @ d.values[at] / weights.sum()
            lse[request, query, head] = np.log(weights.sum()) + scores.max()
    return Part(out, lse)


def spoiled(case: Case, d: Drawn) -> Drawn:
    """NaN in every slot that no query of a group sees."""
    seen = np.zeros((*d.keys.shape[:3],), bool)
    for request, query, of, block in np.argwhere(d.selected):
        slots = np.arange(block * case.block_size, (block + 1) * case.block_size)
        slots = slots[(slots >= d.low[request, query]) & (slots <= d.high[request, query])]
        seen[d.table[request, query, slots // case.page_size], slots % case.page_size, of] = 1
    keys, values = (np.where(seen[..., None], x, np.nan).astype(np.float32) for x in (d.keys, d.values))
    return d._replace(keys=keys, values=values)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_attention_is_that_of_each_query_by_itself(case: Case, seed: int) -> None:
    """Output and log-sum-exp; nothing selected or between the bounds gives 0 and −∞; NaN nowhere seen never shows."""
    d = spoiled(case, drawn(case, seed))
    got, want = attended(case, tasks_of(case, d), d), alone(case, d)
    np.testing.assert_allclose(got.out, want.out, atol=1e-5)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-5)


def test_control_a_mask_that_names_all_queries_is_seen() -> None:
    """The union for every query, and a bound left out, are other attentions."""
    case = CASES[0]
    d = drawn(case, 0)
    tasks, want = tasks_of(case, d), alone(case, d)
    everyone = tasks._replace(queries=np.where(tasks.queries != 0, -1, 0))
    assert np.abs(attended(case, everyone, d).out - want.out).max() > 1e-2
    unbounded = d._replace(high=np.full_like(d.high, case.pages * case.page_size - 1))
    assert np.abs(attended(case, tasks, unbounded).out - want.out).max() > 1e-2


def test_parts_of_a_branch_merge() -> None:
    """Slots up to a place and behind it, where some queries see nothing of one or both."""
    case = CASES[1]
    d = drawn(case, 3)
    tasks, middle = tasks_of(case, d), 7
    before = attended(case, tasks, d._replace(high=np.minimum(d.high, middle)))
    behind = attended(case, tasks, d._replace(low=np.maximum(d.low, middle + 1)))
    merged, want = merged_parts(before, behind), alone(case, d)
    both = np.isfinite(before.lse) & np.isfinite(behind.lse)
    assert both.any()
    assert not both.all()
    np.testing.assert_allclose(merged.out, want.out, atol=1e-5)
    np.testing.assert_allclose(merged.lse, want.lse, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3])
def test_compressed_tokens_are_read_by_spans(group: int) -> None:
    """A query reads tokens that end by its position, from the page of their last one; control: one more is seen."""
    size, stride, page_size, pages = 8, 4, 16, 4
    rng = np.random.default_rng(group)
    table = 1 + rng.permutation(pages)
    positions = np.array([[5, 7, 8, 30, 31, 32, 63]])
    pool = np.full((2, pages + 1, page_size // stride, KV_HEADS, DIM), np.nan, np.float32)
    ends = np.arange(size - 1, pages * page_size, stride)
    tokens = rng.standard_normal((2, len(ends), KV_HEADS, DIM)).astype(np.float32)
    pool[:, table[ends // page_size], ends % page_size // stride] = tokens
    q = rng.standard_normal((1, positions.size, HEADS, DIM)).astype(np.float32)
    groups = QueryGroups(tuple(range(positions.size)), group)
    tables = jnp.asarray(np.broadcast_to(table, (1, positions.size, pages)))

    def attended(ahead: int) -> Part:
        low, high = compressed_slots(jnp.asarray(positions + ahead), kernel_size=size, kernel_stride=stride)
        shape = {"page_size": page_size // stride, "unit": 2, "sets": KV_HEADS, "most_slots": pages * 4}
        tasks = _span_tasks(low, high, tables, groups, **shape)
        keys, values = map(jnp.asarray, pool)
        return _grouped_attention(jnp.asarray(q), keys, values, tasks, groups, low, high, unit=2)

    visible = np.broadcast_to((ends <= positions[..., None])[:, :, None], (1, positions.size, KV_HEADS, len(ends)))
    want, _ = masked_attention(jnp.asarray(q), *(jnp.asarray(x)[None] for x in tokens), jnp.asarray(visible))
    got = attended(0)
    np.testing.assert_allclose(got.out, want.out, atol=1e-5)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-5)
    assert (got.lse[0, 0] == -np.inf).all()
    assert np.abs(attended(1).out - want.out).max() > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spans_are_sets_of_units(case: Case) -> None:
    """The window's tasks attend as a mask over all slots does, whoever shares pages, and are the same in all sets."""
    d = drawn(case, 5)
    unit = unit_slots(case.page_size, case.block_size)
    d = d._replace(low=np.maximum(d.high - 3 * unit + 1, 0), groups=QueryGroups(tuple(range(case.queries)), case.size))
    shape = {"page_size": case.page_size, "unit": unit, "sets": KV_HEADS, "rows": case.rows}
    shape["most_slots"] = case.pages * case.page_size
    tasks = _span_tasks(*map(jnp.asarray, (d.low, d.high, d.table)), d.groups, **shape)
    want = alone(case, d._replace(selected=np.ones_like(d.selected)))
    np.testing.assert_allclose(attended(case, jax.tree.map(np.asarray, tasks), d).out, want.out, atol=1e-5)
    assert all((np.asarray(x) == np.asarray(x)[:, :, :1]).all() for x in tasks)


@pytest.mark.parametrize("seed", range(3))
def test_runs_are_the_units_that_are_seen(seed: int) -> None:
    """Queries with one table: tasks are those that counting flags finds, also with queries that see nothing.

    Control: the flags of windows that are a unit longer.
    """
    rng = np.random.default_rng(seed)
    size, unit, pages, page_size = (int(rng.choice(of)) for of in ((1, 3, 4), (4, 8), (5, 12), (8, 16)))
    groups = QueryGroups(tuple(rng.permutation(7).tolist()), size)
    high = rng.integers(0, 20) + np.arange(7) + np.array([[0], [pages * page_size - 30]])
    low = np.maximum(high - rng.integers(1, 25), 0)
    low[:, rng.integers(7)] += 40
    table = np.repeat(1 + rng.permutation(2 * pages).reshape(2, 1, pages), 7, axis=1)
    of: dict[str, Any] = {"unit": unit, "page_size": page_size, "sets": 2, "most_slots": pages * page_size}
    tasks = _span_tasks(jnp.asarray(low), jnp.asarray(high), jnp.asarray(table), groups, **of)

    def counted(low: np.ndarray) -> Any:
        first = np.arange(pages * page_size // unit) * unit
        inside = (first + unit - 1 >= low[..., None]) & (first <= high[..., None]) & (low <= high)[..., None]
        return tasks_of_blocks_reference(
            jnp.asarray(inside)[:, :, None],
            jnp.asarray(table[:, :1, :, None]),
            None,
            groups,
            width=tasks.unit.shape[3],
            parts=1,
            in_page=page_size // unit,
        )

    for got, want in zip(tasks, counted(low), strict=True):
        np.testing.assert_array_equal(got, np.repeat(want, 2, axis=2))
    longer = counted(np.maximum(low - unit, 0))
    assert (np.asarray(longer.number) != np.asarray(tasks.number)[:, :, :1]).any()


def golden_rows() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(GOLDEN) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("options"))), arrays


@pytest.mark.parametrize("size", [1, 12])
def test_golden_rows(size: int) -> None:
    """Rows that share pages: outputs, windows, and how many pages are read for all of them and for each."""
    o, a = golden_rows()
    groups, block = QueryGroups.of_rows(4, 3, "dfs", size), o["block"]
    blocks = np.arange(a["table"].shape[1])
    selected = (a["selected"][..., None] == blocks).any(axis=2)[None]
    low, high = a["low"][None], a["bound"][None]
    inside = (blocks >= low[..., None] // block) & (blocks <= high[..., None] // block)
    shape = {"page_size": 8, "block_size": block, "rows": 4}

    def run(sets: np.ndarray, low: np.ndarray, most: int) -> tuple[np.ndarray, int]:
        tasks = _group_tasks(jnp.asarray(sets), jnp.asarray(a["table"][None]), groups, **shape, most_blocks=most)
        pages = (jnp.asarray(a[name]) for name in ("q", "pages_k", "pages_v"))
        q, keys, values = pages
        part = _grouped_attention(
            q[None], keys, values, tasks, groups, jnp.asarray(low), jnp.asarray(high), unit=unit_slots(8, block)
        )
        return np.asarray(part.out[0]), int(tasks.number.sum())

    out, loads = run(selected, np.zeros_like(low), o["n"])
    np.testing.assert_allclose(out, a["out"], atol=1e-4)
    if size == 12:
        assert loads == a["loads"]
    if size == 1:
        assert loads == a["loads_per_query"]
    windows = np.broadcast_to(inside[:, :, None], selected.shape)
    np.testing.assert_allclose(run(windows, low, len(blocks))[0], a["window_out"], atol=1e-4)


def test_units_that_cut_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"page_size must be a multiple or a divisor of the block's 8 .*, got 12\.$"):
        unit_slots(12, 8)
