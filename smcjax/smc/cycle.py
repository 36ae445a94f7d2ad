"""The SMC cycle as one pure function of (params, state), made of parts.

    reserve    pages of its own for each particle's block
    propose    K tokens a particle from the draft model
    score      all of them in one forward of the target
    judge      which drafts a particle keeps, and the token behind them (`smcjax.smc.acceptance`)
    commit     the block, up to the row's end, and with it
    weigh      log w += Σ of the block's increments, and what the potentials of the row's answer have gained
               (`smcjax.smc.potential`)
    end        a rule may end the population before its slowest particle (`smcjax.smc.ending`)
    resample   where ESS < threshold·N: ancestors, row state and block tables; KV does not move

Every shape depends on the program only; nothing reads a value on the host. A group whose population has ended is
frozen: its rows go through the forwards like all others, write to the trash page, and change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smcjax import noise
from smcjax.checks import short
from smcjax.decoders.parts import Ending, Potential
from smcjax.decoding.constraints import RowConstraint, extend, row_constraint
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.groups import PairParams
from smcjax.decoding.program import by_implementation
from smcjax.decoding.sampling import Purpose, forbid_stops, group_keys, row_keys
from smcjax.decoding.scores import by_group, scores
from smcjax.decoding.sequences import Block, Sequences
from smcjax.decoding.speculation import keep_pages, propose, reserve, score
from smcjax.kv import fork as fork_rows
from smcjax.smc.acceptance import NewBlock, Scored
from smcjax.smc.chosen_parts import acceptance_of, ending_of, potentials_of
from smcjax.smc.potential import Answers, reads_hidden
from smcjax.smc.resampling import Resampling, plan_resampling
from smcjax.smc.state import Info, SMCProgram, State
from smcjax.smc.weights import temper


@by_implementation
def step(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by one cycle, of `SMC.tokens_per_cycle` tokens at most."""
    # The groups of this cycle: those that end in it leave `state.running`.
    ran, acceptance = state.running, acceptance_of(program, state)
    constraint = row_constraint(state, program.rows)
    proposal = draft_distribution(state, constraint)
    # `copies` are part-filled pages shared with other rows, which both models' first forwards copy before they write.
    state, copies = reserve(program, state)
    state, drafts = propose(program, params, state, proposal, copies, keep_logits=acceptance.rejects)
    state, logits, hidden = score(program, params, state, drafts.tokens, copies)
    scored = scored_drafts(program, state, logits, drafts, constraint)
    block = dataclasses.replace(acceptance.judge(scored), hidden=hidden)
    state = commit(state, block, potentials_of(program))
    state = end(state, ending_of(program.decoding))
    if acceptance.rejects:
        state = keep_pages(program, state, ran)
    if "logprobs" in program.features:
        block = dataclasses.replace(block, scores=scores(scored.logits, block.logprobs))
    return resample(program, state, block, ran)


def draft_distribution(state: State, constraint: RowConstraint | None) -> SamplingDistribution:
    """q, with the target's minimum of tokens and constraint, and never truncated."""
    return SamplingDistribution(
        state.per_row(state.requests.temperature),
        state.per_row(state.requests.stops),
        state.per_row(state.requests.min_tokens),
        features=() if constraint is None else (constraint,),
    )


def scored_drafts(
    program: SMCProgram, state: State, logits: Float[Array, "R C V"], drafts: Drafts, constraint: RowConstraint | None
) -> Scored:
    """The drafts with the target's tempered logits and the keys of this cycle."""
    key, cycle = state.requests.key, state.cycle
    return Scored(
        power=program.decoding.power,
        logits=tempered(state, logits),
        drafts=drafts,
        constraint=constraint,
        accept_keys=group_keys(key, cycle, Purpose.ACCEPT),
        next_keys=row_keys(key, cycle, program.rows, Purpose.BONUS),
    )


def tempered(state: State, logits: Float[Array, "R C V"]) -> Float[Array, "R C V"]:
    """`temper`'s logits of a block's columns, stop tokens impossible where the request's minimum says so."""
    requests = state.requests
    generated = state.sequences.length - state.per_row(requests.prompt_length)
    possible = forbid_stops(
        logits,
        state.per_row(requests.stops)[:, None],
        generated[:, None] + 1 + jnp.arange(logits.shape[1])[None],
        state.per_row(requests.min_tokens)[:, None],
    )
    return temper(possible, state.per_row(requests.temperature)[:, None])


@jax.named_scope("commit")
def commit(state: State, new: NewBlock, potentials: Sequence[Potential] = ()) -> State:
    """Gives the live rows their new tokens, and weighs them."""
    live = state.live
    sequences, block = extend(state, new.tokens, new.logprobs, live, last=new.last)
    increment = jnp.where(live, block_weight(new.increments, block), 0.0)
    log_weight = state.log_weight + state.by_group(increment)
    state = dataclasses.replace(state, sequences=sequences, log_weight=log_weight)
    if potentials:
        hidden = newest_hidden(new, block) if reads_hidden(potentials) else None
        state = steer(state, potentials, live, hidden)
    return update_running(state)


def newest_hidden(new: NewBlock, block: Block) -> Float[Array, "R E"]:
    """The hidden state whose logits each row's newest token was drawn from; any of rows that get none."""
    assert new.hidden is not None
    newest = jnp.maximum(jnp.sum(block.counted, axis=1, dtype=jnp.int32) - 1, 0)
    return jnp.take_along_axis(new.hidden, newest[:, None, None], axis=1)[:, 0].astype(float)


