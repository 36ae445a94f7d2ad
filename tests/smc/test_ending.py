"""Populations that end before their longest particle, by a coin: law 2 by exact enumeration, in float64.

That the running step equals plain Python token for token is `test_reference.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import SMC
from smcjax.smc.ending import Roulette
from tests.smc.enumeration import Toy, deviation
from tests.smc.mutations import ROULETTE_MUTATIONS
from tests.smc.test_unbiased import enumerate_smc

STOP = Toy(vocab=2, cap=4, stop=1)
CASES: dict[str, tuple[Toy, dict[str, Any]]] = {
    "power": (STOP, {"n_particles": 2, "gamma": 1, "power": 1.5, "ess_threshold": 0.9}),
    "never resampled": (STOP, {"n_particles": 3, "gamma": 1, "bonus": False, "ess_threshold": 0.0}),
    "three, control": (STOP, {"n_particles": 3, "gamma": 2, "ess_threshold": 0.95, "control": 0.5}),
    "control 1": (STOP, {"n_particles": 3, "gamma": 1, "control": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_unbiased(case: str) -> None:
    """E[Ẑ·Σ W f] to 1e-12; at control 1 and power 1, where Ẑ is 1, the answer's law is the target's."""
    toy, config = CASES[case]
    done = enumerate_smc(toy, early_end=True, **config)
    assert deviation(done) < 1e-12
    assert done.stopped > 0.01
    if done.config.control == 1:
        law = toy.outcomes(1.0)
        assert max(abs(done.selected.get(x, 0.0) - mass) for x, mass in law.items()) < 1e-12


def test_the_heaviest_is_no_sample_of_the_target() -> None:
    """Rows that a coin lets live and a resampling copies are not alike any more, and ties go to the lowest."""
    assert SMC(control=1.0, early_end=True).exact
    assert SMC(control=1.0, select="best").exact
    assert not SMC(control=1.0, select="best", early_end=True).exact


@pytest.mark.parametrize("mutation", ROULETTE_MUTATIONS)
def test_controls(mutation: str) -> None:
    """Known mistakes break the law."""
    toy, config = CASES["power"]
    assert deviation(enumerate_smc(toy, mutation, early_end=True, **config)) > 1e-3


def test_weights_by_hand() -> None:
    """Rows that stay take the whole weight; rows of weight 0 have no say; where all are alike nothing happens."""
    log_weight = jnp.log(jnp.array([[1.0, 2.0, 5.0, 0.0]] * 4))
    finished = jnp.array([[True, False, False, True]] * 2 + [[True, True, True, False], [False, False, False, True]])
    outcomes = Roulette().outcomes(log_weight, finished)
    found = np.exp(np.asarray(outcomes.at(jnp.array([0.12, 0.13, 0.5, 0.5]))))
    np.testing.assert_allclose(found[0], [8, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0, 16 / 7, 40 / 7, 0], rtol=1e-6)
    np.testing.assert_allclose(found[2:], [[1, 2, 5, 0]] * 2, rtol=1e-6)
