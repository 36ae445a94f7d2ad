"""Readings that take turns: no other tokens, not to and fro, along a rising load once each, at little regret."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.planner import Planner, Switch, switch
from smcjax.planner.switch import DWELL, MARGIN, readings
from smcjax.sparse.verification import SparseVerification
from tests.planner.tables import ALONE, LOADS, Machine

READINGS = tuple(
    Rejection(4, sparse=sparse)
    for sparse in (SparseVerification(), SparseVerification("merged", 2), SparseVerification("merged", 8))
)
PLACES = [(load, 1024.0) for load in LOADS]


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines on which each reading has a time of its own a cycle and a slot."""
    streams, slots = st.floats(2.0, 10.0), st.floats(0.01, 0.5)
    return Machine({one: (draw(streams), draw(slots)) for one in READINGS}, 0.5)


def run(chooses: Switch, loads: Sequence[int]) -> list[Decoding]:
    return [chooses.choose(load, 1024) for load in loads]


def changes(chosen: list[Decoding]) -> int:
    return sum(a != b for a, b in itertools.pairwise(chosen))


def test_decoders_whose_tokens_differ_are_refused() -> None:
    planner = Planner(Machine(dict.fromkeys((ALONE, *READINGS), (1.0, 1.0)), 0.5).profile())
    with pytest.raises(ValueError, match=r"^readings must give the same tokens, got target alone and rejection, K="):
        Switch(planner, (ALONE, READINGS[0]))
    with pytest.raises(ValueError, match=r"^readings must give the same tokens"):
        Switch(planner, (READINGS[0], Rejection(4, sparse=SparseVerification("shared"))))


@given(machines(), st.sampled_from(LOADS))
def test_a_constant_load_settles_at_once(machine: Machine, load: int) -> None:
    chosen = run(Switch(Planner(machine.profile()), READINGS), [load] * 20)
    assert {*chosen} == {min(READINGS, key=lambda one: machine.ms(one, load))}


@given(machines(), st.lists(st.sampled_from(LOADS), min_size=50, max_size=50))
def test_changes_are_some_cycles_apart(machine: Machine, loads: list[int]) -> None:
    chosen = run(Switch(Planner(machine.profile()), READINGS), loads)
    at = [0, *(cycle for cycle, (a, b) in enumerate(itertools.pairwise(chosen), 1) if a != b)]
    assert all(later - earlier >= DWELL for earlier, later in itertools.pairwise(at))


def test_it_does_not_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a load that goes to and fro; the controls lack the margin or the rest."""
    loads, pair = [1, 4] * 100, READINGS[:2]
    near = Planner(Machine({pair[0]: (5.0, 0.1), pair[1]: (4.85, 0.15)}, 0.5).profile())  # 2% and 1% apart
    assert changes(run(Switch(near, pair), loads)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(switch, "MARGIN", 0.0)
        assert changes(run(Switch(near, pair), loads)) > 30
    apart = Planner(Machine({pair[0]: (5.0, 0.1), pair[1]: (1.0, 2.0)}, 0.5).profile())
    assert changes(run(Switch(apart, pair), loads)) <= len(loads) / DWELL
    monkeypatch.setattr(switch, "DWELL", 1)
    assert changes(run(Switch(apart, pair), loads)) == len(loads) - 1


@given(machines(), st.booleans())
def test_a_rising_load_visits_each_reading_once(machine: Machine, falling: bool) -> None:
    """Times a + b·n of two readings cross at most once, so none is come back to; falling likewise."""
    loads = [load for load in LOADS for _ in range(8)]
    chosen = run(Switch(Planner(machine.profile()), READINGS), loads[::-1] if falling else loads)
    assert changes(chosen) == len({*chosen}) - 1


@given(machines(), st.lists(st.tuples(st.sampled_from(LOADS), st.integers(5, 20)), min_size=1, max_size=6))
def test_regret(machine: Machine, plan: list[tuple[int, int]]) -> None:
    """Against the fastest of each load: a margin's worth, but for the rest after a change that a new load may wait."""
    chosen = run(Switch(Planner(machine.profile()), READINGS), [load for load, n in plan for _ in range(n)])
    begin = 0
    for load, count in plan:
        best = min(machine.ms(other, load) for other in READINGS)
        assert all(
            machine.ms(one, load) <= best * (1 + MARGIN) * (1 + 1e-9) for one in chosen[begin + DWELL : begin + count]
        )
        begin += count


@given(machines(), st.sampled_from(READINGS))
def test_readings_worth_programs(machine: Machine, own: Decoding) -> None:
    """The decoder itself and the fastest of places where it is slower by a margin: nothing is lost but that."""
    planner = Planner(machine.profile())
    kept = readings(planner, own, PLACES, READINGS)
    assert kept[0] == own
    assert len({*kept}) == len(kept)
    for load in LOADS:
        best = min(machine.ms(one, load) for one in READINGS)
        assert min(machine.ms(one, load) for one in kept) <= best * (1 + MARGIN) * (1 + 1e-9)
    for one in kept[1:]:
        assert any(machine.ms(own, load) > machine.ms(one, load) for load in LOADS)


def test_only_readings_of_the_decoder_are_kept() -> None:
    """Whatever is faster but drafts otherwise, shares blocks or is not among those asked for."""
    shared, other = Rejection(4, sparse=SparseVerification("shared")), Rejection(2, sparse=SparseVerification())
    slow, fast = READINGS[0], READINGS[1]
    costs: dict[Decoding, tuple[float, float]] = {slow: (9.0, 0.0), fast: (5.0, 0.0), shared: (1.0, 0.0)}
    costs |= {other: (1.0, 0.0), Autoregressive(): (1.0, 0.0)}
    planner = Planner(Machine(costs, 0.5).profile())
    assert readings(planner, slow, PLACES, list(costs)) == (slow, fast)
    assert readings(planner, slow, PLACES, [slow, shared, other]) == (slow,)
    assert readings(planner, fast, PLACES, list(costs)) == (fast,)
