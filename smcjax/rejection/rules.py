"""The choice of drafts to accept, and the law of the token behind them, such that the answer has the target's law.

    token    accept draft j iff u_j·q_j(x_j) < p_j(x_j); at the first rejection the next token is drawn from
             norm(max(p_j − q_j, 0)), after the last acceptance from p_K
             (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)
    candidates
             the same with N independent candidates a position: each that is rejected takes q out of what is left of p,
             and the candidates that agree with the accepted token go on
             (recursive rejection: Miao et al. 2023, arXiv 2305.09781)
    tree     the same along a tree of drafts: a node's children are asked one after the other, and the walk goes on
             from the one that is accepted; children that were drawn take q out of what is left, chosen ones themselves

Pure functions of probabilities and uniforms in [0, 1), for one request; `jax.vmap` them over requests. All keep the
dtype that they are given. u = 0 never accepts what the target cannot say: comparisons are strict.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.trees import DraftTree


class Verification(NamedTuple):
    """The drafts of one request that were accepted."""

    candidate: Int[Array, ""]  # the row that was accepted along
    accepted: Int[Array, ""]  # of its drafts, from the first
    law: Float[Array, " V"]  # of the token behind them, summing to 1


def residuals(
    p: Float[Array, "N K V"], q: Float[Array, "N K V"], count: int
) -> tuple[Float[Array, "count N K"], Float[Array, "count N K"]]:
    """Residuals of p after 0 … count − 1 rejected candidates drawn from q: c and D of max(p − c·q, 0)/D.

    With r_0 = p, rejecting one more leaves r_{m+1} = norm(max(r_m − q, 0)), and by induction

        r_m = max(p − c_m·q, 0)/D_m,   c_0 = 0,  D_0 = 1,  c_{m+1} = c_m + D_m,  D_m = Σ max(p − c_m·q, 0),

    so the chain needs sums only, and none of the drafts. Where nothing is left, which only rounding can bring about,
    r_m stays as it was.
    """
    chain = [(jnp.zeros_like(p[..., 0]), jnp.ones_like(p[..., 0]))]
    for _ in range(count - 1):
        chain.append(rejected_once_more(p, q, *chain[-1]))
    return jnp.stack([c for c, _ in chain]), jnp.stack([total for _, total in chain])


def rejected_once_more(
    p: Float[Array, "*shape V"], q: Float[Array, "*shape V"], c: Float[Array, "*shape"], total: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """c_{m+1} and D_{m+1} of c_m and D_m."""
    more = c + total
    left = jnp.sum(jnp.maximum(p - more[..., None] * q, 0), axis=-1)
    return jnp.where(left > 0, more, c), jnp.where(left > 0, left, total)


def candidates(
    p: Float[Array, "N C V"], q: Float[Array, "N K V"], drafts: Int[Array, "N K"], uniforms: Float[Array, "K N"]
) -> Verification:
    """Recursive rejection over N candidates drafted independently, C = K + 1. With N = 1, token by token.

    p[i, j] is the target's law behind candidate i's first j drafts, q[i, j] the law that drafts[i, j] was drawn from.
    """
    rows, columns = drafts.shape
    c, total = residuals(p[:, :columns], q, rows)  # [N, N, K]: the last rejection's is made for one position alone
    p_draft, q_draft = (jnp.take_along_axis(x[:, :columns], drafts[..., None], axis=-1)[..., 0] for x in (p, q))
    left = (
        jnp.maximum(p_draft[None] - c * q_draft[None], 0) / total
    )  # [N, N, K]: of each draft, by how many were rejected before
    row = jnp.arange(rows)
    earlier = row[None] < row[:, None]  # [i, i']: candidate i' is asked before candidate i
    alive = jnp.ones(rows, bool)  # agree with all that has been accepted
    on, accepted, rejected = jnp.bool_(True), jnp.int32(0), jnp.int32(0)
    for j in range(columns):
        # A candidate is asked when those before it were rejected; candidates that are alive have the same laws.
        # What they choose by numbers is masked, since XLA makes a launch of each index into an array.
        before = jnp.sum(alive[None] & earlier, axis=1)
        chance = jnp.sum(jnp.where(before[None] == row[:, None], left[:, :, j], 0), axis=0)
        accept = alive & (uniforms[j] * q_draft[:, j] < chance)
        rejected = jnp.where(on, jnp.sum(alive, dtype=jnp.int32), rejected)
        on &= accept.any()
        first = accept & ~jnp.any(accept[None] & earlier, axis=1)
        token = jnp.sum(jnp.where(first, drafts[:, j], 0), dtype=drafts.dtype)
        alive = jnp.where(on, alive & (drafts[:, j] == token), alive)
        accepted += on.astype(jnp.int32)
    candidate = jnp.argmax(alive).astype(jnp.int32)
    at = jnp.minimum(accepted, columns - 1)
    target, draft = p[candidate, jnp.where(on, columns, at)], q[candidate, at]
    but_last = jnp.maximum(rejected - 1, 0), candidate, at
    c, total = rejected_once_more(target, draft, c[but_last], total[but_last])
    law = jnp.where(on, target, jnp.maximum(target - c * draft, 0) / total)
    return Verification(candidate, accepted, law)


class TreeVerification(NamedTuple):
    """The decision about a tree of drafts of one request."""

    node: Int[Array, ""]  # the last that is accepted, 0 where no draft is
    law: Float[Array, " V"]  # of the token behind it, summing to 1


def tree(
    shape: DraftTree,
    p: Float[Array, "M V"],
    q: Float[Array, "inner V"],
    tokens: Int[Array, " M"],
    uniforms: Float[Array, " drafts"],
    fixed: Bool[Array, ""],
) -> TreeVerification:
    """Recursive rejection along a tree, from node 0: its children are asked in turn, then those of an accepted one.

    p[m] is the target's law behind node m, uniforms[m − 1] node m's uniform, and q has for each node of `shape.inner`
    the law that its children were drawn from, independently. With r = p[m] at first, a child x is accepted iff
    u·q(x) < r(x), and else leaves r = norm(max(r − q, 0)). Children that are `fixed` were not drawn: each is a law of
    its own, q(x) = 1, so that x is accepted with probability r(x), and else r without x is left, scaled up. Where
    nothing is left, which only rounding can bring about, r stays as it was.
    """
    most = max(map(len, shape.children))
    table = jnp.asarray([[*children, *[0] * (most - len(children))] for children in shape.children])
    place = jnp.asarray([shape.inner.index(node) if children else 0 for node, children in enumerate(shape.children)])
    node, law = jnp.int32(0), p[0]
    for parents in shape.inner_levels:
        at = node
        reached = jnp.asarray([node in parents for node in range(shape.size)])[at]
        accepted = jnp.bool_(False)
        for rank in range(max(len(shape.children[parent]) for parent in parents)):
            child = table[at, rank].astype(jnp.int32)
            asked = reached & ~accepted & (child > 0)
            token = tokens[child]
            drawn_from = jnp.where(fixed, jax.nn.one_hot(token, p.shape[1], dtype=p.dtype), q[place[at]])
            accept = asked & (uniforms[child - 1] * drawn_from[token] < law[token])
            left = jnp.maximum(law - drawn_from, 0)
            total = jnp.sum(left)
            law = jnp.where(asked & ~accept & (total != 0), left / total, law)
            node, accepted = jnp.where(accept, child, node), accepted | accept
        law = jnp.where(accepted, p[node], law)
    return TreeVerification(node, law)
