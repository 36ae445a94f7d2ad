"""Prediction and ranking: the measured example of the H100, regret at every load, and never another law."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.auto import Auto
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.planner import Cell, Measured, Planner, law_of
from smcjax.planner.prediction import RATES
from smcjax.planner.report import best_fixed, gains, markdown, regret
from smcjax.sparse import SparseVerification
from tests.planner.tables import ALONE, EXACT, LOADS, OTHERS, Blind, Machine, machines, measured, profile

# Milliseconds a cycle on one H100, 1B/8B, 1,024 tokens of context, from tokens/s of 9 and of 1 token a cycle:
# 2,639 / 1,377 tok/s at 8 requests, 3,292 / 2,495 at 16, 3,578 / 4,082 at 32.
SPECULATING = Rejection(8, n_candidates=8)
H100 = {
    SPECULATING: {n: 9e3 * n / speed for n, speed in ((8, 2639), (16, 3292), (32, 3578))},
    ALONE: {n: 1e3 * n / speed for n, speed in ((8, 1377), (16, 2495), (32, 4082))},
}


def h100() -> Planner:
    return Planner(profile(*(measured(one, times, rate=1.0) for one, times in H100.items())))


def test_the_measured_example_turns_between_16_and_32() -> None:
    """Where all drafts are accepted, a cycle of rejection along 8 candidates gives the 9 tokens that were measured."""
    planner = h100()
    for load, speeds in ((8, (2639, 1377)), (16, (3292, 2495)), (32, (3578, 4082))):
        for one, speed in zip(H100, speeds, strict=True):
            assert planner.tokens_per_second(one, load, 1024) == pytest.approx(speed)
    fastest = {load: planner.rank("exact", load, 1024)[0].decoding for load in range(1, 65)}
    assert all(fastest[load] == SPECULATING for load in range(1, 17))
    assert all(fastest[load] == ALONE for load in range(32, 65))
    turns = [load for load in range(2, 65) if fastest[load] != fastest[load - 1]]
    assert len(turns) == 1
    assert 16 < turns[0] <= 32
    chosen = [fastest[load] for load in (8, 16, 32)]
    assert regret(planner, chosen, (8, 16, 32), 1024, "exact") < -0.02, "better than any fixed choice"
    assert regret(planner, [ALONE] * 3, (8, 16, 32), 1024, "exact") > 0.1, "control: one choice for all loads"


@given(machines())
def test_within_five_percent_of_the_best_at_every_load(machine: Machine) -> None:
    """From 1 to 64 requests in batches of any size, against the machine's own times between the measured points."""
    planner = Planner(machine.profile())
    for load in range(1, 65):
        chosen = planner.rank("exact", load, 1024)[0].decoding
        best = max(machine.speed(one, load) for one in EXACT)
        assert machine.speed(chosen, load) >= 0.95 * best, load


def test_a_fixed_choice_is_not_within_five_percent() -> None:
    """The control of the law above: a machine on which no strategy is good at all loads."""
    machine = Machine({one: (5 + 0.5 * one.speculation.gamma, 0.1 * one.speculation.scored) for one in EXACT[:6]}, 0.8)
    for one in EXACT[:6]:
        assert any(
            machine.speed(one, load) < 0.95 * max(machine.speed(o, load) for o in machine.costs) for load in LOADS
        )
    planner = Planner(machine.profile())
    fixed = best_fixed(planner, "exact", LOADS, 1024)
    gained = gains(planner, "exact", 1024)
    assert gained.fixed == fixed
    assert min(gained.loads) >= 0
    assert max(gained.loads) > 0.05
    assert gained.regret < 0


@given(machines(), st.lists(st.floats(-0.1, 0.1), min_size=len(EXACT), max_size=len(EXACT)))
def test_regret_is_bounded_by_the_errors_of_the_profile(machine: Machine, noise: list[float]) -> None:
    """Times wrong by a factor in [1 − ε, 1 + ε] cost at most 1 − (1 − ε)/(1 + ε)."""
    planner, error = Planner(machine.profile(noise)), max(map(abs, noise))
    for load in LOADS:
        chosen = planner.rank("exact", load, 1024)[0].decoding
        best = max(machine.speed(one, load) for one in EXACT)
        assert machine.speed(chosen, load) >= best * (1 - error) / (1 + error) * (1 - 1e-9)


