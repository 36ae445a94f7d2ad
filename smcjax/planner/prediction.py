"""Tokens a second of each strategy at a load and a context, from a profile, and their ranking within a law class.

    tokens/s = running · E(r) · 1000 / T(lanes, context)

T   milliseconds a cycle. A cycle runs all lanes of the batch, occupied or not, so time goes by lanes; the engine's
    batches are of 1, 2, 4 … requests, which a profile measures. Between measured points log T is linear in log lanes
    and in log context; beyond them the nearest one's T holds, of all strategies alike, and so their ranking.
E   tokens a cycle of one request, 1 + Σⱼ min(reachedⱼ·rʲ, …): r = 1 is the acceptance of the profile's prompts, another
    r one in which each draft is accepted r times as often, given those before it. No fraction exceeds 1 or the one
    before it. Strategies that reject no drafts have their own constant.

So at given lanes and context a strategy's rank depends on E/T alone, not on how many requests run.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Collection, Sequence

from smcjax.decoders import Decoding
from smcjax.planner.profile import Measured, Profile

RATES = (1 / 16, 16.0)  # of r


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A strategy's predicted tokens a second, of all running requests together."""

    decoding: Decoding
    tokens_per_second: float


class Planner:
    """A profile as a function of load, context and acceptance."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._measured = {one.decoding: one for one in profile.strategies}
        self._times = {
            one.decoding: {(cell.requests, cell.context): math.log(cell.ms) for cell in one.cells}
            for one in profile.strategies
        }

    def strategies(self, law: str) -> list[Decoding]:
        """The strategies of a law class, in the profile's order."""
        return [one.decoding for one in self.profile.strategies if one.law == law]

    def __contains__(self, decoding: object) -> bool:
        return decoding in self._measured

    def cycle_ms(self, decoding: Decoding, lanes: int, context: float) -> float:
        """T, milliseconds a cycle."""
        times = self._times[decoding]
        (low, high, share), (near, far, part) = (
            _place(self.profile.loads, lanes),
            _place(self.profile.contexts, context),
        )
        at_near = times[low, near] * (1 - share) + times[high, near] * share
        at_far = times[low, far] * (1 - share) + times[high, far] * share
        return math.exp(at_near * (1 - part) + at_far * part)

    def tokens_per_cycle(self, decoding: Decoding, rate: float = 1.0) -> float:
        """E, tokens of one request in a cycle, where drafts are accepted `rate` times as often as in the profile."""
        measured = self._measured[decoding]
        return expected(measured, rate)

    def tokens_per_second(
        self, decoding: Decoding, lanes: int, context: float, *, running: int | None = None, rate: float = 1.0
    ) -> float:
        """Tokens a second of `running` requests together; None: as many as lanes."""
        tokens = (lanes if running is None else running) * self.tokens_per_cycle(decoding, rate)
        return 1e3 * tokens / self.cycle_ms(decoding, lanes, context)

    def rank(
        self,
        law: str,
        lanes: int,
        context: float,
        *,
        running: int | None = None,
        rate: float = 1.0,
        among: Collection[Decoding] | None = None,
    ) -> list[Prediction]:
        """The strategies of one law class, fastest first; equal ones in the profile's order. None other is there.

        `among` narrows them down; None: all.
        """
        chosen = [one for one in self.strategies(law) if among is None or one in among]
        speeds = [
            Prediction(one, self.tokens_per_second(one, lanes, context, running=running, rate=rate)) for one in chosen
        ]
        return sorted(speeds, key=lambda prediction: -prediction.tokens_per_second)

    def rates(self, law: str) -> tuple[float, ...]:
        """Rates r to compare strategies at: 1, of all of the profile's prompts, and those of its deciles 1 and 9.

        They are counted by the law's strategy of most drafts; without one that rejects, or with one prompt, r is 1.
        """
        counted = [one for one in self.profile.strategies if one.law == law and one.reached and len(one.prompts) > 1]
        if not counted:
            return (1.0,)
        most = max(counted, key=lambda one: len(one.reached))
        cuts = statistics.quantiles(most.prompts, n=10, method="inclusive")
        return (1.0, *(self.rate_of(most.decoding, tokens - 1) for tokens in (cuts[0], cuts[-1])))

    def useful(
        self,
        law: str,
        loads: Sequence[int],
        *,
        among: Collection[Decoding] | None = None,
        margin: float = 0.0,
        rates: Sequence[float] = (1.0,),
    ) -> list[Decoding]:
        """The strategies that are fastest somewhere, in the profile's order.

        Places are these loads with the profile's contexts and, of acceptance, these `rates`. Those among the fastest
        that no place loses more than `margin` without are left out, the least useful first.
        """
        places = itertools.product(loads, self.profile.contexts, rates)
        ranked = [self.rank(law, load, context, rate=rate, among=among) for load, context, rate in places]
        speeds = [{one.decoding: one.tokens_per_second for one in ranking} for ranking in ranked]
        best = {ranking[0].decoding for ranking in ranked if ranking}
        kept = [one for one in self.strategies(law) if one in best]

        def loss(without: Decoding) -> float:
            """The largest fraction that a place loses with the others alone."""
            others = [one for one in kept if one != without]
            return max(1 - max(at[one] for one in others) / max(at.values()) for at in speeds)

        while len(kept) > 1:
            least = min(kept, key=loss)
            if loss(least) > margin:
                break
            kept.remove(least)
        return kept

    def rate_of(self, decoding: Decoding, accepted: float) -> float:
        """The r within `RATES` that explains so many accepted drafts a cycle; 1 where none are rejected."""
        measured = self._measured[decoding]
        if not measured.reached or not measured.reached[0]:
            return 1.0
        low, high = map(math.log, RATES)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if expected(measured, math.exp(middle)) < 1 + accepted else (low, middle)
        return math.exp((low + high) / 2)

    def chances(self, decoding: Decoding) -> tuple[float, ...]:
        """The fraction of drafts that are accepted at each position, of those whose predecessors are."""
        reached = self._measured[decoding].reached
        return tuple(now / before if before else 0.0 for before, now in itertools.pairwise((1.0, *reached)))

    def accepted(self, decoding: Decoding, rate: float = 1.0) -> float:
        """Accepted drafts of one request in a cycle, in the mean; 0 where none are rejected."""
        measured = self._measured[decoding]
        return expected(measured, rate) - 1 if measured.reached else 0.0


def expected(measured: Measured, rate: float) -> float:
    """E(r) of what was measured."""
    if not measured.reached:
        return measured.tokens_per_cycle
    total, before = 1.0, 1.0
    for position, fraction in enumerate(measured.reached, 1):
        before = min(fraction * rate**position, before)
        total += before
    return total


def _place(known: Sequence[int], value: float) -> tuple[int, int, float]:
    """The known numbers around `value`, and how far it is from the first to the second in logarithm, 0 to 1."""
    at = bisect.bisect_left(known, value)
    if at == len(known):
        return known[-1], known[-1], 0.0
    if at == 0 or known[at] == value:
        return known[at], known[at], 0.0
    low, high = known[at - 1], known[at]
    return low, high, math.log(value / low) / math.log(high / low)
