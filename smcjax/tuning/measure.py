"""Distances of a draft from its target on answers that it was not trained on, with intervals over answers."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from smcjax.model.params import Params
from smcjax.tuning.answers import Batches
from smcjax.tuning.divergence import block_second_moments
from smcjax.tuning.laws import Laws, TargetStates, token_figures

RESAMPLINGS = 1000  # of the bootstrap
Mean = tuple[float, float, float]  # and the ends of its 95% interval


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over tokens or blocks of the target's own answers, with intervals that take answers for independent."""

    # χ² of a block of γ tokens, the variance of a particle's weight in a cycle. Heavy-tailed: a few blocks are most.
    weight_variance: Mean
    token_divergence: Mean  # Rényi's of order 2, log(1 + χ²), nats
    kl: Mean  # Kullback and Leibler's divergence of a token, nats
    acceptance: Mean  # the probability that speculative sampling accepts a token's draft


def measure(
    laws: Laws, target_params: Params, draft_params: Params, batches: Batches, states: TargetStates, gamma: int
) -> Figures:
    """The figures of a draft on some answers."""
    of_tokens = token_figures(laws, target_params, draft_params, batches, states)
    lengths = batches.answers.answer
    counted = np.arange(batches.answers.longest) < lengths[:, None]
    blocks = block_second_moments(of_tokens.log_ratio, of_tokens.log_moment, counted, gamma)

    def of_each(values: np.ndarray) -> Mean:
        return mean_of_all(values.sum(axis=1, dtype=np.float64), lengths)

    return Figures(
        weight_variance=mean_of_all(
            np.array([moments.sum() - len(moments) for moments in blocks]), np.array([len(one) for one in blocks])
        ),
        token_divergence=of_each(of_tokens.log_moment),
        kl=of_each(of_tokens.kl),
        acceptance=of_each(of_tokens.acceptance),
    )


def mean_of_all(sums: Float[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]) -> Mean:
    """Σ sums / Σ sizes of clusters, with the bootstrap's percentiles over clusters (Efron 1979), the same each time."""
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLINGS, len(sums)))
    low, high = np.percentile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [2.5, 97.5])
    return float(sums.sum() / sizes.sum()), float(low), float(high)
