"""Branching on a toy language model with every draw and every resampling outcome integrated, in float64.

As `tests/smc/enumeration.py`, but for the cycle: for every combination of the rows' drafts their children's weights,
for every piece of the uniforms the children that are drawn, and for each of these every token with which it ends. The
weights, the children, their laws, blocks, cuts and log Ẑ are the package's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoding.sequences import cut_block
from smcjax.smc import branching, cycle, resampling
from tests.smc.enumeration import Enumeration, Row, Tokens, _add, chunked, weigh
from tests.smc.mutations import mutated
from tests.smc.test_constraints import Constrained

# The chance of some drafts, the log weights of the row's children, and of each child the rows that it may be.
Family = tuple[float, tuple[float, ...], list[list[tuple[Row, float]]]]


@functools.partial(jax.jit, static_argnames=("mutation", "power", "lam", "cap"))
def families(
    mutation: str,
    power: float,
    lam: float,
    cap: int,
    drafts: Any,
    p: Any,
    q: Any,
    length: Any,
    stops: Any,
    allowed: Any = None,
) -> tuple[Any, Any]:
    """The children's log weights [m, K + 1] of rows with these drafts, and the laws [K + 1, m, V] of last tokens."""
    with mutated(mutation):
        laws = cycle.Laws.of(power, p, q, allowed)
        limit = jnp.full(length.shape, 1 + cap)
        trunk = cut_block(drafts, jnp.broadcast_to(stops, (len(drafts), p.shape[-1])), length, limit)
        weights = branching.offered(laws.target, laws.draft, laws.constant, drafts, trunk, lam)
        rows = jnp.arange(len(drafts))
        law = [
            jax.nn.softmax(branching.following(laws.target, laws.draft, rows, jnp.full_like(rows, child), lam))
            for child in range(weights.shape[1])
        ]
        return weights, jnp.stack(law)


@functools.partial(jax.jit, static_argnames=("mutation", "method"))
def settled(mutation: str, method: str, log_weight: Any, uniforms: Any) -> tuple[Any, Any, Any]:
    """Sources and children [m, N] for these uniforms, and what goes into log Ẑ."""
    with mutated(mutation):
        source, child = jax.vmap(functools.partial(branching.chosen, method))(uniforms, log_weight)
        plan = resampling.decided(jax.nn.logsumexp(log_weight, axis=2), jnp.ones(len(log_weight), bool), source)
        return source, child, plan.log_mean_weight


