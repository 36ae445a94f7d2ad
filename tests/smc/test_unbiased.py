"""Laws 2 and 3 by exact enumeration (tests/smc/enumeration.py), in float64.

E[Ẑ·Σ W_i f(x_i)] = Σ_Ω f(x)·∏ p^α      for every f: checked for f = 1{x = y} with every y of Ω, which span them
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers import published
from tests.smc.enumeration import Enumeration, Toy, deviation
from tests.smc.mutations import MUTATIONS

STOP = Toy(vocab=2, cap=5, stop=1)  # with K = 2: x₀, a whole block, one token cut by the cap
WIDE = Toy(vocab=3, cap=5, stop=2, impossible=True, seed=3)  # with weights of −inf
FREE = Toy(vocab=2, cap=6, seed=2)  # no stop token


def enumerate_smc(toy: Toy, mutation: str = "none", beside: tuple[float, ...] = (), **config: Any) -> Enumeration:
    return Enumeration(toy, published(**config), mutation, beside=beside).run()


PAIRS = [  # of a scheme, a power, a bonus and a threshold each pair once
    *(("systematic", 1.0, True, 0.0), ("systematic", 0.5, False, 0.8), ("systematic", 2.0, True, 1.0)),
    *(("stratified", 1.0, True, 0.8), ("stratified", 0.5, True, 1.0), ("stratified", 2.0, False, 0.5)),
    *(("multinomial", 1.0, False, 1.0), ("multinomial", 0.5, True, 0.5), ("multinomial", 2.0, True, 0.8)),
    *(("residual", 1.0, False, 0.5), ("residual", 0.5, True, 0.8), ("residual", 2.0, False, 1.0)),
    *(("systematic", 2.0, False, 0.0), ("systematic", 1.0, False, 0.5)),
]


@pytest.mark.parametrize(("scheme", "power", "bonus", "threshold"), PAIRS)
def test_exact_for_every_scheme(scheme: str, power: float, bonus: bool, threshold: float) -> None:
    config = {"power": power, "resampling": scheme, "bonus": bonus, "ess_threshold": threshold}
    done = enumerate_smc(STOP, n_particles=3, gamma=2, **config)
    assert deviation(done) < 1e-10
    assert done.resampled == 0 if threshold == 0 else done.resampled > 0.01 or threshold == 0.5


@pytest.mark.parametrize(
    ("toy", "n", "gamma"),
    [(STOP, 1, 2), (STOP, 2, 1), (STOP, 2, 3), (FREE, 2, 1), (FREE, 2, 3), (WIDE, 2, 2), (WIDE, 2, 3), (WIDE, 3, 1)],
    ids=lambda value: value if isinstance(value, int) else f"V{value.vocab}-cap{value.cap}",
)
def test_exact_for_every_shape(toy: Toy, n: int, gamma: int) -> None:
    bonus = n + gamma != 4
    done = enumerate_smc(toy, n_particles=n, gamma=gamma, bonus=bonus, power=1.5, ess_threshold=0.9)
    assert deviation(done) < 1e-10
    several_cycles = 1 + gamma + bonus < toy.cap
    assert (done.resampled > 0) == (n > 1 and several_cycles)
    assert (done.failed > 1e-4) == toy.impossible


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_control_mistakes_break_the_law(mutation: str) -> None:
    """Negative control: each known mistake is seen at α = 2, and two of them cannot be seen at α = 1."""
    config = {"n_particles": 3, "gamma": 2, "ess_threshold": 0.8}
    assert (deviation(enumerate_smc(STOP, mutation, power=2.0, **config)) < 1e-10) == (mutation == "none")
    invisible = mutation in ("none", "bonus without its log Z", "weights counted past the end")
    assert (deviation(enumerate_smc(STOP, mutation, power=1.0, **config)) < 1e-10) == invisible


def falls_as_one_over_n(mutation: str, power: float) -> bool:
    """Returns True if the answer's law nears π in total variation like 1/N (15% to spare), for N from 1 to 5."""
    toy = Toy(vocab=2, cap=3, stop=1, seed=6)
    weights = toy.outcomes(power)
    total = sum(weights.values())
    distances = []
    for n in range(1, 6):
        selected = enumerate_smc(toy, mutation, n_particles=n, gamma=1, power=power, ess_threshold=0.5).selected
        assert sum(selected.values()) == pytest.approx(1.0, abs=1e-10)
        distances.append(sum(abs(selected.get(x, 0.0) - mass / total) for x, mass in weights.items()) / 2)
    return all(b / a < 1.15 * n / (n + 1) for n, (a, b) in enumerate(itertools.pairwise(distances), start=1))


def test_selected_law_approaches_the_target() -> None:
    """Law 3, with a control that converges to something else."""
    assert falls_as_one_over_n("none", 2.0)
    assert not falls_as_one_over_n("q not divided out", 2.0)
