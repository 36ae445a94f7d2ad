"""Divergences of tokens and blocks, against sums over all texts."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.tuning.divergence import block_second_moments, block_tilt, overlap, renyi
from smcjax.tuning.train import Objective

V = 3


def markov(seed: int) -> np.ndarray:
    """A law of the next token behind each token, [V, V], that differs from row to row."""
    logits = np.random.default_rng(seed).normal(size=(V, V))
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


P, Q = markov(0), markov(1)


def of_path(law: np.ndarray, path: tuple[int, ...]) -> list[float]:
    """Probabilities of a path's tokens, each behind the one before it and the first behind 0."""
    return [law[before, token] for before, token in zip((0, *path), path, strict=False)]


def moment(order: float, size: int) -> float:
    """E_Q[w^β] of a block behind 0, summed over all of its texts."""
    paths = itertools.product(range(V), repeat=size)
    return sum(math.prod(of_path(P, path)) ** order * math.prod(of_path(Q, path)) ** (1 - order) for path in paths)


@pytest.mark.parametrize("order", [1.1, 1.5, 2.0, 3.0])
def test_of_one_token(order: float) -> None:
    got = renyi(jnp.log(P[0]), jnp.log(Q[0]), order)
    assert float(got) == pytest.approx(math.log(moment(order, 1)) / (order - 1), rel=1e-5)
    assert float(renyi(jnp.log(P[0]), jnp.log(P[0]), order)) == pytest.approx(0, abs=1e-6)


def test_order_one_is_kl_and_divergences_grow_with_the_order() -> None:
    kl = float((P[0] * np.log(P[0] / Q[0])).sum())
    found = [float(renyi(jnp.log(P[0]), jnp.log(Q[0]), order)) for order in (1.0, 1.01, 1.5, 2.0)]
    assert found[0] == pytest.approx(kl, rel=1e-5)
    assert found[1] == pytest.approx(kl, rel=0.02)
    assert found == sorted(found)
    assert float(overlap(jnp.log(P[0]), jnp.log(Q[0]))) == pytest.approx(np.minimum(P[0], Q[0]).sum(), rel=1e-6)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_estimate_of_a_block_is_unbiased(gamma: int) -> None:
    """Its mean over the target's own texts is E_Q[w²] exactly. Controls: the mean without what the block holds before
    its last token, and that with the draft's texts, are other numbers."""
    mean = without = by_draft = 0.0
    for path in itertools.product(range(V), repeat=gamma):
        p, q = np.array(of_path(P, path)), np.array(of_path(Q, path))
        second = [(P[before] ** 2 / Q[before]).sum() for before in (0, *path[:-1])]
        of_one = block_second_moments(np.log(p / q)[None], np.log(second)[None], np.ones((1, gamma), bool), gamma)
        assert len(of_one[0]) == 1
        mean += p.prod() * of_one[0][0]
        without += p.prod() * second[-1]
        by_draft += q.prod() * of_one[0][0]
    assert mean == pytest.approx(moment(2, gamma), rel=1e-12)
    if gamma > 1:
        assert abs(without / mean - 1) > 0.05
        assert abs(by_draft / mean - 1) > 0.05


def test_blocks_of_an_answer() -> None:
    """One block a beginning; an answer shorter than γ is one block; padding counts for nothing."""
    ratio, moments = np.log([[2.0, 3.0, 5.0, 9.9], [7.0, 8.8, 8.8, 8.8]]), np.log([[1.5, 2.5, 4.0, 9.9]] * 2)
    counted = np.array([[True, True, True, False], [True, False, False, False]])
    first, second = block_second_moments(ratio, moments, counted, 2)
    np.testing.assert_allclose(first, [2.0 * 2.5, 3.0 * 4.0])
    np.testing.assert_allclose(second, [1.5])


@pytest.mark.parametrize("order", [1.5, 2.0])
def test_tilts_make_a_blocks_divergence_of_its_tokens(order: float) -> None:
    """E_P[tilt · Σ p^β q^(1−β) at the token behind] is the moment of the longer block; without the tilt it is not."""
    gamma = 3
    mean = without = 0.0
    for path in itertools.product(range(V), repeat=gamma - 1):
        p, q = of_path(P, path), of_path(Q, path)
        ratio = [math.log(a / b) for a, b in zip(p, q, strict=True)]
        # In a row of one block all of whose tokens have but one place, the last tilt is the product of all before.
        tilts = [block_tilt(jnp.asarray([[*ratio, 0.0]], jnp.float32), size, order)[0, -1] for size in (1, 2, 3)]
        product = 3 * float(tilts[2]) - 2 * float(tilts[1])
        rest = (P[path[-1]] ** order * Q[path[-1]] ** (1 - order)).sum()
        mean += math.prod(p) * product * rest
        without += math.prod(p) * rest
    assert mean == pytest.approx(moment(order, gamma), rel=1e-4)
    assert abs(without / mean - 1) > 0.02


def test_tilts_are_means_over_places() -> None:
    ratio = np.log(np.random.default_rng(3).uniform(0.3, 3, (2, 6)))
    got = np.asarray(block_tilt(jnp.asarray(ratio, jnp.float32), 3, 1.5))
    for row, t in itertools.product(range(2), range(6)):
        products = [math.exp(0.5 * ratio[row, t - place : t].sum()) for place in range(min(3, t + 1))]
        assert got[row, t] == pytest.approx(np.mean(products), rel=1e-5)
    np.testing.assert_allclose(block_tilt(jnp.asarray(ratio, jnp.float32), 1, 1.5), 1.0)
    assert float(block_tilt(jnp.full((1, 9), 50.0), 8, 2.0).max()) <= 10


def test_the_loss_is_a_weighted_mean_whose_weights_have_no_gradient() -> None:
    from smcjax.tuning.answers import Batch

    rng = np.random.default_rng(5)
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 4, V)), jnp.float32)) for _ in range(2))
    counted = np.array([[True] * 4, [True, True, False, False]])
    answer = rng.integers(V, size=(2, 4)).astype(np.int32) * counted
    batch = Batch(np.arange(2), np.zeros((2, 5), np.int32), np.zeros((2, 4), np.int32), answer, counted)
    objective = Objective(order=1.5, kl_share=0.25, gamma=3)
    total, weight = objective(log_p, log_q, batch)
    p, q = np.exp(log_p), np.exp(log_q)
    token = 0.75 * 2 * np.log((p**1.5 * q**-0.5).sum(-1)) + 0.25 * (p * np.log(p / q)).sum(-1)
    ratio = np.take_along_axis(np.log(p / q), answer[..., None], axis=-1)[..., 0] * counted
    tilt = np.minimum(block_tilt(jnp.asarray(ratio), 3, 1.5) * (p**1.5 * q**-0.5).sum(-1), 10.0) * counted
    assert float(total) == pytest.approx((tilt * token).sum(), rel=1e-4)
    assert float(weight) == pytest.approx(tilt.sum(), rel=1e-5)

    def lost(log_q: jax.Array) -> jax.Array:
        return objective(log_p, jax.nn.log_softmax(log_q), batch)[0]

    gradient = np.asarray(jax.grad(lost)(log_q))
    tilted = p**1.5 * q**-0.5
    wanted = tilt[..., None] * (q - 0.75 * tilted / tilted.sum(-1, keepdims=True) - 0.25 * p)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lost)(log_p), 0, atol=1e-5)  # least where q = p
