"""Every `RowFeature` walks along tokens: all at once, one by one, or by the context alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoding.adjustments import RowAdjustments
from smcjax.decoding.constraints import RowConstraint
from smcjax.decoding.distribution import SamplingDistribution, processed_logits
from smcjax.decoding.row_feature import RowFeature
from smcjax.engine.run.constraints import make_tables
from smcjax.structured.automaton import Automaton
from tests.weights import normal

VOCAB, ROWS = 7, 3
TOKENS = jnp.asarray([[1, 4, 2], [0, VOCAB, 3], [5, 2, 5]])  # VOCAB stands for no token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NotTwice(RowFeature):
    """A feature of one's own: no token follows itself."""

    last: Int[Array, " R"]

    only_forbids: ClassVar[bool] = True

    @property
    def context(self) -> Int[Array, " R"]:
        return self.last

    def within(self, context: Int[Array, " R"]) -> NotTwice:
        return NotTwice(context)

    def behind(self, tokens: Int[Array, "R T"]) -> NotTwice:
        last = self.last
        for token in tokens.T:
            last = jnp.where(token < VOCAB, token, last)
        return NotTwice(last)

    def allowed(self) -> Bool[Array, "R V"]:
        return jnp.arange(VOCAB)[None] != self.last[:, None]

    def __call__(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        return jnp.where(self.allowed(), logits, -jnp.inf)


def adjustments() -> RowAdjustments:
    nothing = jnp.zeros((ROWS, VOCAB))
    return RowAdjustments(
        repetition=jnp.asarray([1.0, 1.5, 2.0]),
        frequency=jnp.asarray([0.5, 0.0, -1.0]),
        presence=jnp.asarray([0.0, 1.0, 0.3]),
        bias=nothing.at[:, 3].set(2.0),
        in_prompt=nothing.at[:, 1].set(1) > 0,
        counts=nothing.astype(jnp.int32).at[2, 6].set(1),
    )


def constraint() -> RowConstraint:
    """An automaton in a ring of three states: state s goes on with tokens of s mod 3 alone."""
    following = np.full((3, 3), -1, np.int16)
    following[np.arange(3), np.arange(3)] = [1, 2, 0]
    classes = np.asarray([0, 0, 2, 1, 1, 0, 2], np.int32)
    automaton = Automaton(following, classes, np.zeros(3, np.int32))
    return RowConstraint(
        jax.tree.map(jnp.asarray, make_tables({0: automaton}, 1, VOCAB, most_cells=16, most_states=8)),
        automaton=jnp.zeros(ROWS, jnp.int32),
        stops=jnp.zeros((ROWS, VOCAB), bool),
        state=jnp.asarray([0, 0, -1]),
        left=jnp.full(ROWS, 9),
    )


FEATURES = {"adjustments": adjustments, "constraint": constraint, "own": lambda: NotTwice(jnp.zeros(ROWS, jnp.int32))}
LOGITS = jnp.asarray(normal(jax.random.key(3), (ROWS, VOCAB)))


@pytest.mark.parametrize("make", FEATURES.values(), ids=FEATURES)
def test_a_walk_may_be_cut_anywhere_and_carried_by_its_context(make: Callable[[], RowFeature]) -> None:
    feature = make()
    whole = feature.behind(TOKENS)
    singly = feature
    for column in range(TOKENS.shape[1]):
        singly = singly.behind(TOKENS[:, column : column + 1])
    chex.assert_trees_all_close(whole(LOGITS), singly(LOGITS))
    chex.assert_trees_all_close(whole(LOGITS), feature.within(whole.context)(LOGITS))
    assert not np.allclose(whole(LOGITS), feature(LOGITS))  # control: tokens matter
    if feature.only_forbids:
        np.testing.assert_array_equal(whole(LOGITS), jnp.where(whole.allowed(), LOGITS, -jnp.inf))


def test_features_change_the_logits_in_turn_before_the_temperature() -> None:
    form, own = constraint(), NotTwice(jnp.asarray([1, 1, 1]))
    distribution = SamplingDistribution(
        temperature=jnp.full(ROWS, 0.5),
        stops=jnp.zeros((ROWS, VOCAB), bool),
        minimum=jnp.zeros(ROWS, jnp.int32),
        features=(adjustments(), form, own),
    )
    number = jnp.ones(ROWS, jnp.int32)
    np.testing.assert_allclose(processed_logits(distribution, number, LOGITS), own(form(adjustments()(LOGITS))) / 0.5)
    possible = np.asarray(form.allowed() & own.allowed())
    np.testing.assert_array_equal(~np.asarray(distribution.forbidden(number)), possible)
    assert not distribution.follows_logits
    assert dataclasses.replace(distribution, features=(form, own)).follows_logits
