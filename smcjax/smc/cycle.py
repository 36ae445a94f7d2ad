"""The SMC cycle: draft, verify, weigh, resample, as one pure function of (params, state).

    propose    K tokens a particle from the draft model
    verify     all of them in one target forward, which also draws the bonus token
    weigh      log w += Σ [α·log p_T − log q] + log Z of the bonus, up to the row's end
    resample   where ESS < threshold·N: ancestors, row state and block tables; KV does not move

Every shape depends on the program only; nothing reads a value on the host. A group whose population has ended is
frozen: its rows go through the forwards like all others, write to the trash page, and change nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.next_token import Law, Steps, next_token, plan, prepare
from smcjax.decoding.sampling import Purpose, column_keys, draw, forbid_stops, group_keys, log_softmax_at, row_keys
from smcjax.decoding.sequences import Block, append, cut_block
from smcjax.kv import TRASH, Copies, KVCache, fan_out, make_room
from smcjax.model.decoder import unembed
from smcjax.model.paged import paged_hidden_states
from smcjax.pallas import plan_sharing
from smcjax.smc.resampling import resample as resample_ancestors
from smcjax.smc.state import Info, PairParams, Program, State
from smcjax.smc.weights import (
    bonus_increment,
    draft_increment,
    effective_sample_size,
    log_mean_weight,
    must_resample,
)

DraftCarry = tuple[KVCache, jax.Array, jax.Array]  # and the newest draft, and how many of the steps were taken


def step(program: Program, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by one cycle of `program.smc.tokens_per_cycle` tokens."""
    ran = state.running
    state, copies = reserve(program, state)
    state, drafts, draft_logprobs = propose(program, params, state, copies)
    state, proposal = verify(program, params, state, copies, drafts, draft_logprobs)
    state = weigh(state, proposal)
    state, info = resample(program, state, proposal.tokens)
    state = dataclasses.replace(state, cycle=state.cycle + ran)
    return state, dataclasses.replace(info, ran=ran, done=~state.running)


def run(program: Program, params: PairParams, state: State, num_cycles: int) -> tuple[State, Info]:
    """`num_cycles` cycles in one program; Info fields get a leading [num_cycles] axis. Ended groups stay frozen."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_cycles)


@jax.named_scope("reserve")
def reserve(program: Program, state: State) -> tuple[State, Copies | None]:
    """Pages of their own for the positions that live rows are about to write.

    Also returns which shared part-filled pages each model's first forward is to copy.
    """
    sequences, memory = state.sequences, state.memory
    first = sequences.length - 1  # the frontier
    width = program.smc.tokens_per_cycle
    # The cap's own token is never scored after, so nothing past it needs a page.
    last = jnp.minimum(first + width - 1, state.per_row(state.requests.limit) - 1)
    room = make_room(
        memory.pool,
        sequences.block_table,
        first,
        last,
        state.live,
        page_size=program.page_size,
        max_width=width,
    )
    state = dataclasses.replace(
        state,
        sequences=dataclasses.replace(sequences, block_table=room.block_table),
        memory=dataclasses.replace(memory, pool=room.pool),
    )
    # Pages of one token are never part-filled.
    return state, Copies(room.copy_from, room.copy_to) if program.page_size > 1 else None


def _pages(program: Program, state: State, positions: Int[Array, "R T"]) -> Int[Array, "R T"]:
    """Where the KV of these positions goes; nowhere for rows that are not live and positions beyond the cap."""
    within = positions < state.per_row(state.requests.limit)[:, None]
    return state.sequences.write_pages(positions, state.live[:, None] & within, program.page_size)


def _reach(program: Program, state: State) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """How many slots of each row hold KV by the end of the cycle, and how many every query of the cycle sees.

    Before the first forward a row holds KV up to its frontier; the column before that is the first that a query
    stands at. Rows that are not live reach nothing.
    """
    frontier_at = state.sequences.length - 1
    end = jnp.minimum(frontier_at + program.smc.tokens_per_cycle, state.per_row(state.requests.limit))
    return jnp.where(state.live, end, 0), frontier_at


def _tempered(
    state: State, logits: Float[Array, "R C V"], temperature: Float[Array, " R"], columns: Int[Array, " C"]
) -> Float[Array, "R C V"]:
    """ℓ/T for these columns of the block, with stop tokens impossible where the request's minimum says so."""
    requests = state.requests
    generated = state.sequences.length - state.per_row(requests.prompt_length)
    return forbid_stops(
        logits / temperature[:, None, None],
        state.per_row(requests.stops)[:, None],
        generated[:, None] + 1 + columns,
        state.per_row(requests.min_tokens)[:, None],
    )


