"""Law 4: the paged, batched cycle gives, token for token, what plain Python gives (tests/smc/reference.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from smcjax import smc
from tests.helpers import Ask, finish, outputs, published, select, start, tiny_pair
from tests.smc import reference

MAX_MODEL_LEN = 24
PAIR = tiny_pair()
# Drafts run past the cap, so the oracle must see a little further.
TARGET = reference.language_model(PAIR.target, PAIR.params.target, MAX_MODEL_LEN + 8)
DRAFT = reference.language_model(PAIR.draft, PAIR.params.draft, MAX_MODEL_LEN + 8)

ASKS = [
    Ask((1, 3, 0, 2, 2), max_tokens=11, stops=(4,), seed=41),
    Ask((2,), max_tokens=14, stops=(4,), min_tokens=5, temperature=0.7, seed=42),
    Ask((0, 1, 2, 3, 1, 2, 3, 0, 2, 1, 1, 3, 0, 2, 1, 0), max_tokens=100, temperature=1.3, seed=43),
    Ask((3, 3, 1), max_tokens=1, seed=44),
    Ask((1, 1), max_tokens=16, stops=(0, 4), seed=45),
]
CASES: dict[str, dict[str, Any]] = {
    "always-resample": {"ess_threshold": 1.0},
    "flat-power": {"power": 0.5, "draft_temperature": 1.4, "select": "best", "resampling": "multinomial"},
    "explainer": {"bonus": False, "gamma": 1, "n_particles": 4, "resampling": "residual"},
    "pipelined, early end": {"pipelined": True, "power": 1.5, "early_end": True, "ess_threshold": 0.9}
    | {"resampling": "stratified"},
    "control, early end": {"control": 0.3, "early_end": True, "power": 1.3, "draft_temperature": 1.2}
    | {"ess_threshold": 0.95},
}


def decode(config: smc.SMC) -> list[reference.Result]:
    """The asks by the reference."""
    return [reference.decode(config, TARGET, DRAFT, ask, MAX_MODEL_LEN) for ask in ASKS]


def check(program: smc.Program, expected: list[reference.Result]) -> None:
    """Runs the asks through the package and compares every cycle with the reference's."""
    state, infos = finish(program, PAIR.params, start(program, PAIR.params, ASKS))
    assert not state.failed.any()
    for group, result in enumerate(expected):
        mine = [info for info in infos if info.ran[group]]
        assert len(mine) == len(result.cycles)
        for info, cycle in zip(mine, result.cycles, strict=True):
            np.testing.assert_allclose(info.log_weight[group], cycle.log_weight, atol=1e-4)
            np.testing.assert_allclose(info.ess[group], cycle.ess, rtol=1e-3)
            assert bool(info.resampled[group]) == cycle.resampled
            assert info.ancestors[group].tolist() == cycle.ancestors
            assert info.length[group].tolist() == [len(tokens) for tokens in cycle.tokens]
        prompt = len(ASKS[group].prompt)
        assert outputs(state)[group] == [tuple(row.tokens[prompt:]) for row in result.rows]
        np.testing.assert_allclose(state.log_weight[group], [row.log_weight for row in result.rows], atol=1e-4)
        np.testing.assert_allclose(smc.log_evidence(state)[group], result.log_evidence, atol=1e-4)
        assert int(select(program, state)[group]) == result.selected


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cycle_equals_plain_python(case: str) -> None:
    program = PAIR.program(MAX_MODEL_LEN, **CASES[case])
    expected = decode(program.decoding)
    resampled = sum(cycle.resampled for result in expected for cycle in result.cycles)
    assert resampled > 0, "the case must resample to say anything"
    check(program, expected)


def test_cases_reach_every_kind_of_end() -> None:
    """The asks above end at stops and at caps, at several places of a block."""
    results = decode(published(3, 3, ess_threshold=1.0))
    rows = [(ask, row) for ask, result in zip(ASKS, results, strict=True) for row in result.rows]
    stopped = [row.tokens[-1] in ask.stops for ask, row in rows]
    assert any(stopped)
    assert not all(stopped)
    assert len({(len(row.tokens) - len(ask.prompt) - 1) % 4 for ask, row in rows}) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"ess_threshold": 0.0}, {"power": 1.01}, {"draft_temperature": 1.01}, {"resampling": "multinomial"}]
)
def test_control_another_algorithm_is_told_apart(change: dict[str, Any]) -> None:
    """Negative control: the comparison fails when the reference runs any other configuration."""
    program = PAIR.program(MAX_MODEL_LEN, **CASES["always-resample"])
    with pytest.raises(AssertionError):
        check(program, decode(dataclasses.replace(program.decoding, **change)))
