"""Copying pages of all layers at once, against copying pool by pool: the same bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas import Copies, copy_pages
from smcjax.pallas.cache.page_copy import MAX_POOLS, copy_all_pages, copy_all_pages_mosaic, pieces_of
from smcjax.pallas.dispatch import implementations

COPIES = Copies(jnp.asarray([3, 0, 3, 5]), jnp.asarray([7, 0, 8, 1]))  # two copies of page 3, a row without any


def pools(number: int, *, pages: int, page_size: int, kv_heads: int, dim: int) -> tuple[jax.Array, ...]:
    shape = (pages, page_size, kv_heads, dim)
    return tuple(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(number))


def check(given: tuple[jax.Array, ...], interpret: Any = None) -> None:
    want = [np.asarray(copy_pages(pages, COPIES)) for pages in given]
    got = copy_all_pages_mosaic(given, COPIES, interpret=interpret)
    assert any((a != np.asarray(b)).any() for a, b in zip(want, given, strict=True))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize(("number", "page_size"), [(1, 8), (6, 16)])
def test_equals_copies_pool_by_pool(number: int, page_size: int) -> None:
    check(pools(number, pages=9, page_size=page_size, kv_heads=2, dim=64), plgpu.InterpretGPUParams())


@pytest.mark.parametrize(("width", "pieces"), [(384, (8, 2, 192)), (4096, (4, 16, 256)), (64, (8, 1, 64))])
def test_wide_entries_are_copied_as_several_heads(width: int, pieces: tuple[int, int, int]) -> None:
    """Features of EAGLE-3 heads, as wide as their targets: the copy engine takes 256 numbers along an axis at most."""
    given = (jax.ShapeDtypeStruct((60, 16, 1, width), jnp.bfloat16),)
    assert pieces_of(given[0]) == pieces
    copy = jax.jit(lambda pools: copy_all_pages(pools, COPIES), donate_argnums=0)
    with implementations("mosaic"):
        assert copy_all_pages.kernel_for(given, COPIES) is not None
        text = copy.trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    check(pools(1, pages=9, page_size=16, kv_heads=1, dim=width), plgpu.InterpretGPUParams())


def test_entries_that_no_copy_takes_are_left_to_xla() -> None:
    given = (jax.ShapeDtypeStruct((60, 16, 1, 257), jnp.bfloat16),)  # a prime
    assert pieces_of(given[0]) is None
    with implementations("mosaic"):
        assert copy_all_pages.kernel_for(given, COPIES) is None


def test_is_one_kernel_in_place_and_only_where_asked() -> None:
    given = (jax.ShapeDtypeStruct((600, 16, 8, 64), jnp.bfloat16),) * 32

    def text(implementation: str) -> str:
        copy = jax.jit(lambda pools: copy_all_pages(pools, COPIES), donate_argnums=0)
        with implementations(implementation):
            return copy.trace(given).lower(lowering_platforms=("cuda",)).as_text()

    assert text("mosaic").count("stablehlo.custom_call @mosaic_gpu") == 1, "one function, called for each 16 pools"
    assert "stablehlo.scatter" not in text("mosaic")
    assert text("xla").count('"stablehlo.scatter"') == 32


def test_many_pools_are_copied_by_several_launches() -> None:
    """Descriptors of 240 pools and more do not fit one launch, and compiling goes by the square of their number."""
    copied = copy_all_pages_mosaic
    given = (jax.ShapeDtypeStruct((600, 16, 8, 64), jnp.bfloat16),) * (3 * MAX_POOLS + 2)
    text = (
        jax.jit(lambda pools: copied(pools, COPIES), donate_argnums=0).trace(given).lower(lowering_platforms=("cuda",))
    )
    launches = [line for line in text.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    assert [line.count("tensor<600x") // 2 for line in launches] == [MAX_POOLS, 2]
    assert text.as_text().count("call @_copied") == 4


def test_unlike_pools_are_copied_one_by_one() -> None:
    a = pools(1, pages=9, page_size=16, kv_heads=2, dim=64)
    b = pools(1, pages=9, page_size=16, kv_heads=4, dim=64)
    with implementations("mosaic"):
        assert copy_all_pages.kernel_for(a, COPIES) is not None
        assert copy_all_pages.kernel_for(a + b, COPIES) is None
        copied = copy_all_pages(a + b, COPIES)
    for ours, given in zip(copied, a + b, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(copy_pages(given, COPIES)))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check(pools(32, pages=600, page_size=16, kv_heads=8, dim=64))
