"""Log-probabilities that a request asks for: of the tokens themselves, and of the likeliest ones at each position.

They are made of the very logits that tokens are drawn from or judged by, in the program that has them, and only in
programs that are asked for them (`Program.scores`, `Program.scores_prompts`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoders import MAX_ALTERNATIVES
from smcjax.decoding.distribution import distribution_of, processed_logits
from smcjax.decoding.groups import Groups, PairParams
from smcjax.decoding.program import Program, by_implementation
from smcjax.decoding.sampling import log_softmax_at
from smcjax.decoding.sequences import Sequences
from smcjax.model.decoder import unembed

SLICE = 32  # positions of a prompt whose logits are there at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities at some positions, n = min(`MAX_ALTERNATIVES`, V)."""

    logprobs: Float[Array, "*shape"]  # of the positions' own tokens
    likeliest: Int[Array, "*shape n"]  # the likeliest tokens, in order
    likeliest_logprobs: Float[Array, "*shape n"]  # −inf for tokens that are impossible


def scores(logits: Float[Array, "*shape V"], logprobs: Float[Array, "*shape"]) -> Scores:
    """The scores of tokens of these log-probabilities, drawn from softmax(logits)."""
    top, tokens = jax.lax.top_k(logits, min(MAX_ALTERNATIVES, logits.shape[-1]))
    largest = top[..., :1]
    mass = jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True)
    return Scores(logprobs, tokens.astype(jnp.int32), top - largest - jnp.log(mass))


def by_group[S: Groups](groups: S, of_rows: Scores) -> Scores:
    """Scores [R, …] or, where all rows of a group have the same, [G, …], as [G, N, …]."""
    size, n = groups.running.shape[0], groups.rows

    def arranged(x: jax.Array) -> jax.Array:
        if x.shape[0] == size * n:
            return x.reshape(size, n, *x.shape[1:])
        return jnp.broadcast_to(x[:, None], (size, n, *x.shape[1:]))

    return jax.tree.map(arranged, of_rows)


@by_implementation
def first_scores(
    program: Program[Any], params: PairParams, before: Groups, after: Groups, last_hidden: Float[Array, "G E"]
) -> Scores:
    """The scores [G, N] of first tokens, by the groups `before` and `after` these were drawn.

    All rows of a group draw from one law, that of the hidden state at the prompt's end.
    """
    distribution = distribution_of(before, rows=1, features=program.features)
    if program.decoding.weighted:  # whose weights make up for the constraint: p_T is the target's own
        distribution = dataclasses.replace(distribution, features=())
    number = jnp.ones(last_hidden.shape[0], jnp.int32)
    law = processed_logits(distribution, number, unembed(params.target, last_hidden))
    at = after.per_row(after.requests.prompt_length)[:, None]
    own = after.by_group(jnp.take_along_axis(after.sequences.logprobs, at, axis=1)[:, 0])
    of_groups = by_group(after, scores(law, own[:, 0]))
    return dataclasses.replace(of_groups, logprobs=own)


@by_implementation
def prompt_scores(
    program: Program[Any],
    params: PairParams,
    leaders: Sequences,
    start_at: Int[Array, " G"],
    hidden: Float[Array, "G T E"],
) -> Scores:
    """The scores [G, T] of the prompt tokens behind positions `start_at` … `start_at + T − 1`, of hidden states there.

    The law is softmax of the target's logits. Entries whose token is not the prompt's any more mean nothing.
    """
    groups, length, _ = hidden.shape
    following = jnp.minimum(start_at[:, None] + 1 + jnp.arange(length)[None], leaders.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(leaders.tokens, following, axis=1)
    slices = -(-length // SLICE)

    def sliced(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, slices * SLICE - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(groups, slices, SLICE, *x.shape[2:]), 1, 0)

    def of_slice(one: tuple[jax.Array, jax.Array]) -> Scores:
        hidden, tokens = one
        logits = unembed(params.target, hidden)
        return scores(logits, log_softmax_at(logits, tokens))

    found = jax.lax.map(of_slice, (sliced(hidden), sliced(tokens)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(groups, -1, *x.shape[3:])[:, :length], found)
