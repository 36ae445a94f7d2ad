"""Rejection control of one token, by summing over every draft and its fate, in float64: law · weight = p.

    law(x) = q(x)·acceptance(x) + R·residual(x)/Z          R = 1 − Σ q·acceptance

With laws that depend on the whole prefix, through the cycle's own functions: `test_control.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.smc import control
from smcjax.smc.acceptance import Distributions, RejectionControl, decide

V, CASES = 3, 400
CONTROLS = (0.0, 0.1, 0.5, 1.0)


def laws(seed: int = 0, impossible: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """p and q [CASES, V]; some of p are 0, some cases have p = q."""
    rng = np.random.default_rng(seed)
    p, q = (0.99 * rng.dirichlet(np.full(V, 0.5), CASES) + 0.01 / V for _ in range(2))
    if impossible:
        p[::5, 0] = 0.0
    p[3::7] = q[3::7]
    return p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)


@jax.jit
def parts(p: Any, q: Any, c: Any) -> tuple[Any, ...]:
    log_p, log_q, c = jnp.log(p), jnp.log(q), jnp.broadcast_to(c, p.shape[:1])
    ratio = control.correction(log_p, log_q, c)
    spread = ratio[:, None]
    weight = jnp.exp(control.increment(log_p, log_q, c[:, None], spread))
    return control.acceptance(log_p, log_q, c[:, None]), jnp.exp(control.residual(log_p, log_q)), ratio, weight


def of(p: np.ndarray, q: np.ndarray, c: float) -> list[np.ndarray]:
    """acceptance [CASES, V], normalised residual [CASES, V], R/Z [CASES], weight [CASES, V]."""
    with jax.enable_x64(True):
        accept, left, ratio, weight = map(np.asarray, parts(jnp.asarray(p), jnp.asarray(q), jnp.asarray(c)))
    return [accept, left / left.sum(axis=1, keepdims=True), ratio, weight]


@pytest.mark.parametrize("c", CONTROLS)
def test_law_times_weight_is_the_target(c: float) -> None:
    p, q = laws()
    accept, left, ratio, weight = of(p, q, c)
    rejected = 1 - (q * accept).sum(axis=1)
    law = q * accept + rejected[:, None] * left
    np.testing.assert_allclose(law.sum(axis=1), 1, rtol=0, atol=1e-12)
    emitted = law > 1e-15
    np.testing.assert_allclose(np.where(emitted, law * weight, 0), p, rtol=0, atol=1e-12)
    # The stated formulas, and the stated bounds.
    z = np.maximum(p - q, 0).sum(axis=1)
    spread = np.where(z > 1e-12, rejected / np.where(z > 1e-12, z, 1), ratio)
    np.testing.assert_allclose(ratio, spread, rtol=0, atol=1e-6)  # of what z > 1e-12 leaves of 16 digits
    stated = np.minimum(q, p / c if c else np.inf) + spread[:, None] * np.maximum(p - q, 0)
    np.testing.assert_allclose(law, stated, rtol=0, atol=1e-12)
    assert (weight[emitted] >= c * (1 - 1e-12)).all()
    with np.errstate(divide="ignore"):
        assert (weight <= np.maximum(1 / ratio, 1)[:, None] * (1 + 1e-12))[emitted].all()
    if c == 0:
        assert (accept == 1).all()
        assert (ratio == 0).all()
        np.testing.assert_allclose(weight, p / q, rtol=1e-12)
    if c == 1:
        assert (weight[emitted] == 1).all(), "exactly"


def test_a_certain_draft() -> None:
    """n-gram drafts, q = 1 at one token: control 1 is exact; below it a likely draft leaves others unsaid."""
    p, _ = laws(impossible=False)
    q = np.eye(V)[np.arange(CASES) % V]
    accept, left, _, weight = of(p, q, 1.0)
    law = q * accept + (1 - (q * accept).sum(axis=1, keepdims=True)) * left
    np.testing.assert_allclose(law, p, rtol=0, atol=1e-12)
    assert (weight == 1).all()
    accept, left, _, _ = of(p, q, 0.5)
    law = q * accept + (1 - (q * accept).sum(axis=1, keepdims=True)) * left
    assert ((law == 0) & (p > 0.1)).any()


@pytest.mark.parametrize("c", CONTROLS)
def test_float32_has_no_nan(c: float) -> None:
    """Equal laws, laws that differ by rounding, underflow, and tokens that neither model can say."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 30, (CASES, V)).astype(np.float32)
    other = logits.copy()
    other[::2] += rng.normal(0, 1e-6, other[::2].shape).astype(np.float32)
    other[1::3] = rng.normal(0, 30, other[1::3].shape)
    logits[::4, 0] = other[::4, 0] = -np.inf
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(x)) for x in (logits, other))
    drafts = jnp.asarray(rng.integers(1, V, (CASES, 1)), jnp.int32)
    uniforms = jnp.asarray(rng.random((CASES, 1)), jnp.float32)
    c_rows = jnp.full(CASES, c, jnp.float32)
    unused = jnp.zeros((CASES, 1))
    columns = Distributions(log_p[:, None], log_q[:, None], unused, log_p[:, None])
    accepted, behind = decide(RejectionControl(c_rows), columns, drafts, uniforms)
    assert not np.isnan(behind).any()
    assert np.isfinite(np.max(behind, axis=1)).all()
    following = jnp.argmax(behind, axis=1)
    token = jnp.where(accepted == 1, drafts[:, 0], following)
    ratio = control.correction(log_p, log_q, c_rows)
    assert ((ratio >= 0) & (ratio <= 1)).all()
    weight = np.asarray(control.increment(control.at(log_p, token), control.at(log_q, token), c_rows, ratio))
    assert not np.isnan(weight).any()
    assert (weight >= (np.log(np.float32(c)) if c else -np.inf)).all()
    if c == 1:
        assert (weight == 0).all()


@pytest.mark.parametrize("c", [1 - 2.0**-24, 1.0])
def test_quotients_that_are_rounded_beyond_one(c: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU divides to two units in the last place, so that a quotient of what is nearly equal may be above 1."""
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in laws(impossible=False))
    right, control_of_rows = type(log_p).__truediv__, jnp.full(CASES, c, jnp.float32)
    monkeypatch.setattr(type(log_p), "__truediv__", lambda a, b: right(a, b) * (1 + 2.0**-22))
    assert (right(log_p, log_p) < log_p / log_p).all()
    ratio = control.correction(log_p, log_q, control_of_rows)
    assert (ratio <= 1).all()
    assert (ratio == 1).sum() > CASES // 2
    weight = control.increment(log_p, log_q, control_of_rows[:, None], ratio[:, None])
    assert (np.abs(weight) < 1e-5).all()


def test_broken_logits_break_the_weight() -> None:
    """NaN in either law is NaN in the weight, whatever was decided."""
    law = jnp.log(jnp.asarray([[0.2, 0.3, 0.5]]))
    nan = jnp.full_like(law, jnp.nan)
    for log_p, log_q in ((law, nan), (nan, law)):
        ratio = control.correction(log_p, log_q, jnp.asarray([0.5]))
        assert jnp.isnan(control.increment(log_p[:, 0], log_q[:, 0], jnp.asarray([0.5]), ratio)).all()
