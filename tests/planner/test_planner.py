"""Prediction and the choice of one decoder: the measured example of the H100, how far from the fastest, law classes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.planner import Cell, Counted, Measured, Planner, law_of
from smcjax.planner.laws import same_tokens
from smcjax.planner.report import gain_of_choosing, gains_by_prompt, markdown
from smcjax.sparse.verification import SparseVerification
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


def fastest(planner: Planner, load: int) -> Decoding:
    return planner.best(planner.strategies("exact"), [(load, 1024)])


def share(machine: Machine, one: Decoding) -> float:
    """The speed of a strategy over the fastest one's, in the mean over loads, by the machine's own times."""
    return sum(machine.speed(one, n) / max(machine.speed(other, n) for other in EXACT) for n in LOADS) / len(LOADS)


def test_the_measured_example_turns_between_16_and_32() -> None:
    """Where all drafts are accepted, a cycle of rejection along 8 candidates gives the 9 tokens that were measured."""
    planner = h100()
    for load, speeds in ((8, (2639, 1377)), (16, (3292, 2495)), (32, (3578, 4082))):
        for one, speed in zip(H100, speeds, strict=True):
            assert planner.tokens_per_second(one, load, 1024) == pytest.approx(speed)
    each = {load: fastest(planner, load) for load in range(1, 65)}
    assert all(each[load] == SPECULATING for load in range(1, 17))
    assert all(each[load] == ALONE for load in range(32, 65))
    turns = [load for load in range(2, 65) if each[load] != each[load - 1]]
    assert len(turns) == 1
    assert 16 < turns[0] <= 32


def test_the_one_that_is_near_the_fastest_everywhere() -> None:
    """At 8, 16, 32 requests speculating has 100, 100 and 88% of the fastest's speed, the target alone 52, 76, 100%."""
    planner = h100()
    assert planner.best(list(H100), [(8, 1024), (16, 1024), (32, 1024)]) == SPECULATING
    assert planner.best(list(H100), [(16, 1024), (32, 1024), (64, 1024), (64, 1024)]) == ALONE
    assert planner.best([ALONE], [(8, 1024)]) == ALONE
    middling, extreme = Rejection(2), Rejection(4)
    times = {ALONE: {1: 9.0, 8: 1.0}, extreme: {1: 1.0, 8: 9.0}, middling: {1: 1.2, 8: 1.2}}
    made = Planner(profile(*(measured(one, of_load, rate=0.0) for one, of_load in times.items())))
    assert made.best(list(times), [(1, 1024), (8, 1024)]) == middling, "nowhere the fastest one, and never far from it"
    assert made.best(list(times), [(1, 1024)]) == extreme


@given(machines())
def test_within_five_percent_of_the_best_at_every_load(machine: Machine) -> None:
    """From 1 to 64 requests in batches of any size, against the machine's own times between the measured points."""
    planner = Planner(machine.profile())
    for load in range(1, 65):
        best = max(machine.speed(one, load) for one in EXACT)
        assert machine.speed(fastest(planner, load), load) >= 0.95 * best, load


@given(machines(), st.lists(st.floats(-0.1, 0.1), min_size=len(EXACT), max_size=len(EXACT)))
def test_a_choice_is_as_good_as_the_profile(machine: Machine, noise: list[float]) -> None:
    """Times wrong by a factor in [1 − ε, 1 + ε] cost at most 1 − ((1 − ε)/(1 + ε))² of the mean share."""
    planner, error = Planner(machine.profile(noise)), max(map(abs, noise))
    chosen = planner.best(planner.strategies("exact"), [(load, 1024) for load in LOADS])
    best = max(share(machine, one) for one in EXACT)
    assert share(machine, chosen) >= best * ((1 - error) / (1 + error)) ** 2 * (1 - 1e-9)


@given(machines((*EXACT, *OTHERS)))
def test_no_class_has_two_laws(machine: Machine) -> None:
    planner = Planner(machine.profile())
    for law in {law_of(one) for one in machine.costs}:
        found = planner.strategies(law)
        assert found
        assert {law_of(one) for one in found} == {law}
    assert planner.strategies("another") == []


