"""Values of text potentials in a cycle: the host's functions of text, as weights on the device.

The host reads a cycle's report, asks functions of text about its rows, and sends their values with a later cycle, while
the one between runs. So values are one cycle late, and the rows that they are about have been resampled meanwhile:

    host        values of the rows behind cycle t                     sent with cycle t + 2
    device      a row takes the value of the row that it was then     `State.parent`, its ancestor in cycle t + 1
    weight      log w += log ψ(then) − what it has of ψ so far        `State.log_text_potential`

The terms telescope, so a weight has at any time ψ of a beginning of its answer. The last one, Φ of the whole answer,
is the host's when the population has ended (`smcjax.engine.results.steering`). A group whose values are late
takes no cycle until they come: its tokens depend on its seed and not on how long a function takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smcjax.smc.cycle import update_running
from smcjax.smc.state import Info, State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextValues:
    """The host sends these values with a cycle of G groups of N rows."""

    log_value: Float[Array, "G N"]  # of the rows as they were before the last cycle
    known: Bool[Array, " G"]  # groups with values
    waits: Bool[Array, " G"]  # groups that take no cycle

    @classmethod
    def nothing(cls, groups: int, rows: int) -> TextValues:
        """No values, as arrays of the host that are to be filled."""
        return cls(np.zeros((groups, rows), np.float32), np.zeros(groups, bool), np.zeros(groups, bool))  # type: ignore[arg-type]


def steered(step: Callable[[State], tuple[State, Info]], state: State, values: TextValues) -> tuple[State, Info]:
    """A cycle of the groups that do not wait, after their weights have changed by the values.

    A group that is left without a usable weight ends, and its report says so.
    """
    going = state.running & ~values.waits
    weighed = weigh_by(state, values)
    awake = dataclasses.replace(weighed, running=weighed.running & ~values.waits)
    after, info = step(awake)
    running = after.running | (weighed.running & values.waits)
    info = dataclasses.replace(info, ran=going, done=~running)
    of_text = jnp.take_along_axis(after.log_text_potential, info.ancestors, axis=1)
    of_text = jnp.where(awake.running[:, None], of_text, after.log_text_potential)
    parent = jnp.where(awake.running[:, None], info.ancestors, after.parent)
    after = dataclasses.replace(after, running=running, log_text_potential=of_text, parent=parent)
    return after, dataclasses.replace(info, log_text_potential=of_text)


def weigh_by(state: State, values: TextValues) -> State:
    """Moves weights by what the values of rows have gained since they were told last."""
    value = jnp.take_along_axis(values.log_value, state.parent, axis=1)
    told = (state.running & values.known & ~values.waits)[:, None] & ~jnp.isneginf(state.log_weight)
    gained = jnp.where(told, value - state.log_text_potential, 0.0)
    return update_running(
        dataclasses.replace(
            state,
            log_weight=state.log_weight + gained,
            log_text_potential=jnp.where(told, value, state.log_text_potential),
        )
    )
