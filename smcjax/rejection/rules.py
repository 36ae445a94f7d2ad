"""Which drafts to accept, and the law of the token behind them, such that the answer has the target's law.

    token    accept draft j iff u_j·q_j(x_j) < p_j(x_j); at the first rejection the next token is drawn from
             norm(max(p_j − q_j, 0)), after the last acceptance from p_K
             (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)
    tree     the same with N independent candidates a position: each that is rejected takes its q out of what is left of
             p, and the candidates that agree with the accepted token go on
             (recursive rejection: Miao et al. 2023, arXiv 2305.09781)
    block    accepts the longest run whose joint residual allows it, never fewer tokens in the mean
             (Sun et al. 2024, arXiv 2403.10444, algorithm 2)

Pure functions of probabilities and uniforms in [0, 1), for one request; `jax.vmap` them over requests. All keep the
dtype that they are given. u = 0 never accepts what the target cannot say: comparisons are strict.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Verdict(NamedTuple):
    """What became of the drafts of one request."""

    candidate: Int[Array, ""]  # the row that was accepted along
    accepted: Int[Array, ""]  # of its drafts, from the first
    law: Float[Array, " V"]  # of the token behind them, summing to 1


def residual(p: Float[Array, " V"], q: Float[Array, " V"]) -> Float[Array, " V"]:
    """norm(max(p − q, 0)); p itself where nothing is left, which only rounding can bring about."""
    left = jnp.maximum(p - q, 0)
    total = jnp.sum(left)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1), p)


def tree(
    p: Float[Array, "N C V"], q: Float[Array, "N K V"], drafts: Int[Array, "N K"], uniforms: Float[Array, "K N"]
) -> Verdict:
    """Recursive rejection over N candidates drafted independently, C = K + 1. With N = 1, token by token.

    p[i, j] is the target's law behind candidate i's first j drafts, q[i, j] the law that drafts[i, j] was drawn from.
    """
    rows, columns = drafts.shape

    def level(carry: Any, j: jax.Array) -> tuple[Any, None]:
        alive, stopped, accepted, law = carry  # alive: agree with all that has been accepted
        row = jnp.argmax(alive)
        here = jnp.where(stopped, law, p[row, j])

        def candidate(carry: Any, i: jax.Array) -> tuple[Any, None]:
            left, token = carry  # token: the accepted one, −1 as long as there is none
            draft = drafts[i, j]
            asked = alive[i] & (token < 0) & ~stopped
            accept = uniforms[j, i] * q[row, j, draft] < left[draft]
            left = jnp.where(asked & ~accept, residual(left, q[row, j]), left)
            return (left, jnp.where(asked & accept, draft, token)), None

        (left, token), _ = jax.lax.scan(candidate, (here, jnp.int32(-1)), jnp.arange(rows))
        on = token >= 0
        alive = jnp.where(on, alive & (drafts[:, j] == token), alive)
        return (alive, stopped | ~on, accepted + on, left), None

    carry = (jnp.ones(rows, bool), jnp.bool_(False), jnp.int32(0), p[0, 0])
    (alive, stopped, accepted, law), _ = jax.lax.scan(level, carry, jnp.arange(columns))
    row = jnp.argmax(alive).astype(jnp.int32)
    return Verdict(row, accepted, jnp.where(stopped, law, p[row, columns]))


def block(
    p: Float[Array, "1 C V"], q: Float[Array, "1 K V"], drafts: Int[Array, "1 K"], uniforms: Float[Array, "K 1"]
) -> Verdict:
    """Block verification of one candidate; arguments as for `tree`.

    With w_0 = 1 and w_j = min(w_{j−1}·p_j(x_j)/q_j(x_j), 1), the chance that at least j drafts are accepted, the run of
    length j < K is taken with probability h_j = Σ max(w_j·p − q, 0) / (Σ max(w_j·p − q, 0) + 1 − w_j), of length K with
    w_K; the longest that is taken counts.
    """
    p, q, drafts, uniforms = p[0], q[0], drafts[0], uniforms[:, 0]
    columns = drafts.shape[0]
    index = jnp.arange(columns)
    p_draft, q_draft = p[index, drafts], q[index, drafts]

    def weigh(w: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w = jnp.minimum(w * at[0] / at[1], 1)
        return w, w

    _, w = jax.lax.scan(weigh, jnp.ones((), p.dtype), (p_draft, q_draft))  # w_1 … w_K
    weights = jnp.concatenate([jnp.ones(1, p.dtype), w])
    left = jnp.maximum(weights[:columns, None] * p[:columns] - q, 0)  # behind 0 … K − 1 drafts
    total = jnp.sum(left[1:], axis=1)
    needed = total + 1 - w[:-1]
    h = jnp.where(needed > 0, total / jnp.where(needed > 0, needed, 1), 0)
    taken = uniforms < jnp.concatenate([h, w[-1:]])
    accepted = jnp.max(jnp.where(taken, index + 1, 0)).astype(jnp.int32)
    behind = left[jnp.minimum(accepted, columns - 1)]
    mass = jnp.sum(behind)
    behind = jnp.where(mass > 0, behind / jnp.where(mass > 0, mass, 1), p[jnp.minimum(accepted, columns - 1)])
    law = jnp.where(accepted == columns, p[columns], behind)
    return Verdict(jnp.int32(0), accepted, law)
