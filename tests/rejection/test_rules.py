"""The rules of acceptance give the target's law: every draft and every outcome, with the uniforms integrated exactly.

The package's own functions decide, in float64; only the draws are replaced by sums. A decision is piecewise constant in
each uniform, and where it jumps is known from p and q, so a value inside every piece, with the pieces' volumes, is the
whole integral. Known mistakes must break the law.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.rejection import rules

V = 3
Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Toy:
    """Laws of the next token by prefix, some of them with zeros, some of them equal in both models."""

    seed: int

    @functools.cache  # noqa: B019
    def law(self, model: str, prefix: Tokens) -> np.ndarray:
        """p ("p", the target) or q ("q", the draft)."""
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        both = rng.dirichlet(np.full(V, 0.8), 2)
        kind = rng.random()
        if kind < 0.2:
            both[1] = both[0]
        elif kind < 0.5:
            both[rng.integers(2), rng.integers(V)] = 0
        both /= both.sum(axis=1, keepdims=True)
        return both[int(model == "q")]

    def joint(self, length: int) -> np.ndarray:
        """The target's law of `length` tokens, [V] * length."""
        out = np.zeros((V,) * length)
        for tokens in itertools.product(range(V), repeat=length):
            out[tokens] = np.prod([self.law("p", tokens[:j])[token] for j, token in enumerate(tokens)])
        return out


def norm(left: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    return left / left.sum() if left.sum() > 0 else fallback


def jumps_of(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> list[list[list[float]]]:
    """Where the decision on candidate i at position j can jump in its uniform: [j][i], by how many were rejected."""
    n, gamma = drafts.shape
    result = []
    for j in range(gamma):
        at = []
        for i in range(n):
            values = []
            for row in range(n):  # the laws at this position are those of the candidates that are still alive
                left = p[row, j]
                for _ in range(i + 1):
                    values.append(left[drafts[i, j]] / q[row, j, drafts[i, j]] if q[row, j, drafts[i, j]] > 0 else 2.0)
                    left = norm(np.maximum(left - q[row, j], 0), left)
            at.append(values)
        result.append(at)
    return result


def law_of(
    toy: Toy,
    n: int,
    gamma: int,
    *,
    verify: Callable[..., rules.Verification] = rules.candidates,
    shared_uniform: bool = False,
    claimed: Callable[[np.ndarray], np.ndarray] = lambda q: q,
) -> np.ndarray:
    """The law of γ + 1 tokens: those accepted, the one behind, and the target's own after that.

    `claimed` is what the rule is told of q.
    """
    cases: list[tuple[Any, ...]] = []
    for paths in itertools.product(itertools.product(range(V), repeat=gamma), repeat=n):
        drafts = np.array(paths, np.int32)
        p = np.array([[toy.law("p", path[:j]) for j in range(gamma + 1)] for path in paths])
        q = np.array([[toy.law("q", path[:j]) for j in range(gamma)] for path in paths])
        mass = np.prod([q[i, j, drafts[i, j]] for i in range(n) for j in range(gamma)])
        if mass == 0:
            continue
        told = claimed(q)
        at = [value for position in jumps_of(p, told, drafts) for value in position]
        if shared_uniform:
            at = [[value for values in at for value in values]]
        pieces = []
        for values in at:
            edges = np.unique(np.clip([0.0, 1.0, *values], 0, 1))
            pieces.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)])
        for chosen in itertools.product(*pieces):
            u = np.array([value for value, _ in chosen])
            u = np.full((gamma, n), u[0]) if shared_uniform else u.reshape(gamma, n)
            cases.append((p, told, drafts, u, mass * np.prod([width for _, width in chosen])))
    arrays = [np.stack(column) for column in zip(*cases, strict=True)]
    with jax.enable_x64(True):
        verifications = jax.jit(jax.vmap(verify))(*(jnp.asarray(a) for a in arrays[:4]))
        candidate, accepted, following = (np.asarray(x) for x in verifications)
    out = np.zeros((V,) * (gamma + 1))
    for case, c, a, law in zip(cases, candidate, accepted, following, strict=True):
        run = tuple(case[2][c, :a].tolist())
        for token in range(V):
            for rest in itertools.product(range(V), repeat=gamma - a):
                tokens = (*run, token, *rest)
                tail = np.prod([toy.law("p", tokens[:j])[tokens[j]] for j in range(a + 1, gamma + 1)])
                out[tokens] += case[4] * law[token] * tail
    return out


