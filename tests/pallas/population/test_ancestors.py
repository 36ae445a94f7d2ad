"""The kernel from weights to ancestors, against the plain functions on the same keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax import noise
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.population.ancestors import ancestors_mosaic, supports_ancestors
from smcjax.smc.resampling import plan_resampling, positions
from smcjax.smc.weights import least_ess, normalized_weights

NEAR_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
METHODS = ("systematic", "stratified", "multinomial")
THRESHOLD = 0.6

# As one program: its single operations would be compiled one by one.
_plan = jax.jit(plan_resampling.reference, static_argnames=("method", "threshold"))
_ancestors = jax.jit(ancestors_mosaic, static_argnames=("below", "interpret"))


def populations(groups: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Log weights from even to one particle with all, some of −inf, one group without any; and who runs."""
    keys = jax.random.split(jax.random.key(n), 3)
    spread = jnp.linspace(0.1, 6.0, groups)[:, None]
    log_weight = 100.0 + spread * jax.random.normal(keys[0], (groups, n))
    log_weight = jnp.where(jax.random.bernoulli(keys[1], 0.1, (groups, n)), -jnp.inf, log_weight)
    log_weight = log_weight.at[0].set(-jnp.inf).at[1].set(3.0)
    return log_weight, jax.random.bernoulli(keys[2], 0.9, (groups,)) & (jnp.arange(groups) > 0)


def check(groups: int, n: int, method: str, interpret: Any) -> None:
    log_weight, running = populations(groups, n)
    keys = jax.random.split(jax.random.key(1), groups)
    want = _plan(keys, log_weight, running, method=method, threshold=THRESHOLD)
    drawn = 1 if method == "systematic" else n
    uniforms = noise.uniforms(keys, (drawn,))
    points = jax.vmap(functools.partial(positions, method, n=n))(uniforms)
    below = least_ess(n, THRESHOLD)
    got = _ancestors(log_weight, points, running, below=below, interpret=interpret)
    ess, resampled, ancestors, offspring, log_mean = map(np.asarray, got)
    # Weights are sums of N terms of relative error 2⁻²² (exp2 of the GPU) at most.
    error = n * 2.0**-21
    np.testing.assert_allclose(ess, want.ess, rtol=error)
    np.testing.assert_allclose(log_mean, want.log_mean_weight, rtol=2.0**-22, atol=error)
    np.testing.assert_array_equal(resampled, want.resampled)
    edges = np.cumsum(np.asarray(normalized_weights(log_weight)), axis=1)
    clear = (np.abs(np.asarray(points)[:, :, None] - edges[:, None]) > error).all(axis=(1, 2))
    assert clear.mean() > 0.9  # elsewhere a point lies as near to an edge as sums may differ
    np.testing.assert_array_equal(ancestors[clear], np.asarray(want.ancestors)[clear])
    np.testing.assert_array_equal(offspring[clear], np.asarray(want.offspring)[clear])
    if n > 1:
        assert 0 < resampled.sum() < running.sum()
    assert not resampled[~np.asarray(running)].any()
    assert (ancestors[~resampled] == np.arange(n)).all()


@pytest.mark.parametrize(("method", "n"), [*zip(METHODS, (3, 8, 1), strict=True)])
def test_equals_the_plain_functions(method: str, n: int) -> None:
    check(20, n, method, plgpu.InterpretGPUParams())


@pytest.mark.parametrize("point", [NEAR_ONE, 1.0])
def test_a_row_without_weight_has_no_offspring(point: float) -> None:
    """Also where rounding takes a point to the end of the cumulative weights, or past it."""
    log_weight = jnp.asarray([[0.0, 0.0, -jnp.inf], [-jnp.inf, 0.0, -jnp.inf]])
    points = jnp.full((2, 3), point, jnp.float32)
    running = jnp.ones(2, bool)
    got = _ancestors(log_weight, points, running, below=4.0, interpret=plgpu.InterpretGPUParams())
    assert got[3].tolist() == [[0, 3, 0], [0, 3, 0]]
    assert got[2].tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.slow
def test_more_groups_than_threads() -> None:
    check(150, 4, "systematic", plgpu.InterpretGPUParams())


def test_what_the_kernel_takes() -> None:
    assert supports_ancestors(32, jnp.float32)
    assert not supports_ancestors(33, jnp.float32)
    assert not supports_ancestors(8, jnp.float64)


@pytest.mark.parametrize(("method", "kernels"), [("systematic", 1), ("multinomial", 1), ("residual", 0)])
def test_lowers_to_cuda(method: str, kernels: int) -> None:
    plan = functools.partial(plan_resampling, method=method, threshold=THRESHOLD)
    arguments = (
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 32)),
        jax.ShapeDtypeStruct((32, 16), jnp.float32),
        jax.ShapeDtypeStruct((32,), jnp.bool_),
    )
    with implementations("mosaic"):
        text = jax.jit(plan).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("groups", "n"), [(20, 1), (20, 3), (32, 8), (150, 16), (100, 32)])
def test_equals_the_plain_functions_on_a_gpu(groups: int, n: int, method: str) -> None:
    check(groups, n, method, None)
