"""From prompts to rows: pages for the prompt, its KV, and the hidden state that predicts the first token.

The prompt's pages are allocated once per group and named by all its rows (fan-out is integers), and its KV is
written once, through the first row of each group, in chunks of a fixed length so that no prompt length compiles
anything new. Where the first pages of a prompt hold its KV already (`smcjax.engine.prefix_cache`), its rows name them,
and nothing is written there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.sequences import Bounded, Requests, Sequences
from smcjax.kv import TRASH, KVCache, PagePool, allocate, rebind
from smcjax.model.config import ModelConfig
from smcjax.model.paged import paged_hidden_states, plan_attention
from smcjax.model.params import Params
from smcjax.model.view import BatchView


def admit(
    program: Bounded,
    pool: PagePool,
    prompts: Int[Array, "G L"],
    requests: Requests,
    present: Bool[Array, " G"],
    rows: int,
    prefix: Int[Array, "G M"] | None = None,
) -> tuple[PagePool, Sequences]:
    """`rows` rows for each group, with its prompt and pages for it, which its rows share.

    Groups not `present` only fill up the batch: they have no prompt and no pages. L ≤ T_max; columns of `prompts`
    beyond the prompt's length are ignored. `prefix` names pages in use that hold the KV of each prompt's beginning,
    `TRASH` behind it; None: there are none. Raises ValueError for prompts that exceed the program's `max_model_len`.
    """
    groups = present.shape[0]
    if prompts.shape[1] > program.max_model_len:
        raise ValueError(
            f"prompts have {prompts.shape[1]} columns and max_model_len is {program.max_model_len}; "
            "shorten them, or raise it."
        )
    empty = Sequences.create(groups * rows, max_tokens=program.max_tokens, max_pages=program.max_pages)
    length = jnp.where(present, requests.prompt_length, 0)
    first_token = jnp.arange(program.max_pages) * program.page_size
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
    )


def prefill_chunk(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    leaders: Sequences,
    start: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    implementation: str = "auto",
    cached: Int[Array, " G"] | None = None,
) -> tuple[KVCache, Float[Array, "G E"]]:
    """Writes the KV of prompt positions `start` … `start + chunk − 1`; `leaders` are the groups' first rows.

    `start` is one for all groups or one each; a group whose prompt ends before it writes nothing. The KV of each
    group's first `cached` positions (None: 0) is there already and is not written again.

    Returns the cache and `last_hidden` with the rows whose last prompt token lies in this chunk filled in.
    """
    positions = jnp.broadcast_to(start[..., None] + jnp.arange(chunk), (leaders.length.shape[0], chunk))
    in_prompt = positions < leaders.length[:, None]
    tokens = jnp.take_along_axis(leaders.tokens, jnp.minimum(positions, leaders.tokens.shape[1] - 1), axis=1)
    new = in_prompt if cached is None else in_prompt & (positions >= cached[:, None])
    pages = leaders.write_pages(positions, new, cache.page_size)
    view = BatchView(
        tokens,
        positions,
        leaders.block_table,
        pages,
        lengths=jnp.max(jnp.where(new, positions + 1, 0), axis=1),
        num_immutable=positions[:, 0],
        page_size=cache.page_size,
    )
    plans = plan_attention(config, params, view, columns=chunk)
    hidden, cache = paged_hidden_states(config, params, cache, view, plans)

    last = leaders.length - 1 - start
    found = (last >= 0) & (last < chunk)
    candidate = jnp.take_along_axis(hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(found[:, None], candidate, last_hidden)


def leaders_of(sequences: Sequences, groups: int) -> Sequences:
    """The first row of each group."""
    fan_out = sequences.length.shape[0] // groups
    return jax.tree.map(lambda x: x[::fan_out], sequences)
