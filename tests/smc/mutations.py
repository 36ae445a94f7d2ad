"""Known ways to get SMC wrong: replacements in the package. A law is worth something if they break it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.smc import acceptance, control, cycle, ending, lifecycle, resampling, weights
from tests.lazily import program_patches


def _with_one_behind_rejections(rule: Any, distributions: Any, drafts: Any, accepted: Any, following: Any) -> Any:
    """A mistaken `block_of`: what stands in the column behind a rejected draft still belongs to the block."""
    block = _BLOCK_OF(rule, distributions, drafts, accepted, following)
    return dataclasses.replace(block, last=jnp.minimum(accepted + 1, distributions.target.shape[1] - 1))


def _weightless_when_drawn(rule: Any, distributions: Any, drafts: Any, accepted: Any, following: Any) -> Any:
    """A mistaken `block_of`: a token of the residual weighs as if it came from the target."""
    block = _BLOCK_OF(rule, distributions, drafts, accepted, following)
    drawn = jnp.arange(block.tokens.shape[1])[None] == accepted[:, None]
    return dataclasses.replace(block, increments=jnp.where(drawn, distributions.log_normalizer, block.increments))


def _under_another_control(rule: Any, *rest: Any) -> Any:
    """A mistaken `block_of`: weights are those of another control than drafts were judged by."""
    return _BLOCK_OF(dataclasses.replace(rule, control=jnp.sqrt(rule.control)), *rest)


def _undivided(roulette: Any, log_weight: Any, finished: Any) -> Any:
    """A mistaken `outcomes`: particles that stay weigh what they weighed before the coin."""
    right = _OUTCOMES(roulette, log_weight, finished)
    return right._replace(log_weight=jnp.where(jnp.isneginf(right.log_weight), -jnp.inf, log_weight[:, None]))


def _by_counts(roulette: Any, log_weight: Any, finished: Any) -> Any:
    """A mistaken `outcomes`: weights are divided by another share than the coin's."""
    right = _OUTCOMES(roulette, log_weight, finished)
    counts = _OUTCOMES(roulette, jnp.where(jnp.isneginf(log_weight), -jnp.inf, 0.0), finished).log_weight
    stays = ~jnp.isneginf(right.log_weight)
    return right._replace(log_weight=jnp.where(stays, log_weight[:, None] + counts, -jnp.inf))


def _always_stop(roulette: Any, log_weight: Any, finished: Any) -> Any:
    """A mistaken `outcomes`: the finished particles stay whatever their share of the weight is."""
    right = _OUTCOMES(roulette, log_weight, finished)
    return right._replace(probability=jnp.ones_like(right.probability).at[:, 1:].set(0))


_BLOCK_OF = acceptance.block_of
_OUTCOMES = ending.Roulette.outcomes

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
    "weight 1 after a rejection": [(acceptance, "block_of", _weightless_when_drawn)],
    "R/Z omitted": [(control, "correction", lambda p, q, c: jnp.zeros(p.shape[:-1]))],
    "R/Z of exact sampling": [(control, "correction", lambda p, q, c: jnp.ones(p.shape[:-1]))],
    "bonus after a rejection": [(acceptance, "block_of", _with_one_behind_rejections)],
    "the residual replaced by p": [(control, "residual", lambda p, q: p)],
    "weights of discarded drafts counted": MUTATIONS["weights counted past the end"],
    "weighed by another control": [(acceptance, "block_of", _under_another_control)],
    "the power's normaliser left out": [
        (acceptance, "bonus_increment", lambda power, logits, allowed=None: jnp.zeros(logits.shape[:-1]))
    ],
}
ROULETTE_MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "weights not divided by the share": [(ending.Roulette, "outcomes", _undivided)],
    "the finished ones always stay": [(ending.Roulette, "outcomes", _always_stop)],
    "a coin of counts": [(ending.Roulette, "outcomes", _by_counts)],
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The package with one mistake."""
    with program_patches() as patch:
        for mistake in {**MUTATIONS, **CONTROL_MUTATIONS, **ROULETTE_MUTATIONS}[name]:
            patch(*mistake)
        yield
