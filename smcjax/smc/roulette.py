"""Ending a population before its slowest particle has finished, without bias: Russian roulette (Kahn & Harris 1951).

A population ends when all of its particles have, so it waits for the longest. Instead, once some have finished, one
coin decides between these and the others, by their shares of the weight:

    with probability F = Σ W_i over finished i    the finished stay, w_i/F each, the others weigh 0, and the group ends
    else                                          the others stay, w_i/(1 − F) each, and the finished weigh 0

The mean of every weight is what it was, whatever the answer's length, so Ẑ·Σ W f keeps its expectation (law 2), and the
total weight does not change at all. Weights of 0 lower the ESS, and the next resampling replaces those rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smcjax import noise
from smcjax.decoding.sampling import Purpose, group_keys
from smcjax.smc.state import State


def part(
    log_weight: Float[Array, "G N"], finished: Bool[Array, "G N"], uniforms: Float[Array, " G"]
) -> Float[Array, "G N"]:
    """Log weights after the coins of groups in which some particles of weight above 0 have finished and some have not.

    The finished ones stay where the group's uniform is below their share.
    """
    alive = ~jnp.isneginf(log_weight)
    ended, going = alive & finished, alive & ~finished
    some = ended.any(axis=1) & going.any(axis=1)
    total = jax.nn.logsumexp(log_weight, axis=1)
    share, rest = (jax.nn.logsumexp(jnp.where(of, log_weight, -jnp.inf), axis=1) - total for of in (ended, going))
    stop = uniforms < jnp.exp(share)
    stays = jnp.where(stop[:, None], ended, going)
    divided = log_weight - jnp.where(stop, share, rest)[:, None]
    return jnp.where(some[:, None], jnp.where(stays, divided, -jnp.inf), log_weight)


def spin(state: State) -> State:
    """The state with the coins tossed in groups that run."""
    keys = group_keys(state.requests.key, state.cycle, Purpose.END)
    parted = part(state.log_weight, state.by_group(state.sequences.finished), noise.uniforms(keys, ()))
    return dataclasses.replace(state, log_weight=jnp.where(state.running[:, None], parted, state.log_weight))
