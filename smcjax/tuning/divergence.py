"""Divergences of the draft's law q of a token, or of a block of tokens, from the target's law p.

A particle whose block of γ drafts is drawn from q is multiplied by w = ∏ p/q, whose mean is 1 and whose variance is
χ²(P‖Q) of the block's two laws. Chained over tokens, with x from the target and s_j the text before x_j,

    E_Q[w^β] = E_P[w^(β−1)] = E_P[∏_{i<j} (p/q)(x_i)^(β−1) · exp((β−1)·D_β(s_j)) · (the same of what follows x_j)]

so a token's Rényi divergence D_β counts in the block's by the *tilt* ∏_{i<j} (p/q)(x_i)^(β−1) of what the block
already holds. β = 2 is χ² itself; derivation and estimates: docs/explanation/tuned-drafts.md.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

LARGEST_TILT = 10.0  # of one place


def renyi(log_p: Float[Array, "*shape V"], log_q: Float[Array, "*shape V"], order: float) -> Float[Array, "*shape"]:
    """D_β(p‖q) = log(Σ p^β q^(1−β)) / (β−1), nats; `order` is β > 1, or 1 for Kullback and Leibler's."""
    if order == 1.0:
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jax.nn.logsumexp(order * log_p + (1 - order) * log_q, axis=-1) / (order - 1)


def overlap(log_p: Float[Array, "*shape V"], log_q: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Σ min(p, q): the probability that speculative sampling accepts a draft."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def block_tilt(log_ratio: Float[Array, "B A"], gamma: int, order: float) -> Float[Array, "B A"]:
    """ω of each of A tokens of an answer: the mean of ∏ (p/q)^(β−1) over the places that it can have in a block.

    `log_ratio` is log p/q of the answers' own tokens. A token's place is 0 to γ−1, its number in the answer at most;
    each product is `LARGEST_TILT` at most.
    """
    length = log_ratio.shape[1]
    before = jnp.cumsum(log_ratio, axis=1) - log_ratio  # of all tokens before each
    index = jnp.arange(length)
    total, places = jnp.zeros_like(log_ratio), jnp.zeros(length)
    for place in range(min(gamma, length)):
        exponent = (order - 1) * (before - jnp.roll(before, place, axis=1))
        there = index >= place
        total += jnp.where(there[None], jnp.exp(jnp.minimum(exponent, math.log(LARGEST_TILT))), 0.0)
        places += there.astype(places.dtype)
    return total / places[None]


def block_second_moments(
    log_ratio: Float[np.ndarray, "n A"],
    log_moment: Float[np.ndarray, "n A"],
    counted: Bool[np.ndarray, "n A"],
    gamma: int,
) -> list[Float[np.ndarray, " blocks"]]:
    """Estimates of 1 + χ² of the block of γ tokens that begins at each token of each answer, float64.

    Of a block x_0 … x_{γ−1} of the target's, ∏_{i<γ−1} p/q(x_i) · Σ p²/q behind them, in whose place the last token's
    p/q would stand: of the same mean and a smaller variance. `log_moment` is log Σ p²/q at each token. An answer of
    fewer tokens is one block.
    """
    found = []
    for ratio, moment, there in zip(log_ratio, log_moment, counted, strict=True):
        length = int(there.sum())
        size = min(gamma, length)
        sums = np.concatenate([[0.0], np.cumsum(ratio[:length], dtype=np.float64)])
        begins = np.arange(length - size + 1)
        last = begins + size - 1
        found.append(np.exp(sums[last] - sums[begins] + moment[last]))
    return found
