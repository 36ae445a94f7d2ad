"""The decoder over a paged KV cache: write the new tokens' keys and values, then attend to all that is visible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.kv import TRASH, KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import hidden_states
from smcjax.model.params import Params
from smcjax.pallas import paged_attention


def create_cache(config: ModelConfig, params: Params, *, num_pages: int, page_size: int) -> KVCache:
    """An empty cache of the model's shape, in its weights' dtype."""
    return KVCache.create(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=params.embed.dtype,
    )


def paged_hidden_states(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    block_table: Int[Array, "R M"],
    write_pages: Int[Array, "R T"],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "R T E"], KVCache]:
    """Forward of T new tokens a row; returns normalised hidden states and the cache with their KV written.

    `positions` are places in the sequence, `write_pages` the physical page of each token's KV: the page that
    `block_table` names for its position, or the trash page where nothing must be written: behind the row's last
    written token that is KV already there, beyond it a token whose output means nothing. `implementation` says how to
    attend: `smcjax.pallas.paged_attention`.
    """
    offsets = positions % cache.page_size
    lengths = jnp.max(jnp.where(write_pages == TRASH, 0, positions + 1), axis=1)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = cache.write(layer, k, v, write_pages, offsets)
        return paged_attention(
            q,
            cache.keys[layer],
            cache.values[layer],
            block_table,
            positions,
            lengths,
            implementation=implementation,
        )

    hidden = hidden_states(config, params, tokens, positions, attend)
    return hidden, cache
