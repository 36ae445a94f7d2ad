"""Rejection along trees gives the target's law: every draft and every outcome, with the uniforms integrated exactly.

As in `test_rules`: the package's function decides, in float64, and a value inside every piece between the jumps of a
decision, with the pieces' volumes, is the whole integral over the uniforms. Known mistakes must break the law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.rejection import rules
from smcjax.trees import DraftTree
from tests.rejection.test_rules import Tokens, Toy, V, norm


def path_tokens(shape: DraftTree, tokens: Tokens, node: int) -> Tokens:
    """Draft tokens from node 0's child to `node`; `tokens` are those of nodes 1 … M − 1."""
    return tuple(tokens[above - 1] for above in shape.paths[node][1 : shape.depths[node] + 1])


def drafted(shape: DraftTree, toy: Toy, *, fixed: bool) -> list[tuple[Tokens, float]]:
    """All that the draft can propose, with probabilities: one tree where its likeliest tokens are taken."""
    cases: list[tuple[Tokens, float]] = [((), 1.0)]
    for node in range(1, shape.size):
        parent, grown = shape.parents[node], []
        rank = shape.children[parent].index(node)
        for tokens, mass in cases:
            q = toy.law("q", path_tokens(shape, tokens, parent))
            if fixed:
                grown.append(((*tokens, int(np.argsort(-q, kind="stable")[rank % V])), mass))
            else:
                grown += [((*tokens, x), mass * q[x]) for x in range(V) if q[x] > 0]
        cases = grown
    return cases


def pieces(shape: DraftTree, toy: Toy, tokens: Tokens, *, fixed: bool) -> list[list[tuple[float, float]]]:
    """For each node but 0 values of its uniform between the jumps of the decision on it, with the pieces' widths."""
    found = []
    for node in range(1, shape.size):
        before, parent = path_tokens(shape, tokens, shape.parents[node]), shape.parents[node]
        left, q = toy.law("p", before), toy.law("q", before)
        for sibling in shape.children[parent][: shape.children[parent].index(node)]:
            left = norm(np.maximum(left - (np.eye(V)[tokens[sibling - 1]] if fixed else q), 0), left)
        x = tokens[node - 1]
        edges = np.unique(np.clip([0.0, 1.0, left[x] / (1.0 if fixed else q[x])], 0, 1))
        found.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)])
    return found


def law_of(
    shape: DraftTree,
    toy: Toy,
    *,
    fixed: bool,
    verify: Callable[..., rules.TreeVerification] = rules.tree,
    claimed: Callable[[np.ndarray], np.ndarray] = lambda q: q,
    told_fixed: bool | None = None,
    shared_uniform: bool = False,
) -> np.ndarray:
    """The law of K + 1 tokens: the accepted path, the token behind it, and the target's own after that.

    `claimed` is what the rule is told of q, `told_fixed` what of how siblings came about.
    """
    cases: list[tuple[Any, ...]] = []
    for tokens, mass in drafted(shape, toy, fixed=fixed):
        p = np.array([toy.law("p", path_tokens(shape, tokens, node)) for node in range(shape.size)])
        q = claimed(np.array([toy.law("q", path_tokens(shape, tokens, node)) for node in shape.inner]))
        of_nodes = pieces(shape, toy, tokens, fixed=fixed)
        if shared_uniform:
            edges = np.unique([0.0, 1.0, *(value + width / 2 for one in of_nodes for value, width in one)])
            together = [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]
            drawn = [((value,) * len(of_nodes), width) for value, width in together]
        else:
            drawn = [
                (tuple(value for value, _ in chosen), float(np.prod([width for _, width in chosen])))
                for chosen in itertools.product(*of_nodes)
            ]
        cases += [(p, q, np.array((0, *tokens), np.int32), np.array(u), mass * volume) for u, volume in drawn]
    arrays = [np.stack(column) for column in zip(*cases, strict=True)]
    told = fixed if told_fixed is None else told_fixed

    def judge(*of_case: jax.Array) -> rules.TreeVerification:
        return verify(shape, *of_case, jnp.bool_(told))

    with jax.enable_x64(True):
        verifications = jax.jit(jax.vmap(judge))(*(jnp.asarray(a) for a in arrays[:4]))
        nodes, following = (np.asarray(x) for x in verifications)
    out = np.zeros((V,) * (shape.depth + 1))
    for case, node, law in zip(cases, nodes, following, strict=True):
        run = path_tokens(shape, tuple(case[2][1:]), node)
        for token in range(V):
            for rest in itertools.product(range(V), repeat=shape.depth - len(run)):
                x = (*run, token, *rest)
                tail = np.prod([toy.law("p", x[:j])[x[j]] for j in range(len(run) + 1, len(x))])
                out[x] += case[4] * law[token] * tail
    return out


