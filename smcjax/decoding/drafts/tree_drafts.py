"""Trees of drafts of a language model: a forward a depth, each over all nodes of that depth that have children.

The first is a chain's: over the frontier and the token before it, whose KV go to pages. Of drafted nodes KV goes to
scratch (`smcjax.model.view.TreeView`), and from there to pages once it is known which of them are accepted. Leaves need
no forward; one that is accepted is the next cycle's `prev`, whose KV the next first forward writes.

A node's children are drawn independently from the law behind it, each with a key of its own, or are its likeliest
tokens; those of a greedy request always are, since all draws would be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax.decoders import Speculation
from smcjax.decoding.cycle_view import head_view
from smcjax.decoding.distribution import SamplingDistribution, processed_logits, within_reach
from smcjax.decoding.groups import Groups
from smcjax.decoding.sampling import Purpose, column_keys, draw, row_keys
from smcjax.kv import TRASH, Copies, KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import unembed
from smcjax.model.paged import (
    Scratch,
    create_scratch,
    paged_hidden_states,
    plan_attention,
    tree_hidden_states,
    write_path,
)
from smcjax.model.params import Params
from smcjax.model.view import TreeView
from smcjax.trees import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeDrafts:
    """The tokens of a tree's M nodes in each row."""

    tokens: Int[Array, "R M"]  # node 0's is the frontier
    logits: Float[Array, "R I V"]  # processed, behind each node of `DraftTree.inner`
    scratch: Scratch  # what the inner nodes but 0 keep


class Path(NamedTuple):
    """The nodes of each row from node 0 to the last that is accepted, by depth; behind that, stale ones."""

    nodes: Int[Array, "R C"]
    positions: Int[Array, "R C"]
    pages: Int[Array, "R C"]  # where KV goes; `TRASH` behind the last accepted node, and where none is kept


def draft_tree(
    config: ModelConfig,
    speculation: Speculation,
    params: Params,
    groups: Groups,
    copies: Copies | None,
    distribution: SamplingDistribution,
    *,
    page_size: int,
) -> tuple[TreeDrafts, KVCache]:
    """Drafts `speculation.tree` behind each row's frontier; the cache has the frontier's KV after it."""
    tree = speculation.tree
    assert tree is not None
    view = head_view(speculation, groups, copies, page_size=page_size)
    plans = plan_attention(config, params, view, columns=view.tokens.shape[1])
    hidden, cache = paged_hidden_states(config, params, groups.memory.draft, view, plans)
    scratch = create_scratch(config, params, rows=hidden.shape[0], nodes=tree.size)

    def behind(level: TreeView) -> jax.Array:
        nonlocal scratch
        hidden, scratch = tree_hidden_states(config, params, cache, scratch, level)
        return unembed(params, hidden)

    grown = grow(speculation, groups, distribution, unembed(params, hidden[:, -1:]), behind, page_size=page_size)
    return TreeDrafts(*grown, scratch), cache


def grow(
    speculation: Speculation,
    groups: Groups,
    distribution: SamplingDistribution,
    root: Float[Array, "R 1 V"],
    behind: Callable[[TreeView], Float[Array, "R T V"]],
    *,
    page_size: int,
    prunes: bool = False,
) -> tuple[Int[Array, "R M"], Float[Array, "R I V"]]:
    """The first two fields of `TreeDrafts`, depth by depth.

    `root` are the logits behind each row's frontier, and `behind` makes those behind all nodes of a depth that have
    children, whose own parents it was called for before. `prunes` says that they are −∞ for a part of the vocabulary.
    """
    tree = speculation.tree
    assert tree is not None
    sequences = groups.sequences
    frontier_at = sequences.length - 1
    number = sequences.length - groups.per_row(groups.requests.prompt_length) + 1  # of a child of node 0
    keys = row_keys(groups.requests.key, groups.cycle, speculation.rows, Purpose.DRAFT)

    logits = root
    tokens = jnp.broadcast_to(sequences.token_at(frontier_at)[:, None], (root.shape[0], tree.size))
    laws: list[jax.Array] = []
    for depth, parents in enumerate(tree.inner_levels):
        if depth:
            level = TreeView(
                tokens=tokens[:, jnp.asarray(parents)],
                root=frontier_at,
                committed=frontier_at + 1,
                block_table=sequences.block_table,
                tree=tree,
                nodes=parents,
                page_size=page_size,
            )
            logits = behind(level)
        earlier = distribution.before(tokens, tree.drafts_to(parents))
        laws.append(_laws(distribution, number + depth, logits, earlier, prunes=prunes))
        children = [child for parent in parents for child in tree.children[parent]]
        chosen = _children(speculation, tree, parents, keys, laws[-1], distribution.greedy)
        tokens = tokens.at[:, jnp.asarray(children)].set(chosen)
    return tokens, jnp.concatenate(laws, axis=1)


def _laws(
    distribution: SamplingDistribution,
    number: Int[Array, " R"],
    logits: Float[Array, "R parents V"],
    earlier: Int[Array, "R parents most"] | None,
    *,
    prunes: bool,
) -> Float[Array, "R parents V"]:
    """Processed logits behind some nodes of one depth, `earlier` being the drafts up to each of them."""

    def law(logits: jax.Array, earlier: jax.Array | None) -> jax.Array:
        here = distribution.behind(earlier)
        return processed_logits(here, number, within_reach(here, number, logits) if prunes else logits)

    return jax.vmap(law, in_axes=1, out_axes=1)(logits, earlier)


def _children(
    speculation: Speculation,
    tree: DraftTree,
    parents: tuple[int, ...],
    keys: Key[Array, " R"],
    logits: Float[Array, "R parents V"],
    greedy: Bool[Array, " R"] | None,
) -> Int[Array, "R children"]:
    """Tokens of all children of some nodes, parent by parent, from the processed logits behind each of these."""
    families = [tree.children[parent] for parent in parents]
    column = jnp.asarray([column for column, family in enumerate(families) for _ in family])
    rank = jnp.asarray([rank for family in families for rank in range(len(family))])
    # With more children than tokens the last are the least likely one again: siblings that cannot be accepted.
    most = min(max(map(len, families)), logits.shape[-1])
    likeliest = jax.lax.top_k(logits, most)[1][:, column, jnp.minimum(rank, most - 1)].astype(jnp.int32)
    if speculation.siblings == "top":
        return likeliest

    def drawn(column: jax.Array, logits: jax.Array) -> jax.Array:
        return draw(column_keys(keys, column), logits)

    # Node m is drawn as column m − 1, as it is in a chain.
    columns = jnp.asarray([node - 1 for family in families for node in family])
    sampled = jax.vmap(drawn, in_axes=(0, 1), out_axes=1)(columns, logits[:, column])
    return sampled if greedy is None else jnp.where(greedy[:, None], likeliest, sampled)


def keep_path(config: ModelConfig, speculation: Speculation, cache: KVCache, scratch: Scratch, path: Path) -> KVCache:
    """The cache with the KV of the accepted drafts but a leaf's, which has none, and the frontier's, which is there."""
    tree = speculation.tree
    assert tree is not None
    kept = jnp.asarray([node > 0 and bool(children) for node, children in enumerate(tree.children)])
    pages = jnp.where(kept[path.nodes], path.pages, TRASH)
    return write_path(config, cache, scratch, path.nodes, path.positions, pages)
