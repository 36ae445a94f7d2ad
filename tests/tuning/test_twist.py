"""A twist learns E[Φ | x_1:t]: the loss has its least value there, and a trained one comes near on a tiny pair."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import TextPotential, smc
from smcjax.smc.heads import TwistParams
from smcjax.tuning.answers import Sampling
from smcjax.tuning.train import Schedule
from smcjax.tuning.twist import STEEPEST, Given, loss, of_rows, require_trainable, tune_twist
from tests.checkpoints import Pair, write_pair
from tests.smc.test_potential import Alternating, Likelier, Probe

pytest.importorskip("optax")


def constant(value: Any) -> TwistParams:
    """A twist that says this of every beginning."""
    return TwistParams(np.zeros((2, 1), np.float32), np.zeros(1, np.float32), np.zeros((1, 1), np.float32), value)


def given(gains: np.ndarray) -> Given:
    """Beginnings that are all alike, with these log gains."""
    shape = (len(gains), 1)
    newest, counted = np.zeros(shape, np.int32), np.ones(shape, bool)
    return Given(np.zeros((*shape, 2), np.float32), newest, gains.reshape(shape).astype(np.float32), counted)


def slope(gains: np.ndarray, value: float) -> float:
    """The derivative of the sum of losses by a value that all beginnings have."""
    return float(jax.grad(lambda one: loss(constant(one), given(gains))[0])(jnp.full(1, value, jnp.float32))[0])


@pytest.mark.parametrize("scale", [0.0, -30.0])
def test_the_loss_is_least_at_the_mean_gain(scale: float) -> None:
    """At log E[R], not at E[log R], in whatever units; a gain of 0 counts too."""
    gains = np.array([0.3, -1.0, 2.0, -np.inf]) + scale
    best = float(np.log(np.exp(gains).mean()))
    assert abs(slope(gains, best)) < 1e-4
    assert slope(gains, best + 0.1) > 0.1
    assert slope(gains, best - 0.1) < -0.1


def test_a_value_far_off_has_a_finite_slope() -> None:
    assert slope(np.zeros(1), -300.0) == pytest.approx(1 - np.exp(STEEPEST), rel=1e-5)
    assert slope(np.full(1, -np.inf), -300.0) == 1.0


PROMPTS, HELD_OUT = [f"{number} and" for number in range(12)], ["one", "two", "three"]


@dataclasses.dataclass(frozen=True)
class Vowels:
    """A factor of each of a text's vowels."""

    factor: float = 1.0

    def __call__(self, prompt: str, texts: list[str]) -> list[float]:
        return [self.factor * sum(letter in "aeiou" for letter in text) for text in texts]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def tuned(pair: Pair, potential: Any, output: Path, steps: int = 60, **how: Any) -> Any:
    return tune_twist(
        pair.target,
        pair.draft,
        potential,
        PROMPTS,
        HELD_OUT,
        output,
        sampling=Sampling(temperature=0.8, max_tokens=8, max_num_seqs=8, max_model_len=32),
        schedule=Schedule(steps, 1e-2),
        samples=8,
        units=8,
        batch_tokens=8192,
        **how,
    )


@pytest.mark.parametrize("potential", [Likelier(), TextPotential(Vowels())], ids=["log-probabilities", "text"])
def test_a_twist_is_trained_written_and_read(pair: Pair, potential: Any, tmp_path: Path) -> None:
    """A second training gives the same one."""
    output, lines = tmp_path / "twist.safetensors", []
    report = tuned(pair, potential, output, on_line=lines.append)
    twist = smc.Twist.load(output)
    assert twist.hidden_size == twist.params.up.shape[0]
    assert twist.params.up.shape[1] == 8
    assert report.loss[-1][1] < report.loss[0][1]
    assert report.held_out[0][0] == 0
    assert report.kept in {step for step, _ in report.held_out}
    assert lines[-1].startswith("step    60 of 60: loss ")
    if isinstance(potential, TextPotential):
        again = tuned(pair, potential, tmp_path / "again.safetensors")
        assert smc.Twist.load(tmp_path / "again.safetensors") == twist
        assert again.held_out == report.held_out


def test_values_of_beginnings_are_the_potentials_own() -> None:
    from smcjax.tuning.answers import Answers

    tokens = np.array([[9, 0, 1, 1, 0], [9, 9, 1, 1, 7]], np.int32)
    answers = Answers(tokens, np.array([1, 2], np.int32), np.array([4, 2], np.int32))
    whole, beginnings = of_rows(Alternating(1.0), answers, np.zeros(tokens.shape, np.float32))
    np.testing.assert_allclose(whole, [2, 0])
    np.testing.assert_allclose(beginnings, [[-0.9, 1, 0.1, 2], [-0.9, 0, 0, 0]], atol=1e-6)


def test_what_cannot_be_trained_for_is_refused(pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "none.safetensors"
    with pytest.raises(ValueError, match=r"the potential forbids all of 96 answers .*; sample more, or soften it\.$"):
        tuned(pair, TextPotential(lambda prompt, texts: [-np.inf] * len(texts)), output)
    assert not output.exists()
    with pytest.raises(ValueError, match=r"values beginnings of answers itself, at 3, .* use it with ask=None\.$"):
        require_trainable(TextPotential(Vowels(), ask=3))
    with pytest.raises(ValueError, match=r"reads hidden states, as a twist does; give one of tokens\.$"):
        require_trainable(Probe())
