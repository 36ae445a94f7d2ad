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


def jumps_of_the_tree(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> list[list[list[float]]]:
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


def jumps_of_the_block(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> list[list[list[float]]]:
    """The chances that runs of 1 … K drafts are taken."""
    w, result = 1.0, []
    gamma = drafts.shape[1]
    for j in range(gamma):
        w = min(w * p[0, j, drafts[0, j]] / q[0, j, drafts[0, j]], 1.0)
        if j == gamma - 1:
            result.append([[w]])
        else:
            left = np.maximum(w * p[0, j + 1] - q[0, j + 1], 0).sum()
            needed = left + 1 - w
            result.append([[left / needed if needed > 0 else 0.0]])
    return result


def law_of(
    toy: Toy,
    n: int,
    gamma: int,
    verify: Callable[..., rules.Verdict],
    jumps: Callable[..., list[list[list[float]]]],
    *,
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
        at = [value for position in jumps(p, told, drafts) for value in position]
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
        verdicts = jax.jit(jax.vmap(verify))(*(jnp.asarray(a) for a in arrays[:4]))
        candidate, accepted, following = (np.asarray(x) for x in verdicts)
    out = np.zeros((V,) * (gamma + 1))
    for case, c, a, law in zip(cases, candidate, accepted, following, strict=True):
        run = tuple(case[2][c, :a].tolist())
        for token in range(V):
            for rest in itertools.product(range(V), repeat=gamma - a):
                tokens = (*run, token, *rest)
                tail = np.prod([toy.law("p", tokens[:j])[tokens[j]] for j in range(a + 1, gamma + 1)])
                out[tokens] += case[4] * law[token] * tail
    return out


TOKEN = (rules.candidates, jumps_of_the_tree)
BLOCK = (rules.block, jumps_of_the_block)
RULES = {
    "token": (1, 3, *TOKEN),
    "token, one draft": (1, 1, *TOKEN),
    "two candidates": (2, 2, *TOKEN),
    "three candidates, one draft": (3, 1, *TOKEN),
    "block": (1, 3, *BLOCK),
    "block, one draft": (1, 1, *BLOCK),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_law_is_the_targets(name: str, seed: int) -> None:
    toy, (n, gamma, *rest) = Toy(seed), RULES[name]
    np.testing.assert_allclose(law_of(toy, n, gamma, *rest), toy.joint(gamma + 1), rtol=0, atol=1e-12)


def off(toy: Toy, name: str, **changes: Any) -> float:
    """How far a mistaken rule's law is from the target's."""
    n, gamma, verify, jumps = RULES[name]
    if "verify" in changes:
        verify = changes.pop("verify")
    return float(np.abs(law_of(toy, n, gamma, verify, jumps, **changes) - toy.joint(gamma + 1)).max())


@pytest.mark.parametrize("name", ["token", "two candidates", "block"])
def test_controls(name: str) -> None:
    """Each broken variant of a rule gives a law that is not the target's."""
    verify, toy = RULES[name][2], Toy(0)

    def always_bonus(p: Any, q: Any, drafts: Any, uniforms: Any) -> rules.Verdict:
        verdict = verify(p, q, drafts, uniforms)
        return verdict._replace(law=p[verdict.candidate, drafts.shape[1]])

    def target_again(p: Any, q: Any, drafts: Any, uniforms: Any) -> rules.Verdict:
        verdict = verify(p, q, drafts, uniforms)
        return verdict._replace(law=p[verdict.candidate, verdict.accepted])

    assert off(toy, name, verify=always_bonus) > 1e-3, "always the bonus"
    assert off(toy, name, verify=target_again) > 1e-3, "the residual replaced by p"
    warmer = off(toy, name, claimed=lambda q: q**0.5 / (q**0.5).sum(axis=-1, keepdims=True))
    assert warmer > 1e-3, "q at another temperature than it was drawn from"
    assert off(toy, name, shared_uniform=True) > 1e-3, "one uniform for all positions"


def test_without_the_candidates_taken_out_the_law_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second candidate judged by p instead of by what the first left of it."""

    def nothing_taken_out(p: Any, q: Any, count: int) -> Any:
        return jnp.zeros((count, *p.shape[:-1])), jnp.ones((count, *p.shape[:-1]))

    monkeypatch.setattr(rules, "residuals", nothing_taken_out)
    assert off(Toy(0), "two candidates") > 1e-3


def verdicts_of(verify: Callable[..., rules.Verdict], *arrays: np.ndarray) -> rules.Verdict:
    """Returns the verdicts of `verify` on many cases at once, computed in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(verify))(*(jnp.asarray(x) for x in arrays)))


@pytest.mark.parametrize(("n", "gamma"), [(1, 1), (1, 4), (3, 2), (4, 1)])
def test_equal_models_accept_everything(n: int, gamma: int) -> None:
    """p = q: no draft is rejected, whatever the uniforms; the last law is the target's."""
    rng, cases = np.random.default_rng(0), 500
    p = rng.dirichlet(np.full(V, 0.5), (cases, 1, gamma + 1)).repeat(n, axis=1)
    drafts = rng.integers(0, V, (cases, 1, gamma), np.int32).repeat(n, axis=1)
    for verify in (rules.candidates, rules.block) if n == 1 else (rules.candidates,):
        verdict = verdicts_of(verify, p, p[:, :, :gamma], drafts, rng.random((cases, gamma, n)))
        assert (verdict.accepted == gamma).all()
        np.testing.assert_array_equal(verdict.law, p[:, 0, gamma])


def test_impossible_tokens_are_rejected_even_at_zero() -> None:
    """u = 0 and p = 0 must reject, and the token behind is one that the target can say."""
    rng, cases = np.random.default_rng(0), 500
    p, q = rng.dirichlet(np.ones(V), (cases, 1, 3)), rng.dirichlet(np.ones(V), (cases, 1, 2))
    drafts = rng.integers(0, V, (cases, 1, 2), np.int32)
    np.put_along_axis(p[:, 0, 0], drafts[:, 0, :1], 0, axis=1)
    p /= p.sum(axis=-1, keepdims=True)
    for verify in (rules.candidates, rules.block):
        verdict = verdicts_of(verify, p, q, drafts, np.zeros((cases, 2, 1)))
        assert (verdict.accepted == 0).all()
        assert (np.take_along_axis(verdict.law, drafts[:, 0, :1], axis=1) == 0).all()
        np.testing.assert_allclose(verdict.law.sum(axis=1), 1, atol=1e-12)


def test_blocks_accept_no_fewer_in_the_mean() -> None:
    """The reason for block verification; strictly more for some toy."""
    means = {"token": [], "block": []}  # type: dict[str, list[float]]
    rng = np.random.default_rng(0)
    uniforms = jnp.asarray(rng.random((4000, 3, 1)))
    for seed in range(6):
        toy = Toy(seed)
        paths = [tuple(rng.choice(V, p=toy.law("q", ())) for _ in range(1)) for _ in range(4000)]
        for j in (1, 2):
            paths = [(*path, int(rng.choice(V, p=toy.law("q", path[:j])))) for path in paths]
        p = np.array([[[toy.law("p", path[:j]) for j in range(4)]] for path in paths])
        q = np.array([[[toy.law("q", path[:j]) for j in range(3)]] for path in paths])
        drafts = jnp.asarray(np.array(paths, np.int32)[:, None])
        for name, verify in (("token", rules.candidates), ("block", rules.block)):
            verdicts = jax.jit(jax.vmap(verify))(jnp.asarray(p), jnp.asarray(q), drafts, uniforms)
            means[name].append(float(verdicts.accepted.mean()))
    token, block = np.array(means["token"]), np.array(means["block"])
    assert (block > token - 0.05).all()
    assert (block > token + 0.05).any()
