"""Cycles of another decoder on a batch's state, so that a batch can change how it decodes between two cycles.

The state is made for the engine's own decoder: N rows a group, and token buffers for its blocks. Where the rows of a
group agree between cycles (`Decoding.agrees`), whatever advances one of them advances the group: another such decoder
of at most as many rows and tokens a cycle gets the first of them, and all rows are copies of these afterwards. Integers
move; keys and values stay in their pages. The law is that of the decoder that advances, cycle by cycle: exact ones may
take turns. Keys fold the cycle's number in, so no draw of one is a draw of another.

A draft model does not see the tokens of cycles without drafts. Before it drafts again it reads them (`catch_up`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smcjax.decoders import Decoding
from smcjax.decoding.groups import Groups, Info, PairParams
from smcjax.decoding.prefill import leaders_of
from smcjax.decoding.program import Program, by_implementation
from smcjax.engine.extras import WORDS
from smcjax.engine.loading import make_decoder
from smcjax.kv import fan_out, release


def can_advance(by: Decoding, own: Decoding) -> bool:
    """True where cycles of `by` can advance a state made for `own`."""
    return by.agrees and own.agrees and by.rows <= own.rows and by.tokens_per_cycle <= own.tokens_per_cycle


def advance(program: Any, params: PairParams, state: Any) -> tuple[Any, Any]:
    """A cycle of `program.by`, or of the program's own decoder where that is None; reports are its own either way."""
    if program.by is None:
        return program.step(params, state)
    geometry = (program.max_model_len, program.page_size, program.implementation)
    other = make_decoder(program.by, program.target, program.draft, *geometry)
    asked = {name: getattr(program, name) for name in WORDS}
    few, info = dataclasses.replace(other, **asked).step(params, narrowed(state, other.rows))
    return widened(few, program.rows), program.adopt(_widened_info(info, program.rows))


def narrowed[S: Groups](state: S, rows: int) -> S:
    """The state with the first `rows` rows of each group, the references of the others given back."""
    groups, own = state.running.shape[0], state.sequences.length.shape[0] // state.running.shape[0]
    if own == rows:
        return state
    sequences = jax.tree.map(
        lambda leaf: state.by_group(leaf)[:, :rows].reshape(groups * rows, *leaf.shape[1:]), state.sequences
    )
    pool = release(state.memory.pool, state.by_group(state.sequences.block_table)[:, rows:])
    return dataclasses.replace(state, sequences=sequences, memory=dataclasses.replace(state.memory, pool=pool))


def widened[S: Groups](state: S, rows: int) -> S:
    """The state with `rows` rows a group, which agree, made copies of its first."""
    groups, own = state.running.shape[0], state.sequences.length.shape[0] // state.running.shape[0]
    if own == rows:
        return state
    leaders = leaders_of(state.sequences, groups)
    pool = fan_out(state.memory.pool, leaders.block_table, jnp.full(groups, 1 + rows - own, jnp.int32))
    sequences = jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), leaders)
    return dataclasses.replace(state, sequences=sequences, memory=dataclasses.replace(state.memory, pool=pool))


def _widened_info(info: Info, rows: int) -> Any:
    """The report with entries of `rows` rows a group, copies of the first row's."""

    def copied(leaf: jax.Array) -> jax.Array:
        return jnp.repeat(leaf[:, :1], rows, axis=1)

    return dataclasses.replace(
        info, tokens=copied(info.tokens), length=copied(info.length), scores=jax.tree.map(copied, info.scores)
    )


@by_implementation
def catch_up[S: Groups](
    program: Program[Any], params: PairParams, groups: S, start_at: Int[Array, " G"], chunk: int
) -> S:
    """The groups after the draft has read positions `start_at` … `start_at + chunk − 1` of their answers.

    Prompts it has read before, and the frontier it reads when it drafts. A `start_at` beyond the answer reads nothing.
    """
    assert program.proposer is not None
    leaders = leaders_of(groups.sequences, groups.running.shape[0])
    leaders = dataclasses.replace(leaders, length=leaders.length - 1)
    draft = program.proposer.prefill(
        params.draft, groups.memory.draft, leaders, start_at, chunk, groups.requests.prompt_length
    )
    return dataclasses.replace(groups, memory=dataclasses.replace(groups.memory, draft=draft))
