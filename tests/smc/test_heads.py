"""Heads on hidden states: a value head is the factor that it says; whatever a twist says, the law is Φ's; files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import CheckpointError, smc
from smcjax.smc.heads import HeadParams, TwistParams
from smcjax.testing import battery
from tests.helpers import published
from tests.smc.enumeration import HIDDEN, Enumeration, Toy, deviation

FACTORS = ((0, 0.8), (1, -0.5))
TOYS = {"stop": Toy(vocab=2, cap=5, stop=1), "wide": Toy(vocab=3, cap=4, stop=2, impossible=True, seed=3)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("stop", {"gamma": 2, "ess_threshold": 0.95}),
    "control": ("wide", {"gamma": 2, "control": 0.3}),
}


def random_twist(vocab: int, hidden: int = HIDDEN, seed: int = 0) -> smc.Twist:
    rng = np.random.default_rng(seed)
    shapes = (hidden, 4), (4,), (vocab, 4), (vocab,)
    return smc.Twist(TwistParams(*(rng.normal(size=shape).astype(np.float32) for shape in shapes)))


def off(case: str, twist: Any) -> float:
    """The largest over Ω of |E[Ẑ·Σ W_i·1{x_i = x}] − p(x)^α·Φ(x)|."""
    name, config = CASES[case]
    toy = TOYS[name]
    potentials = (smc.TokenPotential(FACTORS), twist)
    done = Enumeration(toy, published(n_particles=2, **config, potentials=potentials)).run()
    law = toy.outcomes(done.config.power)
    return deviation(
        done, {x: mass * float(np.exp(sum(dict(FACTORS).get(token, 0.0) for token in x))) for x, mass in law.items()}
    )


@pytest.mark.parametrize("case", CASES)
def test_an_untrained_twist_costs_no_law(case: str) -> None:
    """To 1e-12, by random weights."""
    assert off(case, random_twist(TOYS[CASES[case][0]].vocab)) < 1e-12


@dataclasses.dataclass(frozen=True)
class Kept(smc.Twist):
    """A mistake: whole answers keep the value that they had as beginnings."""

    def log_value(self, answers: smc.Answers) -> Any:
        return super().log_value(answers._replace(finished=answers.finished & False))


def test_control_a_twist_of_whole_answers_is_seen() -> None:
    assert off("two", Kept(random_twist(2).params)) > 1e-3


def test_the_battery_takes_it() -> None:
    battery(random_twist(8))


def test_files(tmp_path: Path) -> None:
    twist, path = random_twist(5), tmp_path / "twist.safetensors"
    path.write_bytes(twist.content({"potential": "brief"}))
    read = smc.Twist.load(path)
    assert read == twist
    assert hash(read) == hash(twist)
    assert repr(read) == repr(twist)
    for ours, theirs in zip(twist.params, read.params, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert read != random_twist(5, seed=1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twist.safetensors"
    with pytest.raises(CheckpointError, match=r"twist\.safetensors does not exist; .*\.$"):
        smc.Twist.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"holds no twist .*; name a file that smcjax tune-twist wrote\.$"):
        smc.Twist.load(path)
    params = random_twist(5).params
    with pytest.raises(ValueError, match=r"shapes \(E, H\).*train it anew\.$"):
        smc.Twist(params._replace(tokens=params.tokens[:, :2]))
    with pytest.raises(ValueError, match="not finite"):
        smc.Twist(params._replace(up_bias=params.up_bias * np.nan))


def random_head(labels: int, hidden: int = HIDDEN, seed: int = 0, **fields: Any) -> smc.ValueHead:
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(size=shape).astype(np.float32) for shape in ((labels, hidden), (labels,)))
    return smc.ValueHead(HeadParams(*arrays), **fields)


def log_factor(head: smc.ValueHead, hidden: np.ndarray) -> float:
    """log Φ in float64, as the head's definition says."""
    weight, bias = (np.asarray(leaf, np.float64) for leaf in head.params)
    scores = weight @ hidden + bias
    value = scores[0] if head.label is None else scores[head.label] - np.log(np.exp(scores).sum())
    return float(head.exponent * value)


def off_by_head(case: str, head: smc.ValueHead, law_of: smc.ValueHead | None = None) -> float:
    """The largest over Ω of |E[Ẑ·Σ W_i·1{x_i = x}] − p(x)^α·Φ(x)|, Φ of the head `law_of` (None: of `head`)."""
    name, config = CASES[case]
    toy = TOYS[name]
    done = Enumeration(toy, published(n_particles=2, **config, potentials=(head,))).run()
    law = toy.outcomes(done.config.power)
    return deviation(
        done, {x: mass * np.exp(log_factor(law_of or head, toy.hidden(x[:-1]))) for x, mass in law.items()}
    )


HEADS = {"a reward": random_head(1, exponent=0.5), "a label of three": random_head(3, label=1)}


@pytest.mark.parametrize(("case", "kind"), [*zip(CASES, HEADS, strict=True)])
def test_a_value_head_is_a_factor(case: str, kind: str) -> None:
    """To 1e-12: its score behind all of an answer but the last token."""
    assert off_by_head(case, HEADS[kind]) < 1e-12


@pytest.mark.parametrize("kind", HEADS)
def test_control_a_head_of_other_columns_breaks_the_law(kind: str) -> None:
    """Negative control: the columns of its weight rolled by one."""
    head = HEADS[kind]
    rolled = dataclasses.replace(head, params=head.params._replace(weight=np.roll(head.params.weight, 1, axis=1)))
    assert off_by_head("two", rolled, law_of=head) > 1e-3


@dataclasses.dataclass(frozen=True)
class OfAnother(smc.ValueHead):
    """A mistake: a row's score is that of the row beside it."""

    def log_value(self, answers: smc.Answers) -> Any:
        return super().log_value(answers._replace(hidden=jnp.roll(answers.hidden, 1, axis=0)))


def test_the_battery_takes_heads_and_sees_another_rows_state() -> None:
    for head in HEADS.values():
        battery(head)
    with pytest.raises(AssertionError, match="must not depend on other rows"):
        battery(OfAnother(random_head(1).params))


def test_value_heads_are_told_apart_and_refused(tmp_path: Path) -> None:
    head = random_head(3, label=1)
    assert head == random_head(3, label=1)
    assert len({repr(one) for one in (head, random_head(3, label=2), random_head(3, seed=1, label=1))}) == 3
    for label in (None, 3, -1, True):
        with pytest.raises(ValueError, match=rf"label must be a whole number from 0 to 2, got {label}\.$"):
            random_head(3, label=label)
    with pytest.raises(ValueError, match=r"label is 0 and the head has one, whose score is the value; leave it out\.$"):
        random_head(1, label=0)
    for exponent in (-1.0, np.nan):
        with pytest.raises(ValueError, match="exponent must be a number from 0"):
            random_head(1, exponent=exponent)
    for weight in (np.ones((2, 4)), np.ones(4), np.ones((1, 4, 1))):
        with pytest.raises(ValueError, match=r"shapes \(labels, E\), \(labels,\), got .*; read it anew\.$"):
            smc.ValueHead(HeadParams(weight, np.ones(1)))
    with pytest.raises(ValueError, match="not finite"):
        smc.ValueHead(HeadParams(np.full((1, 4), np.inf), np.ones(1)))