@given(machines((*EXACT, *OTHERS)), st.integers(1, 100), st.floats(*RATES))
def test_no_ranking_has_two_laws(machine: Machine, lanes: int, rate: float) -> None:
    planner = Planner(machine.profile())
    for law in {law_of(one) for one in machine.costs}:
        ranking = planner.rank(law, lanes, 1024, rate=rate)
        assert ranking
        assert {law_of(one.decoding) for one in ranking} == {law}
        speeds = [one.tokens_per_second for one in ranking]
        assert speeds == sorted(speeds, reverse=True)
    assert planner.rank("another", lanes, 1024) == []


def test_a_ranking_of_all_would_cross_laws() -> None:
    """The control of the law above: SMC is faster than anything exact on this machine, and no exact request gets it."""
    machine = Machine(dict.fromkeys((ALONE, Rejection(4), SMC(8, 8)), (5.0, 0.1)), 0.3)
    assert max(machine.costs, key=lambda one: one.tokens_per_cycle / machine.ms(one, 8)) == SMC(8, 8)
    assert Planner(machine.profile()).rank("exact", 8, 1024)[0].decoding == Rejection(4)


SPARSE = SparseVerification("merged", 4)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Rejection(4), ALONE, True),
        (Rejection(4), Rejection(tree=(2, 2), siblings="top"), True),
        (Rejection(4, n_candidates=2), Rejection(2, draft_temperature=0.5), True),
        (Rejection(4, sparse=SPARSE), Rejection(4), True),
        (SMC(control=1.0), ALONE, True),
        (SMC(4, 4), SMC(4, 8), True),
        (SMC(4, 4), SMC(8, 4), False),
        (SMC(4, 4), SMC(4, 4, control=0.1), False),
        (SMC(4, 4), SMC(4, 4, power=2.0), False),
        (SMC(4, 4), ALONE, False),
        (Rejection(4, sparse=SparseVerification(schedule=2)), Autoregressive(SparseVerification(schedule=2)), True),
        (Rejection(4, sparse=SparseVerification(schedule=2)), ALONE, False),
        (
            Rejection(4, sparse=SparseVerification(schedule=2)),
            Rejection(4, sparse=SparseVerification(schedule=4)),
            False,
        ),
        (Blind(4), Blind(4), True),
        (Blind(4), Blind(8), False),
        (Blind(4), SMC(gamma=4), False),
        (Rejection(4, sparse=SparseVerification("shared")), Rejection(2, sparse=SparseVerification("shared")), False),
    ],
)
def test_law_classes(one: Decoding, other: Decoding, same: bool) -> None:
    assert (law_of(one) == law_of(other)) is same


def test_times_between_measured_points() -> None:
    """A power law of both is met exactly; beyond the points the nearest holds; one point is enough."""

    def ms(lanes: float, context: float) -> float:
        return 3 * lanes**0.5 * context**0.25

    cells = tuple(Cell(n, t, ms(n, t)) for n in (1, 4, 16) for t in (64, 1024))
    planner = Planner(profile(Measured(ALONE, 1.0, cells=cells)))
    for lanes, context in ((1, 64), (2, 100), (7, 1000), (16, 1024)):
        assert planner.cycle_ms(ALONE, lanes, context) == pytest.approx(ms(lanes, context))
    assert planner.cycle_ms(ALONE, 64, 9999) == planner.cycle_ms(ALONE, 16, 1024)
    assert planner.cycle_ms(ALONE, 1, 1) == planner.cycle_ms(ALONE, 1, 64)
    assert planner.tokens_per_second(ALONE, 4, 64, running=3) == pytest.approx(3e3 / ms(4, 64))
    one = Planner(profile(measured(ALONE, {8: 5.0})))
    times = [one.cycle_ms(ALONE, lanes, context) for lanes in (1, 8, 99) for context in (1, 1e6)]
    assert times == pytest.approx([5.0] * 6)


