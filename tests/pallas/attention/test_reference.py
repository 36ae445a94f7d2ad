"""Attention over pages against numpy, and what may not leak through the slots that are masked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.pallas import attention, paged_attention_reference
from smcjax.pallas.attention.reference import sees

R, T, H, HKV, D = 3, 2, 4, 2, 6
_paged = jax.jit(paged_attention_reference, static_argnames=("window", "scale"))


def oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    window: int | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """One query at a time, float64."""
    out = np.zeros(q.shape)
    for r, t, h in np.ndindex(*q.shape[:3]):
        last = positions[r, t] + 1
        seen = slice(0 if window is None else max(0, last - window), last)
        scores = k[r, seen, h // (H // HKV)].astype(float) @ q[r, t, h].astype(float)
        scores *= 1 / np.sqrt(D) if scale is None else scale
        weights = np.exp(scores - scores.max())
        out[r, t, h] = weights @ v[r, seen, h // (H // HKV)] / weights.sum()
    return out


def case(page_size: int) -> dict[str, np.ndarray]:
    """Rows of unequal length over scattered pages, slots that are not theirs full of garbage."""
    rng = np.random.default_rng(page_size)
    width = -(-12 // page_size)
    table = 1 + rng.permutation(R * width).reshape(R, width)
    shape = (R * width + 2, page_size, HKV, D)
    return {
        "q": rng.normal(size=(R, T, H, D)).astype(np.float32),
        "key_pages": rng.normal(size=shape).astype(np.float32),
        "value_pages": rng.normal(size=shape).astype(np.float32),
        "block_table": table.astype(np.int32),
        "positions": np.array([[0, 1], [7, 8], [10, 11]], np.int32),
        "lengths": np.array([2, 9, 12], np.int32),
    }


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_paged_equals_numpy(page_size: int) -> None:
    inputs = case(page_size)
    k, v = (inputs[name][inputs["block_table"]].reshape(R, -1, HKV, D) for name in ("key_pages", "value_pages"))
    expected = oracle(inputs["q"], k, v, inputs["positions"])
    np.testing.assert_allclose(_paged(**inputs), expected, atol=2e-6)
    visible = np.arange(k.shape[1]) <= inputs["positions"][:, :, None]
    got = attention(jnp.asarray(inputs["q"]), jnp.asarray(k), jnp.asarray(v), jnp.asarray(visible))
    np.testing.assert_allclose(got, expected, atol=2e-6)
    inputs["positions"][1] -= 1
    assert np.abs(_paged(**inputs) - expected).max() > 1e-2, "control: the mask matters"


@pytest.mark.parametrize("window", [1, 3, 4, 5, 6, 100, None])
@pytest.mark.parametrize("scale", [None, 0.05, 1.0])
def test_windows_and_scales_equal_numpy(window: int | None, scale: float | None) -> None:
    """Pages of 5 slots: windows of one slot, about a page, of more than there is."""
    inputs = case(5)
    k, v = (inputs[name][inputs["block_table"]].reshape(R, -1, HKV, D) for name in ("key_pages", "value_pages"))
    expected = oracle(inputs["q"], k, v, inputs["positions"], window, scale)
    got = _paged(**inputs, window=window, scale=scale)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    visible = sees(jnp.arange(k.shape[1])[None, None], jnp.asarray(inputs["positions"][:, :, None]), window)
    dense = attention(jnp.asarray(inputs["q"]), jnp.asarray(k), jnp.asarray(v), visible, scale=scale)
    np.testing.assert_allclose(dense, expected, atol=2e-6)
    if window is not None and window <= 6:
        for other in (window - 1, window + 1):
            unlike = oracle(inputs["q"], k, v, inputs["positions"], other, scale) if other else 0
            assert np.abs(expected - unlike).max() > 1e-3, "control: one slot more or less matters"


def test_scores_and_softmax_of_bfloat16_are_in_float32() -> None:
    """Scores near 40 have roundings of 0.1 to 0.25 in bfloat16, weights' of 2^-9 are what remains."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(R, n, heads, D)) for n, heads in ((T, H), (12, HKV), (12, HKV)))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (10 * q, 4 * k, v))
    visible = jnp.ones((R, T, 12), bool)
    doubles = [np.asarray(x, np.float64) for x in (q, k, v)]
    exact = oracle(doubles[0], doubles[1], doubles[2], np.full((R, T), 11))
    np.testing.assert_allclose(np.asarray(attention(q, k, v, visible), np.float64), exact, atol=2**-7)


def test_stale_nan_does_not_leak() -> None:
    """Slots from `lengths` on may hold another request's NaN, also where a query beyond `lengths` looks."""
    inputs = case(4)
    clean = np.asarray(_paged(**inputs))
    inputs["positions"] = inputs["positions"] + np.array([0, 5])  # the second query of each row is padding
    row, slot = 1, 9
    poisoned = inputs["block_table"][row, slot // 4], slot % 4
    inputs["key_pages"][poisoned] = np.nan
    inputs["value_pages"][poisoned] = np.nan
    np.testing.assert_array_equal(np.asarray(_paged(**inputs))[:, 0], clean[:, 0])
    inputs["lengths"] = inputs["lengths"] + 1
    assert np.isnan(np.asarray(_paged(**inputs))[row, 0]).all(), "control: a slot that counts as written does leak"
