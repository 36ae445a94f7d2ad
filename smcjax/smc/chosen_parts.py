"""The parts of a cycle that `SMC`'s options stand for: a number, a name or True is one of the package's own."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.decoders import SMC
from smcjax.decoders.parts import Acceptance, Ending, Potential
from smcjax.smc.acceptance import KeepAll, RejectionControl
from smcjax.smc.ending import Roulette, WaitForAll
from smcjax.smc.potential import RequestedPotential
from smcjax.smc.state import SMCProgram, State


def acceptance_of(program: SMCProgram, state: State) -> Acceptance:
    """The rule about drafts of each row: `SMC(control=…)`, or a request's own control in its place."""
    rule = program.decoding.control
    if isinstance(rule, Acceptance):
        return rule
    if not program.ragged:
        return KeepAll()
    return RejectionControl(state.per_row(control_of(rule, state)))


def control_of(usual: float, state: State) -> Float[Array, " G"]:
    """c of each group: its request's or, where that brings none, the decoder's."""
    own = state.requests.control
    return jnp.where(own < 0, jnp.float32(usual), own)


def ending_of(smc: SMC) -> Ending:
    """The rule about ends: `SMC(early_end=…)`."""
    rule = smc.early_end
    if isinstance(rule, bool):
        return Roulette() if rule else WaitForAll()
    return rule


def potentials_of(program: SMCProgram) -> tuple[Potential, ...]:
    """The factors of the target on the device: the decoder's, and those that some requests ask for."""
    requested = (RequestedPotential(one, column) for column, one in enumerate(program.requested_potentials))
    return (*program.decoding.potentials, *requested)
