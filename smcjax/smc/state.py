"""The state of SMC decoding: what a cycle carries, apart from what it reports."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoders import SMC, Speculation
from smcjax.decoding.sequences import Requests, Sequences
from smcjax.decoding.speculation import Memory, PairProgram
from smcjax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Program(PairProgram):
    """All that is static about a cycle. Hashable: pass it to `jax.jit` as a static argument or close over it."""

    smc: SMC
    target: ModelConfig
    draft: ModelConfig
    max_model_len: int
    page_size: int = 16
    implementation: str = "auto"  # with GPU kernels or without: `smcjax.pallas.uses_kernels`

    @property
    def speculation(self) -> Speculation:
        """What the draft and the target's forward need to know."""
        return self.smc.speculation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """G groups of N particles in flight. Frontier and `prev` are the last two committed tokens of a row."""

    requests: Requests
    sequences: Sequences  # R = G·N rows
    log_weight: Float[Array, "G N"]  # since the last resampling
    log_evidence: Float[Array, " G"]  # log Ẑ without the closing term
    cycle: Int[Array, " G"]  # the group's own cycle: 0 draws x₀
    running: Bool[Array, " G"]  # a group that is not is frozen
    failed: Bool[Array, " G"]  # ended because no weight is left or one is NaN
    memory: Memory

    @property
    def live(self) -> Bool[Array, " R"]:
        """Rows that a cycle advances."""
        return self.per_row(self.running) & ~self.sequences.finished

    def per_row(self, per_group: Array) -> Array:
        """A [G, …] array repeated for every row: [R, …]."""
        return jnp.repeat(per_group, self.log_weight.shape[1], axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """What one cycle reports. For groups that were frozen when it began, `ran` is false and the rest is stale."""

    ran: Bool[Array, " G"]
    ess: Float[Array, " G"]
    resampled: Bool[Array, " G"]
    ancestors: Int[Array, "G N"]  # the row itself where nothing was resampled
    log_weight: Float[Array, "G N"]  # before resampling
    length: Int[Array, "G N"]  # after resampling, as `finished`
    finished: Bool[Array, "G N"]
    done: Bool[Array, " G"]  # no longer running
    tokens: Int[Array, "G N C"]  # each row's block before resampling; what lies behind the row's end is not part of it
