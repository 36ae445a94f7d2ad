"""Resampling: unbiased counts by exact integration, the textbook's counts (blackjax), fewest moves, edge cases."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax import smc
from smcjax.smc import resampling
from smcjax.smc.resampling import (
    _supports_plan,
    ancestors,
    inverse_cdf,
    num_uniforms,
    offspring,
)
from smcjax.smc.weights import effective_sample_size, must_resample, normalized_weights
from tests.smc.enumeration import pieces
from tests.smc.reference import ancestors_of, counts_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    from blackjax.smc import resampling as blackjax

NEAR_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
counts = jax.jit(jax.vmap(offspring, in_axes=(None, 0, None)), static_argnums=0)
resample = jax.jit(smc.resample, static_argnames="method")


WEIGHTS = [[0.2, 0.5, 0.3], [0.0, 0.7, 0.3], [1 / 3, 1 / 3, 1 / 3], [0.0, 1.0, 0.0], [1.0]]


def law_of_counts(method: str, weights: np.ndarray, squeeze: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The counts in every cell of the uniforms, which are squeezed, and the cells' volumes; cells that are missing to
    a round number have none."""
    cells = pieces(method, weights)
    uniforms, volumes = np.zeros((-(-len(cells) // 128) * 128, len(cells[0][0]))), np.zeros(-(-len(cells) // 128) * 128)
    uniforms[: len(cells)], volumes[: len(cells)] = [u for u, _ in cells], [volume for _, volume in cells]
    with jax.enable_x64(True):
        return np.asarray(counts(method, jnp.asarray(squeeze * uniforms), jnp.asarray(weights))), volumes


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("method", smc.SCHEMES)
def test_counts_are_unbiased(method: str, weights: list[float]) -> None:
    """E[offspring of i] = N·W_i exactly. Control: uniforms squeezed by half break the expectation."""
    w = np.asarray(weights)
    found, volumes = law_of_counts(method, w)
    np.testing.assert_allclose(volumes @ found, len(w) * w, atol=1e-12)
    if weights == WEIGHTS[0]:
        assert np.abs(volumes @ law_of_counts(method, w, 0.5)[0] - len(w) * w).max() > 0.05


@pytest.mark.parametrize("method", ["systematic", "stratified", "multinomial"])
def test_counts_equal_blackjax_from_the_same_uniforms(method: str) -> None:
    """blackjax draws its own uniforms; with the same key and shape they are the ones that we are given here."""
    rng = np.random.default_rng(0)
    for n in (3, 8):
        weights = rng.dirichlet(np.full(n, 0.5), size=20).astype(np.float32)
        for trial, w in enumerate(weights):
            key = jax.random.key(trial)
            theirs = np.bincount(getattr(blackjax, method)(key, jnp.asarray(w), n), minlength=n)
            if method == "systematic":
                u = jax.random.uniform(key, ())[None]
            elif method == "stratified":
                u = jax.random.uniform(key, (n,))
            else:  # blackjax builds sorted uniforms from exponential spacings
                spacings = jnp.cumsum(-jnp.log(jax.random.uniform(key, (n + 1,))))
                u = spacings[:-1] / spacings[-1]
            np.testing.assert_array_equal(counts(method, u[None], jnp.asarray(w))[0], theirs)


def test_law_of_residual_counts_equals_blackjax() -> None:
    """The whole law of the count vector of the scheme whose uniforms differ: ours by integration, theirs by draws."""
    w = np.asarray([0.12, 0.45, 0.43])
    law: dict[tuple[int, ...], float] = {}
    for vector, volume in zip(*law_of_counts("residual", w), strict=True):
        law[tuple(vector.tolist())] = law.get(tuple(vector.tolist()), 0.0) + volume
    draws = 20_000
    keys = jax.random.split(jax.random.key(3), draws)
    with jax.numpy_dtype_promotion("standard"):  # blackjax's residual scheme subtracts integers from floats
        theirs = jax.vmap(lambda key: blackjax.residual(key, jnp.asarray(w), 3))(keys)
    vectors, seen = np.unique(
        np.stack([(theirs == i).sum(axis=1) for i in range(3)], axis=1), axis=0, return_counts=True
    )
    assert set(map(tuple, vectors.tolist())) <= set(law)
    for vector, times in zip(map(tuple, vectors.tolist()), seen, strict=True):
        p = law[vector]
        assert abs(times / draws - p) <= 4.5 * np.sqrt(p * (1 - p) / draws) + 1e-7, (vector, times / draws, p)


def sizes(*choices: int) -> st.SearchStrategy[list[float]]:
    """Log weights of few lengths: every length is compiled."""
    return st.sampled_from(choices).flatmap(lambda n: st.lists(st.floats(-30, 30, width=32), min_size=n, max_size=n))


jitted_offspring = jax.jit(offspring, static_argnums=0)
jitted_ancestors = jax.jit(ancestors, static_argnums=0)


@given(
    method=st.sampled_from(smc.SCHEMES),
    logs=sizes(1, 3, 9),
    dead=st.sets(st.integers(0, 8)),
    us=st.lists(st.sampled_from([0.0, 1e-7, 0.25, 0.5, 0.999999, NEAR_ONE]), min_size=9, max_size=9),
)
def test_properties(method: str, logs: list[float], dead: set[int], us: list[float]) -> None:
    """For any weights, −inf among them, and the extreme uniforms: counts sum to N, a weight of zero is never drawn,
    survivors keep their rows, only dead rows receive, and the counts are those of a plain loop."""
    n = len(logs)
    log_weights = np.asarray([-np.inf if i in dead else x for i, x in enumerate(logs)], np.float32)
    if np.isneginf(log_weights).all():
        log_weights[-1] = 0.0
    uniforms = jnp.asarray(us[: num_uniforms(method, n)], jnp.float32)
    w = np.asarray(normalized_weights(jnp.asarray(log_weights)))
    c = np.asarray(jitted_offspring(method, uniforms, jnp.asarray(w)))
    a = np.asarray(jitted_ancestors(method, uniforms, jnp.asarray(log_weights)))
    assert c.sum() == n
    assert (c[w == 0] == 0).all()
    assert (w[a] > 0).all()
    np.testing.assert_array_equal(np.bincount(a, minlength=n), c)
    alive = c > 0
    np.testing.assert_array_equal(a[alive], np.arange(n)[alive])
    assert a.tolist() == ancestors_of(c)
    if method == "systematic":
        assert (np.abs(c - n * w) < 1 + 1e-4).all()


@given(st.sampled_from(smc.SCHEMES), st.sampled_from([1, 6]), st.integers(0, 1000))
def test_counts_equal_a_plain_loop(method: str, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.dirichlet(np.full(n, 0.7))
    u = rng.random(num_uniforms(method, n))
    with jax.enable_x64(True):
        mine = np.asarray(jitted_offspring(method, jnp.asarray(u), jnp.asarray(w)))
    np.testing.assert_array_equal(mine, counts_of(method, u, w, n))


def test_inverse_cdf_edges() -> None:
    """u = 0 skips leading zeros; a cumsum that ends below 1 clips to the last row of positive weight."""
    below = jnp.asarray([0.0, 0.3, 0.0, 0.6999, 0.0], jnp.float32)
    got = inverse_cdf(jnp.asarray([0.0, 0.29999, 0.3, 0.9999, NEAR_ONE, 1.0], jnp.float32), below)
    assert got.tolist() == [1, 1, 3, 3, 3, 3]
    tenth = jnp.full(10, 0.1, jnp.float32)
    assert float(jnp.cumsum(tenth)[-1]) != 1.0, "the rounding that this is about"
    assert inverse_cdf(jnp.asarray([NEAR_ONE], jnp.float32), tenth).tolist() == [9]


def test_control_a_weak_comparison_draws_a_zero_weight() -> None:
    """Negative control: `searchsorted` on the left, as elsewhere, picks a dead row at u = 0."""
    w = jnp.asarray([0.0, 1.0])
    assert int(jnp.searchsorted(jnp.cumsum(w), 0.0)) == 0
    assert inverse_cdf(jnp.zeros(1), w).tolist() == [1]


@pytest.mark.parametrize("method", ["systematic", "residual"])
def test_resample_batches_and_keys(method: str) -> None:
    """Leading axes of any rank; an array of keys makes each population's draw its own; systematic is the default."""
    logs = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5)), jnp.float32)
    key = jax.random.key(7)
    assert resample(key, logs[0, 0], method).shape == (5,)
    whole = resample(key, logs, method)
    assert whole.shape == (2, 3, 5)
    assert whole.dtype == jnp.int32
    keys = jax.random.split(key, (2, 3))
    np.testing.assert_array_equal(resample(keys, logs, method), whole)
    for g, h in itertools.product(range(2), range(3)):
        np.testing.assert_array_equal(resample(keys[g, h], logs[g, h], method), whole[g, h])
    np.testing.assert_array_equal(
        resample(jax.random.PRNGKey(7), logs[0, 0], method), resample(key, logs[0, 0], method)
    )
    assert resample(key, jnp.zeros(1), method).tolist() == [0]
    default = np.array_equal(resample(key, logs), whole)
    assert default == (method == "systematic") == (method == resampling.SCHEMES[0])


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_schemes_in_the_order_of_their_variances(weights: list[float]) -> None:
    """Systematic is the least that any scheme can have, and multinomial is the binomial's N·W·(1 − W)."""
    w = np.asarray(weights)
    found = {
        method: volumes @ got.astype(float) ** 2 - (volumes @ got) ** 2
        for method in smc.SCHEMES
        for got, volumes in [law_of_counts(method, w)]
    }
    binomial = len(w) * w * (1 - w)
    part = len(w) * w % 1  # counts of whole numbers with this mean vary by f·(1 − f) at least
    np.testing.assert_allclose(found["multinomial"], binomial, atol=1e-12)
    np.testing.assert_allclose(found["systematic"], part * (1 - part), atol=1e-12)
    for method in ("stratified", "residual"):
        assert (found[method] <= binomial + 1e-12).all()
        assert (found["systematic"] <= found[method] + 1e-12).all()
    if weights == WEIGHTS[0]:
        assert found["stratified"].sum() < found["multinomial"].sum() - 0.1, "control: the orders are strict"


def test_resample_refuses_an_unknown_scheme() -> None:
    with pytest.raises(ValueError, match=f"{', '.join(smc.SCHEMES)}, or a Resampler, got 'other'"):
        smc.resample(jax.random.key(0), jnp.zeros(3), "other")
    # A scheme that is new, and has no branch yet, is no other one: neither for the reference nor for the kernel.
    with pytest.raises(AssertionError, match="other"):
        offspring("other", jnp.zeros(3), jnp.full(3, 1 / 3))
    for method in ("residual", "other"):
        assert not _supports_plan(jnp.zeros(1), jnp.zeros((1, 8)), method=method)
    assert _supports_plan(jnp.zeros(1), jnp.zeros((1, 8)), method="stratified")


@dataclasses.dataclass(frozen=True)
class Returning:
    """A part of the user's own that returns the same counts whatever the weights."""

    counts: tuple[float, ...]

    def num_uniforms(self, n: int) -> int:
        return 1

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        return jnp.asarray(self.counts)


@pytest.mark.parametrize("counts", [(1, 1), (1.0, 1.0, 1.0)], ids=["too few", "no integers"])
def test_a_parts_counts_are_one_integer_a_particle(counts: tuple[float, ...]) -> None:
    assert smc.resample(jax.random.key(0), jnp.zeros(3), Returning((3, 0, 0))).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"must return integers of shape \(3,\), one a particle, got "):
        smc.resample(jax.random.key(0), jnp.zeros(3), Returning(counts))


