"""From prompts to a running population, and from a population to an answer.

    begin → prefill (chunk by chunk) → start → step … step → conclude

`init` does the first three at once, for research code; the engine calls them one by one, so that prompts of any
length run through programs of fixed shapes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding import admission
from smcjax.decoding.constraints import masked, row_constraint
from smcjax.decoding.groups import Memory, PairParams
from smcjax.decoding.program import by_implementation
from smcjax.decoding.sampling import Purpose, draw, group_keys, row_keys
from smcjax.decoding.sequences import Population, Requests, population
from smcjax.model.decoder import unembed
from smcjax.smc.acceptance import NewBlock
from smcjax.smc.chosen_parts import potentials_of
from smcjax.smc.cycle import commit, tempered
from smcjax.smc.potential import reads_hidden
from smcjax.smc.state import SMCProgram, State
from smcjax.smc.weights import bonus_increment, log_mean_weight, logprob_at


def begin(
    program: SMCProgram,
    memory: Memory,
    prompts: Int[Array, "G L"],
    requests: Requests,
    present: Bool[Array, " G"],
    prefix: Int[Array, "G M"] | None = None,
) -> State:
    """A population for each prompt, weights equal: `smcjax.decoding.admission.begin`."""
    groups = admission.begin(program, memory, prompts, requests, present, prefix)
    of_rows = (present.shape[0], program.rows)
    return State(
        **vars(groups),
        log_weight=jnp.zeros(of_rows, jnp.float32),
        log_evidence=jnp.zeros(present.shape, jnp.float32),
        log_potential=jnp.zeros(of_rows, jnp.float32),
        log_text_potential=jnp.zeros(of_rows, jnp.float32),
        parent=jnp.broadcast_to(jnp.arange(program.rows, dtype=jnp.int32), of_rows),
    )


@by_implementation
def start(program: SMCProgram, params: PairParams, state: State, last_hidden: Float[Array, "G E"]) -> State:
    """Draws x₀ for every particle from the target's prefill logits, by the bonus rule."""
    smc = program.decoding
    logits = tempered(state, state.per_row(unembed(params.target, last_hidden))[:, None])[:, 0]
    keys = row_keys(state.requests.key, state.cycle, program.rows, Purpose.FIRST)
    constraint = row_constraint(state, program.rows)
    allowed = None if constraint is None else constraint.allowed()
    first = draw(keys, masked(smc.power * logits, allowed))
    potentials = potentials_of(program)
    block = NewBlock(
        tokens=first[:, None],
        increments=bonus_increment(smc.power, logits, allowed)[:, None],
        logprobs=logprob_at(logits, first)[:, None],
        hidden=state.per_row(last_hidden)[:, None] if reads_hidden(potentials) else None,
    )
    return commit(state, block, potentials)


def init(
    program: SMCProgram,
    params: PairParams,
    prompts: Int[Array, "G L"],
    requests: Requests,
    *,
    num_pages: int | None = None,
    memory: Memory | None = None,
) -> State:
    """A population ready for `step`: pages taken, prompts prefilled, x₀ drawn. Pure and jit-able (program static).

    `prompts` are padded on the right; `requests.prompt_length` says how much of each row counts. Give `memory` to
    reuse one, or `num_pages` for a new one (default: what all rows need when none of their pages is shared).
    """
    groups, length = prompts.shape
    if memory is None:
        memory = program.create_memory(params, num_pages or groups * program.rows * program.max_pages + 1)
    state = begin(program, memory, prompts, requests, jnp.ones(groups, bool))
    last_hidden = jnp.zeros((groups, program.target.hidden_size), params.target.embed.dtype)
    state, last_hidden = admission.prefill(program, params, state, jnp.asarray(0, jnp.int32), length, last_hidden)
    return start(program, params, state, last_hidden)


def log_evidence(state: State) -> Float[Array, " G"]:
    """log Ẑ of each group, the closing term LSE(log w) − log N included."""
    return state.log_evidence + log_mean_weight(state.log_weight)


def select(program: SMCProgram, state: State) -> Int[Array, " G"]:
    """The particle that answers: drawn from softmax(log w), or the largest weight, ties to the lowest row."""
    if program.decoding.select == "best":
        return jnp.argmax(state.log_weight, axis=1).astype(jnp.int32)
    return draw(group_keys(state.requests.key, state.cycle, Purpose.SELECT), state.log_weight)


def conclude(program: SMCProgram, state: State) -> tuple[Population, Memory]:
    """The ended populations with the rows that answer, and the memory with every page given back."""
    ended = population(
        state.sequences,
        log_weight=state.log_weight,
        log_evidence=log_evidence(state),
        selected=select(program, state),
        failed=state.failed,
        log_text_potential=state.log_text_potential,
    )
    return ended, state.release()
