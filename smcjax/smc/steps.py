"""One cycle of whichever kind the decoder asks for, and many in one program."""

from __future__ import annotations

import jax

from smcjax.decoding.groups import PairParams
from smcjax.smc import cycle, pipelined
from smcjax.smc.state import Info, SMCProgram, State


def step(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by one cycle: `smcjax.smc.cycle.step`, or `smcjax.smc.pipelined.step`."""
    return (pipelined.step if program.decoding.pipelined else cycle.step)(program, params, state)


def run(program: SMCProgram, params: PairParams, state: State, num_cycles: int) -> tuple[State, Info]:
    """Runs `num_cycles` cycles in one program; Info gets a leading [num_cycles] axis. Ended groups stay frozen."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_cycles)