TREES = {
    "chain": DraftTree.of((1, 1)),
    "star": DraftTree.of((3,)),
    "binary": DraftTree.of((2, 1)),
    "lopsided": DraftTree.of((-1, 0, 0, 2, 2)),
    "numbered across": DraftTree.of((-1, 0, 1, 0, 1)),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("fixed", [False, True], ids=["sampled", "fixed"])
def test_the_law_is_the_targets(name: str, fixed: bool) -> None:
    for seed in (0, 1, 2):
        toy, shape = Toy(seed), TREES[name]
        got = law_of(shape, toy, fixed=fixed)
        np.testing.assert_allclose(got, toy.joint(shape.depth + 1), rtol=0, atol=1e-12)


def test_more_siblings_than_tokens() -> None:
    """Fixed siblings that come again are accepted by nobody."""
    shape, toy = DraftTree.of((V + 2,)), Toy(1)
    np.testing.assert_allclose(law_of(shape, toy, fixed=True), toy.joint(2), rtol=0, atol=1e-12)


def off(name: str, **changes: Any) -> float:
    """How far a mistaken rule's law is from the target's."""
    toy, shape = Toy(0), TREES[name]
    return float(np.abs(law_of(shape, toy, **changes) - toy.joint(shape.depth + 1)).max())


def judged_by_p(shape: DraftTree, p: Any, q: Any, tokens: Any, uniforms: Any, fixed: Any) -> rules.TreeVerification:
    """A mistaken rule: every sibling is judged by what its first is judged by, whatever was rejected before it."""
    node = jnp.int32(0)
    for child in range(1, shape.size):
        at, x = shape.parents[child], tokens[child]
        law_of_x = jnp.where(fixed, 1.0, q[shape.inner.index(at)][x])
        accept = (node == at) & (uniforms[child - 1] * law_of_x < p[at][x])
        node = jnp.where(accept, child, node)
    exact = rules.tree(shape, p, q, tokens, uniforms, fixed)
    return rules.TreeVerification(node, jnp.where(node == exact.node, exact.law, p[node]))


@pytest.mark.parametrize("fixed", [False, True], ids=["sampled", "fixed"])
def test_controls(fixed: bool) -> None:
    """Each broken variant of the rule gives a law that is not the target's."""

    def target_again(shape: DraftTree, p: Any, *rest: Any) -> rules.TreeVerification:
        verification = rules.tree(shape, p, *rest)
        return verification._replace(law=p[verification.node])

    assert off("binary", fixed=fixed, verify=target_again) > 1e-3, "the residual replaced by p"
    assert off("star", fixed=fixed, verify=judged_by_p) > 1e-3, "the residual not updated after a rejected sibling"
    assert off("binary", fixed=fixed, shared_uniform=True) > 1e-3, "one uniform for all nodes"
    assert off("star", fixed=fixed, told_fixed=not fixed) > 1e-3, "drawn siblings taken for chosen ones, or the reverse"
    if not fixed:
        warmer = off("binary", fixed=False, claimed=lambda q: q**0.5 / (q**0.5).sum(axis=-1, keepdims=True))
        assert warmer > 1e-3, "q at another temperature than it was drawn from"
        uniform = off("binary", fixed=False, claimed=lambda q: np.full_like(q, 1 / V))
        assert uniform > 1e-3, "q forgotten"


def test_a_chain_is_judged_as_a_chain() -> None:
    """A chain as a tree has the nodes and laws of token by token, whatever the uniforms."""
    rng, cases, gamma = np.random.default_rng(0), 500, 4
    p, q = (rng.dirichlet(np.full(V, 0.7), (cases, gamma + extra)) for extra in (1, 0))
    tokens, uniforms = rng.integers(0, V, (cases, gamma + 1), np.int32), rng.random((cases, gamma))
    shape = DraftTree.of((1,) * gamma)
    with jax.enable_x64(True):
        of_tree = jax.jit(jax.vmap(lambda p, q, x, u: rules.tree(shape, p, q, x, u, jnp.bool_(False))))
        of_chain = jax.jit(jax.vmap(lambda p, q, x, u: rules.candidates(p[None], q[None], x[None, 1:], u[:, None])))
        arrays = [jnp.asarray(x) for x in (p, q, tokens, uniforms)]
        got, want = of_tree(*arrays), of_chain(*arrays)
        np.testing.assert_array_equal(got.node, want.accepted)
        np.testing.assert_allclose(got.law, want.law, atol=1e-12)
    assert set(np.asarray(got.node).tolist()) == set(range(gamma + 1))


def test_impossible_tokens_are_rejected_even_at_zero() -> None:
    """u = 0 and p = 0 must reject, of either kind of siblings, and the token behind is one that the target can say."""
    shape, rng, cases = DraftTree.of((2, 1)), np.random.default_rng(0), 300
    p, q = rng.dirichlet(np.ones(V), (cases, shape.size)), rng.dirichlet(np.ones(V), (cases, len(shape.inner)))
    tokens = rng.integers(0, V, (cases, shape.size), np.int32)
    tokens[:, 2] = tokens[:, 1]
    np.put_along_axis(p[:, 0], tokens[:, 1:2], 0, axis=1)
    p /= p.sum(axis=-1, keepdims=True)
    for fixed in (False, True):
        judge = jax.jit(jax.vmap(lambda p, q, x, u, fixed=fixed: rules.tree(shape, p, q, x, u, jnp.bool_(fixed))))
        with jax.enable_x64(True):
            verification = judge(*(jnp.asarray(x) for x in (p, q, tokens, np.zeros((cases, shape.size - 1)))))
        assert (np.asarray(verification.node) == 0).all()
        assert (np.take_along_axis(np.asarray(verification.law), tokens[:, 1:2], axis=1) == 0).all()
        np.testing.assert_allclose(np.asarray(verification.law).sum(axis=1), 1, atol=1e-12)
