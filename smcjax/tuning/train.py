"""Training a draft for SMC: steps, learning rate, and a state from which an interrupted run goes on.

Every step is a function of the settings and its number: batches are drawn by (seed, epoch), and nothing else is random.
So a run that was interrupted and goes on ends with the same weights as one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from smcjax.model.params import Params
from smcjax.tuning.answers import Batch, Batches
from smcjax.tuning.divergence import block_tilt, renyi
from smcjax.tuning.laws import Laws, TargetStates, log_ratio_of

LARGEST_WEIGHT = 10.0  # of a token, so that no few tokens make a step
WARMUP = 0.05  # of the steps, until the learning rate is at its peak


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss: Σ_t ω_t·((1 − κ)·D_β + κ·KL) / Σ_t ω_t over tokens of the target's answers.

    Attributes:
        order: β > 1 of Rényi's divergence.
        kl_share: κ in [0, 1].
        gamma: γ; ω is what a token's divergence counts in that of the blocks of γ tokens that it lies in: their tilt
            (`smcjax.tuning.divergence.block_tilt`) times exp((β − 1)·D_β) of its own, 10 at most.
    """

    order: float = 1.5
    kl_share: float = 0.25
    gamma: int = 8

    def __call__(
        self, log_p: Float[Array, "B A V"], log_q: Float[Array, "B A V"], batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The sum over a batch, and the weights' sum; divergences are differentiated, weights are not."""
        divergence = renyi(log_p, log_q, self.order)
        losses = (1 - self.kl_share) * divergence + self.kl_share * renyi(log_p, log_q, 1.0)
        ratio, own = jax.lax.stop_gradient((log_ratio_of(log_p, log_q, batch.answer), divergence))
        tilt = block_tilt(jnp.where(batch.counted, ratio, 0.0), self.gamma, self.order)
        weights = jnp.where(batch.counted, jnp.minimum(tilt * jnp.exp((self.order - 1) * own), LARGEST_WEIGHT), 0.0)
        return jnp.sum(weights * losses), jnp.sum(weights)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int = 1000
    learning_rate: float = 1e-3  # Adam's, at its peak: warmed up over the first 5% of the steps, then a cosine to 0
    seed: int = 0  # of the order of the answers

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on gradients clipped at norm 1."""
        warmup = max(1, round(WARMUP * self.steps))
        rate = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, max(self.steps, warmup + 1))
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b1=0.9, b2=0.99))


def train(
    laws: Laws,
    target_params: Params,
    draft_params: Params,
    batches: Batches,
    states: TargetStates,
    objective: Objective,
    schedule: Schedule,
    *,
    begin: tuple[int, Any] | None = None,
    on_step: Callable[[int, jax.Array, Params, Any], None] = lambda *_: None,
) -> Params:
    """The draft's weights, float32, after all steps.

    `begin` is the number of steps done and the optimiser's state behind them, whose weights are then `draft_params`.
    `on_step` hears of each step its number from 1, the loss a token, weights and optimiser's state behind it.
    """
    compute = target_params.embed.dtype
    mean_tokens = batches.tokens_per_batch

    def loss(params: Params, given: tuple[Params, Batch, jax.Array]) -> tuple[jax.Array, jax.Array]:
        target_params, batch, target_states = given
        log_p = laws.log_p(target_params, target_states)
        cast = jax.tree.map(lambda leaf: leaf.astype(compute), params)
        total, weight = objective(log_p, laws.log_q(cast, batch), batch)
        # Not by the batch's own number of tokens, so that a token weighs the same in a short batch.
        count = jnp.maximum(jnp.sum(batch.counted), 1).astype(jnp.float32)
        return total / weight * count / mean_tokens, total / weight

    def given(batch: Batch) -> tuple[Params, Batch, np.ndarray]:
        return target_params, batch, states.of(batch)

    return minimise(loss, draft_params, batches, given, schedule, begin=begin, on_step=on_step)


def minimise[P](
    loss: Callable[[P, Any], tuple[jax.Array, jax.Array]],
    params: P,
    batches: Batches,
    given: Callable[[Batch], Any],
    schedule: Schedule,
    *,
    begin: tuple[int, Any] | None = None,
    on_step: Callable[[int, jax.Array, P, Any], None] = lambda *_: None,
) -> P:
    """The parameters, float32, after all steps of gradient descent on a loss; `begin` and `on_step` as in `train`.

    `loss(params, given(batch))` is what is differentiated, and the loss a token that `on_step` hears of.
    """
    optimizer = schedule.optimizer()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: P, state: Any, given: Any) -> tuple[P, Any, jax.Array]:
        gradient, own = jax.grad(loss, has_aux=True)(params, given)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers, whatever the user has set
            change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, own

    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    done, state = (0, optimizer.init(params)) if begin is None else begin
    while done < schedule.steps:
        epoch, first = divmod(done, len(batches))
        order = batches.epoch(np.random.default_rng([schedule.seed, epoch]))
        for batch in order[first : first + schedule.steps - done]:
            params, state, own = step(params, state, given(batch))
            done += 1
            on_step(done, own, params, state)
    return params
