"""SMC with a control: laws 2 and 4 where drafts are rejected and rows of a population have unequal lengths.

By exact enumeration (tests/smc/enumeration.py): every block of every row with every fate of its drafts, every
resampling outcome, in float64. Then the running step: neighbours of other controls. That it equals plain Python token
for token is `test_reference.py`; one token's rule is `test_control_rules.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from smcjax import smc
from smcjax.decoding.drafts.ngram import NGram
from smcjax.kv import pages_for
from tests.helpers import assert_pages_sound, finish, outputs, release, start, step, tiny_pair
from tests.smc.enumeration import Enumeration, Toy, deviation
from tests.smc.mutations import CONTROL_MUTATIONS
from tests.smc.test_invariance import ASKS
from tests.smc.test_unbiased import enumerate_smc
from tests.test_testing import Capped

STOP = Toy(vocab=2, cap=4, stop=1)
WIDE = Toy(vocab=3, cap=4, stop=2, impossible=True, seed=3, minimum=2)
SHORT = dataclasses.replace(WIDE, cap=3, minimum=1)

CASES: dict[str, tuple[Toy, dict[str, Any]]] = {
    "one particle": (WIDE, {"n_particles": 1, "gamma": 3, "control": 0.1}),
    "two": (WIDE, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.95, "control": 0.5}),
    "K=3, power": (WIDE, {"n_particles": 2, "gamma": 3, "power": 1.5, "ess_threshold": 0.9, "control": 0.1}),
    "three, exact": (STOP, {"n_particles": 3, "gamma": 2, "ess_threshold": 0.95, "control": 1.0}),
    "three, no bonus": (SHORT, {"n_particles": 3, "gamma": 2, "bonus": False, "ess_threshold": 1.0, "control": 0.5}),
    "two, 0 beside others": (
        WIDE,
        {"n_particles": 2, "gamma": 2, "bonus": False, "ess_threshold": 0.95, "control": 0.0, "beside": (1.0,)},
    ),
    "a user's rule, power": (
        STOP,
        {"n_particles": 2, "gamma": 2, "power": 1.5, "ess_threshold": 1.0, "control": Capped(0.5)},
    ),
    "flat, no bonus": (
        STOP,
        {"gamma": 2, "bonus": False, "power": 0.5, "resampling": "residual", "ess_threshold": 0.95, "control": 1.0}
        | {"n_particles": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_unbiased(case: str) -> None:
    """E[Ẑ·Σ W f] to 1e-12; stops, the cap and the minimum fall inside blocks.

    Control 0 is that of a request whose program can reject, as one that runs beside it has another control; SMC's own
    program is in `test_unbiased.py`.
    """
    toy, config = CASES[case]
    done = enumerate_smc(toy, **config)
    assert deviation(done) < 1e-12
    assert (done.failed > 0) == (toy.impossible and config["control"] == 0), "else a token is never weightless"
    assert (done.resampled > 0) == (config["n_particles"] > 1 and not done.config.exact)
    if done.config.exact:
        law = toy.outcomes(1.0)
        assert max(abs(done.selected.get(x, 0.0) - mass) for x, mass in law.items()) < 1e-12, "each answer is exact"


def test_unbiased_as_it_is_by_default() -> None:
    """A control of 0.1, by which rows of one population have unequal lengths."""
    done = Enumeration(STOP, smc.SMC(n_particles=2, gamma=2)).run()
    assert (done.config.control, done.config.ragged) == (0.1, True)
    assert deviation(done) < 1e-12


@pytest.mark.parametrize("mutation", CONTROL_MUTATIONS)
def test_controls(mutation: str) -> None:
    """Known mistakes break the law, at α = 2 all of them."""
    config = {"n_particles": 2, "gamma": 2, "control": 0.5, "ess_threshold": 0.9}
    assert deviation(enumerate_smc(STOP, mutation, power=2.0, **config)) > 1e-3


def test_a_control_nears_the_target() -> None:
    """The answer's law is the nearer to the target's the larger c is."""
    toy = Toy(vocab=2, cap=3, stop=1, seed=6)
    law, distances = toy.outcomes(1.0), []
    for c in (0.0, 0.1, 0.5, 1.0):
        selected = Enumeration(toy, smc.SMC(n_particles=2, gamma=2, control=c)).run().selected
        distances.append(sum(abs(selected.get(x, 0.0) - mass) for x, mass in law.items()) / 2)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.01
    assert distances[-1] < 1e-12


# The running step.

PAIR = tiny_pair()
MAX_MODEL_LEN = 24
BASE = PAIR.program(MAX_MODEL_LEN, page_size=4, ess_threshold=0.95, control=0.3)


def answers(program: smc.Program, **memory: int) -> tuple[list[Any], list[smc.Info]]:
    """All rows' tokens and log Ẑ by group; after every cycle the pages are sound and none is kept behind a frontier."""
    state, infos = start(program, PAIR.params, ASKS, **memory), []
    while state.running.any():
        state, info = step(program, PAIR.params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        held = (np.asarray(state.sequences.block_table) != 0).sum(axis=1).reshape(len(ASKS), -1)
        ran = np.asarray(info.ran)
        np.testing.assert_array_equal(held[ran], pages_for(np.asarray(info.length)[ran] - 1, program.page_size))
        infos.append(info)
    assert not state.failed.any()
    assert (release(state).pool.refcount == 0).all()
    evidence = np.asarray(smc.log_evidence(state), np.float64).round(3)
    return list(zip(outputs(state), evidence.tolist(), strict=True)), infos


@pytest.fixture(scope="module")
def base() -> tuple[list[Any], list[smc.Info]]:
    return answers(BASE)


def test_rows_have_unequal_lengths_and_fork(base: tuple[list[Any], list[smc.Info]]) -> None:
    """Rows do differ in length and fork, which the other tests here are about."""
    infos = base[1]
    assert any((np.ptp(np.asarray(info.length)[np.asarray(info.ran)], axis=1) > 0).any() for info in infos)
    assert any(np.asarray(info.resampled).any() for info in infos)


@pytest.mark.slow
def test_each_group_has_its_own_control(base: tuple[list[Any], list[smc.Info]]) -> None:
    """A group's own control, in one program with others, makes of it what a decoder of that control does."""
    own = dataclasses.replace(
        BASE, decoding=dataclasses.replace(BASE.decoding, control=0.0), features=frozenset({"control"})
    )
    asks = [dataclasses.replace(ask, control=c) for ask, c in zip(ASKS, (None, 0.1, 0.3, 1.0), strict=True)]
    state, _ = finish(own, PAIR.params, start(own, PAIR.params, asks))
    assert outputs(state)[2] == base[0][2][0]
    assert outputs(state)[1] != base[0][1][0], "control: another c gives other tokens"


@pytest.mark.slow
def test_full_control_weighs_nothing() -> None:
    """c = 1 at power 1: all weights exactly 1, so nothing is resampled, also by drafts of n-grams."""
    exact = dataclasses.replace(BASE.decoding, control=1.0)
    program, params = (
        dataclasses.replace(BASE, decoding=exact, draft=NGram()),
        dataclasses.replace(PAIR.params, draft=None),
    )
    state, infos = finish(program, params, start(program, params, ASKS))
    assert (state.log_weight == 0).all()
    assert (smc.log_evidence(state) == 0).all()
    assert not any(np.asarray(info.resampled).any() for info in infos)
    assert len({tuple(row) for group in outputs(state) for row in group}) > 8, "particles are their own"
    with pytest.raises(ValueError, match=r"SMC\(control=1\)"):
        dataclasses.replace(BASE, draft=NGram())