def test_worked_example_of_the_explainer() -> None:
    """Law 6: N = 4; the increments are target/draft, and ESS stays above N/2."""
    ratio = np.asarray([0.5 / 0.4, 0.1 / 0.3, 0.3 / 0.2, 0.1 / 0.1])
    log_weights = jnp.log(jnp.asarray(ratio, jnp.float32))
    np.testing.assert_allclose(np.exp(log_weights), [1.25, 0.3333, 1.5, 1.0], atol=1e-4)
    np.testing.assert_allclose(normalized_weights(log_weights), [0.3061, 0.0816, 0.3673, 0.2449], atol=5e-5)
    ess = smc.effective_sample_size(log_weights)
    np.testing.assert_allclose(ess, 3.3865, atol=5e-5)
    assert not bool(must_resample(ess, 4, 0.5))
    assert bool(must_resample(ess, 4, 0.9)), "control: at another threshold the same weights do resample"


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_equal_weights_never_fire(n: int) -> None:
    """ESS = N to rounding, and the factor 1 − 1e-6 keeps threshold 1 from firing."""
    level = jnp.asarray(np.random.default_rng(n).uniform(-50, 50, 100), jnp.float32)
    logs = jnp.tile(level[:, None], (1, n))
    assert not must_resample(effective_sample_size(logs), n, 1.0).any()
    if n > 1:
        assert must_resample(effective_sample_size(logs.at[:, 0].add(1.0)), n, 1.0).all(), "control: unequal weights do"


def test_ess_edges() -> None:
    logs = jnp.asarray([[-jnp.inf] * 3, [0.0, -jnp.inf, -jnp.inf], [-1e30, -1e30, -jnp.inf]])
    assert effective_sample_size(logs).tolist() == [0.0, 1.0, 2.0]