class Branching(Enumeration):
    """`Enumeration` of `SMC(branching=λ)`."""

    def run(self) -> Branching:
        """Every history to its end."""
        with jax.enable_x64(True):
            start: Row = ((), False, 0.0)
            populations: dict = {((start,) * self.config.n_particles, (0.0, 0.0)): (1.0, 1.0)}
            populations = self._end(self._extend(populations, self._first))
            while populations:
                populations = self._end(self._branched(populations))
        return self

    def _family(self, prefix: Tokens) -> list[Family]:
        """Each combination of drafts behind a prefix with the row's children."""
        if prefix not in self._seen:
            self._seen[prefix] = self._made(prefix)
        return self._seen[prefix]

    def _made(self, prefix: Tokens) -> list[Family]:
        toy, config = self.toy, self.config
        drafts = np.array(list(itertools.product(range(toy.vocab), repeat=config.gamma)), np.int32)
        p, q = (
            np.array([[toy.logprobs(model, (*prefix, *d[:i])) for i in range(columns)] for d in drafts.tolist()])
            for model, columns in (("p", config.tokens_per_cycle), ("q", config.gamma))
        )
        stops = np.arange(toy.vocab) == (-1 if toy.stop is None else toy.stop)
        length = np.full(len(drafts), 1 + len(prefix), np.int32)
        terms = (self.mutation, config.power, config.branching, toy.cap, drafts, p, q, length, stops)
        weights, laws = map(np.asarray, families(*terms, self._allowed(prefix, drafts)))
        chance = np.exp(np.take_along_axis(q, drafts[..., None], axis=2).sum(axis=(1, 2)))
        count, size, columns = len(drafts), toy.vocab, config.tokens_per_cycle
        children = []
        for child in range(config.gamma + 1):
            repeated = np.repeat(drafts, size, axis=0)
            with mutated(self.mutation):
                tokens, last = branching.block_of(
                    jnp.asarray(repeated),
                    jnp.full(count * size, child, jnp.int32),
                    jnp.tile(jnp.arange(size, dtype=jnp.int32), count),
                    columns,
                )
            nothing = np.zeros(tokens.shape)
            ends, done, _ = weigh(self.mutation, toy.cap, tokens, nothing, last, np.repeat(length, size), stops)
            rows = [
                ((*prefix, *block)[: end - 1], bool(finished), 0.0)
                for block, end, finished in zip(
                    np.asarray(tokens).tolist(), np.asarray(ends), np.asarray(done), strict=True
                )
            ]
            merged = []
            for one in range(count):
                ways: dict[Row, float] = {}
                for token in range(size):
                    row = rows[one * size + token]
                    ways[row] = ways.get(row, 0.0) + float(laws[child, one, token])
                merged.append([(row, mass) for row, mass in ways.items() if mass > 0])
            children.append(merged)
        return [
            (float(chance[one]), tuple(weights[one].tolist()), [children[child][one] for child in range(len(children))])
            for one in range(count)
            if chance[one] > 0
        ]

    def _allowed(self, prefix: Tokens, drafts: np.ndarray) -> np.ndarray | None:
        """The tokens that may come behind each beginning of the drafts; None: all."""
        return None

    def _branched(self, populations: dict) -> dict:
        """Populations after a cycle of branching."""
        config, result = self.config, dict[Any, tuple[float, float]]()
        alone = (*[-np.inf] * config.gamma, 0.0)
        jobs: list[Any] = []
        for (rows, watch), (measure, chance) in populations.items():
            ways = [
                [(1.0, alone, [[]] * config.gamma + [[((tokens, True, 0.0), 1.0)]])] if done else self._family(tokens)
                for tokens, done, _ in rows
            ]
            for way in itertools.product(*ways):
                likely = float(np.prod([one[0] for one in way]))
                log_weight = np.array([[w + row[2] for w in one[1]] for row, one in zip(rows, way, strict=True)])
                top = log_weight.max()
                if top == -np.inf:
                    self.failed += chance * likely
                    continue
                weight = np.exp(log_weight - top).reshape(-1)
                for uniforms, volume in pieces_of(config.resampling, weight / weight.sum(), config.n_particles):
                    share = likely * volume
                    jobs.append((watch, [one[2] for one in way], measure * share, chance * share, log_weight, uniforms))
        draw: Callable[..., Any] = functools.partial(settled, self.mutation, config.resampling)
        outs = chunked(draw, np.array([job[4] for job in jobs]), np.array([job[5] for job in jobs]))
        for (watch, offers, measure, chance, *_), source, child, evidence in zip(jobs, *outs, strict=True):
            self.resampled += chance
            gained = measure * np.exp(evidence)
            for new in itertools.product(*(offers[s][c] for s, c in zip(source, child, strict=True))):
                mass = 1.0
                for _, one in new:
                    mass *= one
                _add(result, tuple(row for row, _ in new), watch, gained * mass, chance * mass)
        return result


def pieces_of(method: str, w: np.ndarray, n: int) -> list[tuple[list[float], float]]:
    """`pieces` of M weights from which n are drawn."""
    if method == "systematic":
        edges = np.unique(np.concatenate([[0.0, 1.0], n * np.cumsum(w) % 1.0]))
        return [([(a + b) / 2], b - a) for a, b in itertools.pairwise(edges) if b - a > 1e-14]
    cuts = [np.cumsum(w)] * n if method == "multinomial" else [n * np.cumsum(w) - k for k in range(n)]
    axes = []
    for cut in cuts:
        points = np.unique(np.concatenate([[0.0, 1.0], np.clip(cut, 0.0, 1.0)]))
        axes.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(points) if b - a > 1e-14])
    return [([u for u, _ in cell], float(np.prod([v for _, v in cell]))) for cell in itertools.product(*axes)]


class ConstrainedBranching(Branching, Constrained):
    """Likewise on a toy whose answers have a form."""

    def _allowed(self, prefix: Tokens, drafts: np.ndarray) -> np.ndarray:
        columns = range(self.config.tokens_per_cycle)
        return np.array([[self.toy.allowed((*prefix, *d[:i])) for i in columns] for d in drafts.tolist()])
