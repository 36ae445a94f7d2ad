"""Autoregressive decoding: the target model alone, one token a step, exactly from its law. The baseline of all others.

The same life as `smcjax.smc`: begin → prefill → start → step … step → conclude, with one row a group.
Temperature 0 is greedy; top_k and top_p are honoured (temperature, then k, then p).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax.decoders import Autoregressive as Autoregressive
from smcjax.decoding.next_token import Drawn, Law, Steps, law_of, next_token, plan, prepare, sample
from smcjax.decoding.prefill import admit, prefill_chunk
from smcjax.decoding.sampling import Purpose, row_keys
from smcjax.decoding.sequences import Bounded, Population, Requests, Sequences, append, cut_block, population
from smcjax.kv import KVCache, PagePool, make_room, release
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import unembed
from smcjax.model.paged import create_cache
from smcjax.model.params import Params


@dataclasses.dataclass(frozen=True)
class Program(Bounded):
    """All that is static about a step. `truncates` is set where a request uses top_k or top_p: sorting a vocabulary
    at every step is not for those who do not ask."""

    target: ModelConfig
    max_model_len: int
    page_size: int = 16
    implementation: str = "auto"  # with GPU kernels or without: `smcjax.pallas.uses_kernels`
    truncates: bool = False

    @property
    def block(self) -> int:
        """One token a step."""
        return 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What outlives a batch of requests."""

    pool: PagePool
    target: KVCache

    @classmethod
    def create(cls, program: Program, params: Params, num_pages: int) -> Memory:
        """Empty memory of `num_pages` pages, the trash page included."""
        cache = create_cache(program.target, params, num_pages=num_pages, page_size=program.page_size)
        return cls(pool=PagePool.create(num_pages), target=cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """G requests in flight, one row each."""

    requests: Requests
    sequences: Sequences
    cycle: Int[Array, " G"]
    running: Bool[Array, " G"]
    failed: Bool[Array, " G"]  # ended because the model gave NaN
    memory: Memory

    @property
    def live(self) -> Bool[Array, " G"]:
        """Rows that a step advances."""
        return self.running & ~self.sequences.finished


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """What one step reports."""

    ran: Bool[Array, " G"]
    done: Bool[Array, " G"]
    tokens: Int[Array, "G 1 1"]  # the one drawn
    length: Int[Array, "G 1"]


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
    groups = prompts.shape[0]
    pool, sequences = admit(program, memory.pool, prompts, requests, present, 1, prefix)
    return State(
        requests=requests.within(program.max_model_len),
        sequences=sequences,
        cycle=jnp.zeros(groups, jnp.int32),
        running=present,
        failed=jnp.zeros(groups, bool),
        memory=dataclasses.replace(memory, pool=pool),
    )


def prefill(
    program: Program,
    params: Params,
    state: State,
    start_at: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None = None,
) -> tuple[State, Float[Array, "G E"]]:
    """Writes the KV of one chunk of the prompts; returns the hidden state at each prompt's end.

    The first `cached` tokens of each prompt have theirs already (None: 0).
    """
    cache, last_hidden = prefill_chunk(
        program.target,
        params,
        state.memory.target,
        state.sequences,
        start_at,
        chunk,
        last_hidden,
        program.implementation,
        cached,
    )
    return dataclasses.replace(state, memory=dataclasses.replace(state.memory, target=cache)), last_hidden


def start(program: Program, params: Params, state: State, last_hidden: Float[Array, "G E"]) -> State:
    """Draws the first token."""
    keys, number = _draw(state, Purpose.FIRST)
    return _append(state, sample(_law(program, state), keys, number, unembed(params, last_hidden)))


def step(program: Program, params: Params, state: State) -> tuple[State, Info]:
    """Advances every running request by one token."""
    ran, sequences, memory = state.running, state.sequences, state.memory
    position = sequences.length - 1
    room = make_room(
        memory.pool,
        sequences.block_table,
        position,
        position,
        state.live,
        page_size=program.page_size,
        max_width=1,
        group=1,
    )
    sequences = dataclasses.replace(sequences, block_table=room.block_table)
    tokens = sequences.token_at(position)[:, None]
    pages = sequences.write_pages(position[:, None], state.live[:, None], program.page_size)
    law = _law(program, state)
    alone = plan(
        program.target,
        params,
        sequences.block_table,
        jnp.where(state.live, position + 1, 0),
        position + 1,
        law,
        rows=1,
        columns=1,
        page_size=program.page_size,
        implementation=program.implementation,
    )
    keys, number = _draw(state, Purpose.DRAFT)
    one = prepare(
        program.target,
        params,
        Steps(position[None, :, None], pages[None], keys[None], number[None]),
        law,
        plan=alone,
        page_size=program.page_size,
        implementation=program.implementation,
    )
    drawn, cache = next_token(
        program.target,
        params,
        memory.target,
        tokens,
        sequences.block_table,
        one,
        0,
        law,
        plan=alone,
        implementation=program.implementation,
    )
    state = dataclasses.replace(state, sequences=sequences, memory=Memory(room.pool, cache))
    state = _append(state, drawn)
    state = dataclasses.replace(state, cycle=state.cycle + ran)
    length = state.sequences.length[:, None]
    return state, Info(ran=ran, done=~state.running, tokens=drawn.token[:, None, None], length=length)


def run(program: Program, params: Params, state: State, num_steps: int) -> tuple[State, Info]:
    """`num_steps` steps in one program; Info fields get a leading [num_steps] axis."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_steps)


def _law(program: Program, state: State) -> Law:
    """What each request's next token is drawn from."""
    return law_of(state.requests, rows=1, truncates=program.truncates)


def _draw(state: State, purpose: Purpose) -> tuple[Key[Array, " G"], Int[Array, " G"]]:
    """Keys and numbers of the requests' next tokens."""
    requests = state.requests
    return row_keys(requests.key, state.cycle, 1, purpose), state.sequences.length - requests.prompt_length + 1


def _append(state: State, drawn: Drawn) -> State:
    """Commits one token a request; where its log-probability is NaN the request fails instead."""
    requests, live = state.requests, state.live
    token, logprob = drawn.token, drawn.logprob
    broken = jnp.isnan(logprob)
    block = cut_block(token[:, None], requests.stops, state.sequences.length, requests.limit)
    sequences = append(state.sequences, token[:, None], logprob[:, None], block, live & ~broken)
    return dataclasses.replace(
        state,
        sequences=sequences,
        failed=state.failed | (state.running & broken),
        running=state.running & ~broken & ~sequences.finished,
    )


def conclude(program: Program, state: State) -> tuple[Population, Memory]:
    """The ended sequences, and the memory with every page given back."""
    groups = state.running.shape[0]
    ended = population(
        state.sequences,
        log_weight=jnp.zeros((groups, 1)),
        log_evidence=jnp.zeros(groups),
        selected=jnp.zeros(groups, jnp.int32),
        failed=state.failed,
    )
    pool = release(state.memory.pool, state.sequences.block_table)
    return ended, dataclasses.replace(state.memory, pool=pool)
