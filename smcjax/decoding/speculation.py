"""The part of a speculative cycle that all its decoders share: drafts, and the target's scores of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoding.cycle_view import reserve, view_of
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.groups import Groups, PairParams
from smcjax.decoding.program import Program
from smcjax.decoding.proposer import Drafts
from smcjax.kv import Copies
from smcjax.model.decoder import unembed
from smcjax.model.paged import paged_hidden_states, plan_attention


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
    return dataclasses.replace(groups, memory=dataclasses.replace(groups.memory, draft=draft)), drafts, copies


def score[S: Groups](
    program: Program[Any], params: PairParams, groups: S, drafts: Int[Array, "R K"], copies: Copies | None
) -> tuple[S, Float[Array, "R C V"]]:
    """The target's logits behind each of [frontier, d₀ …], C = width tokens a row, whose KV it writes."""
    width, config, sequences = program.speculation.width, program.target, groups.sequences
    frontier_at = sequences.length - 1
    tokens = jnp.concatenate([sequences.token_at(frontier_at)[:, None], drafts[:, : width - 1]], axis=1)
    positions = frontier_at[:, None] + jnp.arange(width)
    view = view_of(groups, tokens, positions, copies, width=width, page_size=program.page_size)
    plans = plan_attention(config, params.target, view, columns=width)
    hidden, cache = paged_hidden_states(config, params.target, groups.memory.target, view, plans)
    groups = dataclasses.replace(groups, memory=dataclasses.replace(groups.memory, target=cache))
    return groups, unembed(params.target, hidden)