def test_a_choice_among_all_would_cross_laws() -> None:
    """The control of the law above: SMC is faster than anything exact on this machine, and no exact request gets it."""
    machine = Machine(dict.fromkeys((ALONE, Rejection(4), SMC(8, 8)), (5.0, 0.1)), 0.3)
    planner = Planner(machine.profile())
    assert planner.best(list(machine.costs), [(8, 1024)]) == SMC(8, 8)
    assert fastest(planner, 8) == Rejection(4)


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
        (SMC(4, 4), SMC(4, 4, control=0.1), True),
        (SMC(4, 4), SMC(4, 4, control=0), False),
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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Rejection(4), Rejection(4, sparse=SPARSE), True),
        (Rejection(4, sparse=SPARSE), Rejection(4, sparse=SparseVerification("merged", 8, "dfs")), True),
        (Rejection(tree=(2, 2)), Rejection(tree=(2, 2), sparse=SPARSE), True),
        (ALONE, Autoregressive(SparseVerification("merged", 1)), True),
        (
            Rejection(4, sparse=SparseVerification(schedule=2)),
            Rejection(4, sparse=SparseVerification("merged", schedule=2)),
            True,
        ),
        (Rejection(4), Rejection(5), False),
        (Rejection(4), Rejection(4, n_candidates=2), False),
        (Rejection(tree=(2, 2)), Rejection(tree=(2, 2), order="dfs"), False),
        (Rejection(4), Rejection(4, sparse=SparseVerification(schedule=2)), False),
        (Rejection(4), Rejection(4, sparse=SparseVerification("shared")), False),
        (
            Rejection(4, sparse=SparseVerification("shared", 2)),
            Rejection(4, sparse=SparseVerification("shared")),
            False,
        ),
        (ALONE, Rejection(4), False),
        (SMC(control=1.0), Rejection(4), False),
    ],
)
def test_readings_give_the_same_tokens(one: Decoding, other: Decoding, same: bool) -> None:
    """Readings are of one law, and alike in all but how selected blocks are read."""
    assert same_tokens(one, other) is same_tokens(other, one) is same
    assert same_tokens(one, one)


def test_times_between_measured_points() -> None:
    """A power law of both is met exactly; beyond the points the nearest holds; one point is enough."""

    def ms(slots: float, context: float) -> float:
        return 3 * slots**0.5 * context**0.25

    cells = tuple(Cell(n, t, ms(n, t)) for n in (1, 4, 16) for t in (64, 1024))
    planner = Planner(profile(Measured(ALONE, (Counted(64, 1.0),), cells)))
    for slots, context in ((1, 64), (2, 100), (7, 1000), (16, 1024)):
        assert planner.cycle_ms(ALONE, slots, context) == pytest.approx(ms(slots, context))
    assert planner.cycle_ms(ALONE, 64, 9999) == planner.cycle_ms(ALONE, 16, 1024)
    assert planner.cycle_ms(ALONE, 1, 1) == planner.cycle_ms(ALONE, 1, 64)
    assert planner.tokens_per_second(ALONE, 4, 64) == pytest.approx(4e3 / ms(4, 64))
    one = Planner(profile(measured(ALONE, {8: 5.0})))
    times = [one.cycle_ms(ALONE, slots, context) for slots in (1, 8, 99) for context in (1, 1e6)]
    assert times == pytest.approx([5.0] * 6)


