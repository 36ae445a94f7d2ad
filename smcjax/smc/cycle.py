"""The SMC cycle: draft, verify, weigh, resample, as one pure function of (params, state).

    propose    K tokens a particle from the draft model
    verify     all of them in one target forward, which also draws the bonus token
    weigh      log w += Σ [α·log p_T − log q] + log Z of the bonus, up to the row's end; of requests with a constraint
               q and the bonus are drawn from allowed tokens, p_T is not changed, and Z sums over those
    end early  with `early_end`: a coin between finished rows and the others (`smcjax.smc.roulette`)
    resample   where ESS < threshold·N: ancestors, row state and block tables; KV does not move

With a control c > 0, the decoder's or a request's, verifying rejects drafts too (`smcjax.smc.control`): rows advance by
1 to K + 1 tokens, and give back the pages behind them. With `branching` rows are resampled before they advance, and
with them how much of its drafts each keeps (`smcjax.smc.branching`).

Every shape depends on the program only; nothing reads a value on the host. A group whose population has ended is
frozen: its rows go through the forwards like all others, write to the trash page, and change nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax import noise
from smcjax.decoding.constraints import extend, masked, row_constraint
from smcjax.decoding.cycle_view import keep_pages
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.groups import PairParams
from smcjax.decoding.program import by_implementation
from smcjax.decoding.proposer import Drafts
from smcjax.decoding.sampling import Purpose, draw, forbid_stops, group_keys, row_keys
from smcjax.decoding.scores import Scores, by_group, scores
from smcjax.decoding.sequences import Block, Sequences, cut_block
from smcjax.decoding.speculation import propose, score
from smcjax.kv import Copies
from smcjax.kv import fork as fork_rows
from smcjax.smc import branching
from smcjax.smc.control import at, correction, increment, judge
from smcjax.smc.resampling import Resampling, plan_resampling
from smcjax.smc.roulette import spin
from smcjax.smc.state import Info, SMCProgram, State
from smcjax.smc.watchdog import watch
from smcjax.smc.weights import bonus_increment, draft_increment, log_mass, logprob_at, temper


@by_implementation
def step(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by one cycle of `SMC.tokens_per_cycle` tokens, with a control by that at most."""
    ran, before = state.running, state
    state, drafts, copies = draft(program, params, state)
    if program.decoding.branching is not None:
        state, info = branch(program, params, state, drafts, copies)
        return dataclasses.replace(state, cycle=state.cycle + ran), info
    state, proposal = verify(program, params, state, drafts, copies)
    state = weigh(state, proposal)
    if program.decoding.watchdog is not None:
        state = watch(program.decoding, before, state)
    if program.decoding.early_end:
        state = update_running(spin(state))
    if program.ragged:
        state = keep_pages(state, state.sequences.block_table, ran, page_size=program.page_size)
    state, info = resample(program, state, proposal.tokens)
    state = dataclasses.replace(state, cycle=state.cycle + ran)
    of_rows = None if proposal.scores is None else by_group(state, proposal.scores)
    return state, dataclasses.replace(info, ran=ran, done=~state.running, scores=of_rows)


def tempered(
    state: State, logits: Float[Array, "R C V"], temperature: Float[Array, " R"], columns: Int[Array, " C"]
) -> Float[Array, "R C V"]:
    """`temper`'s logits for these columns of the block, stop tokens impossible where the request's minimum says so."""
    requests = state.requests
    generated = state.sequences.length - state.per_row(requests.prompt_length)
    possible = forbid_stops(
        logits,
        state.per_row(requests.stops)[:, None],
        generated[:, None] + 1 + columns,
        state.per_row(requests.min_tokens)[:, None],
    )
    return temper(possible, temperature[:, None])


def draft(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Drafts, Copies | None]:
    """K draft tokens a row with log q, whole where they can be rejected."""
    return propose(program, params, state, draft_law(program, state), keep_logits=program.ragged)


