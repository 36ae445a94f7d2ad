"""Answers of a given form: which tokens an automaton allows behind each row, and which state each leads to.

A request's automaton (`smcjax.structured.automaton`) has a table of next states by classes of tokens. A token is

    text    allowed where enough of the request's tokens are left behind it to end in an accepting state
    a stop  allowed in accepting states alone

A row that may go on always has an allowed token, so none runs into a dead end, and at the cap it stands in an accepting
state. Rows of requests without an automaton are in no state, −1, where everything is allowed; so is a row behind its
stop, and behind a draft that was not allowed: what stands there belongs to no answer, and its laws must stay laws.

The law of a token depends on those before it, as with penalties: a row's state lies beside its tokens
(`Sequences.automaton`), and walks along drafts (`RowConstraint.behind`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.groups import Groups, Memory
from smcjax.decoding.row_feature import RowFeature
from smcjax.decoding.sequences import Block, Sequences, append, cut_block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutomatonTables:
    """C automata over V tokens. Cell state·width + class of an automaton says what its class of tokens does there."""

    following: Int[Array, "C cells"]  # int16: the next state, any where there is none
    needed: Int[Array, "C cells"]  # int16: the fewest tokens from there to an accepting state; `NEVER` where none is
    reach: Int[Array, "C states"]  # int16: the same from each state; 0: it accepts
    classes: Int[Array, "C V"]  # int16: of each token
    width: Int[Array, " C"]  # classes


NEVER = 2**15 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedAutomata:
    """The automata of G requests: what a program that knows of forms takes beside the state."""

    place: Int[Array, " G"]  # each request's in the tables; −1: none
    tables: AutomatonTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowConstraint(RowFeature):
    """The automata of R rows behind the tokens so far."""

    tables: AutomatonTables
    automaton: Int[Array, " R"]  # its place in the tables; any where the state is −1
    stops: Bool[Array, "R V"]
    state: Int[Array, " R"]  # −1: everything is allowed
    left: Int[Array, " R"]  # tokens that the row may still have

    only_forbids: ClassVar[bool] = True

    @property
    def context(self) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """The automata's states and the numbers of tokens left."""
        return self.state, self.left

    def within(self, context: tuple[Int[Array, " R"], Int[Array, " R"]]) -> RowConstraint:
        """The automata in other states, with other numbers of tokens left."""
        return dataclasses.replace(self, state=context[0], left=context[1])

    def __call__(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """The logits, −inf for tokens that are not allowed."""
        return masked(logits, self.allowed())

    def allowed(self) -> Bool[Array, "R V"]:
        """The tokens that may come next."""
        tables, row = self.tables, jnp.maximum(self.automaton, 0)
        state = jnp.maximum(self.state, 0)
        cells = (state * tables.width[row])[:, None] + tables.classes[row].astype(jnp.int32)
        enough = tables.needed[row[:, None], cells].astype(jnp.int32) < self.left[:, None]
        accepting = tables.reach[row, state] == 0
        return jnp.where(self.stops, accepting[:, None], enough) | (self.state < 0)[:, None]

    def after(self, token: Int[Array, " R"]) -> RowConstraint:
        """The automata behind one more token a row; ids of V and beyond stand for none."""
        tables, row, vocabulary = self.tables, jnp.maximum(self.automaton, 0), self.stops.shape[1]
        known = jnp.minimum(token, vocabulary - 1)
        cell = jnp.maximum(self.state, 0) * tables.width[row] + tables.classes[row, known].astype(jnp.int32)
        lost = (self.state < 0) | (tables.needed[row, cell].astype(jnp.int32) >= self.left)
        lost |= jnp.take_along_axis(self.stops, known[:, None], axis=1)[:, 0]
        state = jnp.where(lost, -1, tables.following[row, cell]).astype(jnp.int32)
        none = token >= vocabulary
        return dataclasses.replace(
            self, state=jnp.where(none, self.state, state), left=jnp.where(none, self.left, self.left - 1)
        )

    def behind(self, tokens: Int[Array, "R T"]) -> RowConstraint:
        """The automata behind T more tokens a row, ids of V and beyond standing for none."""
        here = self
        for column in range(tokens.shape[1]):
            here = here.after(tokens[:, column])
        return here

    def allowed_along(self, tokens: Int[Array, "R T"]) -> Bool[Array, "R C V"]:
        """The tokens that may come behind each of C = T + 1 beginnings of T tokens."""
        here, allowed = self, [self.allowed()]
        for column in range(tokens.shape[1]):
            here = here.after(tokens[:, column])
            allowed.append(here.allowed())
        return jnp.stack(allowed, axis=1)


def row_constraint(groups: Groups, rows: int) -> RowConstraint | None:
    """The automata of `rows` rows a request: all that it has, or one for all where they agree. None: there are none."""
    requests, sequences = groups.requests, groups.sequences
    if groups.memory.automata is None:
        return None
    step = groups.rows // rows

    def per_row(per_group: jax.Array) -> jax.Array:
        return jnp.repeat(per_group, rows, axis=0)

    return RowConstraint(
        tables=groups.memory.automata,
        automaton=per_row(requests.automaton),
        stops=per_row(requests.stops),
        state=sequences.automaton[::step],
        left=per_row(requests.limit) - sequences.length[::step],
    )


def beginning_states(automaton: Int[Array, " G"], rows: int) -> Int[Array, " R"]:
    """The states of rows without a token."""
    return jnp.repeat(jnp.where(automaton < 0, -1, 0), rows).astype(jnp.int32)


def with_automata[S: Groups](groups: S, automata: PlacedAutomata | None) -> S:
    """The groups as a program that knows of forms reads them; None: as they are."""
    if automata is None:
        return groups
    requests = dataclasses.replace(groups.requests, automaton=automata.place)
    return dataclasses.replace(groups, requests=requests, memory=_with_tables(groups.memory, automata.tables))


def without_automata[S: Groups](groups: S) -> S:
    """The groups without the tables; the states of their rows stay."""
    return dataclasses.replace(groups, memory=_with_tables(groups.memory, None))


def _with_tables(memory: Memory, tables: AutomatonTables | None) -> Memory:
    return dataclasses.replace(memory, automata=tables)


def extend(
    groups: Groups,
    tokens: Int[Array, "R C"],
    logprobs: Float[Array, "R C"],
    live: Bool[Array, " R"],
    *,
    last: Int[Array, " R"] | None = None,
) -> tuple[Sequences, Block]:
    """Commits what `cut_block` leaves of a block to the live rows, and their automata's states with it.

    Also returns what each row keeps. Tokens behind column `last` are none of the row's.
    """
    constraint = row_constraint(groups, groups.rows)
    block = cut_block(
        tokens,
        groups.per_row(groups.requests.stops),
        groups.sequences.length,
        groups.per_row(groups.requests.limit),
        last=last,
    )
    sequences = append(groups.sequences, tokens, logprobs, block, live)
    if constraint is None:
        return sequences, block
    kept = jnp.where(block.counted & live[:, None], tokens, constraint.stops.shape[1])
    return dataclasses.replace(sequences, automaton=constraint.behind(kept).state), block


def masked(logits: Float[Array, "*shape V"], allowed: Bool[Array, "*shape V"] | None) -> Float[Array, "*shape V"]:
    """−inf for tokens that are not allowed; None: all are. NaN stays, so that a broken model is seen."""
    return logits if allowed is None else jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)
