"""The part of a speculative cycle that its decoders share: pages, drafts, and the target's scores of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.cycle_view import pages_at, view_of, written_once
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.proposer import Drafts, TreeProposer
from smcjax.decoding.drafts.tree_drafts import Path, TreeDrafts
from smcjax.decoding.groups import Groups, PairParams
from smcjax.decoding.program import Program
from smcjax.kv import TRASH, Copies, PagePool, keep_until, make_room, truncate_pages
from smcjax.model.decoder import unembed
from smcjax.model.paged import (
    Scratch,
    create_scratch,
    paged_hidden_states,
    plan_attention,
    tree_hidden_states,
    write_path,
)
from smcjax.model.view import TreeView


class Kept(NamedTuple):
    """A tree's M nodes as the target keeps them until it is known which of them are accepted."""

    scratch: Scratch
    features: Float[Array, "R M E"] | None  # by node, for a proposer that reads them


@jax.named_scope("reserve")
def reserve[S: Groups](program: Program[Any], groups: S) -> tuple[S, Copies | None]:
    """Gives live rows pages of their own for a block's positions, from their frontier on, as far as their cap.

    Also returns which shared part-filled pages each model's first forward is to copy.
    """
    sequences, frontier_at = groups.sequences, groups.sequences.length - 1
    # The cap's own token is never scored after, so nothing past it needs a page.
    width, page_size = program.speculation.width, program.page_size
    last = jnp.minimum(frontier_at + width - 1, groups.per_row(groups.requests.limit) - 1)
    room = make_room(
        groups.memory.pool,
        sequences.block_table,
        frontier_at,
        last,
        groups.live,
        page_size=page_size,
        max_width=width,
        group=groups.rows,
    )
    groups = _with_pages(groups, room.pool, room.block_table)
    # Pages of one token are never part-filled, and rows of one group alone share one that is.
    never = page_size == 1 or groups.rows == 1
    return groups, None if never else Copies(room.copy_from, room.copy_to)


def propose[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    distribution: SamplingDistribution,
    copies: Copies | None,
    *,
    keep_logits: bool = False,
) -> tuple[S, Drafts]:
    """Drafts K tokens a row, whose KV goes to pages that `reserve` has taken."""
    assert program.proposer is not None
    drafts, draft = program.proposer.propose(
        program.speculation,
        params.draft,
        groups,
        copies,
        distribution,
        page_size=program.page_size,
        keep_logits=keep_logits,
    )
    return groups.with_memory(draft=draft), drafts


@jax.named_scope("verify")
def score[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    drafts: Int[Array, "R K"],
    copies: Copies | None,
    *,
    once: bool = False,
) -> tuple[S, Float[Array, "R C V"], Float[Array, "R C E"]]:
    """The target's logits behind each of [frontier, d₀ …], C = width tokens a row, whose KV and features it writes.

    The hidden states are those whose unembedding the logits are. With `once`, rows of a group may share pages of these
    tokens, which then are the same, and the first row writes.
    """
    width, config, sequences = program.speculation.width, program.target, groups.sequences
    frontier_at = sequences.length - 1
    tokens = jnp.concatenate([sequences.token_at(frontier_at)[:, None], drafts[:, : width - 1]], axis=1)
    positions = frontier_at[:, None] + jnp.arange(width)[None]
    if len(frontier_at) == 1:
        # Launches that share an array become one in XLA, but not those that share one number.
        positions = jax.lax.optimization_barrier(positions)
    view = view_of(groups, tokens, positions, copies, width=width, page_size=program.page_size)
    view = dataclasses.replace(view, sparse=program.speculation.sparse)
    if once:
        pages = written_once(groups, view.write_pages)
        view = dataclasses.replace(view, write_pages=pages, held=view.written())
    plans = plan_attention(config, params.target, view, columns=width)
    aux, draft = program.aux_hidden_states(), groups.memory.draft
    hidden, cache = paged_hidden_states(config, params.target, groups.memory.target, view, plans, aux)
    if aux is not None:
        features = program.features_proposer.fuse(params.draft, aux.streams)
        draft = program.features_proposer.write_features(draft, features, view.positions, view.write_pages)
    groups = groups.with_memory(target=cache, draft=draft)
    return groups, unembed(params.target, hidden), hidden


