"""The KV of prompts, and the hidden states that predict first tokens.

A prompt's KV is written once, through the first row of its group, in chunks of a fixed length so that no prompt length
compiles anything new. Where its first pages hold KV already (`smcjax.engine.schedule.prefix_cache`) nothing is written.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoding.sequences import Sequences
from smcjax.kv import KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import Watch
from smcjax.model.paged import paged_hidden_states, plan_attention
from smcjax.model.params import Params
from smcjax.model.view import BatchView


def prefill_chunk(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    leaders: Sequences,
    start: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None = None,
    watch: Watch | None = None,
) -> tuple[KVCache, Float[Array, "G E"], Float[Array, "G chunk E"]]:
    """Writes the KV of prompt positions `start` … `start + chunk − 1`; `leaders` are the groups' first rows.

    `start` is one for all groups or one each; a group whose prompt ends before it writes nothing. The KV of each
    group's first `cached` positions (None: 0) is there already and is not written again. `watch` is that of
    `smcjax.model.decoder.hidden_states`.

    Returns the cache, `last_hidden` with the rows whose last prompt token lies in this chunk filled in, and the hidden
    states of all the chunk's positions.
    """
    view = chunk_view(leaders, start, chunk, cached, page_size=cache.page_size)
    plans = plan_attention(config, params, view, columns=chunk)
    hidden, cache = paged_hidden_states(config, params, cache, view, plans, watch)

    last = leaders.length - 1 - start
    found = (last >= 0) & (last < chunk)
    candidate = jnp.take_along_axis(hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(found[:, None], candidate, last_hidden), hidden


def chunk_view(
    leaders: Sequences,
    start: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    cached: Int[Array, " G"] | None,
    *,
    page_size: int,
) -> BatchView:
    """The chunk's tokens and where their KV goes; the arguments are those of `prefill_chunk`."""
    positions = jnp.broadcast_to(start.reshape(-1, 1) + jnp.arange(chunk)[None], (leaders.length.shape[0], chunk))
    in_prompt = positions < leaders.length[:, None]
    tokens = jnp.take_along_axis(leaders.tokens, jnp.minimum(positions, leaders.tokens.shape[1] - 1), axis=1)
    new = in_prompt if cached is None else in_prompt & (positions >= cached[:, None])
    return BatchView(
        tokens=tokens,
        positions=positions,
        block_table=leaders.block_table,
        write_pages=leaders.write_pages(positions, new, page_size),
        lengths=jnp.max(jnp.where(new, positions + 1, 0), axis=1),
        num_immutable=positions[:, 0],
        page_size=page_size,
    )
