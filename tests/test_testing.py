"""`smcjax.testing.battery` passes the package's parts and right ones of a user's own, and says what others break."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest

from smcjax import TextPotential, smc
from smcjax.smc.resampling import num_uniforms, offspring, positions
from smcjax.testing import battery


@dataclasses.dataclass(frozen=True)
class Capped(smc.Acceptance):
    """Keeps a draft with probability min(1, most·p/q), a user's own rule."""

    most: float = 2.0

    def probability(self, log_p: Any, log_q: Any) -> Any:
        return jnp.exp(jnp.minimum(0.0, jnp.log(self.most) + log_p - log_q))


@dataclasses.dataclass(frozen=True)
class Coin(smc.Acceptance):
    """Keeps half of the drafts, whatever they are."""

    @property
    def suits_any_draft(self) -> bool:
        return True

    def probability(self, log_p: Any, log_q: Any) -> Any:
        return jnp.full_like(log_p, 0.5)


class Unweighed(Capped):
    """A mistake: tokens weigh what they would if all drafts were kept."""

    def increment(self, log_p: Any, log_q: Any, tokens: Any) -> Any:
        return smc.KeepAll().increment(log_p, log_q, tokens)


class Proud(Capped):
    """A mistake: says that it suits drafts that lack tokens, whose replacement it may never draw."""

    @property
    def suits_any_draft(self) -> bool:
        return True


class Loud(Capped):
    """A mistake: probabilities above 1."""

    def probability(self, log_p: Any, log_q: Any) -> Any:
        return jnp.exp(log_p - log_q)


@dataclasses.dataclass(frozen=True)
class Halved:
    """An ending that kills the unfinished particles in half of all cases, and doubles weights otherwise."""

    factor: float = 2.0

    def outcomes(self, log_weight: Any, finished: Any) -> smc.Outcomes:
        dead = jnp.where(finished, log_weight, -jnp.inf)
        alive = jnp.where(finished, log_weight, log_weight + jnp.log(self.factor))
        return smc.Outcomes(jnp.full((len(log_weight), 2), 0.5), jnp.stack([dead, alive], axis=1))


@dataclasses.dataclass(frozen=True)
class Turned:
    """Systematic resampling by 1 − u."""

    scale: float = 1.0

    def num_uniforms(self, n: int) -> int:
        return 1

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        return offspring("systematic", self.scale * (1 - uniforms), weights)


@dataclasses.dataclass(frozen=True)
class Named:
    """A scheme of the package as a part."""

    name: str

    def num_uniforms(self, n: int) -> int:
        return num_uniforms(self.name, n)

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        return offspring(self.name, uniforms, weights)


class Clipped(Turned):
    """A mistake: where the weights' sum rounds below a position, the last particle is taken, even a dead one."""

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        n = weights.shape[0]
        reached = jnp.cumsum(weights)[None] <= positions("systematic", uniforms, n)[:, None]
        found = jnp.minimum(reached.sum(axis=1), n - 1)
        return jnp.sum(found[None] == jnp.arange(n)[:, None], axis=1)


class Fractional(Turned):
    """A mistake: counts that are no integers."""

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        return super().offspring(uniforms, weights).astype(float)


@dataclasses.dataclass(frozen=True)
class Length:
    """A potential that prefers long answers."""

    per_token: float = 0.1

    def log_value(self, answers: smc.Answers) -> Any:
        return self.per_token * (answers.end - answers.begin).astype(float)


class Whole(Length):
    """A mistake: the prompt counts."""

    def log_value(self, answers: smc.Answers) -> Any:
        return self.per_token * (answers.tokens[:, 0] + answers.end).astype(float)


@dataclasses.dataclass(frozen=True)
class Sure:
    """A potential that prefers answers whose unlikeliest token is likely."""

    def log_value(self, answers: smc.Answers) -> Any:
        return jnp.min(jnp.where(answers.counted, answers.logprobs, 0.0), axis=1)


class Stale(Sure):
    """A mistake: log-probabilities behind the answer count."""

    def log_value(self, answers: smc.Answers) -> Any:
        return jnp.min(answers.logprobs, axis=1)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A potential of hidden states."""

    direction: tuple[float, ...] = (0.3, -0.2, 0.5)

    @property
    def hidden_size(self) -> int:
        return len(self.direction)

    def log_value(self, answers: smc.Answers) -> Any:
        assert answers.hidden is not None
        return answers.hidden @ jnp.asarray(self.direction)


class Centred(Linear):
    """A mistake: a row's value depends on the mean of all rows."""

    def log_value(self, answers: smc.Answers) -> Any:
        value = super().log_value(answers)
        return value - value.mean()


