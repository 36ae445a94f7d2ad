"""Attention block by block against the dense reference, at real widths, and what its cost and results depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smcjax.pallas.attention.paged_attention import paged_attention
from smcjax.pallas.attention.reference import paged_attention_reference
from smcjax.pallas.attention.xla_blockwise import block_slots, blockwise_paged_attention

H, HKV, D = 9, 3, 64  # SmolLM2-135M
_static = ("window", "scale", "first")
_dense = jax.jit(paged_attention_reference, static_argnames=_static)
_blockwise = jax.jit(blockwise_paged_attention, static_argnames=_static)


def case(
    rows: int, columns: int, page_size: int, lengths: list[int], table_slots: int, dim: int = D
) -> dict[str, jax.Array]:
    """Rows whose last `columns` tokens query, over scattered pages; beyond each length all is NaN."""
    rng = np.random.default_rng(page_size)
    width = -(-table_slots // page_size)
    table = 1 + rng.permutation(rows * width).reshape(rows, width)
    shape = (rows * width + 1, page_size, HKV, dim)
    keys, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    for row, length in enumerate(lengths):
        stale = np.arange(width * page_size) >= length
        for pool in (keys, values):
            pool[table[row, np.flatnonzero(stale) // page_size], np.flatnonzero(stale) % page_size] = np.nan
    ends = np.array(lengths)
    return {
        "q": jnp.asarray(rng.normal(size=(rows, columns, H, dim)), jnp.float32),
        "key_pages": jnp.asarray(keys),
        "value_pages": jnp.asarray(values),
        "block_table": jnp.asarray(table, jnp.int32),
        "positions": jnp.asarray(ends[:, None] - columns + np.arange(columns), jnp.int32),
        "lengths": jnp.asarray(ends, jnp.int32),
    }


@pytest.mark.parametrize(("rows", "columns", "page_size"), [(1, 1, 1), (1, 33, 5), (4, 1, 16), (4, 9, 64)])
def test_equals_the_dense_reference(rows: int, columns: int, page_size: int) -> None:
    lengths = [columns, columns + 1, 64, 300][-rows:]
    inputs = case(rows, columns, page_size, lengths, table_slots=513)
    got, want = np.asarray(_blockwise(**inputs)), np.asarray(_dense(**inputs))
    np.testing.assert_allclose(got, want, atol=3e-6)
    inputs["positions"] = inputs["positions"].at[-1].add(-1)
    assert np.abs(np.asarray(_blockwise(**inputs)) - want).max() > 1e-4, "control: the mask matters"


@pytest.mark.parametrize(
    ("rows", "columns", "window"),
    [(1, 1, 1), (1, 33, 63), (4, 9, 15), (4, 9, 17), (4, 9, 65), (4, 9, 1000)],
)
def test_windows_equal_the_dense_reference(rows: int, columns: int, window: int) -> None:
    """Windows about a page, about a block, longer than a row; also with a scale and heads as Gemma has them."""
    inputs = case(rows, columns, 16, [columns, columns + 1, 64, 300][-rows:], table_slots=513, dim=256)
    how = {"window": window, "scale": 1 / 14}
    got, want = np.asarray(_blockwise(**inputs, **how)), np.asarray(_dense(**inputs, **how))
    np.testing.assert_allclose(got, want, atol=3e-6)
    if window < 300:
        wider = np.asarray(_blockwise(**inputs, scale=1 / 14, window=window + 1))
        assert np.abs(wider - want).max() > 1e-4, "control: a slot more matters"


@pytest.mark.parametrize("first", [1, 70])
def test_slots_before_the_first_are_not_seen(first: int) -> None:
    """One of the first block, and more than a block; a query that sees none is left out, as it means nothing."""
    inputs = case(4, 3, 16, [3, 4, 72, 300], table_slots=513)
    got, want = (np.asarray(compute(**inputs, first=first)) for compute in (_blockwise, _dense))
    seen = np.asarray(inputs["positions"]) >= first
    np.testing.assert_allclose(got[seen], want[seen], atol=3e-6)
    assert np.isfinite(got).all()
    assert np.abs(np.asarray(_blockwise(**inputs)) - want)[seen].max() > 1e-4, "control: those slots matter"


def test_is_what_a_cpu_runs() -> None:
    inputs = case(1, 1, 16, [40], table_slots=2048)
    text = jax.jit(paged_attention).lower(**inputs).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.while" not in _dense.lower(**inputs).as_text(), "control"


@settings(max_examples=20)
@given(
    mine=st.integers(3, 1000),
    others=st.lists(st.integers(3, 1000), min_size=2, max_size=2),
    window=st.sampled_from([1, 65, 300, None]),
)
@example(mine=40, others=[41, 1000], window=None)
@example(mine=900, others=[901, 10], window=70)
def test_bits_do_not_depend_on_other_rows_lengths(mine: int, others: list[int], window: int | None) -> None:
    """A row beside a longer or shorter one goes through blocks that it sees nothing of, before and after."""
    alone, beside = (
        np.asarray(_blockwise(**case(2, 3, 16, [mine, other], 1024), window=window))[0] for other in others
    )
    np.testing.assert_array_equal(alone, beside)


def test_the_first_block_is_the_first_that_a_row_sees() -> None:
    """NaN keys before all windows are never read; with a row whose window begins there they are, by that row alone."""
    inputs = case(2, 3, 16, [900, 960], table_slots=1024)
    clean = np.asarray(_blockwise(**inputs, window=100))
    early = inputs["block_table"][:, : 768 // 16]  # the first query's window begins at slot 798, in the block of 768
    inputs["key_pages"] = inputs["key_pages"].at[early].set(np.nan)
    inputs["value_pages"] = inputs["value_pages"].at[early].set(np.nan)
    np.testing.assert_array_equal(np.asarray(_blockwise(**inputs, window=100)), clean)
    touched = np.asarray(_blockwise(**inputs, window=150))
    assert np.isnan(touched[0]).all(), "control: what a window reaches is read"


@pytest.mark.parametrize("window", [1, 70])
def test_empty_rows_beside_windows_stay_finite(window: int) -> None:
    """A frozen row may stand where no block is read; and all rows may be frozen."""
    inputs = case(2, 1, 16, [900, 901], table_slots=1024)
    clean = np.asarray(_blockwise(**inputs, window=window))[0]
    inputs["lengths"] = jnp.asarray([900, 0], jnp.int32)
    inputs["positions"] = jnp.asarray([[899], [10]], jnp.int32)
    got = np.asarray(_blockwise(**inputs, window=window))
    np.testing.assert_array_equal(got[0], clean)
    assert np.isfinite(got).all()
    inputs["lengths"] = jnp.zeros(2, jnp.int32)
    assert np.isfinite(np.asarray(_blockwise(**inputs, window=window))[1]).all()


def test_blocks_are_as_many_as_the_longest_row_needs() -> None:
    """NaN keys in a block that nobody needs are never read; in one that a row needs they are."""
    inputs = case(2, 1, 16, [40, 41], table_slots=1024)
    assert block_slots(2) == 64
    clean = np.asarray(_blockwise(**inputs))
    assert np.isfinite(clean).all()
    inputs["lengths"] = inputs["lengths"] + np.array([0, 1], np.int32)
    inputs["positions"] = inputs["positions"] + np.array([[0], [1]], np.int32)
    touched = np.asarray(_blockwise(**inputs))
    assert np.isnan(touched[1]).all(), "control: what counts as written is read"
    np.testing.assert_array_equal(touched[0], clean[0])
