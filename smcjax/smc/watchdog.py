"""A control that is raised while a group runs, once its evidence falls faster than a stated rate ρ, nats a token.

With E the group's log Ẑ as if it ended now, and n the tokens that a cycle adds, weighted as the rows were before it,

    excess ← max(0, excess − ΔE − ρ·n)          (Page 1954, Continuous Inspection Schemes)

is by how much the evidence has fallen below that rate since it last kept to it. Once it exceeds `ALARM`, the control of
all following cycles is e^−ρ. Every token weighs at least its control, so by Jensen's inequality

    ΔE = log Σ W_i·exp(increment_i) ≥ Σ W_i·increment_i ≥ −ρ·n

from then on: the evidence never falls faster again, and no further step is needed.

A cycle's control is a function of the cycles before it, and weights are right for any control, so what is unbiased for
one is so for all of these (docs/algorithm.md, "Control").
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.decoders import ALARM, SMC
from smcjax.smc.state import State
from smcjax.smc.weights import log_mean_weight, normalized_weights


def watch(smc: SMC, before: State, after: State) -> State:
    """`after` a cycle has been weighed and before it is resampled, with the control of the next one.

    Groups that are frozen change nothing: neither evidence nor lengths have.
    """
    assert before.excess is not None
    assert smc.watchdog is not None
    gained = (after.sequences.length - before.sequences.length).reshape(before.log_weight.shape)
    tokens = jnp.sum(normalized_weights(before.log_weight) * gained, axis=1)
    excess = jnp.maximum(0.0, before.excess - (_evidence(after) - _evidence(before)) - smc.watchdog * tokens)
    raised = jnp.maximum(before.control, smc.raised_control)  # a request's own may be higher
    control = jnp.where(excess > ALARM, raised, before.control)
    return dataclasses.replace(after, control=control, excess=excess)


def _evidence(state: State) -> Float[Array, " G"]:
    """log Ẑ as if the groups ended now."""
    return state.log_evidence + log_mean_weight(state.log_weight)
