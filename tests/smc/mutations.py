"""Known ways to get SMC wrong: replacements in the package. A law is worth something if they break it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from smcjax.decoding.sequences import Block
from smcjax.smc import branching, control, cycle, lifecycle, resampling, roulette, weights


def _with_one_behind_rejections(laws: Any, drafts: Any, accepted: Any, *rest: Any) -> Any:
    """A mistaken `run_of`: what stands in the column behind a rejected draft still belongs to the block."""
    run = _RUN_OF(laws, drafts, accepted, *rest)
    return dataclasses.replace(run, last=jnp.minimum(accepted + 1, laws.target.shape[1] - 1))


def _weightless_when_drawn(laws: Any, drafts: Any, accepted: Any, *rest: Any) -> Any:
    """A mistaken `run_of`: a token of the residual weighs as if it came from the target."""
    run = _RUN_OF(laws, drafts, accepted, *rest)
    drawn = jnp.arange(run.tokens.shape[1]) == accepted[:, None]
    return dataclasses.replace(run, increments=jnp.where(drawn, laws.constant, run.increments))


def _under_another_control(laws: Any, drafts: Any, accepted: Any, following: Any, c: Any) -> Any:
    """A mistaken `run_of`: weights are those of another control than drafts were judged by."""
    return _RUN_OF(laws, drafts, accepted, following, jnp.sqrt(c))


def _undivided(log_weight: Any, finished: Any, uniforms: Any) -> Any:
    """A mistaken `part`: who stays weighs what it weighed before the coin."""
    return jnp.where(jnp.isneginf(_PART(log_weight, finished, uniforms)), -jnp.inf, log_weight)


def _by_counts(log_weight: Any, finished: Any, uniforms: Any) -> Any:
    """A mistaken `part`: weights are divided by another share than the coin's."""
    counts = _PART(jnp.where(jnp.isneginf(log_weight), -jnp.inf, 0.0), finished, uniforms)
    stays = ~jnp.isneginf(_PART(log_weight, finished, uniforms))
    return jnp.where(stays, log_weight + counts, -jnp.inf)


def _weighed_as_if_kept(log_p: Any, log_q: Any, constant: Any, drafts: Any, trunk: Any, lam: Any) -> Any:
    """A mistaken `offered`: drafts past a row's end count, for children that stay and for those that leave."""
    unending = Block(jnp.ones_like(trunk.counted), jnp.zeros_like(trunk.ended))
    return _OFFERED(log_p, log_q, constant, drafts, unending, lam)


def _with_one_behind_children(drafts: Any, child: Any, token: Any, columns: int) -> Any:
    """A mistaken `block_of`: what stands in the column behind a child that left still belongs to its block."""
    tokens, last = _BLOCK_OF(drafts, child, token, columns)
    return tokens, jnp.minimum(last + 1, columns - 1)


_OFFERED = branching.offered
_BLOCK_OF = branching.block_of
_RUN_OF = cycle.run_of
_PART = roulette.part
_LEAVING = branching.leaving

MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "none": [],
    "bonus without its log Z": [
        (weights, "bonus_increment", lambda power, logits, allowed=None: jnp.zeros(logits.shape[:-1]))
    ],
    "weights counted past the end": [(cycle, "block_weight", lambda increments, block: jnp.sum(increments, axis=1))],
    "log N omitted": [
        (module, "log_mean_weight", lambda w: jax.nn.logsumexp(w, axis=-1)) for module in (resampling, lifecycle)
    ],
    "no closing term": [(lifecycle, "log_mean_weight", lambda w: jnp.zeros(w.shape[:-1]))],
    "q not divided out": [(weights, "draft_increment", lambda power, p, q: power * p)],
}
CONTROL_MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "weight 1 after a rejection": [(cycle, "run_of", _weightless_when_drawn)],
    "R/Z omitted": [(cycle, "correction", lambda p, q, c: jnp.zeros(p.shape[:-1]))],
    "R/Z of exact sampling": [(cycle, "correction", lambda p, q, c: jnp.ones(p.shape[:-1]))],
    "bonus after a rejection": [(cycle, "run_of", _with_one_behind_rejections)],
    "the residual replaced by p": [(control, "residual", lambda p, q: p)],
    "weights of discarded drafts counted": MUTATIONS["weights counted past the end"],
    "weighed by another control": [(cycle, "run_of", _under_another_control)],
    "the power's normaliser left out": [
        (cycle, "bonus_increment", lambda power, logits, allowed=None: jnp.zeros(logits.shape[:-1]))
    ],
}
ROULETTE_MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "weights not divided by the share": [(roulette, "part", _undivided)],
    "the finished ones always stay": [(roulette, "part", lambda w, done, u: _PART(w, done, jnp.zeros_like(u)))],
    "a coin of counts": [(roulette, "part", _by_counts)],
}
BRANCHING_MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "mass omitted": [
        (branching, "leaving", lambda p, q, lam: _LEAVING(p, q, lam) / _LEAVING(p, q, lam).sum(axis=-1, keepdims=True))
    ],
    "λ forgotten in what stays": [(branching, "staying", lambda p, q, lam: p - q)],
    "what stays weighs by exact sampling": [(branching, "staying", lambda p, q, lam: jnp.minimum(p - q, 0))],
    "children leave for p": [(branching, "following", lambda p, q, source, child, lam: p[source, child])],
    "bonus behind a child that left": [(branching, "block_of", _with_one_behind_children)],
    "drafts past an end counted": [(branching, "offered", _weighed_as_if_kept)],
    "log K + 1 taken off": [
        (resampling, "log_mean_weight", lambda w: jax.nn.logsumexp(w, axis=-1) - jnp.log(3 * w.shape[-1]))
    ],
    "the power's normaliser left out": CONTROL_MUTATIONS["the power's normaliser left out"],
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The package with one mistake."""
    with contextlib.ExitStack() as stack:
        mistakes = {**BRANCHING_MUTATIONS, **MUTATIONS, **CONTROL_MUTATIONS, **ROULETTE_MUTATIONS}
        for module, attribute, replacement in mistakes[name]:
            stack.enter_context(mock.patch.object(module, attribute, replacement))
        yield
