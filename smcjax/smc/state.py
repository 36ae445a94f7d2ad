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
    log_potential: Float[Array, "G N"]  # what the weights have of potentials (`smcjax.smc.potential`)
    log_text_potential: Float[Array, "G N"]  # what they have of text potentials (`smcjax.smc.steering`)
    parent: Int[Array, "G N"]  # the row that each was before the last cycle, kept where text potentials are asked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info(groups.Info):
    """The report of one cycle, with its weights and its resampling."""

    ess: Float[Array, " G"]
    resampled: Bool[Array, " G"]
    ancestors: Int[Array, "G N"]  # the row itself where nothing was resampled
    log_weight: Float[Array, "G N"]  # before resampling
    finished: Bool[Array, "G N"]  # after resampling
    weighed: Int[Array, "G N"]  # lengths before resampling
    # What the weights have of text potentials after the cycle, in programs that know of them.
    log_text_potential: Float[Array, "G N"] | None = None