def block_weight(increments: Float[Array, "R C"], block: Block) -> Float[Array, " R"]:
    """Sum of the increments that count: what lies past a row's end is not part of its weight."""
    return jnp.sum(jnp.where(block.counted, increments, 0.0), axis=1)


def update_running(state: State) -> State:
    """Stops the groups whose weights are unusable or whose rows have all finished."""
    log_weight = state.log_weight
    unusable = broken(log_weight)
    finished = state.sequences.finished.reshape(log_weight.shape) | jnp.isneginf(log_weight)
    return dataclasses.replace(
        state,
        failed=state.failed | (state.running & unusable),
        running=state.running & ~unusable & ~finished.all(axis=1),
    )


def broken(log_weight: Float[Array, "G N"]) -> Bool[Array, " G"]:
    """Groups whose weights are unusable: any NaN or +inf, or all −inf."""
    return (jnp.isnan(log_weight) | jnp.isposinf(log_weight)).any(axis=1) | jnp.isneginf(log_weight).all(axis=1)


def steer(
    state: State, potentials: Sequence[Potential], live: Bool[Array, " R"], hidden: Float[Array, "R E"] | None = None
) -> State:
    """Moves weights by what the log potentials of the rows' tokens have gained since they were asked last.

    Rows that are not `live` have no new tokens, and what was asked of theirs stands.
    """
    sequences, before, wanted = state.sequences, state.log_potential, state.requests.potentials
    begin = state.per_row(state.requests.prompt_length)
    wanted = None if wanted is None else state.per_row(wanted)
    answers = Answers(
        sequences.tokens,
        begin,
        sequences.length,
        sequences.finished,
        sequences.logprobs,
        wanted=wanted,
        hidden=hidden,
    )
    nothing = jnp.zeros(begin.shape, before.dtype)
    value = state.by_group(sum((log_value(one, answers) for one in potentials), nothing))
    value = jnp.where(state.by_group(live), value, before)
    gained = jnp.where(jnp.isneginf(state.log_weight), 0.0, value - before)  # a particle once dead stays so
    return dataclasses.replace(state, log_weight=state.log_weight + gained, log_potential=value)


def log_value(potential: Potential, answers: Answers) -> Float[Array, " R"]:
    """The potential's values. Raises ValueError for what it raises, which an engine takes for its requests' failure."""
    try:
        return potential.log_value(answers)
    except Exception as error:
        raise ValueError(f"{short(potential)} failed, {type(error).__name__}: {error}") from error


@jax.named_scope("end")
def end(state: State, ending: Ending) -> State:
    """Draws an outcome of the rule about ends in groups that run."""
    keys = group_keys(state.requests.key, state.cycle, Purpose.END)
    outcomes = ending.outcomes(state.log_weight, state.by_group(state.sequences.finished))
    if outcomes.probability.shape[1] == 1:
        return state
    log_weight = jnp.where(state.running[:, None], outcomes.at(noise.uniforms(keys, ())), state.log_weight)
    return update_running(dataclasses.replace(state, log_weight=log_weight))


@jax.named_scope("resample")
def resample(
    program: SMCProgram, state: State, block: NewBlock, ran: Bool[Array, " G"], *, pending: int = 0
) -> tuple[State, Info]:
    """Resamples the running groups whose ESS is low, and reports the cycle of the groups that `ran`.

    `block` is the rows' newest one. Copies get the `pending` tokens behind the committed ones as well.
    """
    log_weight = state.log_weight
    plan = plan_resampling(
        group_keys(state.requests.key, state.cycle, Purpose.RESAMPLE),
        log_weight,
        state.running,
        method=program.decoding.resampling,
        threshold=program.decoding.ess_threshold,
    )
    weighed, state = state.by_group(state.sequences.length), fork(state, plan, pending=pending)
    info = Info(
        ran=ran,
        done=~state.running,
        tokens=state.by_group(block.tokens),
        length=state.by_group(state.sequences.length),
        ess=plan.ess,
        resampled=plan.resampled,
        ancestors=plan.ancestors,
        log_weight=log_weight,
        finished=state.by_group(state.sequences.finished),
        weighed=weighed,
        scores=None if block.scores is None else by_group(state, block.scores),
    )
    return dataclasses.replace(state, cycle=state.cycle + ran.astype(jnp.int32)), info


def fork(state: State, plan: Resampling, *, pending: int = 0) -> State:
    """Makes every row a copy of its ancestor; resampled groups' mean weight moves into log Ẑ.

    Integers move, keys and values do not. The `pending` tokens behind a row's committed ones are copied too.
    """
    num_groups, n = plan.ancestors.shape
    source = (jnp.arange(num_groups, dtype=jnp.int32)[:, None] * n + plan.ancestors).reshape(-1)
    sequences = state.sequences
    pool, block_table, (tokens, logprobs) = fork_rows(
        state.memory.pool,
        sequences.block_table,
        (sequences.tokens, sequences.logprobs),
        source,
        plan.offspring.reshape(-1),
        begin=state.per_row(state.requests.prompt_length),
        end=sequences.length + pending,
        group=n,
    )
    states = None if sequences.automaton is None else sequences.automaton[source]
    forked = Sequences(tokens, sequences.length[source], sequences.finished[source], logprobs, block_table, states)
    return update_running(
        dataclasses.replace(
            state,
            sequences=forked,
            log_weight=jnp.where(plan.resampled[:, None], 0.0, state.log_weight),
            log_evidence=state.log_evidence + jnp.where(plan.resampled, plan.log_mean_weight, 0.0),
            log_potential=state.log_potential.reshape(-1)[source].reshape(num_groups, n),
            memory=dataclasses.replace(state.memory, pool=pool),
        )
    )
