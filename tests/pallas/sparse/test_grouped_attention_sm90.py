"""The kernels of query groups: interpreted, against the reference; lowered for CUDA at an 8B model's shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import smcjax.pallas.sparse.grouped_attention_sm90 as sm90
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.grouped_attention import (
    Branch,
    Part,
    Tasks,
    group_tasks,
    grouped_attention,
    grouped_attention_reference,
    grouped_scores_reference,
    span_tasks,
    unit_slots,
)
from smcjax.pallas.sparse.grouped_attention_sm90 import grouped_branches_mosaic, grouped_scores_mosaic, supports
from smcjax.pallas.sparse.grouped_shares import LOADERS, Tuning, default_tuning
from smcjax.pallas.sparse.query_groups import QueryGroups

# As one program each: their single operations would be compiled one by one.
_span_tasks = jax.jit(span_tasks, static_argnames=("groups", "page_size", "unit", "sets", "most_slots", "rows"))
_scores = jax.jit(grouped_scores_reference, static_argnames=("groups", "unit", "slots", "scale"))

INTERPRET = plgpu.InterpretGPUParams()


class Case(NamedTuple):
    """Shapes of requests of N rows, whose tables begin alike; branches have pages and blocks of their own sizes."""

    groups: QueryGroups  # of M = N·T queries
    heads: int
    kv_heads: int
    rows: int
    branches: tuple[tuple[int, int], ...]  # page size, l'
    tuning: Tuning | None  # None: the default
    requests: int = 1
    blocks: int = 6
    most: int = 3
    dim: int = 64


class Drawn(NamedTuple):
    """A branch's arrays; pools are NaN wherever no query of a set sees anything."""

    selected: np.ndarray
    table: np.ndarray
    low: np.ndarray
    high: np.ndarray
    keys: jax.Array
    values: jax.Array


