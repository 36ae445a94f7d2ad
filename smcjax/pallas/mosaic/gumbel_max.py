"""A draw from softmax(logits) and its log-probability by one pass over the logits, which are kept nowhere.

    token    = argmax_v (logit_v + noise_v),  noise Gumbel (`noise.py`); of equal ones the lowest
    logprob  = logit(token) − LSE,   LSE = m + log Σ_c mass_c · exp(top_c − m),   m = max_c top_c

Whoever sees logits pass keeps five numbers in each of several places c, a *candidate* each, which are compared last.
Ids that may not be drawn have the logit −∞; flags say which, 32 ids to a word, the first in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from smcjax.noise import gumbel
from smcjax.pallas.mosaic.wgmma import MASKED

NO_ID = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """Candidates of M tokens: n each, and then perhaps whatever was there. In a kernel: an array of places."""

    best: Float[Array, "M n"]  # largest perturbed logit
    ids: Int[Array, "M n"]  # its id
    logit: Float[Array, "M n"]  # its logit
    top: Float[Array, "M n"]  # largest logit
    mass: Float[Array, "M n"]  # Σ exp(logit − top)


DTYPES = Candidates(jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)


def initial(full: Callable[[float | int, Any], jax.Array]) -> Candidates:
    """Candidates before the first logit; `full(value, dtype)` is an array of places."""
    return Candidates(
        full(-jnp.inf, jnp.float32),
        full(0, jnp.int32),
        full(-jnp.inf, jnp.float32),
        full(MASKED, jnp.float32),
        full(0.0, jnp.float32),
    )


def whole_words(forbids: Bool[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """`0xFFFFFFFF` where `forbids` is true, else 0: switches a row's packed stop bits on or off."""
    return jnp.where(forbids, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))


class Draw(NamedTuple):
    """The draw of a place's token, within a kernel."""

    key0: jax.Array  # uint32
    key1: jax.Array  # uint32
    inverse: jax.Array  # 1 / temperature
    noise_scale: jax.Array  # 1, or 0 to take the likeliest


def update(
    found: Candidates, product: jax.Array, at: jax.Array, first: jax.Array, flags: jax.Array, draw: Draw
) -> Candidates:
    """Counts one id more in every place: number `at` of a word of ids from `first` on, x · Wᵀ its `product`."""
    best, best_id, best_logit, top, mass = found
    ids = at + first
    bit = lax.shift_right_logical(flags, at.astype(jnp.uint32)) & jnp.uint32(1)
    logit = jnp.where(bit == jnp.uint32(0), product * draw.inverse, -jnp.inf)
    perturbed = logit + draw.noise_scale * gumbel(draw.key0, draw.key1, ids.astype(jnp.uint32))
    better = perturbed > best
    best_id = jnp.where(better, ids, best_id)
    best_logit = jnp.where(better, logit, best_logit)
    best = jnp.where(better, perturbed, best)
    new_top = jnp.maximum(top, logit)
    mass = mass * jnp.exp(top - new_top) + jnp.exp(logit - new_top)
    return Candidates(best, best_id, best_logit, new_top, mass)


def reduce_candidates(found: Candidates) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    """Reduces each row's candidates, all five numbers at once, to its token and log-probability."""

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (best_a, id_a, logit_a, top_a, mass_a), (best_b, id_b, logit_b, top_b, mass_b) = a, b
        first = (best_a > best_b) | ((best_a == best_b) & (id_a < id_b))
        top = jnp.maximum(top_a, top_b)
        mass = mass_a * jnp.exp(top_a - top) + mass_b * jnp.exp(top_b - top)
        chosen = (jnp.where(first, x, y) for x, y in ((best_a, best_b), (id_a, id_b), (logit_a, logit_b)))
        return (*chosen, top, mass)

    before = (-jnp.inf, NO_ID, -jnp.inf, MASKED, 0.0)
    start = tuple(jnp.asarray(x, operand.dtype) for x, operand in zip(before, found, strict=True))
    _, token, logit, top, mass = lax.reduce(tuple(found), start, better, (1,))
    return token, logit - top - jnp.log(mass)
