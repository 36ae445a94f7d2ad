"""Speculative sampling as one pure function of (params, state): every request advances by its own acceptance.

    propose    K tokens for each of N candidates from the draft
    score      all of them in one target forward
    decide     how many of the drafts are accepted, along which candidate, and the token behind them
    commit     that run to all rows of the request: its KV is there; pages behind it are given back

The life is that of `smcjax.smc`: begin → prefill → start → step … step → conclude. The N rows of a request agree
between cycles, and share all pages. Shapes depend on the program only, so rows that accept nothing and rows that accept
all share a batch; nothing reads a value on the host. The draft's first forward of a cycle is over two tokens: after a
full acceptance it lacks the KV of the last draft, otherwise it writes again what is there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoders import Rejection, Speculation
from smcjax.decoding.next_token import Law, law_logits, law_of, sample
from smcjax.decoding.prefill import admit, leaders_of
from smcjax.decoding.sampling import Purpose, draw, group_keys, log_softmax_at, row_keys
from smcjax.decoding.sequences import Population, Requests, Sequences, append, cut_block, population
from smcjax.decoding.speculation import (
    Memory,
    PairParams,
    PairProgram,
    propose,
    reserve,
    score,
)
from smcjax.kv import TRASH, rebind, release
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import unembed
from smcjax.rejection.rules import Verdict, block, tree


@dataclasses.dataclass(frozen=True)
class Program(PairProgram):
    """All that is static about a step. `truncates` is set where a request uses top_k or top_p."""

    decoding: Rejection
    target: ModelConfig
    draft: ModelConfig
    max_model_len: int
    page_size: int = 16
    implementation: str = "auto"  # with GPU kernels or without: `smcjax.pallas.uses_kernels`
    truncates: bool = False

    @property
    def speculation(self) -> Speculation:
        """What the draft and the target's forward need to know."""
        return self.decoding.speculation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """G requests in flight, N rows each, which agree between steps."""

    requests: Requests
    sequences: Sequences  # R = G·N rows
    cycle: Int[Array, " G"]
    running: Bool[Array, " G"]
    failed: Bool[Array, " G"]  # ended because a model gave NaN
    memory: Memory

    @property
    def live(self) -> Bool[Array, " R"]:
        """Rows that a step advances."""
        return self.per_row(self.running) & ~self.sequences.finished

    def per_row(self, per_group: Array) -> Array:
        """A [G, …] array repeated for every row: [R, …]."""
        return jnp.repeat(per_group, self.sequences.length.shape[0] // self.running.shape[0], axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """What one step reports. For groups that did not run, `ran` is false and the rest is stale."""

    ran: Bool[Array, " G"]
    done: Bool[Array, " G"]
    accepted: Int[Array, " G"]  # drafts, those behind an end among them
    length: Int[Array, "G N"]
    tokens: Int[Array, "G N C"]  # the block, the same for all rows; what lies behind the row's end is not part of it


def begin(
    program: Program,
    memory: Memory,
    prompts: Int[Array, "G L"],
    requests: Requests,
    present: Bool[Array, " G"],
    prefix: Int[Array, "G M"] | None = None,
) -> State:
    """Rows and pages for the prompts, no KV yet but in the pages of `prefix` (`smcjax.decoding.prefill.admit`).

    Groups not `present` only fill up the batch and never run.
    """
    groups, n = prompts.shape[0], program.decoding.n_candidates
    pool, sequences = admit(program, memory.pool, prompts, requests, present, n, prefix)
    return State(
        requests=requests.within(program.max_model_len),
        sequences=sequences,
        cycle=jnp.zeros(groups, jnp.int32),
        running=present,
        failed=jnp.zeros(groups, bool),
        memory=dataclasses.replace(memory, pool=pool),
    )


def start(program: Program, params: PairParams, state: State, last_hidden: Float[Array, "G E"]) -> State:
    """Draws the first token from the target, one for all rows of a request."""
    requests, groups = state.requests, state.running.shape[0]
    keys = row_keys(requests.key, state.cycle, 1, Purpose.FIRST)
    first = sample(_law(program, state, 1), keys, jnp.ones(groups, jnp.int32), unembed(params.target, last_hidden))
    nothing = jnp.zeros(groups, jnp.int32)
    return _commit(program, state, first.token[:, None], first.logprob[:, None], nothing, jnp.isnan(first.logprob))


def step(program: Program, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every running request by 1 to K + 1 tokens."""
    ran, decoding = state.running, program.decoding
    groups, n, gamma = ran.shape[0], decoding.n_candidates, decoding.gamma
    sequences, pool, copies = reserve(program, state)
    state = dataclasses.replace(state, sequences=sequences, memory=dataclasses.replace(state.memory, pool=pool))
    drafts, cache = propose(program, params.draft, state, copies, _law(program, state, n), keeps_laws=True)
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, draft=cache))
    logits, cache = score(program, params.target, state, copies, drafts.tokens)
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, target=cache))

    with jax.named_scope("decide"):
        logits = _target_logits(program, state, logits)
        assert drafts.logits is not None
        verdict = decide(program, state, logits, drafts.logits, drafts.tokens)
        keys = group_keys(state.requests.key, state.cycle, Purpose.NEXT)
        following = draw(keys, jnp.log(verdict.law))

    with jax.named_scope("commit"):
        chosen = jnp.arange(groups) * n + verdict.candidate
        column = jnp.arange(gamma + 1)
        tokens = jnp.pad(drafts.tokens[chosen], ((0, 0), (0, 1)))
        tokens = jnp.where(column == verdict.accepted[:, None], following[:, None], tokens)
        # Greedy laws are certain; what is reported of their tokens is the probability at temperature 1.
        logprobs = log_softmax_at(logits[chosen], tokens)
        broken = jnp.isnan(verdict.law).any(axis=1) | jnp.isnan(logprobs[:, 0])
        state = _commit(program, state, tokens, logprobs, verdict.accepted, broken)
        state = _adopt(program, dataclasses.replace(state, cycle=state.cycle + ran), ran, chosen)
    info = Info(
        ran=ran,
        done=~state.running,
        accepted=verdict.accepted,
        length=state.sequences.length.reshape(groups, n),
        tokens=jnp.broadcast_to(tokens[:, None], (groups, n, gamma + 1)),
    )
    return state, info


def run(program: Program, params: PairParams, state: State, num_steps: int) -> tuple[State, Info]:
    """`num_steps` steps in one program; Info fields get a leading [num_steps] axis."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_steps)


def _law(program: Program, state: State, rows: int) -> Law:
    """What the next token of each of `rows` rows a request is drawn from, in either model."""
    return law_of(state.requests, rows=rows, truncates=program.truncates)


def _target_logits(program: Program, state: State, logits: Float[Array, "R C V"]) -> Float[Array, "R C V"]:
    """Those whose softmax is the target's law behind each column."""
    law = _law(program, state, program.decoding.n_candidates)
    generated = state.sequences.length - state.per_row(state.requests.prompt_length)
    return jax.vmap(lambda column, logits: law_logits(law, generated + 1 + column, logits), in_axes=(0, 1), out_axes=1)(
        jnp.arange(logits.shape[1]), logits
    )


def decide(
    program: Program,
    state: State,
    target_logits: Float[Array, "R C V"],
    draft_logits: Float[Array, "R K V"],
    drafts: Int[Array, "R K"],
) -> Verdict:
    """The verdict on each request's drafts."""
    decoding, groups = program.decoding, state.running.shape[0]
    n, gamma = decoding.n_candidates, decoding.gamma
    greedy = state.requests.temperature == 0

    def law(logits: jax.Array, greedy: jax.Array) -> jax.Array:
        """Probabilities; of a greedy request all on the likeliest token. [N, columns, V]"""
        likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
        likeliest = jnp.where(jnp.isnan(logits).any(axis=-1, keepdims=True), jnp.nan, likeliest)
        return jnp.where(greedy, likeliest, jax.nn.softmax(logits, axis=-1))

    keys = group_keys(state.requests.key, state.cycle, Purpose.ACCEPT)
    verify = tree if decoding.verification == "token" else block

    def one(key: jax.Array, greedy: jax.Array, target: jax.Array, draft: jax.Array, drafts: jax.Array) -> Verdict:
        uniforms = jax.random.uniform(key, (gamma, n), jnp.float32)
        return verify(law(target, greedy), law(draft, greedy), drafts, uniforms)

    def by_group(rows: jax.Array) -> jax.Array:
        return rows.reshape(groups, n, *rows.shape[1:])

    return jax.vmap(one)(keys, greedy, by_group(target_logits), by_group(draft_logits), by_group(drafts))


def _commit(
    program: Program,
    state: State,
    tokens: Int[Array, "G C"],
    logprobs: Float[Array, "G C"],
    accepted: Int[Array, " G"],
    broken: Bool[Array, " G"],
) -> State:
    """Appends `accepted` + 1 tokens to all rows of the running requests; those with a broken law fail instead."""
    requests = state.requests
    tokens, logprobs, last = state.per_row(tokens), state.per_row(logprobs), state.per_row(accepted)
    live = state.live & ~state.per_row(broken)
    block = cut_block(
        tokens, state.per_row(requests.stops), state.sequences.length, state.per_row(requests.limit), last=last
    )
    sequences = append(state.sequences, tokens, logprobs, block, live)
    ended = sequences.finished.reshape(state.running.shape[0], -1)[:, 0]
    return dataclasses.replace(
        state,
        sequences=sequences,
        failed=state.failed | (state.running & broken),
        running=state.running & ~broken & ~ended,
    )


def _adopt(program: Program, state: State, ran: Bool[Array, " G"], chosen: Int[Array, " G"]) -> State:
    """Every row of a request that ran names the pages of its `chosen` one, up to the last KV that counts.

    That is the one before the frontier.
    """
    old = state.sequences.block_table
    begins = jnp.arange(old.shape[1]) * program.page_size
    adopted = jnp.where(begins < state.sequences.length[:, None] - 1, old[state.per_row(chosen)], TRASH)
    table = jnp.where(state.per_row(ran)[:, None], adopted, old)
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(state.sequences, block_table=table),
        memory=dataclasses.replace(state.memory, pool=rebind(state.memory.pool, old, table)),
    )


def conclude(program: Program, state: State) -> tuple[Population, Memory]:
    """The ended sequences, one a request, and the memory with every page given back."""
    groups = state.running.shape[0]
    ended = population(
        leaders_of(state.sequences, groups),
        log_weight=jnp.zeros((groups, 1)),
        log_evidence=jnp.zeros(groups),
        selected=jnp.zeros(groups, jnp.int32),
        failed=state.failed,
    )
    pool = release(state.memory.pool, state.sequences.block_table)
    return ended, dataclasses.replace(state.memory, pool=pool)
