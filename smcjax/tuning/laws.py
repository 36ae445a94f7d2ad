"""The laws of both models at the tokens of the target's answers, dense and without a cache.

The target's normalised hidden states are made once and kept in host memory, E numbers a token instead of V; its law is
one product away.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.model.config import ModelConfig
from smcjax.model.decoder import forward, unembed
from smcjax.model.params import Params
from smcjax.tuning.answers import Answers, Batch, Batches
from smcjax.tuning.divergence import overlap, renyi


@dataclasses.dataclass(frozen=True)
class Laws:
    """The laws of the next token of a target and a draft: over the first `vocabulary` ids, at one temperature."""

    target: ModelConfig
    draft: ModelConfig
    vocabulary: int
    temperature: float

    def log_p(self, target_params: Params, states: Float[Array, "B A E"]) -> Float[Array, "B A V"]:
        """log p of the target behind its hidden states, float32."""
        return self._log_law(target_params, states)

    def log_q(self, draft_params: Params, batch: Batch) -> Float[Array, "B A V"]:
        """log q of the draft at the places of a batch, float32."""
        return self._log_law(draft_params, states_at(self.draft, draft_params, batch))

    def _log_law(self, params: Params, states: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(unembed(params, states)[..., : self.vocabulary] / self.temperature, axis=-1)


def states_at(config: ModelConfig, params: Params, batch: Batch) -> Float[Array, "B A E"]:
    """Hidden states at the places of a batch, ready for `unembed`."""
    return jnp.take_along_axis(forward(config, params, batch.tokens), jnp.asarray(batch.places)[..., None], axis=1)


def log_ratio_of(
    log_p: Float[Array, "B A V"], log_q: Float[Array, "B A V"], answer: Int[Array | np.ndarray, "B A"]
) -> Float[Array, "B A"]:
    """log p/q of the answers' own tokens."""
    return jnp.take_along_axis(log_p - log_q, jnp.asarray(answer)[..., None], axis=-1)[..., 0]


class TargetStates:
    """The target's hidden states behind every place of some answers where a token of theirs is predicted."""

    def __init__(self, laws: Laws, target_params: Params, batches: Batches) -> None:
        self._ends = np.cumsum(batches.answers.answer)
        self._states: np.ndarray | None = None
        of = jax.jit(functools.partial(states_at, laws.target))
        for batch in batches.epoch():
            made = np.asarray(of(target_params, batch))
            if self._states is None:
                self._states = np.zeros((int(self._ends[-1]), made.shape[-1]), made.dtype)
            for row, own, counted in zip(batch.rows, made, batch.counted, strict=True):
                length = int(counted.sum())  # 0 where the row stands for none
                self._states[self._ends[row] - length : self._ends[row]] = own[:length]

    def of(self, batch: Batch) -> Float[np.ndarray, "B A E"]:
        """The states of a batch; 0 where nothing counts."""
        assert self._states is not None
        found = np.zeros((*batch.counted.shape, self._states.shape[-1]), self._states.dtype)
        for row, own, counted in zip(batch.rows, found, batch.counted, strict=True):
            length = int(counted.sum())
            own[:length] = self._states[self._ends[row] - length : self._ends[row]]
        return found


class TokenFigures(NamedTuple):
    """One number for each token of each answer, [n, A]; 0 behind its end."""

    log_ratio: np.ndarray  # log p/q of the token itself
    log_moment: np.ndarray  # log Σ p²/q, Rényi's divergence of order 2
    kl: np.ndarray  # KL(p‖q)
    acceptance: np.ndarray  # Σ min(p, q)


@functools.partial(jax.jit, static_argnums=0)
def _figures_of(
    laws: Laws, target_params: Params, draft_params: Params, batch: Batch, states: jax.Array
) -> tuple[jax.Array, ...]:
    log_p, log_q = laws.log_p(target_params, states), laws.log_q(draft_params, batch)
    return (
        log_ratio_of(log_p, log_q, batch.answer),
        renyi(log_p, log_q, 2.0),
        renyi(log_p, log_q, 1.0),
        overlap(log_p, log_q),
    )


def token_figures(
    laws: Laws, target_params: Params, draft_params: Params, batches: Batches, states: TargetStates
) -> TokenFigures:
    """The figures of all answers that `batches` cuts."""
    answers: Answers = batches.answers
    found = np.zeros((4, len(answers), answers.longest), np.float32)
    for batch in batches.epoch():
        made = np.stack(_figures_of(laws, target_params, draft_params, batch, states.of(batch)))
        for number, (row, counted) in enumerate(zip(batch.rows, batch.counted, strict=True)):
            length = int(counted.sum())
            found[:, row, :length] = made[:, number, :length]
    return TokenFigures(*found)