def draft_law(program: SMCProgram, state: State) -> SamplingDistribution:
    """q, with the target's minimum of tokens and constraint, and never truncated."""
    return SamplingDistribution(
        state.per_row(state.requests.temperature),
        state.per_row(state.requests.stops),
        state.per_row(state.requests.min_tokens),
        constraint=row_constraint(state, program.rows),
    )


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A block of C new tokens a row, C = `tokens_per_cycle`: the drafts and, with bonus, the bonus token."""

    tokens: Int[Array, "R C"]
    increments: Float[Array, "R C"]  # what each adds to the log weight
    logprobs: Float[Array, "R C"]  # log p_T
    last: Int[Array, " R"] | None = None  # the column behind which the block ends; None: it is whole
    scores: Scores | None = None  # of all columns, where the program is asked for them


@jax.named_scope("verify")
def verify(
    program: SMCProgram, params: PairParams, state: State, drafts: Drafts, copies: Copies | None
) -> tuple[State, Proposal]:
    """Scores the drafts in one target forward over [frontier, d₀ …], writing its KV, and draws the bonus token."""
    smc = program.decoding
    state, logits = score(program, params, state, drafts.tokens, copies)
    temperature = state.per_row(state.requests.temperature)
    logits = tempered(state, logits, temperature, jnp.arange(smc.tokens_per_cycle))
    if program.ragged:
        return state, _scored(program, logits, controlled(program, state, logits, drafts))
    logprobs = logprob_at(logits[:, : smc.gamma], drafts.tokens)
    increments = draft_increment(smc.power, logprobs, drafts.logprobs)
    block = drafts.tokens
    if program.speculation.bonus:
        last = logits[:, -1]
        constraint = row_constraint(state, program.rows)
        allowed = None if constraint is None else constraint.behind(drafts.tokens).allowed()
        keys = row_keys(state.requests.key, state.cycle, smc.n_particles, Purpose.BONUS)
        bonus = draw(keys, masked(smc.power * last, allowed))
        block = jnp.concatenate([block, bonus[:, None]], axis=1)
        increments = jnp.concatenate([increments, bonus_increment(smc.power, last, allowed)[:, None]], axis=1)
        logprobs = jnp.concatenate([logprobs, logprob_at(last, bonus)[:, None]], axis=1)
    return state, _scored(program, logits, Proposal(tokens=block, increments=increments, logprobs=logprobs))


def _scored(program: SMCProgram, logits: Float[Array, "R C V"], proposal: Proposal) -> Proposal:
    """The proposal with its scores where they are asked for."""
    return dataclasses.replace(proposal, scores=scores(logits, proposal.logprobs)) if program.scores else proposal


def controlled(program: SMCProgram, state: State, logits: Float[Array, "R C V"], drafts: Drafts) -> Proposal:
    """Rejects drafts by the groups' controls, and draws the token behind those that are accepted."""
    smc = program.decoding
    control = state.per_row(state.control)
    laws = laws_of(program, state, logits, drafts)
    keys = group_keys(state.requests.key, state.cycle, Purpose.ACCEPT)
    uniforms = noise.uniforms(keys, (smc.n_particles, smc.gamma)).reshape(drafts.tokens.shape)
    verdict = judge(laws.target, laws.draft, drafts.tokens, uniforms, control)
    following = draw(row_keys(state.requests.key, state.cycle, smc.n_particles, Purpose.BONUS), verdict.law)
    return run_of(laws, drafts.tokens, verdict.accepted, following, control)


class Laws(NamedTuple):
    """The laws of a block's columns, normalised: C of the target to the power α, K of the draft.

    With a constraint, both are laws of the allowed tokens, and so is the sum.
    """

    target: Float[Array, "R C V"]  # log of p_T^α/Σ p_T^α
    draft: Float[Array, "R K V"]  # log q
    constant: Float[Array, "R C"]  # log Σ p_T^α
    logits: Float[Array, "R C V"]  # whose softmax is p_T

    @classmethod
    def of(
        cls,
        power: float,
        logits: Float[Array, "R C V"],
        draft_logits: Float[Array, "R K V"],
        allowed: Bool[Array, "R C V"] | None = None,
    ) -> Laws:
        """The laws of the target's tempered logits and of the draft's, whose own are of allowed tokens already."""
        scaled = power * logits
        draft = jax.nn.log_softmax(draft_logits, axis=-1)
        if allowed is None:
            target = scaled - log_mass(scaled)[..., None]
        else:  # any law of the allowed tokens where they are impossible, which `constant` weighs 0
            some = masked(scaled, allowed)
            impossible = jnp.isneginf(jnp.max(some, axis=-1, keepdims=True))
            target = jax.nn.log_softmax(jnp.where(impossible, masked(jnp.zeros_like(scaled), allowed), some), axis=-1)
        return cls(target, draft, bonus_increment(power, logits, allowed), logits)


