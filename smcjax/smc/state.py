"""The state of SMC decoding, and the report of a cycle."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoders import SMC
from smcjax.decoding import groups
from smcjax.decoding.program import Program as Program

SMCProgram = Program[SMC]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State(groups.Groups):
    """G groups of N particles in flight. Frontier and `prev` are the last two committed tokens of a row."""

    log_weight: Float[Array, "G N"]  # since the last resampling
    log_evidence: Float[Array, " G"]  # log Ẑ without the closing term
    control: Float[Array, " G"]  # c of the next cycle
    excess: Float[Array, " G"] | None = None  # the watchdog's, nats (`smcjax.smc.watchdog`); None: there is none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info(groups.Info):
    """The report of one cycle, with its weights and its resampling.

    With branching, rows are resampled before they are given `tokens`: weights and ESS are of their children's sums, and
    `tokens`, as `weighed` and `length`, of the copies.
    """

    ess: Float[Array, " G"]
    resampled: Bool[Array, " G"]
    ancestors: Int[Array, "G N"]  # the row itself where nothing was resampled
    log_weight: Float[Array, "G N"]  # before resampling
    finished: Bool[Array, "G N"]  # after resampling
    weighed: Int[Array, "G N"]  # lengths before resampling
    control: Float[Array, " G"]  # of the next cycle