@given(st.floats(*RATES), st.floats(0.05, 0.95), st.integers(1, 12))
def test_the_rate_that_explains_what_was_accepted(rate: float, acceptance: float, gamma: int) -> None:
    planner = Planner(profile(measured(Rejection(gamma), {1: 1.0}, acceptance)))
    accepted = planner.accepted(Rejection(gamma), rate)
    found = planner.rate_of(Rejection(gamma), accepted)
    assert planner.accepted(Rejection(gamma), found) == pytest.approx(accepted, abs=1e-6)
    assert 0 <= accepted <= gamma
    if acceptance * rate < 1:  # a draft that is accepted r times as often, given those before it
        assert accepted == pytest.approx(sum((acceptance * rate) ** j for j in range(1, gamma + 1)))


def test_what_rejects_nothing_has_no_rate() -> None:
    planner = h100()
    assert planner.rate_of(ALONE, 3.0) == 1.0
    assert planner.tokens_per_cycle(ALONE, 7.0) == 1.0
    assert planner.accepted(ALONE) == 0.0


def test_strategies_worth_compiling() -> None:
    """Keeps strategies that are fastest somewhere; a margin leaves out what hardly matters, and one is always left."""
    planner = h100()
    assert planner.useful("exact", (8, 16, 32)) == [SPECULATING, ALONE]
    assert planner.useful("exact", (1, 2)) == [SPECULATING]
    assert planner.useful("exact", (64,)) == [ALONE]
    assert planner.useful("exact", (8, 32), margin=0.2) == [SPECULATING], "of 12% at 32"
    assert planner.useful("exact", (8, 32), among=[ALONE]) == [ALONE]
    assert len(planner.useful("exact", (8, 32), margin=1.0)) == 1


def test_strategies_for_prompts_of_all_kinds() -> None:
    """A strategy that no load wants on the mean prompt is kept where a tenth of the prompts want it, and only there."""
    times = {Rejection(8): 3.0, ALONE: 2.0}

    def planner(*prompts: float) -> Planner:
        rows = (measured(one, {1: ms, 8: ms}, 0.8) for one, ms in times.items())
        return Planner(profile(*(dataclasses.replace(row, prompts=prompts) for row in rows)))

    alike, mixed = planner(*[4.3] * 20), planner(*[4.8] * 17, *[1.1] * 3)
    for one in (alike, mixed):
        assert one.useful("exact", (1, 8)) == [Rejection(8)]
    one, low, high = alike.rates("exact")
    assert one == 1.0
    assert low == high == pytest.approx(1.0, abs=0.02)
    assert alike.useful("exact", (1, 8), rates=alike.rates("exact")) == [Rejection(8)]
    one, low, high = mixed.rates("exact")
    assert mixed.accepted(Rejection(8), low) == pytest.approx(0.1, abs=0.01)
    assert low < one < high
    assert mixed.useful("exact", (1, 8), rates=mixed.rates("exact")) == [Rejection(8), ALONE]
    assert Auto().strategies(mixed.profile, has_draft=True, loads=(1, 8)) == (Rejection(8), ALONE)
    assert planner(4.3).rates("exact") == planner().rates("exact") == (1.0,)


def test_gains_by_prompt_and_the_table() -> None:
    """On one prompt drafts help and on the other they do not: with hindsight each has its own."""
    times = {n: 10.0 + n for n in LOADS}
    drafting = Measured(
        Rejection(2), 1.6, (0.4, 0.2), (2.6, 1.0), tuple(Cell(n, 64, 1.5 * ms) for n, ms in times.items())
    )
    alone = Measured(ALONE, 1.0, (), (1.0, 1.0), tuple(Cell(n, 64, ms) for n, ms in times.items()))
    made = profile(alone, drafting)
    gained = gains(Planner(made), "exact", 64)
    assert gained.prompts is not None
    low, middle, high = gained.prompts
    assert (low, high) == (pytest.approx(0, abs=0.08), pytest.approx(0.73 * 0.9, abs=0.1))
    assert low < middle < high
    text = markdown(made)
    assert "| target alone | 1.00 |" in text
    assert "Best fixed: rejection, K=2." in text
    assert math.isclose(gained.regret, 0, abs_tol=1e-9)
