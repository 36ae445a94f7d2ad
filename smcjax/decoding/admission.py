"""From prompts to groups: pages for the prompt, named by all rows of the group, and its KV in every model. And back.

Fan-out is integers: a prompt's pages are allocated once per group. Where the first pages of a prompt hold its KV
already (`smcjax.engine.schedule.prefix_cache`), its rows name them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.constraints import beginning_states
from smcjax.decoding.groups import Groups, Memory, PairParams
from smcjax.decoding.prefill import chunk_view, prefill_chunk
from smcjax.decoding.program import Program, by_implementation
from smcjax.decoding.scores import Scores, prompt_scores
from smcjax.decoding.sequences import Population, Requests, Sequences, population
from smcjax.kv import TRASH, PagePool, allocate, rebind


@by_implementation
def begin(
    program: Program[Any],
    memory: Memory,
    prompts: Int[Array, "G L"],
    requests: Requests,
    present: Bool[Array, " G"],
    prefix: Int[Array, "G M"] | None = None,
) -> Groups:
    """Groups with rows and pages for the prompts, no KV yet but in the pages of `prefix` (`admit`).

    Groups not `present` only fill up the batch and never run.
    """
    pool, sequences = admit(program, memory.pool, prompts, requests, present, prefix)
    return Groups(
        requests=requests.within(program.max_model_len),
        sequences=sequences,
        cycle=jnp.zeros(present.shape, jnp.int32),
        running=present,
        failed=jnp.zeros_like(present),
        memory=dataclasses.replace(memory, pool=pool),
    )


def admit(
    program: Program[Any],
    pool: PagePool,
    prompts: Int[Array, "G L"],
    requests: Requests,
    present: Bool[Array, " G"],
    prefix: Int[Array, "G M"] | None = None,
) -> tuple[PagePool, Sequences]:
    """N rows for each group, with its prompt and pages for it, which its rows share.

    Groups not `present` only fill up the batch: they have no prompt and no pages. L ≤ T_max; columns of `prompts`
    beyond the prompt's length are ignored. `prefix` names pages in use that hold the KV of each prompt's beginning,
    `TRASH` behind it; None: there are none. Raises ValueError for prompts that exceed the program's `max_model_len`.
    """
    groups, rows = present.shape[0], program.rows
    if prompts.shape[1] > program.max_model_len:
        raise ValueError(
            f"prompts have {prompts.shape[1]} columns and max_model_len is {program.max_model_len}; "
            "shorten them, or raise it."
        )
    empty = Sequences.create(groups * rows, max_tokens=program.max_tokens, max_pages=program.max_pages)
    length = jnp.where(present, requests.prompt_length, 0)
    first_token = jnp.arange(program.max_pages)[None] * program.page_size
    if prefix is None:
        prefix = jnp.full((groups, program.max_pages), TRASH, jnp.int32)
    pool, fresh = allocate(pool, (first_token < length[:, None]) & (prefix == TRASH))
    table = jnp.repeat(jnp.where(prefix == TRASH, fresh, prefix), rows, axis=0)
    pool = rebind(pool, empty.block_table.at[::rows].set(fresh), table)
    return pool, dataclasses.replace(
        empty,
        tokens=empty.tokens.at[:, : prompts.shape[1]].set(jnp.repeat(prompts, rows, axis=0)),
        length=jnp.maximum(jnp.repeat(length, rows), 1),  # every query must see a key, even of no prompt
        finished=jnp.zeros_like(empty.finished),
        block_table=table,
        automaton=None if requests.automaton is None else beginning_states(requests.automaton, rows),
    )


@by_implementation
def prefill[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    start_at: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None = None,
) -> tuple[S, Float[Array, "G E"]]:
    """Reads one chunk of the prompts in all models; returns the target's hidden state at each prompt's end.

    The first `cached` tokens of each prompt have their KV already (None: 0).
    """
    return _read(program, params, groups, start_at, chunk, last_hidden, cached)[:2]


@by_implementation
def prefill_scored[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    start_at: Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None = None,
) -> tuple[S, Float[Array, "G E"], Scores]:
    """Reads like `prefill`; returns the scores [G, chunk] of the tokens behind the chunk's positions too."""
    groups, last_hidden, hidden = _read(program, params, groups, start_at, chunk, last_hidden, cached)
    return groups, last_hidden, prompt_scores(program, params, groups.leaders, start_at, hidden)


def _read[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    start_at: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None,
) -> tuple[S, Float[Array, "G E"], Float[Array, "G chunk E"]]:
    """Reads one chunk in all models; the hidden states at prompts' ends, and at all the chunk's positions."""
    memory, leaders = groups.memory, groups.leaders
    aux = program.aux_hidden_states()
    target, last_hidden, hidden = prefill_chunk(
        program.target, params.target, memory.target, leaders, start_at, chunk, last_hidden, cached, aux
    )
    draft = memory.draft
    if aux is not None:
        view = chunk_view(leaders, start_at, chunk, cached, page_size=program.page_size)
        features = program.features_proposer.fuse(params.draft, aux.streams)
        draft = program.features_proposer.write_features(draft, features, view.positions, view.write_pages)
    if program.proposer is not None:
        draft = program.proposer.prefill(params.draft, draft, leaders, start_at, chunk, cached)
    memory = dataclasses.replace(memory, target=target, draft=draft)
    return dataclasses.replace(groups, memory=memory), last_hidden, hidden


def conclude(program: Program[Any], state: Groups) -> tuple[Population, Memory]:
    """The ended sequences of groups whose rows agree, one a request, and the memory with every page given back."""
    count = state.running.shape[0]
    ended = population(
        state.leaders,
        log_weight=jnp.zeros((count, 1)),
        log_evidence=jnp.zeros(count),
        selected=jnp.zeros(count, jnp.int32),
        failed=state.failed,
    )
    return ended, state.release()
