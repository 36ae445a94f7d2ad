"""Switching online: only within a law, not to and fro under noise, along a rising load once each, at little regret."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Hashable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.decoders import SMC, Decoding, Rejection
from smcjax.planner import Planner, Rule, Switch, law_of
from tests.planner.tables import ALONE, EXACT, LOADS, OTHERS, Machine, machines, measured, profile, reached

EAGER = Rule(margin=0.0, dwell=1, window=1, prior=0.1)  # the planted mistake: no hysteresis at all
DEAF = Rule(prior=1e9)  # goes by the profile's acceptance, whatever it hears
AGREED = Rejection(4)


def accepted(rng: random.Random, decoding: Decoding, rates: Sequence[float]) -> dict[Hashable, int]:
    """Drafts that each request accepts in one cycle, each with the probability of its request."""
    found: dict[Hashable, int] = {}
    for request, rate in enumerate(rates):
        drafts = (rng.random() < rate for _ in range(decoding.speculation.gamma))
        found[request] = sum(1 for _ in itertools.takewhile(bool, drafts))
    return found


def run(switch: Switch, loads: list[int], rate: float, seed: int = 0, requests: int | None = None) -> list[Decoding]:
    """The strategy of each cycle, where reports come a cycle late, as on a GPU."""
    rng, chosen, late = random.Random(seed), list[Decoding](), None
    for load in loads:
        running = range(requests or load)
        chosen.append(switch.choose(load, 1024, running))
        if late is not None:
            switch.heard(*late)
        late = chosen[-1], accepted(rng, chosen[-1], [rate] * len(running))
    return chosen


def turns(chosen: list[Decoding]) -> int:
    return sum(a != b for a, b in itertools.pairwise(chosen))


@given(machines((*EXACT, *OTHERS)), st.data())
def test_never_another_law(machine: Machine, data: st.DataObject) -> None:
    """Whatever loads and reports come, of whichever strategies."""
    planner = Planner(machine.profile())
    law = data.draw(st.sampled_from(sorted({law_of(one) for one in machine.costs})))
    switch = Switch(planner, planner.strategies(law), dataclasses.replace(Rule(), dwell=2))
    requests = st.integers(0, 3)
    for _ in range(30):
        running = data.draw(st.sets(requests))
        assert law_of(switch.choose(data.draw(st.sampled_from(LOADS)), 1024, running)) == law
        reports = data.draw(st.dictionaries(requests, st.integers(0, 8)))
        switch.heard(data.draw(st.sampled_from(list(machine.costs))), reports)


def test_strategies_of_two_laws_are_refused() -> None:
    planner = Planner(Machine(dict.fromkeys((ALONE, AGREED, SMC(8, 8)), (1.0, 1.0)), 0.5).profile())
    with pytest.raises(ValueError, match=r"^strategies must be of one law class, got exact, population,"):
        Switch(planner, (ALONE, SMC(8, 8)))
    with pytest.raises(ValueError, match=r"^the profile has no rejection, K=7; profile it"):
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
    chosen = run(Switch(Planner(machine.profile()), EXACT, DEAF), loads[::-1] if falling else loads, 0.5)
    assert turns(chosen) == len(set(chosen)) - 1


@given(machines(), st.lists(st.tuples(st.sampled_from(LOADS), st.integers(20, 60)), min_size=1, max_size=6))
def test_regret_online(machine: Machine, plan: list[tuple[int, int]]) -> None:
    """Against the best of each load: a margin's worth, but for the rest after a switch that a new load has to wait."""
    rule = DEAF
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


def test_a_rate_means_the_same_whoever_drafts() -> None:
    """Drafts accepted .6 of the time where the profile has .8 are 3/4 as often, by reports of one draft or of eight."""
    machine = Machine(dict.fromkeys(EXACT, (1.0, 0.0)), 0.8)
    for decoding in (Rejection(1), Rejection(2), Rejection(8)):
        switch, rng = Switch(Planner(machine.profile()), EXACT, Rule(window=1e9)), random.Random(1)
        for _ in range(2000):
            switch.choose(4, 1024, range(4))
            switch.heard(decoding, accepted(rng, decoding, [0.6] * 4))
        switch.choose(4, 1024, range(4))
        assert switch.rate == pytest.approx(0.75, abs=0.02)


def test_acceptance_comes_and_goes_with_its_request() -> None:
    """A request's acceptance says nothing of the next one's; together they count in equal parts."""
    costs: dict[Decoding, tuple[float, float]] = {ALONE: (5.0, 0.0), AGREED: (8.0, 0.0)}
    switch = Switch(Planner(Machine(costs, 0.7).profile()), tuple(costs))
    assert switch.present is None
    assert switch.choose(8, 1024, ["a"]) == AGREED
    for _ in range(20):
        switch.heard(ALONE, {"a": 0})
        switch.heard(Rejection(8), {"a": 0})
    switch.choose(8, 1024, ["a"])
    assert switch.rate == 1.0, "neither the target alone nor a stranger says anything of drafts"
    for _ in range(20):
        switch.heard(AGREED, {"a": 0})
    switch.choose(8, 1024, ["a"])
    low = switch.rate
    assert low < 0.5
    switch.choose(8, 1024, ["a", "b"])
    assert switch.rate == pytest.approx((low + 1) / 2)
    switch.choose(8, 1024, ["b"])
    assert switch.rate == 1.0
    switch.choose(8, 1024, ["a"])
    assert switch.rate == 1.0, "who has left is forgotten"
    switch.choose(8, 1024, [])
    assert switch.rate == 1.0


def test_phases_are_followed() -> None:
    """Bursts of eight new requests, 30 cycles each, whose drafts are accepted nearly always or seldom, in turns.

    The best strategy has most of every burst, from its 8th cycle on all. Control: who listens to nobody stays.
    """
    rates = {True: 0.98, False: 0.45}
    costs: dict[Decoding, tuple[float, float]] = {Rejection(2): (6.0, 0.0), Rejection(8): (10.0, 0.0)}
    machine, rng = Machine(costs, 0.8), random.Random(5)
    for rule, follows in ((Rule(), True), (DEAF, False)):
        switch, right = Switch(Planner(machine.profile()), tuple(costs), rule), list[bool]()
        for burst in range(12):
            rate = rates[burst % 2 == 0]
            best = max(costs, key=lambda one: machine.speed(one, 8, rate))
            assert best == (Rejection(8) if burst % 2 == 0 else Rejection(2))
            running = [(burst, number) for number in range(8)]
            for cycle in range(30):
                chosen = switch.choose(8, 1024, running)
                if cycle >= 8:
                    right.append(chosen == best)
                counts = accepted(rng, chosen, [rate] * 8).values()
                switch.heard(chosen, dict(zip(running, counts, strict=True)))
        assert all(right) == follows
        assert follows or sum(right) <= len(right) / 2