def laws_of(program: SMCProgram, state: State, logits: Float[Array, "R C V"], drafts: Drafts) -> Laws:
    """The laws of the block behind the rows' tokens, by the target's tempered logits and the draft's whole ones."""
    constraint = row_constraint(state, program.rows)
    allowed = None if constraint is None else constraint.allowed_along(drafts.tokens[:, : logits.shape[1] - 1])
    return Laws.of(program.decoding.power, logits, drafts.whole(logits.shape[-1]), allowed)


def run_of(
    laws: Laws,
    drafts: Int[Array, "R K"],
    accepted: Int[Array, " R"],
    following: Int[Array, " R"],
    control: Float[Array, " R"],
) -> Proposal:
    """The accepted drafts and the token behind them as a block that ends there, with weights by `increment`.

    Where all of K = C drafts are accepted there is no token behind them.
    """
    gamma, columns = drafts.shape[1], laws.target.shape[1]
    padded = jnp.pad(drafts, ((0, 0), (0, columns - gamma)))
    tokens = jnp.where(jnp.arange(columns) == accepted[:, None], following[:, None], padded)
    log_p, log_q = at(laws.target, tokens)[:, :gamma], at(laws.draft, tokens[:, :gamma])
    c = control[:, None]
    controlled = increment(log_p, log_q, c, correction(laws.target[:, :gamma], laws.draft, c))
    return Proposal(
        tokens=tokens,
        increments=laws.constant.at[:, :gamma].add(controlled),
        logprobs=logprob_at(laws.logits, tokens),
        last=jnp.minimum(accepted, columns - 1),
    )


def block_weight(increments: Float[Array, "R C"], block: Block) -> Float[Array, " R"]:
    """Sum of the increments that count: what lies past a row's end is not part of its weight."""
    return jnp.sum(jnp.where(block.counted, increments, 0.0), axis=1)


@jax.named_scope("weigh")
def weigh(state: State, proposal: Proposal) -> State:
    """Commits the block to the live rows and their weights; ends groups that have failed or have all finished."""
    requests, live = state.requests, state.live
    block = cut_block(
        proposal.tokens,
        state.per_row(requests.stops),
        state.sequences.length,
        state.per_row(requests.limit),
        last=proposal.last,
    )
    increment = jnp.where(live, block_weight(proposal.increments, block), 0.0)
    log_weight = state.log_weight + increment.reshape(state.log_weight.shape)
    sequences = extend(state, proposal.tokens, proposal.logprobs, block, live)
    return update_running(dataclasses.replace(state, sequences=sequences, log_weight=log_weight))


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


@jax.named_scope("resample")
def resample(program: SMCProgram, state: State, tokens: Int[Array, "R C"], *, pending: int = 0) -> tuple[State, Info]:
    """Resamples the running groups whose ESS is low; `tokens` are the rows' newest block, for the report.

    Copies get the `pending` tokens behind the committed ones as well.
    """
    smc, log_weight = program.decoding, state.log_weight
    plan = plan_resampling(
        group_keys(state.requests.key, state.cycle, Purpose.RESAMPLE),
        log_weight,
        state.running,
        method=smc.resampling,
        threshold=smc.ess_threshold,
    )
    resampled = fork(state, plan, pending=pending)
    info = Info(
        ran=state.running,
        ess=plan.ess,
        resampled=plan.resampled,
        ancestors=plan.ancestors,
        log_weight=log_weight,
        length=state.by_group(resampled.sequences.length),
        finished=state.by_group(resampled.sequences.finished),
        weighed=state.by_group(state.sequences.length),
        done=~resampled.running,
        tokens=state.by_group(tokens),
        control=state.control,
    )
    return resampled, info