class Shared(Length):
    """A mistake: a row's value depends on the longest row."""

    def log_value(self, answers: smc.Answers) -> Any:
        return self.per_token * (answers.end - answers.end.max()).astype(float)


@dataclasses.dataclass
class Mutable(smc.Acceptance):
    """A mistake: not frozen."""

    def probability(self, log_p: Any, log_q: Any) -> Any:
        return jnp.ones_like(log_p)


RIGHT = [
    smc.KeepAll(),
    *(smc.RejectionControl(c) for c in (0.0, 0.1, 0.5, 1.0)),
    Capped(),
    Capped(0.5),
    Coin(),
    smc.WaitForAll(),
    smc.Roulette(),
    Halved(),
    Turned(),
    *map(Named, smc.SCHEMES),
    smc.ConstantPotential(0.5),
    smc.TokenPotential(((1, 0.3), (2, -float("inf")))),
    Length(),
    Sure(),
    Linear(),
]
WRONG = [
    (Unweighed(), "times weight of an emitted token must be the target's"),
    (Loud(), "probability must be from 0 to 1"),
    (Proud(), "times weight of an emitted token must be the target's"),
    (Halved(1.5), "the mean of every weight over the outcomes must be the weight"),
    (Turned(0.75), "the mean number of offspring must be N·W"),
    (Clipped(), "a particle of weight 0 must have no offspring"),
    (Fractional(), "offspring must be N integers, got float"),
    (Whole(), "must not depend on columns outside the answer"),
    (Stale(), "must not depend on columns outside the answer"),
    (Shared(), "must not depend on other rows"),
    (Centred(), "must not depend on other rows"),
    (Mutable(), "must be hashable"),
]


@pytest.mark.parametrize("part", RIGHT, ids=repr)
def test_right_parts_pass(part: Any) -> None:
    battery(part)


@pytest.mark.parametrize(("part", "law"), WRONG, ids=lambda part: type(part).__name__)
def test_control_mistaken_parts_are_named(part: Any, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        battery(part)


def test_parts_are_checked_where_jax_promotes_nothing() -> None:
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion='raise'"):
        jnp.ones((2, 3)) + jnp.ones(3)
    with pytest.raises(ValueError, match="jax_numpy_dtype_promotion=strict"):
        jnp.ones(3) + jnp.ones(3, jnp.int32)


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must derive from smcjax\.smc\.Acceptance, .*, got 3"):
        battery(3)
    with pytest.raises(TypeError, match=r"must .*, got <class '.*Turned'>"):
        battery(Turned)


def test_a_part_without_its_methods_cannot_be_made() -> None:
    class Half(smc.Resampler):
        def num_uniforms(self, n: int) -> int:
            return 1

    with pytest.raises(TypeError, match="offspring"):
        Half()  # type: ignore[abstract]


def length(prompt: str, texts: list[str]) -> list[float]:
    return [0.1 * len(text) for text in texts]


def without_digits(prompt: str, texts: list[str]) -> list[float]:
    return [-float("inf") if any(letter.isdigit() for letter in text) else 0.0 for text in texts]


def ends_in_a_stop(prompt: str, texts: list[str]) -> list[float]:
    """Right for whole answers alone."""
    return [0.0 if text.endswith(".") else -float("inf") for text in texts]


TEXT_MISTAKES = {
    "relative": (lambda prompt, texts: [len(text) / (1 + max(map(len, texts))) for text in texts], "beside it"),
    "by place": (lambda prompt, texts: list(range(len(texts))), "beside it"),
    "too few": (lambda prompt, texts: [0.0], "the values must be numbers below +inf, one a text: it returned 1 values"),
    "NaN": (lambda prompt, texts: [float("nan")] * len(texts), "it gave nan for"),
    "a beginning that may go on": (ends_in_a_stop, "must begin no answer of value: '' has −inf and '17.' 0"),
}


@pytest.mark.parametrize(
    "potential",
    [
        TextPotential(length, ask=1),
        TextPotential(without_digits, ask="\n", exponent=2.0),
        TextPotential(length, ask=1, complete=ends_in_a_stop),
        TextPotential(ends_in_a_stop),  # of beginnings it is never asked
    ],
    ids=["length", "no digits", "of whole answers", "at the end alone"],
)
def test_right_text_potentials_pass(potential: TextPotential) -> None:
    battery(potential)


@pytest.mark.parametrize("mistake", TEXT_MISTAKES)
def test_wrong_text_potentials_are_told(mistake: str) -> None:
    function, words = TEXT_MISTAKES[mistake]
    with pytest.raises(AssertionError, match=re.escape(words)):
        battery(TextPotential(function, ask=1), texts=("", "a", "17.", "17 and on", "Yes, it is."))