def propose_tree[S: Groups](
    program: Program[Any], params: PairParams, groups: S, distribution: SamplingDistribution, copies: Copies | None
) -> tuple[S, TreeDrafts]:
    """Like `propose`, but drafts a tree of tokens a row."""
    proposer = cast(TreeProposer, program.proposer)
    drafts, draft = proposer.propose_tree(
        program.speculation, params.draft, groups, copies, distribution, page_size=program.page_size
    )
    return groups.with_memory(draft=draft), drafts


def score_tree[S: Groups](
    program: Program[Any], params: PairParams, groups: S, tokens: Int[Array, "R M"], copies: Copies | None
) -> tuple[S, Float[Array, "R M V"], Kept]:
    """The target's logits behind each node of the tree, and what the nodes keep; pages get the copies alone."""
    speculation, config, cache = program.speculation, program.target, groups.memory.target
    tree = speculation.tree
    assert tree is not None
    if copies is not None:
        cache = cache.copy_pages(copies)
    order = tree.order(speculation.order)
    frontier_at = groups.sequences.length - 1
    view = TreeView(
        tokens=tokens[:, jnp.asarray(order)],
        root=frontier_at,
        committed=frontier_at,
        block_table=groups.sequences.block_table,
        tree=tree,
        nodes=order,
        sparse=speculation.sparse,
        page_size=program.page_size,
    )
    scratch = create_scratch(config, params.target, rows=tokens.shape[0], nodes=tree.size)
    aux = program.aux_hidden_states()
    hidden, scratch = tree_hidden_states(config, params.target, cache, scratch, view, aux)
    column_of = jnp.asarray([order.index(node) for node in range(tree.size)])
    features = None if aux is None else program.features_proposer.fuse(params.draft, aux.streams)[:, column_of]
    groups = groups.with_memory(target=cache)
    return groups, unembed(params.target, hidden[:, column_of]), Kept(scratch, features)


@jax.named_scope("keep_path")
def keep_path[S: Groups](program: Program[Any], groups: S, drafts: TreeDrafts, kept: Kept, last: Int[Array, " R"]) -> S:
    """Writes what the nodes up to each row's `last` accepted one keep to the row's pages, in both models.

    `kept` is the target's. Rows that are not live and positions beyond the cap write nowhere.
    """
    tree, proposer = program.speculation.tree, cast(TreeProposer, program.proposer)
    assert tree is not None
    column = jnp.arange(tree.depth + 1)[None]
    positions = groups.sequences.length[:, None] - 1 + column
    accepted = column <= jnp.asarray(tree.depths)[last][:, None]
    pages = jnp.where(accepted, pages_at(groups, positions, program.page_size), TRASH)
    path = Path(jnp.asarray(tree.paths)[last], positions, pages)
    draft = proposer.keep_path(program.speculation, groups.memory.draft, drafts.scratch, path)
    if kept.features is not None:
        row = jnp.arange(path.nodes.shape[0])[:, None]
        features = kept.features[row, path.nodes]
        draft = program.features_proposer.write_features(draft, features, path.positions, path.pages)
    target = write_path(program.target, groups.memory.target, kept.scratch, *path)
    return groups.with_memory(target=target, draft=draft)


def keep_pages[S: Groups](program: Program[Any], groups: S, ran: Bool[Array, " G"]) -> S:
    """Makes the rows of groups that `ran` give back their pages behind their last KV that counts.

    The last KV that counts is the one before the frontier: what rejected drafts wrote is behind it.
    """
    pool, table, length = groups.memory.pool, groups.sequences.block_table, groups.sequences.length
    kept = keep_until(pool, table, table, length, groups.per_row(ran), page_size=program.page_size)
    return _with_pages(groups, *kept)


def agree_on_pages[S: Groups](
    program: Program[Any],
    groups: S,
    source: Int[Array, " R"] | None,
    before: Int[Array, " R"],
    ran: Bool[Array, " G"],
) -> S:
    """Makes the rows of groups that `ran`, which agree between cycles, name what `keep_pages` keeps of their `source`.

    Without a source each row keeps its own. `before` are lengths before the cycle.
    """
    sequences = groups.sequences
    truncated = truncate_pages(
        groups.memory.pool,
        sequences.block_table,
        source,
        before,
        sequences.length,
        groups.per_row(ran),
        page_size=program.page_size,
        max_width=program.speculation.width,
        group=groups.rows,
    )
    return _with_pages(groups, *truncated)


def _with_pages[S: Groups](groups: S, pool: PagePool, table: Int[Array, "R M"]) -> S:
    """The groups with this pool and block table."""
    sequences = dataclasses.replace(groups.sequences, block_table=table)
    return dataclasses.replace(groups, sequences=sequences).with_memory(pool=pool)
