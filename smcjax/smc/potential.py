"""Potentials: factors of the target that steer a population, while its weights stay right.

With potentials the target is π(x) ∝ p(x)^α·∏ φ(x), a product over the potentials φ of `SMC(potentials=…)` and of
the request's `SamplingParams(potentials=…)`; under a form, among the answers that have it. A potential gives a log
value to every beginning of an answer too. After each cycle a particle's log weight gains the log value of its tokens
now less that of its tokens when it was asked last. So the terms telescope: an answer's weight has φ of the whole
answer, whatever the values of its beginnings were. Those decide how early a population turns to good answers. A value
may depend on the target's log-probabilities of the answer's tokens and its hidden states too, since they are functions
of the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.checks import is_number, is_whole, short
from smcjax.decoders.parts import Potential, hidden_size_of


class Answers(NamedTuple):
    """The answers of R rows so far."""

    tokens: Int[Array, "R T"]  # prompt and answer
    begin: Int[Array, " R"]  # the column of the answer's first token
    end: Int[Array, " R"]  # the column behind its last
    finished: Bool[Array, " R"]
    logprobs: Float[Array, "R T"]  # log p_T of each of the answer's tokens by the target, at power 1
    wanted: Bool[Array, "R P"] | None = None  # the `Program.requested_potentials` of each row's own request
    # The target's normalised hidden state behind the prompt and all of the answer but its newest token, which the
    # unembedding has made that token's logits of; the target has not read the newest token yet. Rows that a cycle did
    # not advance have any numbers here, and keep the value that they have. f32; None where no potential reads it.
    hidden: Float[Array, "R E"] | None = None

    @property
    def counted(self) -> Bool[Array, "R T"]:
        """The columns that belong to the answers."""
        column = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        return (column >= self.begin[:, None]) & (column < self.end[:, None])


def reads_hidden(potentials: Iterable[Potential]) -> bool:
    """True where one of them has a `hidden_size`; nothing is traced for others."""
    return any(hidden_size_of(one) is not None for one in potentials)


@dataclasses.dataclass(frozen=True)
class RequestedPotential:
    """A potential of those requests that ask for it.

    Attributes:
        potential: its factor.
        column: its number among the program's `requested_potentials`.
    """

    potential: Potential
    column: int

    @property
    def hidden_size(self) -> int | None:
        """The potential's own."""
        return hidden_size_of(self.potential)

    def log_value(self, answers: Answers) -> Float[Array, " R"]:
        """The potential's value for rows whose request has it, 0 for the others."""
        assert answers.wanted is not None
        return jnp.where(answers.wanted[:, self.column], self.potential.log_value(answers), 0.0)


@dataclasses.dataclass(frozen=True)
class ConstantPotential:
    """One factor for every answer: it adds `log_factor` to the log evidence and steers nothing."""

    log_factor: float = 0.0

    def log_value(self, answers: Answers) -> Float[Array, " R"]:
        """The factor, whatever the tokens are."""
        return jnp.full(answers.end.shape, self.log_factor, float)


@dataclasses.dataclass(frozen=True)
class TokenPotential:
    """A factor for each time that a token stands in an answer.

    Attributes:
        log_factors: pairs of a token id and the log of its factor; other tokens have the factor 1.
    """

    log_factors: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Raises ValueError for what is no tuple of such pairs, as text in place of a token id."""
        pairs: Any = self.log_factors
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and is_whole(pair[0], 0) and is_number(pair[1], -math.inf)
            for pair in pairs
        ):
            raise ValueError(
                f"log_factors must be pairs of a token id and a number, as ((13, -0.5),), got {short(pairs)}."
            )

    def log_value(self, answers: Answers) -> Float[Array, " R"]:
        """The sum of the log factors of an answer's tokens."""
        value = jnp.zeros(answers.end.shape)
        for token, log_factor in self.log_factors:
            count = jnp.sum(answers.counted & (answers.tokens == token), axis=1)
            value += jnp.where(count > 0, count.astype(value.dtype) * log_factor, 0.0)  # 0·(−inf) would be NaN
        return value
