"""Calls take turns: a small one waits for two requests of every other call at most, and no request waits for ever."""

from __future__ import annotations

import bisect
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from smcjax.engine.requests.requests import Request
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.rounds import Rounds
from smcjax.engine.schedule.scheduler import ChunkLengths, Scheduler

SLOTS, PAGES = 4, 40
FOOTPRINT = Footprint(rows=1, page_size=4, width=1)


def request(number: int, call: str, pages: int = 1) -> Request:
    return Request(str(number), None, [1] * 3, SamplingParams(), 8, (), 0, pages, call=call)


def calls(waiting: Rounds) -> str:
    return "".join(one.call for one in waiting)


def test_the_choices_of_a_large_call_let_others_pass() -> None:
    rounds = Rounds()
    for number in range(5):
        rounds.add(request(number, "a"))
    rounds.admit(next(iter(rounds)))
    rounds.add(request(5, "b"))
    rounds.add(request(6, "b"))
    rounds.add(request(7, "c"))
    assert calls(rounds) == "abcabaa"
    rounds.add(request(8, "a"))  # one more of a call joins behind its own
    assert calls(rounds) == "abcabaaa"
    second = next(iter(rounds))
    rounds.admit(second)
    rounds.put_back(second)
    assert next(iter(rounds)) is second
    assert rounds.withdraw("5") is not None
    assert rounds.withdraw("5") is None
    assert calls(rounds) == "acabaaa"
    rounds.clear()
    assert list(rounds) == []


def history(seed: int, steps: int) -> None:
    """Calls of random sizes come and end; both laws of `smcjax.engine.schedule.rounds` hold for each first request."""
    rng, count = random.Random(seed), 0
    made = Scheduler([SLOTS], PAGES, ChunkLengths(8, 8), PrefixCache(0, 4), FOOTPRINT)
    came: dict[str, int] = {}
    first: dict[str, dict[str, int]] = {}  # of requests that were alone of their call: the others', to be counted down
    admitted = 0
    for step in range(steps):
        if rng.random() < 0.3:
            call, size = f"call {step}", rng.choice([1, 1, 1, 2, 30])
            if rng.random() < 0.3 and made.waiting:
                call = rng.choice(list(made.waiting)).call  # one that is there asks for more
            for _ in range(size):
                waiting = [one.call for one in made.waiting]
                if call not in waiting:
                    first[str(count)] = dict.fromkeys(waiting, 2)
                made.add(request(count, call, rng.choice([1, 1, 9])))
                came[str(count)] = count
                count += 1
        if rng.random() < 0.2 and made.waiting:
            gone = rng.choice(list(made.waiting)).request_id
            made.withdraw(gone)
            first.pop(gone, None)
        if rng.random() < 0.5 and made.groups:
            made.withdraw(rng.choice(made.groups).request.request_id)
        for group in made.schedule().joining:
            admitted += 1
            name = group.request.request_id
            first.pop(name, None)
            for waits, others in first.items():
                assert came[name] < came[waits], "a request that came later was admitted before"
                others[group.request.call] -= 1
                assert others[group.request.call] >= 0, "more than two of a call were admitted before"
    assert admitted > steps // 10


@given(st.integers(0, 10**9))
def test_a_small_request_waits_for_two_of_each_other_call_at_most(seed: int) -> None:
    history(seed, 120)


def first_come(rounds: Rounds, request: Request) -> None:
    rounds._count += 1
    bisect.insort(rounds._queue, (1, rounds._count, request))


def into_the_round_that_has_begun(rounds: Rounds, request: Request) -> None:
    after = max(rounds._begun - 1, rounds._latest.get(request.call, 0))
    rounds._latest[request.call] = after + 1
    rounds._count += 1
    bisect.insort(rounds._queue, (after + 1, rounds._count, request))


def test_first_come_first_served_breaks_that_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: in the order of arrival a small request waits for all that came before."""
    monkeypatch.setattr(Rounds, "add", first_come)
    with pytest.raises(AssertionError, match="more than two of a call"):
        history(0, 1000)


def admissions_of_a_large_call(size: int) -> int:
    """Requests admitted until the last of a large call is, while for each of them one of another call comes."""
    rounds = Rounds()
    for number in range(size):
        rounds.add(request(number, "large"))
    for admitted in range(2 * size**2):
        if "large" not in calls(rounds):
            return admitted
        rounds.admit(next(iter(rounds)))
        rounds.add(request(size + admitted, f"small {admitted}"))
    raise AssertionError("the large call starves")


def test_no_request_starves_behind_ones_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests take all there is, so each round is one longer than the last; but it ends."""
    assert admissions_of_a_large_call(24) == 1 + sum(range(1, 24))
    monkeypatch.setattr(Rounds, "add", into_the_round_that_has_begun)
    with pytest.raises(AssertionError, match="the large call starves"):
        admissions_of_a_large_call(24)
