"""When a population ends: once all particles have finished, or before its slowest one has, without bias.

The wait for the longest particle can be cut short by Russian roulette (Kahn & Harris 1951): once some particles have
finished, one coin decides between these and the others, by their shares of the weight.

    with probability F = Σ W_i over finished i    the finished stay, w_i/F each, the others weigh 0, and the group ends
    else                                          the others stay, w_i/(1 − F) each, and the finished weigh 0

The mean of every weight is what it was, whatever the answer's length, so Ẑ·Σ W f keeps its expectation (law 2), and the
total weight does not change at all. Weights of 0 lower the ESS, and the next resampling replaces those rows.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Outcomes(NamedTuple):
    """B outcomes of a group's ending, of which one uniform chooses."""

    probability: Float[Array, "G B"]  # of each; the last takes what the others leave
    log_weight: Float[Array, "G B N"]

    def at(self, uniforms: Float[Array, " G"]) -> Float[Array, "G N"]:
        """The log weights of the outcome in whose part of [0, 1) each group's uniform lies."""
        passed = uniforms[:, None] >= jnp.cumsum(self.probability[:, :-1], axis=1)
        chosen = jnp.sum(passed, axis=1, dtype=jnp.int32)
        return jnp.take_along_axis(self.log_weight, chosen[:, None, None], axis=1)[:, 0]


@dataclasses.dataclass(frozen=True)
class WaitForAll:
    """Changes no weight: a population ends with its longest particle."""

    def outcomes(self, log_weight: Float[Array, "G N"], finished: Bool[Array, "G N"]) -> Outcomes:
        """One outcome, the weights as they are."""
        return Outcomes(jnp.ones_like(log_weight[:, :1]), log_weight[:, None])


@dataclasses.dataclass(frozen=True)
class Roulette:
    """Ends a population with its finished particles by a coin of their share of the weight."""

    def outcomes(self, log_weight: Float[Array, "G N"], finished: Bool[Array, "G N"]) -> Outcomes:
        """The finished particles alone, or the others alone; where there are not both, the weights as they are."""
        alive = ~jnp.isneginf(log_weight)
        ended, going = alive & finished, alive & ~finished
        some = ended.any(axis=1) & going.any(axis=1)
        total = jax.nn.logsumexp(log_weight, axis=1)
        shares, weights = [], []
        for stays in (ended, going):
            share = jax.nn.logsumexp(jnp.where(stays, log_weight, -jnp.inf), axis=1) - total
            divided = jnp.where(stays, log_weight - share[:, None], -jnp.inf)
            shares.append(jnp.exp(share))
            weights.append(jnp.where(some[:, None], divided, log_weight))
        return Outcomes(jnp.stack(shares, axis=1), jnp.stack(weights, axis=1))