SHAPES = {
    "token": (1, 3),
    "token, one draft": (1, 1),
    "two candidates": (2, 2),
    "three candidates, one draft": (3, 1),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_law_is_the_targets(name: str, seed: int) -> None:
    toy, (n, gamma) = Toy(seed), SHAPES[name]
    np.testing.assert_allclose(law_of(toy, n, gamma), toy.joint(gamma + 1), rtol=0, atol=1e-12)


def off(toy: Toy, name: str, **changes: Any) -> float:
    """How far a mistaken rule's law is from the target's."""
    n, gamma = SHAPES[name]
    return float(np.abs(law_of(toy, n, gamma, **changes) - toy.joint(gamma + 1)).max())


@pytest.mark.parametrize("name", ["token", "two candidates"])
def test_controls(name: str) -> None:
    """Each broken variant of the rule gives a law that is not the target's."""
    toy = Toy(0)

    def always_bonus(p: Any, q: Any, drafts: Any, uniforms: Any) -> rules.Verification:
        verification = rules.candidates(p, q, drafts, uniforms)
        return verification._replace(law=p[verification.candidate, drafts.shape[1]])

    def target_again(p: Any, q: Any, drafts: Any, uniforms: Any) -> rules.Verification:
        verification = rules.candidates(p, q, drafts, uniforms)
        return verification._replace(law=p[verification.candidate, verification.accepted])

    assert off(toy, name, verify=always_bonus) > 1e-3, "always the bonus"
    assert off(toy, name, verify=target_again) > 1e-3, "the residual replaced by p"
    warmer = off(toy, name, claimed=lambda q: q**0.5 / (q**0.5).sum(axis=-1, keepdims=True))
    assert warmer > 1e-3, "q at another temperature than it was drawn from"
    assert off(toy, name, shared_uniform=True) > 1e-3, "one uniform for all positions"


def test_without_the_candidates_taken_out_the_law_is_wrong(patch_programs: Any) -> None:
    """A second candidate judged by p instead of by what the first left of it."""

    def nothing_taken_out(p: Any, q: Any, count: int) -> Any:
        return jnp.zeros((count, *p.shape[:-1])), jnp.ones((count, *p.shape[:-1]))

    patch_programs(rules, "residuals", nothing_taken_out)
    assert off(Toy(0), "two candidates") > 1e-3


def verifications_of(*arrays: np.ndarray) -> rules.Verification:
    """Returns the verifications of `rules.candidates` on many cases at once, computed in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(rules.candidates))(*(jnp.asarray(x) for x in arrays)))


@pytest.mark.parametrize(("n", "gamma"), [(1, 1), (1, 4), (3, 2), (4, 1)])
def test_equal_models_accept_everything(n: int, gamma: int) -> None:
    """p = q: no draft is rejected, whatever the uniforms; the last law is the target's."""
    rng, cases = np.random.default_rng(0), 500
    p = rng.dirichlet(np.full(V, 0.5), (cases, 1, gamma + 1)).repeat(n, axis=1)
    drafts = rng.integers(0, V, (cases, 1, gamma), np.int32).repeat(n, axis=1)
    verification = verifications_of(p, p[:, :, :gamma], drafts, rng.random((cases, gamma, n)))
    assert (verification.accepted == gamma).all()
    np.testing.assert_array_equal(verification.law, p[:, 0, gamma])


def test_impossible_tokens_are_rejected_even_at_zero() -> None:
    """u = 0 and p = 0 must reject, and the token behind is one that the target can say."""
    rng, cases = np.random.default_rng(0), 500
    p, q = rng.dirichlet(np.ones(V), (cases, 1, 3)), rng.dirichlet(np.ones(V), (cases, 1, 2))
    drafts = rng.integers(0, V, (cases, 1, 2), np.int32)
    np.put_along_axis(p[:, 0, 0], drafts[:, 0, :1], 0, axis=1)
    p /= p.sum(axis=-1, keepdims=True)
    verification = verifications_of(p, q, drafts, np.zeros((cases, 2, 1)))
    assert (verification.accepted == 0).all()
    assert (np.take_along_axis(verification.law, drafts[:, 0, :1], axis=1) == 0).all()
    np.testing.assert_allclose(verification.law.sum(axis=1), 1, atol=1e-12)
