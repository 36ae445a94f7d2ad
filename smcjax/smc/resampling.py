"""Resampling: from weights to ancestors.

A scheme turns uniforms into offspring counts through one shared inverse CDF, with E[count of i] = N·W_i:

    systematic   one u;  positions (u + k)/N           stratified   N uniforms;  positions (u_k + k)/N
    multinomial  N uniforms;  positions u_k            residual     ⌊N·W_i⌋ copies, the rest multinomial by N·W_i − ⌊·⌋

Counts become ancestors by the fewest moves: a survivor stays in its own row, only dead rows receive copies. The
expectation therefore holds for counts, not for what a given row receives.

A scheme of one's own is a `smcjax.decoders.parts.Resampler` in place of a name.

Sources: Doucet & Johansen (2011), §3.4; Douc & Cappé (2005).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax import noise
from smcjax.decoders import SCHEMES
from smcjax.decoders.parts import Resampler
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.population.ancestors import ancestors_mosaic, supports_ancestors
from smcjax.smc.weights import effective_sample_size, least_ess, log_mean_weight, must_resample, normalized_weights

Method = str | Resampler  # one of `SCHEMES`, or a part of the user's own


def inverse_cdf(positions: Float[Array, " K"], weights: Float[Array, " N"]) -> Int[Array, " K"]:
    """First i with position < W_0 + … + W_i, and the last i of positive weight where rounding leaves none.

    The strict comparison never picks a weight of zero, not even at position 0.
    """
    index = jnp.sum(jnp.cumsum(weights)[None] <= positions[:, None], axis=1)
    last = weights.shape[0] - 1 - jnp.argmax(weights[::-1] > 0)
    return jnp.minimum(index, last)


def num_uniforms(method: Method, n: int) -> int:
    """The number of uniforms that a scheme consumes for n particles."""
    if not isinstance(method, str):
        return method.num_uniforms(n)
    return 1 if method == "systematic" else n


def offspring(method: Method, uniforms: Float[Array, " U"], weights: Float[Array, " N"]) -> Int[Array, " N"]:
    """Offspring counts of N candidates, summing to N.

    `weights` are normalised, `uniforms` in [0, 1), U = num_uniforms(method, N). Raises ValueError for a part that does
    not return N integers.
    """
    n = weights.shape[0]
    if not isinstance(method, str):
        counts = method.offspring(uniforms, weights)
        if counts.shape != (n,) or not jnp.issubdtype(counts.dtype, jnp.integer):
            raise ValueError(
                f"offspring of {method!r} must return integers of shape ({n},), one a particle, got {counts.dtype} of "
                f"shape {counts.shape}."
            )
        return counts
    if method == "residual":
        whole = jnp.floor(n * weights)
        kept, rest = whole.astype(jnp.int32), n * weights - whole
        total = jnp.sum(rest)
        # With nothing left over (total 0) no draw is used; W only keeps the division defined.
        drawn = inverse_cdf(uniforms, jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), weights))
        used = jnp.arange(n) < n - jnp.sum(kept)
        return kept + _counts(drawn, used)
    return _counts(inverse_cdf(positions(method, uniforms, n), weights), jnp.ones(n, bool))


def positions(method: str, uniforms: Float[Array, " U"], n: int) -> Float[Array, " N"]:
    """The positions in [0, 1) at which a scheme other than residual reads the inverse CDF."""
    if method == "multinomial":
        return uniforms
    assert method in ("systematic", "stratified"), method  # one uniform for all strata, or one each
    return (uniforms + jnp.arange(n, dtype=uniforms.dtype)) / n


def _counts(drawn: Int[Array, " N"], used: Bool[Array, " N"]) -> Int[Array, " N"]:
    """Counts the draws of each index. N² comparisons are one small kernel, a scatter is several."""
    index = jnp.arange(drawn.shape[0])
    return jnp.sum((drawn[None] == index[:, None]) & used[None], axis=1, dtype=jnp.int32)


def ancestors_from_counts(counts: Int[Array, " N"]) -> Int[Array, " N"]:
    """Ancestor of each row: itself if it has offspring, else the next surplus copy in row order."""
    surplus = jnp.cumsum(jnp.maximum(counts - 1, 0))
    dead = counts == 0
    rank = jnp.cumsum(dead, dtype=jnp.int32) - 1  # which surplus copy a dead row receives
    source = jnp.sum(surplus[None] <= rank[:, None], axis=1)
    return jnp.where(dead, source, jnp.arange(counts.shape[0])).astype(jnp.int32)


def ancestors(method: Method, uniforms: Float[Array, " U"], log_weights: Float[Array, " N"]) -> Int[Array, " N"]:
    """Ancestors of one population for given uniforms: the deterministic part of `resample`."""
    return ancestors_from_counts(offspring(method, uniforms, normalized_weights(log_weights)))


class Resampling(NamedTuple):
    """Outcome of resampling G populations."""

    ess: Float[Array, " G"]
    resampled: Bool[Array, " G"]
    ancestors: Int[Array, "G N"]  # the row itself where nothing is resampled, as wherever a row has offspring
    offspring: Int[Array, "G N"]
    log_mean_weight: Float[Array, " G"]  # what a resampling adds to log Ẑ


def decided(log_weights: Float[Array, "G N"], resampled: Bool[Array, " G"], drawn: Int[Array, "G N"]) -> Resampling:
    """Takes the drawn ancestors of the groups that are resampled."""
    rows = jnp.arange(log_weights.shape[1], dtype=jnp.int32)[None]
    ancestors = jnp.where(resampled[:, None], drawn, rows)
    return Resampling(
        ess=effective_sample_size(log_weights),
        resampled=resampled,
        ancestors=ancestors,
        offspring=jnp.sum(ancestors[:, None] == rows[..., None], axis=2, dtype=jnp.int32),
        log_mean_weight=log_mean_weight(log_weights),
    )


def _plan_reference(
    keys: Key[Array, " G"],
    log_weights: Float[Array, "G N"],
    running: Bool[Array, " G"],
    *,
    method: Method,
    threshold: float,
) -> Resampling:
    """Resamples the running groups whose ESS is low, each by its own key."""
    n = log_weights.shape[1]
    # A group that is not resampled may have no weight to draw from; what is drawn there is discarded.
    drawn = resample(keys, log_weights, method)
    return decided(log_weights, running & must_resample(effective_sample_size(log_weights), n, threshold), drawn)


def _plan_sm90(
    keys: jax.Array, log_weights: jax.Array, running: jax.Array, *, method: Method, threshold: float
) -> Resampling:
    assert isinstance(method, str)
    n = log_weights.shape[1]
    points = jax.vmap(lambda key: positions(method, uniforms_of(key, method, n, log_weights.dtype), n))(keys)
    return Resampling(*ancestors_mosaic(log_weights, points, running, below=least_ess(n, threshold)))


def _supports_plan(keys: jax.Array, log_weights: jax.Array, *args: Any, method: Method, **named: Any) -> bool:
    by_positions = isinstance(method, str) and method in ("systematic", "stratified", "multinomial")
    return by_positions and supports_ancestors(log_weights.shape[1], log_weights.dtype)


plan_resampling = Op(_plan_reference)
plan_resampling.register(Kernel(runs_mosaic, _plan_sm90, _supports_plan))


def uniforms_of(key: Key[Array, ""], method: Method, n: int, dtype: Any) -> Float[Array, " U"]:
    """The uniforms of one population's resampling, in (0, 1)."""
    return noise.uniforms(key, (num_uniforms(method, n),)).astype(dtype)


def resample(
    key: jax.Array, log_weights: Float[Array, "*batch N"], method: Method = "systematic"
) -> Int[Array, "*batch N"]:
    """Ancestors [..., N] int32 of populations with log weights [..., N].

    `key` is one key, split over the leading axes, or an array of keys of the shape of the leading axes (one each, so
    that a population's draw does not depend on its neighbours). At least one weight must be above −inf.
    Raises ValueError for an unknown method.
    """
    if method not in SCHEMES and not isinstance(method, Resampler):
        raise ValueError(f"method must be one of {', '.join(SCHEMES)}, or a Resampler, got {method!r}.")
    log_weights = jnp.asarray(log_weights)
    batch, n = log_weights.shape[:-1], log_weights.shape[-1]
    keys = jnp.asarray(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    if keys.shape != batch:
        keys = jax.random.split(keys, batch)

    def one(key: jax.Array, log_weights: jax.Array) -> jax.Array:
        return ancestors(method, uniforms_of(key, method, n, log_weights.dtype), log_weights)

    return jax.vmap(one)(keys.reshape(-1), log_weights.reshape(-1, n)).reshape(*batch, n)