def test_tokens_go_by_context() -> None:
    """Drafts that are accepted in short documents alone are chosen there alone; between lengths E is a power law.

    Control: one count for all contexts, as of files before, chooses them everywhere.
    """

    def tokens(context: float) -> float:
        return 4 * (context / 64) ** -0.5

    cells = {ms: tuple(Cell(1, context, ms) for context in (64, 1024)) for ms in (1.0, 2.0)}
    by_context = tuple(Counted(context, tokens(context)) for context in (64, 256, 1024))
    alone = Measured(ALONE, (Counted(64, 1.0),), cells[1.0])
    planner, blind = (
        Planner(profile(alone, Measured(Rejection(4), counted, cells[2.0])))
        for counted in (by_context, (Counted(64, 2.5),))
    )
    for context in (64, 100, 256, 700, 1024):
        assert planner.tokens_per_cycle(Rejection(4), context) == pytest.approx(tokens(context))
        assert planner.tokens_per_second(Rejection(4), 1, context) == pytest.approx(1e3 * tokens(context) / 2)
    assert planner.tokens_per_cycle(Rejection(4), 9999) == planner.tokens_per_cycle(Rejection(4), 1024)
    for made, at_length in ((planner, ALONE), (blind, Rejection(4))):
        assert made.best([ALONE, Rejection(4)], [(1, 64)]) == Rejection(4)
        assert made.best([ALONE, Rejection(4)], [(1, 1024)]) == at_length


def test_prompts_of_a_context_are_those_whose_gain_is_said() -> None:
    """Two documents of each length: choosing gains among the short ones alone, as between lengths nothing is chosen."""
    cells = tuple(Cell(1, context, 1.0) for context in (64, 1024))
    short, long = Counted(64, 1.5, (1.0, 2.0)), Counted(1024, 2.0, (2.0, 2.0))
    alone = tuple(Counted(context, 1.4, (1.4, 1.4)) for context in (64, 1024))
    planner = Planner(profile(Measured(ALONE, alone, cells), Measured(Rejection(4), (short, long), cells)))
    (_, _, near), far = (gains_by_prompt(planner, "exact", context) or () for context in (64, 1024))
    assert near > 0.3
    assert far == (0, 0, 0)
    said = "rejection, K=4 is the best one strategy; choosing by context gains 2.9%, by prompt with hindsight 12.9%."
    assert f"Over all prompts at the least load, {said}" in markdown(planner.profile)


def test_the_gain_of_choosing_over_all_prompts() -> None:
    """Drafts pay on both short documents and on one of the long ones.

    Control: where one strategy is the fastest everywhere nothing is gained.
    """
    cells = tuple(Cell(1, context, 1.0) for context in (64, 1024))

    def planner(long: tuple[float, float]) -> Planner:
        counted = (Counted(64, 2.0, (2.0, 2.0)), Counted(1024, 1.0, long))
        alone = tuple(Counted(context, 1.0, (1.0, 1.0)) for context in (64, 1024))
        return Planner(profile(Measured(ALONE, alone, cells), Measured(Rejection(4), counted, cells)))

    # Drafts take ½ + ½ + 2 + ½ = 3.5 cycles for a token of each, alone 4, by context ½ + ½ + 1 + 1, by prompt 2.5.
    assert gain_of_choosing(planner((0.5, 2.0)), "exact") == (Rejection(4), pytest.approx(1 / 6), pytest.approx(0.4))
    assert gain_of_choosing(planner((2.0, 2.0)), "exact") == (Rejection(4), 0, 0)
    assert gain_of_choosing(planner((2.0, 2.0)), "another") is None


def test_gains_by_prompt_and_the_table() -> None:
    """On one prompt drafts help and on the other they do not: with hindsight each has its own."""
    times = {n: 10.0 + n for n in LOADS}
    counted = Counted(64, 1.6, (2.6, 1.0))
    drafting = Measured(Rejection(2), (counted,), tuple(Cell(n, 64, 1.5 * ms) for n, ms in times.items()))
    counted = Counted(64, 1.0, (1.0, 1.0))
    alone = Measured(ALONE, (counted,), tuple(Cell(n, 64, ms) for n, ms in times.items()))
    made = profile(alone, drafting)
    low, middle, high = gains_by_prompt(Planner(made), "exact", 64) or (0, 0, 0)
    assert (low, high) == (pytest.approx(0, abs=0.08), pytest.approx(0.73 * 0.9, abs=0.1))
    assert low < middle < high
    text = markdown(made)
    assert "| target alone | 1.00 |" in text
    assert "Best over the loads: rejection, K=2, with 100%, 100%, 100%, 100%, 100%, 100%, 100%" in text
