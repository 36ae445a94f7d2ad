"""Tasks of groups, interpreted: exactly the reference's, in all that is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.grouped_attention import Tasks, group_tasks, span_tasks, tasks_of_blocks, tasks_of_blocks_reference
from smcjax.pallas.grouped_tasks_kernel import tasks_of_blocks_mosaic
from smcjax.pallas.query_groups import QueryGroups

# As one program: its single operations would be compiled one by one.
_reference = jax.jit(tasks_of_blocks_reference, static_argnames=("width", "parts", "in_page"))
INTERPRET = plgpu.InterpretGPUParams()


@pytest.mark.parametrize(
    ("shape", "parts", "in_page", "pages", "most", "width"),
    [
        ((2, 3, 2, 40, 1), 1, 2, 20, 1, 12),  # more tasks than count
        ((1, 2, 1, 300, 2), 2, 1, 599, 1, 500),  # two words of queries; half of the last block has a page
        ((1, 1, 2, 5, 1), 4, 4, 5, 1, 21),
        ((1, 2, 1, 9, 2), 1, 2, 5, 3, 20),  # up to three pages at a place
        ((1, 2, 1, 130, 1), 2, 1, 259, 2, 300),  # the same, of several blocks and units a thread
    ],
)
def test_kernel_is_the_reference(
    shape: tuple[int, ...], parts: int, in_page: int, pages: int, most: int, width: int
) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, shape, dtype=np.uint32)
    chosen = jnp.asarray(np.where(rng.random(shape) < 0.3, words, 0))
    chosen = chosen.at[..., -1, :].set(jnp.uint32(1 << 31))
    requests, groups = shape[:2]
    table = 1 + rng.permutation(requests * groups * pages * most).reshape(requests, groups, pages, most)
    members = None
    if most > 1:  # each query is one page's, and some places have fewer pages
        page = rng.integers(0, rng.integers(1, 1 + most, (*table.shape[:3], 1)), (*table.shape[:3], 32 * shape[-1]))
        of_page = page[..., None, :] == np.arange(most)[:, None]
        bits = of_page.reshape(*table.shape, shape[-1], 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        members = jnp.asarray(bits.sum(axis=-1, dtype=np.uint32))
    else:
        table = table[:, :1]
    arguments = (chosen, jnp.asarray(table, jnp.int32), members)
    sizes = {"width": width, "parts": parts, "in_page": in_page}
    want = _reference(*arguments, **sizes)
    for got, of in zip(tasks_of_blocks_mosaic(*arguments, **sizes, interpret=INTERPRET), want, strict=True):
        np.testing.assert_array_equal(got, of)
    assert 0 < int(want.number.min()) <= width


@pytest.mark.parametrize(
    ("blocks", "words", "pages", "most", "is_taken"),
    [
        (1024, 2, 1024, 1, True),
        (1024, 3, 512, 8, True),  # 8 particles at 65,536 positions
        (1024, 3, 512, 9, False),
        (1024, 5, 1024, 1, False),
        (1024, 1, 1023, 1, False),
        (16 << 10, 1, 16 << 10, 1, False),
    ],
)
def test_what_the_kernel_takes(blocks: int, words: int, pages: int, most: int, is_taken: bool) -> None:
    """Not masks of five words, blocks wholly behind the table, or more units than threads write out in line."""
    chosen: Any = jax.ShapeDtypeStruct((1, 2, 3, blocks, words), jnp.uint32)
    table: Any = jax.ShapeDtypeStruct((1, 2, pages, most), jnp.int32)
    members: Any = jax.ShapeDtypeStruct((1, 2, pages, most, words), jnp.uint32)
    with implementations("mosaic"):
        kernel = tasks_of_blocks.kernel_for(chosen, table, members, width=9, parts=1, in_page=1024 // pages)
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
        shapes: list[tuple[Any, Any]] = [((2, 9, 8, 1024), bool), ((2, 9), jnp.int32), ((2, 9, 512), jnp.int32)]
        with implementations("mosaic"):
            traced = jax.jit(tasks, static_argnums=3).trace(*(jax.ShapeDtypeStruct(*one) for one in shapes), rows)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    for rows in (1, 3):
        assert lowered(selection, rows).count("mosaic_gpu_v2") == 1
    assert "mosaic_gpu" not in lowered(selection, 9)
    assert "mosaic_gpu" not in lowered(window, 1)
