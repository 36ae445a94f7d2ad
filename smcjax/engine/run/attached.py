"""Arrays that some requests bring beside a batch's state: attached to it within the programs that know of them alone.

So every other program has the state that it had before there was any of this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int

from smcjax.decoding.adjustments import Adjustments
from smcjax.decoding.constraints import AutomatonTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constraints:
    """The automata of G requests and of their R rows."""

    automaton: Int[Array, " G"]  # `Requests.automaton`
    states: Int[Array, " R"]  # `Sequences.automaton`
    tables: AutomatonTables  # `Memory.automata`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attached:
    """The attachments of a batch; None: the program does not know of them."""

    adjustments: Adjustments | None = None
    constraints: Constraints | None = None


def attach(state: Any, attached: Attached | None = None) -> Any:
    """The state with the attachments; None: as it is."""
    if attached is None:
        return state
    requests, constraints = dataclasses.replace(state.requests, adjustments=attached.adjustments), attached.constraints
    if constraints is None:
        return dataclasses.replace(state, requests=requests)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, automaton=constraints.automaton),
        sequences=dataclasses.replace(state.sequences, automaton=constraints.states),
        memory=dataclasses.replace(state.memory, automata=constraints.tables),
    )


def detach(state: Any, *, constraints: bool = True) -> Any:
    """The state without adjustments and, unless these are to stay, without constraints."""
    state = dataclasses.replace(state, requests=dataclasses.replace(state.requests, adjustments=None))
    if not constraints:
        return state
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(state.requests, automaton=None),
        sequences=dataclasses.replace(state.sequences, automaton=None),
        memory=dataclasses.replace(state.memory, automata=None),
    )
