"""Penalties of tokens that were there before, and a bias of single tokens: a request's own changes of the logits.

    ℓ ← ℓ + bias                                            of the tokens that `logit_bias` names
    ℓ ← ℓ/r where ℓ > 0, else ℓ·r                           of tokens in the prompt or the answer so far
    ℓ ← ℓ − frequency·(times in the answer so far) − presence·(1 where it is in there)

before the temperature, in vLLM's order. The law of a token so depends on which tokens lie before it, and each draft is
before those that follow it: a decoder must say what lies behind the committed tokens (`SamplingDistribution.behind`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.groups import Groups
from smcjax.decoding.row_feature import RowFeature


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """The parameters of G requests."""

    repetition: Float[Array, " G"]  # r; 1: none
    frequency: Float[Array, " G"]
    presence: Float[Array, " G"]
    biased: Int[Array, "G B"]  # token ids; ids of V and beyond are no token's
    bias: Float[Array, "G B"]

    @classmethod
    def none(cls, groups: int, most_biased: int, vocab_size: int) -> Adjustments:
        """The parameters of requests that ask for nothing."""
        zeros, no_token = jnp.zeros(groups, jnp.float32), jnp.full((groups, most_biased), vocab_size, jnp.int32)
        return cls(jnp.ones_like(zeros), zeros, zeros, no_token, jnp.zeros((groups, most_biased), jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAdjustments(RowFeature):
    """Adjusts the logits of R rows by their requests' parameters and what lies before each row's next token."""

    repetition: Float[Array, " R"]
    frequency: Float[Array, " R"]
    presence: Float[Array, " R"]
    bias: Float[Array, "R V"]
    in_prompt: Bool[Array, "R V"]
    counts: Int[Array, "R V"]  # of each token in the answer so far

    only_forbids: ClassVar[bool] = False

    @property
    def context(self) -> Int[Array, "R V"]:
        """The counts of the answer's tokens."""
        return self.counts

    def within(self, context: Int[Array, "R V"]) -> RowAdjustments:
        """The adjustments with other counts."""
        return dataclasses.replace(self, counts=context)

    def behind(self, tokens: Int[Array, "R T"]) -> RowAdjustments:
        """The adjustments behind T more tokens a row; ids of V and beyond stand for none."""
        row = jnp.arange(tokens.shape[0])[:, None]
        return dataclasses.replace(self, counts=self.counts.at[row, tokens].add(1, mode="drop"))

    def __call__(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """Changes a model's own logits."""
        repetition, frequency, presence = (x[:, None] for x in (self.repetition, self.frequency, self.presence))
        logits = logits + self.bias
        punished = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(self.in_prompt | (self.counts > 0), punished, logits)
        counts, present = self.counts.astype(jnp.float32), (self.counts > 0).astype(jnp.float32)
        return logits - frequency * counts - presence * present


def row_adjustments(groups: Groups, rows: int) -> RowAdjustments | None:
    """Each request's adjustments for `rows` rows, which have the tokens of its first row; None where there are none."""
    requests = groups.requests
    asked = requests.adjustments
    if asked is None:
        return None
    size, vocabulary = requests.stops.shape
    tokens, length = groups.leaders.tokens, groups.leaders.length
    group, place = jnp.arange(size)[:, None], jnp.arange(tokens.shape[1])[None]
    of_prompt = place < requests.prompt_length[:, None]
    of_answer = ~of_prompt & (place < length[:, None])
    nothing = jnp.zeros((size, vocabulary), jnp.int32)
    in_prompt = nothing.at[group, jnp.where(of_prompt, tokens, vocabulary)].add(1, mode="drop") > 0
    counts = nothing.at[group, jnp.where(of_answer, tokens, vocabulary)].add(1, mode="drop")
    bias = jnp.zeros((size, vocabulary), jnp.float32).at[group, asked.biased].add(asked.bias, mode="drop")
    of_groups = RowAdjustments(asked.repetition, asked.frequency, asked.presence, bias, in_prompt, counts)
    return jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), of_groups)