@jax.named_scope("propose")
def propose(
    program: Program, params: PairParams, state: State, copies: Copies | None
) -> tuple[State, Int[Array, "R K"], Float[Array, "R K"]]:
    """Draws K draft tokens a row and returns them with log q.

    Writes the draft KV of all but the last, and of that too where the bonus token is not deferred.
    """
    smc, sequences = program.smc, state.sequences
    frontier_at = sequences.length - 1
    keys = row_keys(state.requests.key, state.cycle, smc.n_particles, Purpose.DRAFT)
    temperature = state.per_row(state.requests.temperature)
    if smc.draft_temperature is not None:
        temperature = jnp.full_like(temperature, smc.draft_temperature)

    generated = sequences.length - state.per_row(state.requests.prompt_length)
    stops, config = state.per_row(state.requests.stops), program.draft
    law = Law(temperature, stops, state.per_row(state.requests.min_tokens))
    together = plan(
        config,
        params.draft,
        sequences.block_table,
        *_reach(program, state),
        law,
        rows=smc.n_particles,
        columns=2 if smc.defers else 1,
        page_size=program.page_size,
        implementation=program.implementation,
    )

    def prepared(columns: Int[Array, " K"], positions: Int[Array, "K R T"], pages: Int[Array, "K R T"]) -> Steps:
        """Steps that draw the tokens of these columns."""
        drawn = jax.vmap(lambda column: column_keys(keys, column))(columns)
        return prepare(
            config,
            params.draft,
            Steps(positions, pages, drawn, token_number=generated + 1 + columns[:, None]),
            law,
            plan=together,
            rows=smc.n_particles,
            page_size=program.page_size,
            implementation=program.implementation,
        )

    def forward(
        cache: KVCache, tokens: jax.Array, steps: Steps, step: int | jax.Array, copies: Copies | None = None
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        return next_token(
            config,
            params.draft,
            cache,
            tokens,
            sequences.block_table,
            steps,
            step,
            law,
            plan=together,
            copies=copies,
            implementation=program.implementation,
        )

    # The head: the frontier, and before it `prev` where the last cycle's bonus was deferred.
    frontier = sequences.token_at(frontier_at)
    positions = frontier_at[:, None]
    pages = _pages(program, state, positions)
    tokens = frontier[:, None]
    if smc.defers:
        # At group start `prev` is the last prompt token: its KV is there, perhaps shared with other groups.
        at_start = sequences.length == state.per_row(state.requests.prompt_length) + 1
        previous = jnp.where(at_start[:, None], TRASH, _pages(program, state, positions - 1))
        tokens = jnp.stack([sequences.token_at(frontier_at - 1), frontier], axis=1)
        positions = jnp.concatenate([positions - 1, positions], axis=1)
        pages = jnp.concatenate([previous, pages], axis=1)
    head = prepared(jnp.zeros(1, jnp.int32), positions[None], pages[None])
    token, logprob, cache = forward(state.memory.draft, tokens, head, 0, copies)
    drafts, logprobs = token[:, None], logprob[:, None]

    # The others, and last the forward of the last draft where its KV is wanted now; what would follow it is not.
    after = smc.bonus and not smc.defer_bonus
    columns = jnp.arange(1, smc.gamma + after)
    if not columns.size:
        return dataclasses.replace(state, memory=dataclasses.replace(state.memory, draft=cache)), drafts, logprobs
    ahead = frontier_at[:, None] + columns  # [R, K]
    rest = prepared(columns, ahead.T[:, :, None], _pages(program, state, ahead).T[:, :, None])

    def draft_one(carry: DraftCarry, _: None) -> tuple[DraftCarry, tuple[jax.Array, jax.Array]]:
        cache, token, step = carry
        token, logprob, cache = forward(cache, token[:, None], rest, step)
        return (cache, token, step + 1), (token, logprob)

    # Steps of few launches are unrolled: counting, and putting results in their places, are launches as well.
    unroll = rest.one_kernel is not None
    carry = (cache, token, jnp.int32(0))
    (cache, token, _), others = jax.lax.scan(draft_one, carry, length=smc.gamma - 1, unroll=unroll)
    drafts, logprobs = (
        jnp.concatenate([first, then.T], axis=1) for first, then in zip((drafts, logprobs), others, strict=True)
    )
    if after:
        _, _, cache = forward(cache, token[:, None], rest, smc.gamma - 1)
    return dataclasses.replace(state, memory=dataclasses.replace(state.memory, draft=cache)), drafts, logprobs


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A block of C new tokens a row, C = `tokens_per_cycle`: the drafts and, with bonus, the bonus token."""

    tokens: Int[Array, "R C"]
    increments: Float[Array, "R C"]  # what each adds to the log weight
    logprobs: Float[Array, "R C"]  # log p_T


@jax.named_scope("verify")
def verify(
    program: Program,
    params: PairParams,
    state: State,
    copies: Copies | None,
    drafts: Int[Array, "R K"],
    draft_logprobs: Float[Array, "R K"],
) -> tuple[State, Proposal]:
    """Scores the drafts in one target forward over [frontier, d₀ …], writing its KV, and draws the bonus token."""
    smc, sequences = program.smc, state.sequences
    width = smc.tokens_per_cycle
    frontier_at = sequences.length - 1
    tokens = jnp.concatenate([sequences.token_at(frontier_at)[:, None], drafts[:, : width - 1]], axis=1)
    positions = frontier_at[:, None] + jnp.arange(width)
    config = program.target
    sharing = plan_sharing(
        sequences.block_table,
        *_reach(program, state),
        rows=smc.n_particles,
        columns=width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=program.page_size,
        dtype=params.target.embed.dtype,
        implementation=program.implementation,
    )
    hidden, cache = paged_hidden_states(
        config,
        params.target,
        state.memory.target,
        tokens,
        positions,
        sequences.block_table,
        _pages(program, state, positions),
        copies=copies,
        sharing=sharing,
        implementation=program.implementation,
    )
    temperature = state.per_row(state.requests.temperature)
    logits = _tempered(state, unembed(params.target, hidden), temperature, jnp.arange(width))
    logprobs = log_softmax_at(logits[:, : smc.gamma], drafts)
    increments = draft_increment(smc.power, logprobs, draft_logprobs)
    block = drafts
    if smc.bonus:
        last = logits[:, -1]
        keys = row_keys(state.requests.key, state.cycle, smc.n_particles, Purpose.BONUS)
        bonus = draw(keys, smc.power * last)
        block = jnp.concatenate([drafts, bonus[:, None]], axis=1)
        increments = jnp.concatenate([increments, bonus_increment(smc.power, last)[:, None]], axis=1)
        logprobs = jnp.concatenate([logprobs, log_softmax_at(last, bonus)[:, None]], axis=1)
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, target=cache))
    return state, Proposal(tokens=block, increments=increments, logprobs=logprobs)


def block_weight(increments: Float[Array, "R C"], block: Block) -> Float[Array, " R"]:
    """Sum of the increments that count: what lies past a row's end is not part of its weight."""
    return jnp.sum(jnp.where(block.counted, increments, 0.0), axis=1)


@jax.named_scope("weigh")
def weigh(state: State, proposal: Proposal) -> State:
    """Commits the block to the live rows and their weights; ends groups that have failed or have all finished."""
    requests, live = state.requests, state.live
    block = cut_block(
        proposal.tokens, state.per_row(requests.stops), state.sequences.length, state.per_row(requests.limit)
    )
    increment = jnp.where(live, block_weight(proposal.increments, block), 0.0)
    log_weight = state.log_weight + increment.reshape(state.log_weight.shape)
    sequences = append(state.sequences, proposal.tokens, proposal.logprobs, block, live)
    return settle(dataclasses.replace(state, sequences=sequences, log_weight=log_weight))


def settle(state: State) -> State:
    """Stops the groups whose weights are unusable (any NaN or +inf, or all −inf) or whose rows have all finished."""
    log_weight = state.log_weight
    broken = (jnp.isnan(log_weight) | jnp.isposinf(log_weight)).any(axis=1) | jnp.isneginf(log_weight).all(axis=1)
    finished = state.sequences.finished.reshape(log_weight.shape) | jnp.isneginf(log_weight)
    return dataclasses.replace(
        state,
        failed=state.failed | (state.running & broken),
        running=state.running & ~broken & ~finished.all(axis=1),
    )


@jax.named_scope("resample")
def resample(program: Program, state: State, tokens: Int[Array, "R C"]) -> tuple[State, Info]:
    """Resamples the running groups whose ESS is low; `tokens` are the rows' newest block, for the report."""
    smc, log_weight = program.smc, state.log_weight
    groups, n = log_weight.shape
    ess = effective_sample_size(log_weight)
    needed = state.running & must_resample(ess, n, smc.ess_threshold)
    keys = group_keys(state.requests.key, state.cycle, Purpose.RESAMPLE)
    # A group that is not resampled may have no weight to draw from; what is drawn there is discarded.
    drawn = resample_ancestors(keys, log_weight, smc.resampling)
    ancestors = jnp.where(needed[:, None], drawn, jnp.arange(n))

    resampled = fork(state, needed, ancestors)
    info = Info(
        ran=state.running,
        ess=ess,
        resampled=needed,
        ancestors=ancestors,
        log_weight=log_weight,
        length=resampled.sequences.length.reshape(groups, n),
        finished=resampled.sequences.finished.reshape(groups, n),
        done=~resampled.running,
        tokens=tokens.reshape(groups, n, -1),
    )
    return resampled, info


def fork(state: State, groups: Bool[Array, " G"], ancestors: Int[Array, "G N"]) -> State:
    """Makes every row of `groups` a copy of its ancestor and moves their mean weight into log Ẑ.

    Integers move, keys and values do not. Rows of the other groups are their own ancestors.
    """
    num_groups, n = ancestors.shape
    source = (jnp.arange(num_groups)[:, None] * n + ancestors).reshape(-1)
    sequences = jax.tree.map(lambda rows: rows[source], state.sequences)
    offspring = jnp.sum(ancestors[:, None] == jnp.arange(n)[:, None], axis=2, dtype=jnp.int32).reshape(-1)
    pool = fan_out(state.memory.pool, state.sequences.block_table, offspring)
    return settle(
        dataclasses.replace(
            state,
            sequences=sequences,
            log_weight=jnp.where(groups[:, None], 0.0, state.log_weight),
            log_evidence=state.log_evidence + jnp.where(groups, log_mean_weight(state.log_weight), 0.0),
            memory=dataclasses.replace(state.memory, pool=pool),
        )
    )
