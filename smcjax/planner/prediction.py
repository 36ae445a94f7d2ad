"""Tokens a second of each strategy at a load and a context, from a profile.

    tokens/s = slots · E(context) · 1000 / T(slots, context)

T   milliseconds a cycle. A cycle runs all slots of the batch, occupied or not, so time goes by slots; the engine's
    batches are of 1, 2, 4 … requests, which a profile measures. Between measured points log T is linear in log slots
    and in log context; beyond them the nearest one's T holds, of all strategies alike.
E   tokens a cycle of one request, as counted on the profile's prompts of about that length; between these lengths
    log E is linear in log context, and beyond them the nearest one's E holds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence

from smcjax.decoders import Decoding
from smcjax.planner.profile import Profile

Place = tuple[int, float]  # slots of a batch, and the mean context of its requests


class Planner:
    """A profile as a function of load and context."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._tokens = {
            one.decoding: {counted.context: math.log(counted.tokens_per_cycle) for counted in one.counted}
            for one in profile.strategies
        }
        self._times = {
            one.decoding: {(cell.requests, cell.context): math.log(cell.ms) for cell in one.cells}
            for one in profile.strategies
        }

    def strategies(self, law: str) -> list[Decoding]:
        """The strategies of a law class, in the profile's order."""
        return [one.decoding for one in self.profile.strategies if one.law == law]

    def cycle_ms(self, decoding: Decoding, slots: int, context: float) -> float:
        """T, milliseconds a cycle."""
        times = self._times[decoding]
        low, high, share = _place(self.profile.loads, slots)
        near, far, part = _place(self.profile.contexts, context)
        at_near = times[low, near] * (1 - share) + times[high, near] * share
        at_far = times[low, far] * (1 - share) + times[high, far] * share
        return math.exp(at_near * (1 - part) + at_far * part)

    def tokens_per_cycle(self, decoding: Decoding, context: float) -> float:
        """E, tokens of one request in a cycle."""
        tokens = self._tokens[decoding]
        near, far, part = _place(list(tokens), context)
        return math.exp(tokens[near] * (1 - part) + tokens[far] * part)

    def tokens_per_second(self, decoding: Decoding, slots: int, context: float) -> float:
        """Tokens a second of as many requests as slots."""
        return 1e3 * slots * self.tokens_per_cycle(decoding, context) / self.cycle_ms(decoding, slots, context)

    def best(self, among: Sequence[Decoding], places: Collection[Place]) -> Decoding:
        """The strategy that is nearest to the fastest one in the mean over places; of equal ones the first.

        At each place its tokens/s are divided by those of the strategy that is fastest there.
        """
        shares = dict.fromkeys(among, 0.0)
        for place in places:
            speeds = {one: self.tokens_per_second(one, *place) for one in among}
            fastest = max(speeds.values())
            for one, speed in speeds.items():
                shares[one] += speed / fastest
        return max(among, key=shares.__getitem__)


def _place(known: Sequence[int], value: float) -> tuple[int, int, float]:
    """The known numbers around `value`, and how far it is from the first to the second in logarithm, 0 to 1."""
    at = bisect.bisect_left(known, value)
    if at == len(known):
        return known[-1], known[-1], 0.0
    if at == 0 or known[at] == value:
        return known[at], known[at], 0.0
    low, high = known[at - 1], known[at]
    return low, high, math.log(value / low) / math.log(high / low)
