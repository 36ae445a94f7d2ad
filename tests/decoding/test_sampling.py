"""Draws, masks and truncation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.decoding.sampling import draw, forbid_stops, likeliest, log_softmax_at, truncate
from smcjax.noise import gumbels
from tests.test_autoregressive import top_k_p

_truncate = jax.jit(truncate)


@pytest.mark.parametrize("vocabulary", [7, 3000])
def test_draw_is_the_likeliest_of_perturbed_logits(vocabulary: int) -> None:
    keys = jax.random.split(jax.random.key(0), 64)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, vocabulary)), jnp.float32).at[:, 2].set(-jnp.inf)
    got = draw(keys, logits)
    perturbed = logits + jnp.stack([gumbels(key, (vocabulary,)) for key in keys])
    assert got.tolist() == jnp.argmax(perturbed, axis=1).tolist()
    assert 2 not in got.tolist()
    assert got.tolist() != draw(keys[::-1], logits).tolist(), "control: the key matters"


def test_log_softmax_at_ignores_what_is_forbidden() -> None:
    logits = jnp.asarray([[1.0, -jnp.inf, 2.0, 0.5]])
    np.testing.assert_allclose(
        log_softmax_at(logits, jnp.asarray([2])), 2 - np.log(np.exp([1, 2, 0.5]).sum()), rtol=1e-6
    )
    assert log_softmax_at(logits, jnp.asarray([1])).tolist() == [-np.inf]


@given(st.integers(0, 6), st.integers(1, 8))
def test_stops_are_forbidden_up_to_the_minimum(minimum: int, number: int) -> None:
    """The token's own number decides, from 1."""
    got = forbid_stops(
        jnp.zeros((1, 3)), jnp.asarray([[False, True, False]]), jnp.asarray([number]), jnp.asarray([minimum])
    )
    assert got.tolist() == [[0.0, -np.inf if number <= minimum else 0.0, 0.0]]


@given(
    # Subnormal numbers are 0 to XLA on a CPU, so they tie with each other, and NumPy tells them apart.
    logits=st.lists(st.floats(-6, 6, width=32, allow_subnormal=False), min_size=6, max_size=6, unique=True),
    k=st.integers(1, 8),
    p=st.sampled_from([0.01, 0.3, 0.5, 0.77, 0.95, 1.0]),
)
def test_truncation_equals_numpy(logits: list[float], k: int, p: float) -> None:
    """k first, then p over what is left; the most probable token always stays."""
    x = np.asarray(logits, np.float32)
    got = np.asarray(_truncate(jnp.asarray(x)[None], jnp.asarray([k]), jnp.asarray([p], jnp.float32)))[0]
    mass = np.cumsum(np.sort(np.exp(x - x.max(), dtype=np.float64))[::-1][:k])
    if np.abs(mass / mass[-1] - p).min() < 1e-5 and p < 1:
        return  # at the boundary f32 and f64 may differ
    want = top_k_p(k, p)(x.astype(np.float64))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_array_equal(got[~np.isneginf(got)], x[~np.isneginf(want)])


def test_truncation_edges() -> None:
    """Off keeps all, −inf stays −inf, ties at the k-th stay together, and rows have their own k and p."""
    x = jnp.asarray([[2.0, 1.0, 1.0, -jnp.inf], [2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 0.0]])
    got = truncate(x, jnp.asarray([4, 2, 4]), jnp.asarray([1.0, 1.0, 0.1]))
    inf = -np.inf
    assert truncate(x[1:2], jnp.asarray([4]), jnp.asarray([0.0])).tolist() == [[2, inf, inf, inf]]
    assert got.tolist() == [[2, 1, 1, inf], [2, 1, 1, inf], [2, inf, inf, inf]]


@pytest.mark.parametrize("vocabulary", [7, 1024, 1025, 49152])
def test_likeliest_is_the_first_of_the_largest(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    scores = rng.integers(0, 50, (6, vocabulary)).astype(np.float32)  # full of ties
    scores[2] = -np.inf
    scores[3] = np.inf
    scores[4, :-1] = -np.inf
    got = jax.jit(likeliest)(scores)
    np.testing.assert_array_equal(got, jnp.argmax(jnp.asarray(scores), axis=1))
    assert got[4] == vocabulary - 1
    assert got.dtype == jnp.int32
    scores[:, vocabulary // 2] = np.nan
    assert all(0 <= index < vocabulary for index in jax.jit(likeliest)(scores).tolist())
