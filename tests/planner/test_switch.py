"""Switching online: only within a law, not to and fro under noise, along a rising load once each, at little regret."""

from __future__ import annotations

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.decoders import SMC, Decoding, Rejection
from smcjax.planner import Planner, Rule, Switch, law_of
from tests.planner.tables import ALONE, EXACT, LOADS, OTHERS, Machine, machines, measured, profile, reached

EAGER = Rule(margin=0.0, dwell=1, window=1, least=1, tolerance=0.0)  # the planted mistake: no hysteresis at all
AGREED = Rejection(4)


def accepted(rng: random.Random, decoding: Decoding, rate: float, requests: int) -> float:
    """Drafts accepted by `requests` requests in one cycle, in the mean."""
    total = 0
    for _ in range(requests):
        for _ in range(decoding.speculation.gamma):
            if rng.random() >= rate:
                break
            total += 1
    return total / requests


def run(switch: Switch, loads: list[int], rate: float, seed: int = 0, requests: int | None = None) -> list[Decoding]:
    """The strategy of each cycle, where reports come a cycle late, as on a GPU."""
    rng, chosen, late = random.Random(seed), list[Decoding](), None
    for load in loads:
        chosen.append(switch.choose(load, 1024))
        if late is not None:
            switch.heard(*late)
        late = chosen[-1], accepted(rng, chosen[-1], rate, requests or load)
    return chosen


def turns(chosen: list[Decoding]) -> int:
    return sum(a != b for a, b in itertools.pairwise(chosen))


@given(machines((*EXACT, *OTHERS)), st.data())
def test_never_another_law(machine: Machine, data: st.DataObject) -> None:
    """Whatever loads and reports come, of whichever strategies."""
    planner = Planner(machine.profile())
    law = data.draw(st.sampled_from(sorted({law_of(one) for one in machine.costs})))
    switch = Switch(planner, planner.strategies(law), dataclasses.replace(Rule(), dwell=2, least=1))
    for _ in range(30):
        assert law_of(switch.choose(data.draw(st.sampled_from(LOADS)), 1024)) == law
        switch.heard(data.draw(st.sampled_from(list(machine.costs))), data.draw(st.floats(0, 8)))


def test_strategies_of_two_laws_are_refused() -> None:
    planner = Planner(Machine(dict.fromkeys((ALONE, AGREED, SMC(8, 8)), (1.0, 1.0)), 0.5).profile())
    with pytest.raises(ValueError, match=r"^strategies must be of one law class, got exact, population,"):
        Switch(planner, (ALONE, SMC(8, 8)))
    with pytest.raises(ValueError, match=r"^the profile has no rejection by token, K=7; profile it"):
        Switch(planner, (ALONE, Rejection(7)))
    with pytest.raises(ValueError, match=r"^strategies must be of one law class, got none"):
        Switch(planner, ())


@given(machines(), st.sampled_from(LOADS), st.integers(0, 9))
def test_no_flapping_at_a_constant_load(machine: Machine, load: int, seed: int) -> None:
    """Acceptance is that of the profile, and every cycle's report random: at most one switch and back in 200 cycles."""
    switch = Switch(Planner(machine.profile()), EXACT)
    assert turns(run(switch, [load] * 200, machine.rate, seed, requests=8)) <= 2


def test_without_hysteresis_it_flaps() -> None:
    """The control of the law above: two strategies that are nearly as fast, and reports that are taken at once."""
    costs: dict[Decoding, tuple[float, float]] = {
        Rejection(2): (5.0 * (1 + sum(reached(2, 0.6))), 0.0),
        Rejection(4): (4.95 * (1 + sum(reached(4, 0.6))), 0.0),
    }
    machine = Machine(costs, 0.6)
    patient, eager = (Switch(Planner(machine.profile()), tuple(costs), rule) for rule in (Rule(), EAGER))
    assert turns(run(patient, [8] * 600, 0.6)) == 0
    assert turns(run(eager, [8] * 600, 0.6)) > 20


@given(machines(), st.booleans())
def test_a_rising_load_visits_each_strategy_once(machine: Machine, falling: bool) -> None:
    """Speeds E/(a + b·n) of two strategies cross at most once, so none is come back to; falling likewise."""
    loads = [load for load in LOADS for _ in range(40)]
    chosen = run(Switch(Planner(machine.profile()), EXACT, Rule(tolerance=99)), loads[::-1] if falling else loads, 0.5)
    assert turns(chosen) == len(set(chosen)) - 1


@given(machines(), st.lists(st.tuples(st.sampled_from(LOADS), st.integers(20, 60)), min_size=1, max_size=6))
def test_regret_online(machine: Machine, plan: list[tuple[int, int]]) -> None:
    """Against the best of each load: a margin's worth, but for the rest after a switch that a new load has to wait."""
    rule = Rule(tolerance=99)
    chosen = run(Switch(Planner(machine.profile()), EXACT, rule), [load for load, n in plan for _ in range(n)], 0.5)
    begin = 0
    for load, count in plan:
        for one in chosen[begin + rule.dwell : begin + count]:
            best = max(machine.speed(other, load) for other in EXACT)
            assert machine.speed(one, load) >= best / (1 + rule.margin) * (1 - 1e-9)
        begin += count


def test_drafts_that_miss_are_left_and_tried_again() -> None:
    """Accepted half the time by the profile and hardly ever now: alone within 40 cycles, trials seldom and short."""
    costs: dict[Decoding, tuple[float, float]] = {ALONE: (5.0, 0.0), AGREED: (8.0, 0.0)}
    switch = Switch(Planner(Machine(costs, 0.7).profile()), tuple(costs))
    assert switch.choose(8, 1024) == AGREED
    chosen = run(switch, [8] * 3000, 0.05)
    assert ALONE in chosen[:40]
    trials = chosen[40:].count(AGREED)
    assert 0 < trials < 0.1 * 2960, "a trial costs a few cycles in hundreds"
    back = run(switch, [8] * 1200, 0.7)
    assert set(back[-400:]) == {AGREED}, "once drafts are accepted again, they stay"
    fixed = Switch(Planner(profile(measured(AGREED, {8: 8.0}))), [AGREED])
    assert set(run(fixed, [8] * 50, 0.05)) == {AGREED}


def test_reports_of_an_earlier_strategy_count_for_nothing() -> None:
    costs: dict[Decoding, tuple[float, float]] = {ALONE: (5.0, 0.0), AGREED: (8.0, 0.0)}
    switch = Switch(Planner(Machine(costs, 0.7).profile()), tuple(costs))
    assert switch.present is None
    switch.choose(8, 1024)
    for _ in range(50):
        switch.heard(ALONE, 0.0)
        switch.heard(Rejection(8), 0.0)
    assert switch.rate == 1.0
    for _ in range(50):
        switch.heard(AGREED, 0.0)
    assert switch.rate < 0.2, "control"
