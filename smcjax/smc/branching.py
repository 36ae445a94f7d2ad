"""Branching: every particle offers K + 1 weighted children, of which as many as there are particles are drawn.

With p the target's law of a token, q the draft's and λ ≥ 1, at each of a row's K drafts

    p = min(p, λq) + max(p − λq, 0)

A child leaves the row's drafts at one of them for a token of the second part, or keeps them all:

    child j < K     d_0 … d_{j−1}, then x ~ max(p_j − λq_j, 0)/M_j        weight ∏_{i<j} min(p_i/q_i, λ)(d_i) · M_j
    child K         d_0 … d_{K−1}, then the bonus x ~ p_K if there is one    weight ∏_{i<K} min(p_i/q_i, λ)(d_i)

with M = Σ max(p − λq, 0), and p, q those behind the drafts before. In the mean over drafts and tokens the children's
weights times any function of what they become sum to its mean under the target (docs/algorithm.md, "Branching"), for
every λ and every q: what q lacks is in the second part.

A row that ends at one of its drafts has no children behind it, but child K, which is the row as it ended. A row that
had finished before offers itself alone, as child K of weight 1.

Pure functions of log-probabilities, which keep the dtype that they are given. NaN stays NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax.decoding.sequences import Block
from smcjax.smc.control import at
from smcjax.smc.resampling import Resampling, ancestors_from_counts, decided, offspring, uniforms_of
from smcjax.smc.weights import normalized_weights

Lam = float | Float[Array, ""]  # λ, which may be traced


def staying(log_p: Float[Array, "*shape"], log_q: Float[Array, "*shape"], lam: Lam) -> Float[Array, "*shape"]:
    """log min(p/q, λ) of drafts with these log-probabilities: the factor of a child that keeps them."""
    return jnp.minimum(log_p - log_q, jnp.log(jnp.asarray(lam, log_p.dtype)))


def leaving(log_p: Float[Array, "*shape V"], log_q: Float[Array, "*shape V"], lam: Lam) -> Float[Array, "*shape V"]:
    """max(p − λq, 0): by its sum M a child that leaves is weighed, by it its token is drawn."""
    return jnp.maximum(jnp.exp(log_p) - lam * jnp.exp(log_q), 0)


def offered(
    log_p: Float[Array, "R C V"],
    log_q: Float[Array, "R K V"],
    constant: Float[Array, "R C"],
    drafts: Int[Array, "R K"],
    trunk: Block,
    lam: Lam,
) -> Float[Array, "R K+1"]:
    """Log weights of each row's children; −inf of those that are not there.

    `constant` is the log of the factor that a token of each column brings by itself, C = K + 1 with bonus tokens and K
    without; `trunk` is the drafts' part up to the row's end.
    """
    gamma = drafts.shape[1]
    p, within = log_p[:, :gamma], trunk.counted
    steps = jnp.where(within, constant[:, :gamma] + staying(at(p, drafts), at(log_q, drafts), lam), 0)
    behind = jnp.pad(jnp.cumsum(steps, axis=1), ((0, 0), (1, 0)))
    mass = jnp.log(jnp.sum(leaving(p, log_q, lam), axis=-1))
    leave = jnp.where(within, behind[:, :gamma] + constant[:, :gamma] + mass, -jnp.inf)
    whole = behind[:, gamma:]
    if constant.shape[1] > gamma:
        whole += jnp.where(trunk.ended, 0, constant[:, gamma])[:, None]
    return jnp.concatenate([leave, whole], axis=1)


def following(
    log_p: Float[Array, "R C V"],
    log_q: Float[Array, "R K V"],
    source: Int[Array, " R"],
    child: Int[Array, " R"],
    lam: Lam,
) -> Float[Array, "R V"]:
    """The law, as logits, of the token with which these children of rows `source` end.

    Stale for child K without bonus tokens. Where nothing is left to leave for, which only rounding can bring about, it
    is p.
    """
    gamma = log_q.shape[1]
    p = log_p[source, jnp.minimum(child, log_p.shape[1] - 1)]
    rest = leaving(p, log_q[source, jnp.minimum(child, gamma - 1)], lam)
    leaves = (child < gamma)[:, None] & (rest > 0).any(axis=-1, keepdims=True)
    return jnp.where(leaves, jnp.log(rest), p)


def block_of(
    drafts: Int[Array, "R K"], child: Int[Array, " R"], token: Int[Array, " R"], columns: int
) -> tuple[Int[Array, "R C"], Int[Array, " R"]]:
    """The tokens of these children of rows with these drafts, and the column behind which the block ends."""
    padded = jnp.pad(drafts, ((0, 0), (0, columns - drafts.shape[1])))
    return jnp.where(jnp.arange(columns) == child[:, None], token[:, None], padded), jnp.minimum(child, columns - 1)


def chosen(
    method: str, uniforms: Float[Array, " U"], log_weight: Float[Array, "N K+1"]
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """The row that each new row is a child of, and which one: N of the N(K + 1) children, by a scheme of resampling.

    Rows that have chosen children stay in their places. Of one row's children the longest come first: the first of the
    rows that share a part-filled page keeps it (`smcjax.kv.make_room`), and it must not write what another is to copy.
    """
    n, columns = log_weight.shape
    weights = normalized_weights(log_weight.reshape(-1))
    counts = offspring(method, uniforms, weights, n).reshape(n, columns)
    source = ancestors_from_counts(jnp.sum(counts, axis=1))
    row = jnp.arange(n)
    rank = jnp.sum((source[:, None] == source) & (row < row[:, None]), axis=1)  # among its siblings
    longer = jnp.cumsum(counts[source, ::-1], axis=1)
    return source, (columns - 1 - jnp.sum(longer <= rank[:, None], axis=1)).astype(jnp.int32)


class Branches(NamedTuple):
    """The new rows of G groups."""

    plan: Resampling  # of the rows by their children's total weights
    child: Int[Array, "G N"]  # K in groups that do not branch


def branches(
    keys: Key[Array, " G"], log_weight: Float[Array, "G N K+1"], goes_on: Bool[Array, " G"], method: str
) -> Branches:
    """Draws the children of the groups that go on, each by its own key; `log_weight` are those of all children."""
    _, n, columns = log_weight.shape

    def one(key: jax.Array, log_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return chosen(method, uniforms_of(key, method, n, log_weight.dtype), log_weight)

    # A group that does not go on may have no weight to draw from; what is drawn there is discarded.
    source, child = jax.vmap(one)(keys, log_weight)
    plan = decided(jax.nn.logsumexp(log_weight, axis=2), goes_on, source)
    return Branches(plan, jnp.where(goes_on[:, None], child, columns - 1))
