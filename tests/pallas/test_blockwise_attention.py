"""Attention block by block against the dense reference, at real widths, and what its cost and results depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.pallas.attention import paged_attention_reference
from smcjax.pallas.blockwise_attention import block_slots, blockwise_paged_attention
from smcjax.pallas.paged_attention import paged_attention

H, HKV, D = 9, 3, 64  # SmolLM2-135M
_dense, _blockwise = jax.jit(paged_attention_reference), jax.jit(blockwise_paged_attention)


def case(rows: int, columns: int, page_size: int, lengths: list[int], table_slots: int) -> dict[str, jax.Array]:
    """Rows whose last `columns` tokens query, over scattered pages; beyond each length all is NaN."""
    rng = np.random.default_rng(page_size)
    width = -(-table_slots // page_size)
    table = 1 + rng.permutation(rows * width).reshape(rows, width)
    shape = (rows * width + 1, page_size, HKV, D)
    keys, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    for row, length in enumerate(lengths):
        stale = np.arange(width * page_size) >= length
        for pool in (keys, values):
            pool[table[row, np.flatnonzero(stale) // page_size], np.flatnonzero(stale) % page_size] = np.nan
    ends = np.array(lengths)
    return {
        "q": jnp.asarray(rng.normal(size=(rows, columns, H, D)), jnp.float32),
        "key_pages": jnp.asarray(keys),
        "value_pages": jnp.asarray(values),
        "block_table": jnp.asarray(table, jnp.int32),
        "positions": jnp.asarray(ends[:, None] - columns + np.arange(columns), jnp.int32),
        "lengths": jnp.asarray(ends, jnp.int32),
    }


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 33), (4, 1), (4, 9)])
def test_equals_the_dense_reference(rows: int, columns: int, page_size: int) -> None:
    lengths = [columns, columns + 1, 64, 300][-rows:]
    inputs = case(rows, columns, page_size, lengths, table_slots=513)
    got, want = np.asarray(_blockwise(**inputs)), np.asarray(_dense(**inputs))
    np.testing.assert_allclose(got, want, atol=3e-6)
    inputs["positions"] = inputs["positions"].at[-1].add(-1)
    assert np.abs(np.asarray(_blockwise(**inputs)) - want).max() > 1e-4, "control: the mask matters"


def test_is_what_a_cpu_runs() -> None:
    inputs = case(1, 1, 16, [40], table_slots=2048)
    text = jax.jit(paged_attention).lower(**inputs).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.while" not in _dense.lower(**inputs).as_text(), "control"


def test_bits_do_not_depend_on_other_rows_lengths() -> None:
    """A short row beside a long one goes through blocks that it sees nothing of."""
    short = case(2, 1, 16, [40, 41], table_slots=1024)
    long = case(2, 1, 16, [40, 1000], table_slots=1024)
    alone, beside = (np.asarray(_blockwise(**inputs))[0] for inputs in (short, long))
    np.testing.assert_array_equal(alone, beside)


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


def test_rows_without_kv_leave_others_alone() -> None:
    """A frozen row has length 0 and may stand anywhere: its numbers mean nothing and cost no block."""
    inputs = case(2, 1, 16, [40, 41], table_slots=1024)
    clean = np.asarray(_blockwise(**inputs))[0]
    inputs["lengths"] = jnp.asarray([40, 0], jnp.int32)
    inputs["positions"] = jnp.asarray([[39], [1000]], jnp.int32)
    np.testing.assert_array_equal(np.asarray(_blockwise(**inputs))[0], clean)
