"""The decoder over a paged KV cache: write the new tokens' keys and values, then attend to all that is visible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.kv import TRASH, KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import Projection, hidden_states
from smcjax.model.params import Params
from smcjax.pallas import Copies, Sharing, attends_by_kernels, paged_attention, plan_sharing


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


def plan_reads(
    config: ModelConfig,
    params: Params,
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    settled: Int[Array, " R"],
    *,
    rows: int,
    columns: int,
    page_size: int,
    implementation: str,
) -> Sharing | None:
    """`plan_sharing` for this model's layers: what each N = `rows` rows share, of T = `columns` new tokens a row."""
    return plan_sharing(
        block_table,
        lengths,
        settled,
        rows=rows,
        columns=columns,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=params.embed.dtype,
        implementation=implementation,
    )


def reads_by_kernels(config: ModelConfig, cache: KVCache, *, columns: int, implementation: str) -> bool:
    """Whether rows of T = `columns` new tokens attend by a kernel, each row by itself, planned by `plan_reads`."""
    _, page_size, kv_heads, dim = cache.keys[0].shape
    return attends_by_kernels(
        columns=columns,
        num_heads=config.num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=cache.keys[0].dtype,
        implementation=implementation,
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
    copies: Copies | None = None,
    sharing: Sharing | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "R T E"], KVCache]:
    """Forward of T new tokens a row; returns normalised hidden states and the cache with their KV written.

    `positions` are places in the sequence, `write_pages` the physical page of each token's KV: the page that
    `block_table` names for its position, or the trash page where nothing must be written: behind the row's last
    written token that is KV already there, beyond it a token whose output means nothing. `copies` are the shared pages
    that must be copied before rows write to their copies (`smcjax.kv.make_room`). `sharing` is what rows of a group
    share (`plan_reads`), to be read once. `implementation` says how to attend, write and norm:
    `smcjax.pallas.paged_attention`.
    """
    slots = positions % cache.page_size
    lengths = jnp.max(jnp.where(write_pages == TRASH, 0, positions + 1), axis=1)

    def attend(layer: int, projection: Projection) -> jax.Array:
        nonlocal cache
        q, cache = cache.write(
            layer,
            projection.qkv,
            projection.cos,
            projection.sin,
            write_pages,
            slots,
            copies,
            projection.norms,
            projection.pending,
        )
        return paged_attention(
            q,
            cache.keys[layer],
            cache.values[layer],
            block_table,
            positions,
            lengths,
            implementation=implementation,
            sharing=sharing,
        )

    hidden = hidden_states(config, params, tokens, positions, attend, implementation=implementation)
    return hidden, cache
