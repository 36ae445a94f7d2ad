"""The decoder over a paged KV cache: write the new tokens' keys and values, then attend to all that is visible."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.kv import KVCache, LayerCache
from smcjax.model.attention import AttentionKind, Plan, Projection, Selection
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import Watch, hidden_states
from smcjax.model.params import Params
from smcjax.model.view import BatchView, TreeView
from smcjax.sparse.verification import SparseVerification

Plans = tuple[Plan, ...]  # one for each of `attention_kinds`
Scratch = tuple[LayerCache, ...]  # by layer, [R, M, heads, D]: what nodes of a tree keep (`TreeView`)


def attention_kinds(config: ModelConfig) -> tuple[AttentionKind, ...]:
    """The model's distinct kinds of attention, in the order of the first layers that have them."""
    return tuple(dict.fromkeys(config.layer(index).attention for index in range(config.num_layers)))


def create_cache(config: ModelConfig, params: Params, *, num_pages: int, page_size: int) -> KVCache:
    """An empty cache of what the model's layers keep, in its weights' dtype."""
    return KVCache.create(config.cache_specs, num_pages=num_pages, page_size=page_size, dtype=params.embed.dtype)


def plan_attention(config: ModelConfig, params: Params, view: BatchView, *, columns: int) -> Plans:
    """The plans of a cycle, whose forwards have 1 to T = `columns` new tokens a row.

    Of `view` they read the table, `lengths` at the end of the cycle, `num_immutable` and the groups.
    """
    dtype = params.embed.dtype
    return tuple(kind.plan(config, view, columns=columns, dtype=dtype) for kind in attention_kinds(config))


def reads_by_kernels(config: ModelConfig, cache: KVCache, *, columns: int) -> bool:
    """True where kernels read rows of T = `columns` new tokens in every layer, each row by itself, as planned."""
    shape = {"columns": columns, "page_size": cache.page_size, "dtype": jax.tree.leaves(cache)[0].dtype}
    return all(kind.by_kernels(config, **shape) for kind in attention_kinds(config))


def selecting_layers(config: ModelConfig, sparse: SparseVerification | None) -> tuple[int, ...]:
    """For each layer the one whose selection it takes: itself, where it is to select or selects nothing ever."""
    found, selecting = list(range(config.num_layers)), tuple(config.selecting)
    if sparse is not None:
        for layer, source in zip(selecting, sparse.sources(len(selecting)), strict=True):
            found[layer] = selecting[source]
    return tuple(found)


def paged_hidden_states(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    view: BatchView,
    plans: Plans | None = None,
    watch: Watch | None = None,
) -> tuple[Float[Array, "R T E"], KVCache]:
    """Forward of T new tokens a row; returns normalised hidden states and the cache with their KV written.

    `plans` are those of the forward's cycle (`plan_attention`); None: nothing is planned. A row that writes nothing
    reads nothing: its states mean nothing. `watch` is that of `hidden_states`.
    """
    view = dataclasses.replace(view, lengths=view.written())
    kinds = attention_kinds(config)
    if view.copies is not None and any(kind.selects for kind in kinds):
        # Once for all layers: each would launch copies of its own for arrays that its kernels do not write.
        cache, view = cache.copy_pages(view.copies), dataclasses.replace(view, copies=None)
    layers = list(cache.layers)
    plan_of = dict(zip(kinds, plans or [None] * len(kinds), strict=True))
    sources, selected = selecting_layers(config, view.sparse), dict[int, Selection]()

    def attend(index: int, projection: Projection) -> jax.Array:
        kind, earlier = config.layer(index).attention, selected.get(sources[index])
        attended, layers[index], selected[index] = kind(projection, layers[index], plan_of[kind], view, earlier)
        return attended

    hidden = hidden_states(config, params, view.tokens, view.positions, attend, watch)
    return hidden, dataclasses.replace(cache, layers=tuple(layers))


def create_scratch(config: ModelConfig, params: Params, *, rows: int, nodes: int) -> Scratch:
    """Scratch of zeros for trees of so many nodes, in the weights' dtype."""
    return tuple(
        {
            name: jnp.zeros((rows, nodes, array.heads, array.dim), params.embed.dtype)
            for name, array in spec.arrays.items()
        }
        for spec in config.cache_specs
    )


def tree_hidden_states(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    scratch: Scratch,
    view: TreeView,
    watch: Watch | None = None,
) -> tuple[Float[Array, "R T E"], Scratch]:
    """Forward of T nodes a row; returns normalised hidden states, and scratch with what the nodes keep."""
    layers = list(scratch)
    sources, selected = selecting_layers(config, view.sparse), dict[int, Selection]()

    def attend(index: int, projection: Projection) -> jax.Array:
        kind, earlier = config.layer(index).attention, selected.get(sources[index])
        attended, layers[index], selected[index] = kind.over_tree(
            projection, cache.layers[index], layers[index], view, earlier
        )
        return attended

    hidden = hidden_states(config, params, view.tokens, view.positions, attend, watch)
    return hidden, tuple(layers)


def write_path(
    config: ModelConfig,
    cache: KVCache,
    scratch: Scratch,
    nodes: Int[Array, "R C"],
    positions: Int[Array, "R C"],
    pages: Int[Array, "R C"],
) -> KVCache:
    """The cache with what these nodes keep written where they stand, to `pages`: nowhere for `TRASH`."""
    row = jnp.arange(nodes.shape[0])[:, None]
    new = jax.tree.map(lambda array: array[row, nodes], scratch)
    return cache.write(config.cache_specs, new, positions, pages)
