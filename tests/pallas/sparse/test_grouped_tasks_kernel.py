"""Tasks of groups: exactly the reference's, in all that is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.grouped_attention import (
    Tasks,
    group_tasks,
    span_tasks,
    tasks_of_blocks,
    tasks_of_blocks_reference,
)
from smcjax.pallas.sparse.grouped_tasks_kernel import tasks_of_blocks_mosaic
from smcjax.pallas.sparse.query_groups import QueryGroups

# As one program: its single operations would be compiled one by one.
_reference = jax.jit(tasks_of_blocks_reference, static_argnames=("groups", "width", "parts", "in_page"))
INTERPRET = plgpu.InterpretGPUParams()


def shuffled(queries: int, size: int) -> QueryGroups:
    """Groups of queries in an order of their own."""
    return QueryGroups(tuple(np.random.default_rng(queries).permutation(queries).tolist()), size)


@pytest.mark.parametrize(
    ("shape", "groups", "parts", "in_page", "pages", "most", "width"),
    [
        ((2, 27, 2, 40), QueryGroups.of_rows(1, 27, "dfs", 9), 1, 2, 20, 1, 12),  # more tasks than count
        ((1, 66, 1, 140), shuffled(66, 33), 2, 1, 279, 1, 250),  # two words of queries; half of the last block has one
        ((1, 50, 1, 9), shuffled(50, 33), 1, 2, 5, 3, 20),  # up to three pages at a place; the last group has 17
    ],
)
@pytest.mark.parametrize("interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["", "gpu"])
def test_kernel_is_the_reference(
    shape: tuple[int, ...],
    groups: QueryGroups,
    parts: int,
    in_page: int,
    pages: int,
    most: int,
    width: int,
    interpret: Any,
) -> None:
    """Control: queries in another order have other masks."""
    rng = np.random.default_rng(0)
    selected = (rng.random(shape) < 0.3 * rng.random((*shape[:1], 1, *shape[2:]))) & (rng.random(shape[-1]) < 0.4)
    selected[..., -1] = np.arange(shape[1])[:, None] == groups.order[-1]
    requests, number = shape[0], groups.number
    table = 1 + rng.permutation(requests * number * pages * most).reshape(requests, number, pages, most)
    members = None
    if most > 1:  # each query is one page's, and some places have fewer pages
        words = -(-groups.size // 32)
        page = rng.integers(0, rng.integers(1, 1 + most, (*table.shape[:3], 1)), (*table.shape[:3], 32 * words))
        of_page = page[..., None, :] == np.arange(most)[:, None]
        bits = of_page.reshape(*table.shape, words, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        members = jnp.asarray(bits.sum(axis=-1, dtype=np.uint32))
    else:
        table = table[:, :1]
    arguments = (jnp.asarray(selected), jnp.asarray(table, jnp.int32), members)
    sizes = {"width": width, "parts": parts, "in_page": in_page}
    want = _reference(*arguments, groups=groups, **sizes)
    for got, of in zip(tasks_of_blocks_mosaic(*arguments, groups, **sizes, interpret=interpret), want, strict=True):
        np.testing.assert_array_equal(got, of)
    assert 0 < int(want.number.max()) <= width
    backwards = QueryGroups(groups.order[::-1], groups.size)
    assert not np.array_equal(_reference(*arguments, groups=backwards, **sizes).queries, want.queries)


@pytest.mark.parametrize(
    ("blocks", "size", "pages", "most", "is_taken"),
    [
        (1024, 64, 1024, 1, True),
        (1024, 72, 512, 8, True),  # 8 particles at 65,536 positions
        (1028, 72, 514, 8, True),
        (1024, 72, 512, 13, False),
        (1024, 129, 1024, 1, False),
        (1024, 9, 1023, 1, False),
        (8 << 10, 32, 8 << 10, 1, True),
        (8 << 10, 33, 8 << 10, 1, False),
        (16 << 10, 9, 16 << 10, 1, False),
    ],
)
def test_what_the_kernel_takes(blocks: int, size: int, pages: int, most: int, is_taken: bool) -> None:
    """Not masks of five words, blocks wholly behind the table, or more flags or units than are written out in line."""
    groups = QueryGroups.of_rows(1, 2 * size, "dfs", size)
    selected: Any = jax.ShapeDtypeStruct((1, 2 * size, 3, blocks), bool)
    table: Any = jax.ShapeDtypeStruct((1, 2, pages, most), jnp.int32)
    members: Any = jax.ShapeDtypeStruct((1, 2, pages, most, -(-size // 32)), jnp.uint32)
    with implementations("mosaic"):
        kernel = tasks_of_blocks.kernel_for(selected, table, members, groups, width=9, parts=1, in_page=blocks // pages)
    assert (kernel is not None) == is_taken


def test_lowers_for_cuda() -> None:
    """Tasks of selections, of queries of one table and of several; XLA makes windows' once for all."""
    groups, sizes = QueryGroups.of_rows(1, 9, "dfs", 9), {"page_size": 128}

    def selection(selected: jax.Array, positions: jax.Array, table: jax.Array, rows: int) -> Tasks:
        return group_tasks(selected, table, groups, block_size=64, most_blocks=16, rows=rows, **sizes)

    def window(selected: jax.Array, positions: jax.Array, table: jax.Array, rows: int) -> Tasks:
        spans = {"unit": 64, "sets": 8, "most_slots": 520, "rows": rows}
        return span_tasks(positions - 511, positions, table, groups, **spans, **sizes)

    def lowered(tasks: Callable[..., Tasks], rows: int) -> str:
        shapes: list[tuple[Any, Any]] = [((2, 9, 8, 1536), bool), ((2, 9), jnp.int32), ((2, 9, 768), jnp.int32)]
        with implementations("mosaic"):
            traced = jax.jit(tasks, static_argnums=3).trace(*(jax.ShapeDtypeStruct(*one) for one in shapes), rows)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    for rows in (1, 3):
        assert lowered(selection, rows).count("mosaic_gpu_v2") == 1
    assert "mosaic_gpu" not in lowered(selection, 9)
    assert "mosaic_gpu" not in lowered(window, 1)
