"""Importance weights in log space (docs/explanation/algorithm.md, "One cycle").

    draft token d:  α·log p_T(d) − log q(d)
    bonus token:    log Σ_v p_T(v)^α  =  LSE(α·ℓ/T) − α·LSE(ℓ/T)

All functions keep the dtype that they are given, so tests can run them in float64.

In float32 the terms are wrong by about 2^-23 of what is rounded, times α. So what is rounded is kept small: logits are
taken relative to their largest before they are divided by T and multiplied by α, and log Σ exp of those is at most
log V. Then a term is within 1e-3 nats of the exact one, or 2^-22 of itself where that is more, while α/T is at most
`smcjax.decoders.SHARPEST`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def temper(logits: Float[Array, "*shape V"], temperature: Float[Array, "*#shape"]) -> Float[Array, "*shape V"]:
    """(ℓ − max ℓ)/T, whose softmax is that of ℓ/T and whose largest is 0; with NaN where logits are no law."""
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[..., None]


def log_mass(tempered: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """log Σ exp of logits whose largest is 0."""
    return jnp.log(jnp.sum(jnp.exp(tempered), axis=-1))


def logprob_at(tempered: Float[Array, "*shape V"], tokens: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log softmax(tempered)[tokens] of logits whose largest is 0, as `temper` makes them: one pass less."""
    return jnp.take_along_axis(tempered, tokens[..., None], axis=-1)[..., 0] - log_mass(tempered)


def draft_increment(
    power: float, target_logprob: Float[Array, "*shape"], draft_logprob: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The log of the factor by which a draft token multiplies its particle's weight: α·log p_T − log q."""
    return power * target_logprob - draft_logprob


def bonus_increment(
    power: float, logits: Float[Array, "*shape V"], allowed: Bool[Array, "*shape V"] | None = None
) -> Float[Array, "*shape"]:
    """The log of the factor for a token drawn from softmax(α·logits): the log normaliser of p_T^α; 0 at α = 1.

    Where only some tokens are `allowed` it is drawn from those, and the sum is over those: at α = 1 their probability.

    `logits` are tempered, as by `temper`. Logits that are no law (one is NaN or +inf, or all are −inf) give NaN at any
    α, so that a broken model is never taken for a sample.
    """
    if allowed is not None:
        return _allowed_mass(power, logits, allowed)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    plain = log_mass(logits)
    if power == 1.0:
        return jnp.where(jnp.isfinite(plain), 0.0, jnp.nan)
    return log_mass(power * logits) - power * plain


def _allowed_mass(
    power: float, logits: Float[Array, "*shape V"], allowed: Bool[Array, "*shape V"]
) -> Float[Array, "*shape"]:
    """log Σ p_T^α over the allowed tokens, relative to their largest logit: they may be improbable beyond underflow."""
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    plain = log_mass(logits)
    some = jnp.where(allowed, logits, -jnp.inf)
    top = jnp.max(some, axis=-1)
    mass = power * top + log_mass(power * (some - jnp.where(jnp.isneginf(top), 0.0, top)[..., None]))
    return jnp.where(jnp.isfinite(plain), mass - power * plain, jnp.nan)


def normalized_weights(log_weights: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
    """softmax; all zeros where every weight is −inf."""
    top = jnp.max(log_weights, axis=-1, keepdims=True)
    weights = jnp.exp(log_weights - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def effective_sample_size(log_weights: Float[Array, "*batch N"]) -> Float[Array, "*batch"]:
    """ESS = 1/Σ W² of the normalised weights: N when equal, 1 when one holds all, 0 when all are −inf."""
    squares = jnp.sum(normalized_weights(jnp.asarray(log_weights)) ** 2, axis=-1)
    return jnp.where(squares == 0.0, 0.0, 1.0 / jnp.where(squares == 0.0, 1.0, squares))


def log_mean_weight(log_weights: Float[Array, "*batch N"]) -> Float[Array, "*batch"]:
    """LSE(log w) − log N: the term that a resampling, or the end, adds to log Ẑ."""
    return jax.nn.logsumexp(log_weights, axis=-1) - jnp.log(log_weights.shape[-1]).astype(log_weights.dtype)


def must_resample(ess: Float[Array, "*batch"], n_particles: int, threshold: float) -> Array:
    """True where the ESS is below `least_ess`."""
    return ess < least_ess(n_particles, threshold)


def least_ess(n_particles: int, threshold: float) -> float:
    """threshold·N, less a factor that keeps equal weights from firing at threshold 1 by rounding."""
    return threshold * n_particles * (1.0 - 1e-6)
