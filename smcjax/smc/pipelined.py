"""The cycle of `SMC(pipelined=True)`: the draft writes the next block while the target scores this one.

A row in flight has committed tokens and behind them a *pending* block of K drafts, which no target has seen. A cycle

    proposes  K tokens behind the pending block, by the draft alone
    scores    the pending block, by the target alone
    commits   the pending block and weighs its rows, which makes the new drafts the pending block
    resamples rows together with their pending blocks

Drafts and scores need nothing of each other, so two devices can compute them at the same time
(`smcjax.decoding.disaggregation`). Weights decide about a block one cycle later than they would otherwise: copies of a
row share the pending block and part behind it. The law is unbiased all the same: the block is drawn from q behind its
row whichever cycle weighs it, and resampling by the weights of the committed tokens keeps expectations of whatever the
rows carry with them. No bonus token is drawn: the draft has gone on before the target could say it.

Pending tokens and their log q stand where the row's next tokens and log p will, `Sequences.tokens` and `.logprobs`
from `length` on. In its first cycle a group has no pending block, and nothing to score: an answer takes one cycle more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smcjax.decoding.constraints import row_constraint
from smcjax.decoding.disaggregation import Part, run_disaggregated
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.groups import PairParams
from smcjax.decoding.program import by_implementation
from smcjax.decoding.scores import Scores, scores
from smcjax.decoding.sequences import put_behind
from smcjax.decoding.speculation import propose, reserve, score
from smcjax.smc.acceptance import NewBlock
from smcjax.smc.chosen_parts import ending_of, potentials_of
from smcjax.smc.cycle import commit, draft_distribution, end, resample, tempered
from smcjax.smc.potential import reads_hidden
from smcjax.smc.state import Info, SMCProgram, State
from smcjax.smc.weights import draft_increment, logprob_at


@by_implementation
def step(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by its K pending tokens and drafts the next K; a group's first cycle only drafts."""
    ran, waiting = state.running, state.running & (state.cycle == 0)
    pending = pending_of(state, program.decoding.gamma)
    state, drafts, block = draft_and_score(program, params, state, pending)
    state = commit_pending(program, state, waiting, block)
    # Behind the committed tokens, among which the block before it is by now.
    sequences = put_behind(state.sequences, drafts.tokens, drafts.logprobs, state.live)
    state = end(dataclasses.replace(state, sequences=sequences), ending_of(program.decoding))
    return resample(program, state, block, ran, pending=program.decoding.gamma)


def pending_of(state: State, gamma: int) -> Drafts:
    """The K tokens behind each row's committed ones, and their log q. In a group's first cycle they say nothing."""
    sequences = state.sequences
    columns = sequences.length[:, None] + jnp.arange(gamma)[None]
    row = jnp.arange(columns.shape[0])[:, None]
    return Drafts(*(array.at[row, columns].get(mode="clip") for array in (sequences.tokens, sequences.logprobs)))


def ahead_of(state: State, pending: Drafts) -> State:
    """The state as the draft sees it: pending tokens are committed, and rows that those take to the cap, finished."""
    gamma, sequences = pending.tokens.shape[1], state.sequences
    lead = state.per_row(jnp.where(state.cycle == 0, 0, gamma))
    length = sequences.length + lead
    capped = (lead > 0) & (length >= state.per_row(state.requests.limit))
    constraint = row_constraint(state, state.rows)
    automaton = None
    if constraint is not None:
        none = constraint.stops.shape[1]  # stands for no token
        automaton = constraint.behind(jnp.where(lead[:, None] > 0, pending.tokens, none)).state
    longer = dataclasses.replace(sequences, length=length, finished=sequences.finished | capped, automaton=automaton)
    return dataclasses.replace(state, sequences=longer)


@jax.named_scope("draft and score")
def draft_and_score(
    program: SMCProgram, params: PairParams, state: State, pending: Drafts
) -> tuple[State, Drafts, NewBlock]:
    """The next K drafts a row, and the pending block with its weights, each written to its model's KV."""
    smc, waiting = program.decoding, state.cycle == 0
    ahead, copies = reserve(program, ahead_of(state, pending))
    own_table = dataclasses.replace(state.sequences, block_table=ahead.sequences.block_table)
    state = dataclasses.replace(state, sequences=own_table).with_memory(pool=ahead.memory.pool)

    def drafting(memory: Any) -> tuple[Any, Drafts]:
        distribution = draft_distribution(ahead, row_constraint(ahead, program.rows))
        groups, drafts = propose(program, params, ahead.with_memory(draft=memory), distribution, copies)
        return groups.memory.draft, drafts

    asked = reads_hidden(potentials_of(program))

    def scoring(memory: Any) -> tuple[Any, tuple[Float[Array, "R K"], Scores | None, Float[Array, "R K E"] | None]]:
        # Before pending tokens are written, unlike elsewhere: a page to copy may hold some.
        if copies is not None:
            memory = memory.copy_pages(copies)
        groups = dataclasses.replace(state, running=state.running & ~waiting).with_memory(target=memory)
        groups, logits, hidden = score(program, params, groups, pending.tokens, None, once=True)
        logits = tempered(groups, logits)
        logprobs = logprob_at(logits, pending.tokens)
        of_block = scores(logits, logprobs) if "logprobs" in program.features else None
        return groups.memory.target, (logprobs, of_block, hidden.astype(jnp.float32) if asked else None)

    (draft, drafts), (target, (logprobs, of_block, hidden)) = run_disaggregated(
        Part(drafting, state.memory.draft), Part(scoring, state.memory.target), axis=program.disaggregated_axis
    )
    state = state.with_memory(target=target, draft=draft)
    increments = draft_increment(smc.power, logprobs, pending.logprobs)
    return state, drafts, NewBlock(pending.tokens, increments, logprobs, scores=of_block, hidden=hidden)


def commit_pending(program: SMCProgram, state: State, waiting: Bool[Array, " G"], block: NewBlock) -> State:
    """Commits pending blocks to the live rows and their weights, as `commit` does; groups that wait have none."""
    going = dataclasses.replace(state, running=state.running & ~waiting)
    committed = commit(going, block, potentials_of(program))
    return dataclasses.replace(committed, running=committed.running | waiting)