def drawn(case: Case, rng: np.random.Generator, page_size: int, block_size: int) -> Drawn:
    """Each query's own blocks; the last query has none."""
    pages, rows, requests = case.blocks * block_size // page_size, case.rows, case.requests
    table = 1 + rng.permutation(requests * rows * pages).reshape(requests, rows, pages)
    table[:, 1:, : pages // 2] = table[:, :1, : pages // 2]
    table = table.repeat(len(case.groups.order) // rows, axis=1)
    shape = table.shape[:2]
    high = case.blocks * block_size - 1 - rng.integers(0, 2 * block_size, shape)
    low = np.maximum(0, rng.integers(-block_size, block_size, shape))
    best = np.argsort(rng.random((*shape, case.kv_heads, case.blocks)))[..., : case.most]
    selected = (best[..., None] == np.arange(case.blocks)).any(-2)
    selected[:, -1] = False
    pool = rng.standard_normal((2, 1 + requests * rows * pages, page_size, case.kv_heads, case.dim))
    seen = np.zeros(pool.shape[1:4], bool)
    for request, query, of, block in np.argwhere(selected):
        slots = np.arange(block * block_size, (block + 1) * block_size)
        slots = slots[(slots >= low[request, query]) & (slots <= high[request, query])]
        seen[table[request, query, slots // page_size], slots % page_size, of] = True
    keys, values = (jnp.asarray(np.where(seen[..., None], x, np.nan), jnp.bfloat16) for x in pool)
    return Drawn(selected, table, low, high, keys, values)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _expected(case: Case, sizes: tuple[int, int], q: jax.Array, d: Drawn) -> tuple[Tasks, Part]:
    page_size, block_size = sizes
    shape = {"page_size": page_size, "block_size": block_size, "most_blocks": case.most + 2, "rows": case.rows}
    tasks = group_tasks(d.selected, d.table, case.groups, **shape)
    q, keys, values = (x.astype(jnp.float32) for x in (q, d.keys, d.values))
    unit = unit_slots(*sizes)
    return tasks, grouped_attention_reference(q, keys, values, tasks, case.groups, d.low, d.high, unit=unit)


def run(
    case: Case,
    seed: int,
    change: Callable[[Branch], Branch] = lambda branch: branch,
    *,
    interpret: Any = INTERPRET,
) -> list[tuple[Part, Part]]:
    """By the kernels, which read what `change` makes of a branch, and by the reference in f32, branch by branch."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((case.requests, len(case.groups.order), case.heads, case.dim)), jnp.bfloat16)
    branches, want = [], []
    for sizes in case.branches:
        d = drawn(case, rng, *sizes)
        tasks, part = _expected(case, sizes, q, d)
        branches.append(change(Branch(d.keys, d.values, tasks, jnp.asarray(d.low), jnp.asarray(d.high))))
        want.append(part)
    units = tuple(unit_slots(*sizes) for sizes in case.branches)
    got = grouped_branches_mosaic(q, tuple(branches), case.groups, units=units, tuning=case.tuning, interpret=interpret)
    return [(Part(*map(np.asarray, a[:2])), Part(*map(np.asarray, b[:2]))) for a, b in zip(got, want, strict=True)]


def error(got: Part, want: Part) -> float:
    """Largest difference of outputs relative to the largest; NaN where a NaN has leaked."""
    return float(np.abs(got.out - want.out).max() / np.abs(want.out).max())


def check(case: Case, seed: int, *, interpret: Any = INTERPRET) -> None:
    """Weights round to bf16 and outputs to f16, relative to the largest value; log-sum-exps round to nothing less."""
    for got, want in run(case, seed, interpret=interpret):
        assert error(got, want) <= 3 * 2**-9
        np.testing.assert_allclose(got.lse, want.lse, atol=1e-4)
        assert (got.lse[:, -1] == -np.inf).all()
        assert (got.out[:, -1] == 0).all()


# A short last group; tasks in two shares, turns, and a ring that refills.
CHAIN = Case(QueryGroups(tuple(range(5)), 3), 4, 1, 1, ((16, 32),), Tuning(blocks=3, subs=2, stages=2), blocks=12)
CHAIN = CHAIN._replace(most=9)


@pytest.mark.slow
def test_each_query_by_itself() -> None:
    """Groups of one query, of two requests of two rows each, two key-value heads and pairs of heads."""
    groups = QueryGroups.of_rows(2, 1, "bfs", 1)
    check(Case(groups, 4, 2, 2, ((8, 16),), Tuning(blocks=5, subs=1, stages=2), requests=2), 1)


@pytest.mark.slow
def test_branches() -> None:
    """Two words of queries in two tiles, in any order, of three rows; units of pages and of parts of pages.

    Two warpgroups take both at once; `test_each_query_by_itself` has one.
    """
    groups = QueryGroups(tuple(np.random.default_rng(2).permutation(66).tolist()), 66)
    tuning = Tuning(blocks=4, subs=2, stages=2)
    check(Case(groups, 1, 1, 3, ((16, 8), (64, 64)), tuning, blocks=4, most=2), 2)


@pytest.mark.slow
def test_controls() -> None:
    """The reference tells apart: all queries at every task, and NaN that someone sees."""

    def spoiled(branch: Branch) -> Branch:
        page = branch.tasks.unit[0, 0, 0, 0]
        return branch._replace(value_pages=branch.value_pages.at[page].set(jnp.nan))

    def everyone(branch: Branch) -> Branch:
        return branch._replace(tasks=branch.tasks._replace(queries=jnp.full_like(branch.tasks.queries, -1)))

    for change in (spoiled, everyone):
        ((got, want),) = run(CHAIN, 0, change=change)
        assert not error(got, want) < 1e-2


def test_a_chain() -> None:
    check(CHAIN, 0)


@pytest.mark.parametrize(("size", "page_size"), [(8, 16), (16, 64)])
def test_lowers_for_cuda(size: int, page_size: int) -> None:
    """At an 8B model's shapes, 40 queries at 64 Ki positions; other dtypes go to the reference."""
    groups, unit = QueryGroups.of_rows(8, 5, "dfs", size), unit_slots(page_size, 64)

    def lowered(dtype: Any) -> str:
        def attend(q: Any, keys: Any, values: Any, selected: Any, table: Any, high: Any) -> Part:
            sizes = {"page_size": page_size, "block_size": 64, "most_blocks": 16, "rows": 8}
            tasks = group_tasks(selected, table, groups, **sizes)
            return grouped_attention(q, keys, values, tasks, groups, high * 0, high, unit=unit)

        kinds: list[tuple[Any, Any]] = [
            ((1, 40, 32, 128), dtype),
            *[((9, page_size, 8, 128), dtype)] * 2,
            ((1, 40, 8, 1024), bool),
        ]
        kinds += [((1, 40, 65536 // page_size), jnp.int32), ((1, 40), jnp.int32)]
        with implementations("mosaic"):
            traced = jax.jit(attend).trace(*(jax.ShapeDtypeStruct(*kind) for kind in kinds))
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    of_tasks = page_size == 64  # tasks of so many units and tables are XLA's with smaller pages
    assert lowered(jnp.bfloat16).count("mosaic_gpu_v2") == 2 + of_tasks
    if of_tasks:
        assert lowered(jnp.float32).count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(("size", "page_size"), [(2, 16), (8, 64), (40, 64)])
def test_on_the_gpu(size: int, page_size: int, requests: int, dim: int) -> None:
    """Shares of one chunk and of many, whose ring refills; of 40 queries three tiles."""
    groups = QueryGroups.of_rows(1, max(8, size), "bfs", size)
    branches = ((page_size, 64), (page_size, 64))
    case = Case(groups, 8, 2, 1, branches, None, requests=requests, blocks=32, most=8, dim=dim)
    check(case, 0, interpret=None)


def test_what_is_not_supported() -> None:
    shape = {"size": 9, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "unit": 16}
    assert supports(**shape, dtype=jnp.bfloat16)
    assert not supports(**shape, dtype=jnp.float32)
    for change in ({"head_dim": 96}, {"unit": 4}, {"unit": 24, "page_size": 24}, {"size": 129}):
        assert not supports(**{**shape, **change}, dtype=jnp.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
def test_tuning_fits(dim: int) -> None:
    tuning = default_tuning(dim)
    assert tuning.stages % tuning.subs == 0
    assert (tuning.stages * 2 + tuning.subs) * 64 * dim * 2 < 227 << 10
    registers = tuning.registers
    assert (tuning.subs * registers.computing + LOADERS * registers.loading) * 128 <= 1 << 16


@pytest.mark.slow
def test_more_pairs_than_a_launch_takes(patch_programs: Any) -> None:
    """Requests are divided among launches, of which each takes some; the parts are those of all together."""
    groups = QueryGroups.of_rows(1, 3, "bfs", 2)
    case = Case(groups, 2, 2, 1, ((16, 32),), Tuning(blocks=3, subs=1, stages=2), requests=3)
    launches = []
    kernel = sm90.plgpu.kernel

    def counted(*args: Any, **options: Any) -> Any:
        launches.append(options["kernel_name"])
        return kernel(*args, **options)

    patch_programs(sm90.plgpu, "kernel", counted)
    patch_programs(sm90, "MAX_PAIRS", 8)
    check(case, 5)
    assert launches.count("grouped_attention") == 2  # of one request and of two, whose shapes are traced once each


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["", "gpu"])
@pytest.mark.parametrize(
    ("rows", "groups", "heads"),
    [
        (3, QueryGroups.of_rows(3, 2, "bfs", 4), 6),
        (1, QueryGroups.of_rows(1, 70, "dfs", 70), 4),
    ],
    ids=["three rows", "three tiles of three words"],
)
def test_scores_are_kept(rows: int, groups: QueryGroups, heads: int, interpret: Any) -> None:
    """By slot of each query's own sequence, of rows whose tables end differently; the reference has the same.

    Two or three heads share a key-value head, and kernels take three as four; slots that no query sees hold NaN.
    Controls: a slot late, and what the first row sees in its own pages for all rows.
    """
    rng, queries, shared = np.random.default_rng(0), len(groups.order), 7
    columns = queries // rows
    q = jnp.asarray(rng.standard_normal((2, queries, heads, 64)), jnp.bfloat16)
    tables = 1 + rng.permutation(20 * rows).reshape(2, rows, 10)
    tables[:, 1:, :shared] = tables[:, :1, :shared]
    tables[:, 2:, : shared + 1] = tables[:, 1:2, : shared + 1]  # of three rows two share a page more
    table = jnp.asarray(tables.repeat(columns, axis=1), jnp.int32)
    high = jnp.asarray(rng.integers(130, 150, (2, queries)), jnp.int32)
    low = jnp.ones_like(high)
    slot = np.arange(160)
    seen = (slot >= 1) & (slot <= np.asarray(high)[..., None])  # [R, M, slots]
    held = np.zeros((1 + tables.size, 16), bool)
    np.logical_or.at(held, (np.asarray(table)[:, :, slot // 16], slot % 16), seen)
    numbers = np.where(held[..., None, None], rng.standard_normal((2, *held.shape, 2, 64)), np.nan)
    pool = jnp.asarray(numbers, jnp.bfloat16)
    sizes = {"page_size": 16, "unit": 8, "sets": 2, "most_slots": 160}
    tasks = _span_tasks(low, high, table, groups, **sizes, rows=rows)
    arguments = (q, *pool, tasks, groups, low, high)
    tuning, slots = Tuning(blocks=3, subs=2, stages=2), {"unit": 8, "slots": 160}
    part, scores, _ = grouped_scores_mosaic(*arguments, **slots, tuning=tuning, interpret=interpret)
    exact = (np.asarray(x, np.float32) for x in arguments[:3])
    want, of_slots, _ = _scores(*exact, *arguments[3:], **slots)
    assert error(Part(*map(np.asarray, part[:2])), Part(*map(np.asarray, want[:2]))) <= 3 * 2**-9
    seen = np.broadcast_to(seen[:, :, None], scores.shape)
    got, of_slots = np.asarray(scores), np.asarray(of_slots)
    rounded: Any = {"atol": 1e-4, "rtol": 2**-11}  # to float16
    np.testing.assert_allclose(got[seen], of_slots[seen], **rounded)

    def of_queries(table: np.ndarray) -> np.ndarray:
        """Scores by each query's own table, without tasks."""
        keys = np.asarray(pool[0], np.float32)[table].reshape(2, queries, 160, 2, 1, 64)
        by_head = np.asarray(q, np.float32).reshape(2, queries, 1, 2, heads // 2, 64)
        return np.moveaxis((keys * by_head).sum(-1) / 8, 2, 4).reshape(seen.shape)

    np.testing.assert_allclose(got[seen], of_queries(np.asarray(table))[seen], **rounded)
    assert np.abs(got[..., 2:][seen[..., 2:]] - got[..., 1:-1][seen[..., 2:]]).max() > 1
    if rows > 1:
        of_first = of_queries(np.asarray(table)[:, :1].repeat(queries, axis=1))
        np.testing.assert_allclose(
            got[..., : shared * 16][seen[..., : shared * 16]],
            of_first[..., : shared * 16][seen[..., : shared * 16]],
            **rounded,
        )
        assert np.nanmax(np.abs(got - of_first)[seen]) > 1
