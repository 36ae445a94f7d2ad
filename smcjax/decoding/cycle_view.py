"""A speculative cycle's view of its rows: the pages that it may write, and the slots that its queries see."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smcjax.decoders import Speculation
from smcjax.decoding.groups import Groups
from smcjax.kv import TRASH, Copies, PagePool, keep_until, make_room, truncate_pages
from smcjax.model.view import BatchView


@jax.named_scope("reserve")
def reserve[S: Groups](groups: S, *, width: int, page_size: int) -> tuple[S, Copies | None]:
    """Gives live rows pages of their own for the `width` positions from their frontier on, as far as their cap.

    Also returns which shared part-filled pages each model's first forward is to copy.
    """
    sequences, frontier_at = groups.sequences, groups.sequences.length - 1
    rows = sequences.length.shape[0] // groups.running.shape[0]
    # The cap's own token is never scored after, so nothing past it needs a page.
    last = jnp.minimum(frontier_at + width - 1, groups.per_row(groups.requests.limit) - 1)
    room = make_room(
        groups.memory.pool,
        sequences.block_table,
        frontier_at,
        last,
        groups.live,
        page_size=page_size,
        max_width=width,
        group=rows,
    )
    groups = _with_pages(groups, room.pool, room.block_table)
    # Pages of one token are never part-filled, and rows of one group alone share one that is.
    never = page_size == 1 or rows == 1
    return groups, None if never else Copies(room.copy_from, room.copy_to)


def keep_pages[S: Groups](groups: S, table: Int[Array, "R M"], ran: Bool[Array, " G"], *, page_size: int) -> S:
    """Makes the rows of groups that `ran` name the pages of `table` up to their last KV that counts, and no others.

    The last KV that counts is the one before the frontier: what rejected drafts wrote is behind it.
    """
    sequences, pool = groups.sequences, groups.memory.pool
    goes = groups.per_row(ran)
    kept = keep_until(pool, sequences.block_table, table, sequences.length, goes, page_size=page_size)
    return _with_pages(groups, *kept)


def agree_on_pages[S: Groups](
    groups: S,
    source: Int[Array, " R"] | None,
    before: Int[Array, " R"],
    ran: Bool[Array, " G"],
    *,
    width: int,
    page_size: int,
) -> S:
    """Does what `keep_pages` does with the pages of each row's `source`, where rows of a group agree between cycles.

    Without a source each row keeps its own. `before` are lengths before the cycle, which reserved pages for `width`
    positions from the frontier on.
    """
    sequences = groups.sequences
    truncated = truncate_pages(
        groups.memory.pool,
        sequences.block_table,
        source,
        before,
        sequences.length,
        groups.per_row(ran),
        page_size=page_size,
        max_width=width,
        group=sequences.length.shape[0] // ran.shape[0],
    )
    return _with_pages(groups, *truncated)


def _with_pages[S: Groups](groups: S, pool: PagePool, table: Int[Array, "R M"]) -> S:
    """The groups with this pool and block table."""
    sequences = dataclasses.replace(groups.sequences, block_table=table)
    return dataclasses.replace(groups, sequences=sequences).with_memory(pool=pool)


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
        rows=groups.sequences.length.shape[0] // groups.running.shape[0],
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
