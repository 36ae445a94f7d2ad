"""Drawing tokens: keys, tempering, masks. What all decoders share.

Keys are functional: every draw's key is folded from the request's own key, the request's own cycle, the row's place
in its group, the purpose and the draft column, so a draw never depends on what else is in the batch.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax.device import on_cpu
from smcjax.noise import gumbels


class Purpose(enum.IntEnum):
    """The purpose of a draw, folded into its key; two draws of one row and cycle differ at least in this.

    Group draws fold their purpose in where row draws fold the row, so theirs lie beyond every row index: else the key
    of a resampling would be the parent of some row's keys.
    """

    FIRST = 0  # x₀
    DRAFT = 1
    BONUS = 2
    RESAMPLE = 1 << 16
    SELECT = RESAMPLE + 1
    ACCEPT = RESAMPLE + 2  # the uniforms that drafts are accepted by
    NEXT = RESAMPLE + 3  # the token behind the accepted ones
    END = RESAMPLE + 4  # the coin by which a population ends early


def group_keys(keys: Key[Array, " G"], cycle: Int[Array, " G"], purpose: Purpose) -> Key[Array, " G"]:
    """Keys of the draws that a whole group makes together."""
    return jax.vmap(lambda key, c: jax.random.fold_in(jax.random.fold_in(key, c), purpose))(keys, cycle)


def row_keys(keys: Key[Array, " G"], cycle: Int[Array, " G"], num_rows: int, purpose: Purpose) -> Key[Array, " R"]:
    """Keys of per-row draws, R = G·num_rows, rows of a group consecutive."""

    def of_row(key: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, row), purpose)

    def of_group(key: jax.Array, c: jax.Array) -> jax.Array:
        return jax.vmap(of_row, in_axes=(None, 0))(jax.random.fold_in(key, c), jnp.arange(num_rows))

    return jax.vmap(of_group)(keys, cycle).reshape(-1)


def column_keys(keys: Key[Array, " R"], column: int | Int[Array, ""]) -> Key[Array, " R"]:
    """Keys of one draft column."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, column)


def draw(keys: Key[Array, " R"], logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """One categorical draw a row by Gumbel-max, with the noise that kernels make of the same key (`smcjax.noise`)."""
    return likeliest(logits + gumbels(keys, logits.shape[1:]))


def likeliest(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Index of each row's largest score, the first of equal ones; any index of a row that has a NaN.

    On a CPU XLA compares one element at a time in `argmax` and eight or more in `max`, so the vocabulary is first
    reduced block by block and only one block a row searched.
    """
    rows, vocabulary = scores.shape
    width = 1024
    if not on_cpu() or vocabulary <= width:
        return jnp.argmax(scores, axis=1).astype(jnp.int32)
    blocks = jnp.pad(scores, ((0, 0), (0, -vocabulary % width)), constant_values=-jnp.inf).reshape(rows, -1, width)
    block = jnp.argmax(jnp.max(blocks, axis=2), axis=1)
    within = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=1)
    return (block * width + within).astype(jnp.int32)


class Softmax(NamedTuple):
    """softmax(logits) = exp(logits − top) / mass, which goes over the vocabulary once for each of the two.

    Relative to the largest logit nothing as large as the logits is rounded. All is NaN where a logit is.
    """

    logits: Float[Array, "*shape V"]
    top: Float[Array, "*shape"]  # the largest logit
    mass: Float[Array, "*shape"]  # the sum of exp(logits − top)

    @classmethod
    def of(cls, logits: Float[Array, "*shape V"]) -> Softmax:
        """The softmax of these logits."""
        top = jnp.max(logits, axis=-1)
        return cls(logits, top, jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))

    def probabilities(self) -> Float[Array, "*shape V"]:
        """Probabilities of all tokens."""
        return jnp.exp(self.logits - self.top[..., None]) / self.mass[..., None]

    def log_at(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Log-probabilities of one token each."""
        chosen = jnp.take_along_axis(self.logits, tokens[..., None], axis=-1)[..., 0]
        return chosen - self.top - jnp.log(self.mass)


def log_softmax_at(logits: Float[Array, "*shape V"], tokens: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log_softmax(logits)[tokens], without the other entries."""
    return Softmax.of(logits).log_at(tokens)


def forbid_stops(
    logits: Float[Array, "*shape V"],
    stops: Bool[Array, "*#shape V"],
    token_number: Int[Array, "*shape"],
    minimum: Int[Array, "*#shape"],
) -> Float[Array, "*shape V"]:
    """−inf on stop tokens while the token to be drawn, the `token_number`-th (from 1), is within the minimum."""
    return jnp.where(stops & (token_number <= minimum)[..., None], -jnp.inf, logits)


def truncate(logits: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """−inf outside the `top_k` largest logits, then outside the smallest set of total probability ≥ `top_p`.

    `top_k` ≥ V and `top_p` ≥ 1 keep everything. Ties at the k-th largest value are all kept; the most probable token
    always is.
    """
    descending = jnp.sort(logits, axis=-1)[:, ::-1]
    vocabulary = logits.shape[-1]
    kth = jnp.take_along_axis(descending, jnp.clip(top_k - 1, 0, vocabulary - 1)[:, None], axis=-1)
    logits = jnp.where(logits < kth, -jnp.inf, logits)
    descending = jnp.where(descending < kth, -jnp.inf, descending)
    probability = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # mass strictly above each token
    inside = (before < top_p[:, None]) | (top_p >= 1.0)[:, None] | (jnp.arange(vocabulary) == 0)[None]
    least = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)