def sources(plan: Resampling) -> Int[Array, " R"]:
    """The row that each row becomes a copy of."""
    num_groups, n = plan.ancestors.shape
    return (jnp.arange(num_groups)[:, None] * n + plan.ancestors).reshape(-1)


def fork(state: State, plan: Resampling, *, pending: int = 0) -> State:
    """Makes every row a copy of its ancestor; resampled groups' mean weight moves into log Ẑ.

    Integers move, keys and values do not. The `pending` tokens behind a row's committed ones are copied too.
    """
    n = plan.ancestors.shape[1]
    source = sources(plan)
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
    automaton = None if sequences.automaton is None else sequences.automaton[source]
    forked = Sequences(tokens, sequences.length[source], sequences.finished[source], logprobs, block_table, automaton)
    return update_running(
        dataclasses.replace(
            state,
            sequences=forked,
            log_weight=jnp.where(plan.resampled[:, None], 0.0, state.log_weight),
            log_evidence=state.log_evidence + jnp.where(plan.resampled, plan.log_mean_weight, 0.0),
            memory=dataclasses.replace(state.memory, pool=pool),
        )
    )


@jax.named_scope("branch")
def branch(
    program: SMCProgram, params: PairParams, state: State, drafts: Drafts, copies: Copies | None
) -> tuple[State, Info]:
    """Scores the drafts, draws N of the rows' children, and makes the rows these: copies first, then their tokens.

    Pages go to copies whole, and are given back behind each copy's own end.
    """
    smc = program.decoding
    lam, gamma, ran, live = smc.branching, smc.gamma, state.running, state.live
    assert lam is not None
    state, logits = score(program, params, state, drafts.tokens, copies)
    logits = tempered(state, logits, state.per_row(state.requests.temperature), jnp.arange(smc.tokens_per_cycle))
    laws = laws_of(program, state, logits, drafts)
    stops, limit = state.per_row(state.requests.stops), state.per_row(state.requests.limit)
    trunk = cut_block(drafts.tokens, stops, state.sequences.length, limit)
    children = branching.offered(laws.target, laws.draft, laws.constant, drafts.tokens, trunk, lam)
    alone = jnp.where(jnp.arange(gamma + 1) == gamma, 0.0, -jnp.inf)
    offers = state.log_weight[:, :, None] + state.by_group(jnp.where(live[:, None], children, alone))
    total = jnp.where(ran[:, None], jax.nn.logsumexp(offers, axis=2), state.log_weight)
    keys = group_keys(state.requests.key, state.cycle, Purpose.RESAMPLE)
    plan, child = branching.branches(keys, offers, ran & ~broken(total), smc.resampling)

    state = fork(dataclasses.replace(state, log_weight=total), plan)
    source, child = sources(plan), child.reshape(-1)
    law = branching.following(laws.target, laws.draft, source, child, lam)
    token = draw(row_keys(state.requests.key, state.cycle, smc.n_particles, Purpose.BONUS), law)
    tokens, last = branching.block_of(drafts.tokens[source], child, token, logits.shape[1])
    chosen_logits = logits[source[:, None], jnp.arange(logits.shape[1]), tokens]
    logprobs = chosen_logits - log_mass(logits)[source]
    proposal = Proposal(tokens, jnp.zeros_like(logprobs), logprobs, last)
    state = weigh(state, proposal)
    # Child K's last draft alone has no KV in the draft model yet.
    settled = dataclasses.replace(state.sequences, settled=child < gamma)
    state = keep_pages(
        dataclasses.replace(state, sequences=settled), settled.block_table, ran, page_size=program.page_size
    )
    of_rows = None
    if program.scores:
        of_rows = jax.tree.map(lambda leaf: leaf[source], scores(logits, logprobs))
        of_rows = by_group(state, dataclasses.replace(of_rows, logprobs=logprobs))
    length = state.by_group(state.sequences.length)
    return state, Info(
        ran=ran,
        ess=plan.ess,
        resampled=plan.resampled,
        ancestors=plan.ancestors,
        log_weight=total,
        length=length,
        finished=state.by_group(state.sequences.finished),
        weighed=length,
        done=~state.running,
        tokens=state.by_group(tokens),
        control=state.control,
        scores=of_rows,
    )
