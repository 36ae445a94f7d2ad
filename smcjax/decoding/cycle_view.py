"""A cycle's view of its rows: where their new tokens go, and the slots that their queries see."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from smcjax.decoders import Speculation
from smcjax.decoding.groups import Groups
from smcjax.kv import TRASH, Copies
from smcjax.model.view import BatchView


def pages_at(groups: Groups, positions: Int[Array, "R T"], page_size: int) -> Int[Array, "R T"]:
    """The pages of these positions' KV; the trash page for rows that are not live and positions beyond the cap."""
    within = positions < groups.per_row(groups.requests.limit)[:, None]
    return groups.sequences.write_pages(positions, groups.live[:, None] & within, page_size)


def written_once(groups: Groups, pages: Int[Array, "R T"]) -> Int[Array, "R T"]:
    """Keeps each page for the first row of a group that names it, `TRASH` for others: they write the same there."""
    of_group = groups.by_group(pages)  # [G, N, T]
    n = of_group.shape[1]
    earlier = jnp.arange(n)[:, None] > jnp.arange(n)[None]
    same = of_group[:, :, None] == of_group[:, None]  # [G, N, N, T]
    taken = (same & earlier[None, :, :, None]).any(axis=2)
    return jnp.where(taken, TRASH, of_group).reshape(pages.shape)


def view_of(
    groups: Groups,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    copies: Copies | None,
    *,
    width: int,
    page_size: int,
) -> BatchView:
    """The rows' new tokens in a cycle that covers `width` positions from each row's frontier on.

    Before the first forward a row holds KV up to its frontier; the column before that is the first that a query
    stands at. Rows that are not live reach nothing.
    """
    frontier_at = groups.sequences.length - 1
    end = jnp.minimum(frontier_at + width, groups.per_row(groups.requests.limit))
    return BatchView(
        tokens=tokens,
        positions=positions,
        block_table=groups.sequences.block_table,
        write_pages=pages_at(groups, positions, page_size),
        lengths=jnp.where(groups.live, end, 0),
        num_immutable=frontier_at,
        copies=copies,
        rows=groups.rows,
        page_size=page_size,
    )


def head_view(speculation: Speculation, groups: Groups, copies: Copies | None, *, page_size: int) -> BatchView:
    """The draft's first forward of a cycle: over the frontier, and before it `prev` where its KV is lacking."""
    sequences = groups.sequences
    frontier_at = sequences.length - 1
    tokens, positions = sequences.token_at(frontier_at)[:, None], frontier_at[:, None]
    if speculation.defers:
        tokens = jnp.concatenate([sequences.token_at(frontier_at - 1)[:, None], tokens], axis=1)
        positions = jnp.concatenate([positions - 1, positions], axis=1)
    view = view_of(groups, tokens, positions, copies, width=speculation.width, page_size=page_size)
    if not speculation.defers:
        return view
    # At group start `prev` is the last prompt token: its KV is there, perhaps shared with other groups.
    there = sequences.length == groups.per_row(groups.requests.prompt_length) + 1
    pages = view.write_pages.at[:, 0].set(jnp.where(there, TRASH, view.write_pages[:, 0]))
    return dataclasses.replace(view, write_pages=pages)
