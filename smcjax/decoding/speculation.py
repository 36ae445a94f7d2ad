"""The part of a speculative cycle that all its decoders share: drafts, and the target's scores of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoding.cycle_view import pages_at, reserve, view_of, written_once
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.proposer import Drafts, TreeProposer
from smcjax.decoding.drafts.tree_drafts import Path, TreeDrafts
from smcjax.decoding.groups import Groups, PairParams
from smcjax.decoding.program import Program
from smcjax.kv import TRASH, Copies
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


def propose[S: Groups](
    program: Program[Any],
    params: PairParams,
    groups: S,
    distribution: SamplingDistribution,
    *,
    keep_logits: bool = False,
) -> tuple[S, Drafts, Copies | None]:
    """Reserves the block's pages and drafts K tokens a row; the copies are for the target's forward to make too."""
    assert program.proposer is not None
    groups, copies = reserve(groups, width=program.speculation.width, page_size=program.page_size)
    drafts, draft = program.proposer.propose(
        program.speculation,
        params.draft,
        groups,
        copies,
        distribution,
        page_size=program.page_size,
        keep_logits=keep_logits,
    )
    return groups.with_memory(draft=draft), drafts, copies


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
    program: Program[Any], params: PairParams, groups: S, distribution: SamplingDistribution
) -> tuple[S, TreeDrafts, Copies | None]:
    """Like `propose`, but drafts a tree of tokens a row."""
    proposer = cast(TreeProposer, program.proposer)
    groups, copies = reserve(groups, width=program.speculation.width, page_size=program.page_size)
    drafts, draft = proposer.propose_tree(
        program.speculation, params.draft, groups, copies, distribution, page_size=program.page_size
    )
    return groups.with_memory(draft=draft), drafts, copies


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
