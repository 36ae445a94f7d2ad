"""Rejection control of drafts: from SMC (control 0) to speculative sampling of each particle (control 1).

With p the target's law of a token, q the draft's and c in [0, 1] the control, a draft d ~ q is

    accepted    with probability min(1, p(d)/(c·q(d))), always at c = 0
    rejected    otherwise: the token is drawn from the residual ∝ max(p − q, 0)

With Z = Σ max(p − q, 0) and R = Σ max(q − p/c, 0), the chance of a rejection, the token's law and weight are

    m = min(q, p/c) + (R/Z)·max(p − q, 0)         p/m = max(p/q, c) where p < q, else p/(q + (R/Z)·(p − q)),

whether it was accepted or drawn. Since R ≤ Z, weights lie between c and Z/R; at c = 1, R = Z: m = p, and every weight
is 1. (Liu, Chen & Wong 1998, Rejection Control and Sequential Importance Sampling, whose rejected draws begin again;
the residual is Leviathan et al. 2023, arXiv 2211.17192.)

Pure functions of log-probabilities, which keep the dtype that they are given; `control` broadcasts against their
leading axes and may be traced. NaN stays NaN.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def acceptance(
    log_p: Float[Array, "*shape"], log_q: Float[Array, "*shape"], control: Float[Array, "*#shape"]
) -> Float[Array, "*shape"]:
    """min(1, p/(c·q)) of drafts with these log-probabilities: u < it, u uniform in [0, 1), accepts one.

    What the target cannot say has 0, except at c = 0, where every draft has 1.
    """
    ratio = log_p - log_q - jnp.log(jnp.where(control > 0, control, 1))
    return jnp.where(control > 0, jnp.exp(jnp.minimum(ratio, 0)), 1)


def residual(log_p: Float[Array, "*shape V"], log_q: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """log max(p − q, 0), of sum Z; log p where nothing is left, which only rounding can bring about."""
    left = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)
    return jnp.where((left > 0).any(axis=-1, keepdims=True), jnp.log(left), log_p)


def correction(
    log_p: Float[Array, "*shape V"], log_q: Float[Array, "*shape V"], control: Float[Array, "*#shape"]
) -> Float[Array, "*shape"]:
    """R/Z, in [0, 1]: exactly 0 at c = 0 and exactly 1 at c = 1. Where p = q it is c, as nothing can be rejected.

    Z is taken from the other side, Z = Σ max(q − p, 0) = R + Σ_{p < q} (min(q, p/c) − p), so that rounding treats R
    and Z alike.
    """
    p, q, c = jnp.exp(log_p), jnp.exp(log_q), control[..., None]
    kept = jnp.where(p < c * q, p / jnp.where(c > 0, c, 1), q)  # min(q, p/c)
    rejected = jnp.sum(q - kept, axis=-1)
    total = rejected + jnp.sum(jnp.where(p < q, kept - p, 0), axis=-1)
    # A GPU's quotient of a number by itself need not be 1, and beyond 1 `increment` would have no logarithm.
    share = jnp.where(rejected < total, rejected / jnp.where(total > 0, total, 1), 1)
    return jnp.where(total > 0, jnp.clip(share, 0, 1), control)


def increment(
    log_p: Float[Array, "*shape"],
    log_q: Float[Array, "*shape"],
    control: Float[Array, "*#shape"],
    correction: Float[Array, "*#shape"],
) -> Float[Array, "*shape"]:
    """log p/m of emitted tokens with these log-probabilities, `correction` being R/Z of their laws, in [0, 1]."""
    behind = log_q - log_p
    above = -jnp.logaddexp(jnp.log1p(-correction) + behind, jnp.log(correction))
    return jnp.where(log_p < log_q, jnp.maximum(-behind, jnp.log(control)), above)


def at(laws: Float[Array, "*shape V"], tokens: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """laws[…, token] of each token."""
    return jnp.take_along_axis(laws, tokens[..., None], axis=-1)[..., 0]
