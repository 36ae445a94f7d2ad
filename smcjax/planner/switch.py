"""The choice of a strategy cycle by cycle, for one batch: who is fastest now, and whether it is worth a change.

    a       accepted drafts of a request a cycle: the mean over the requests that ran, averaged over cycles with weight
            1/16 for the newest, since the last switch; used from 8 cycles on
    r       1 at first. Where a differs from what r predicts by more than 0.5, r becomes the rate that explains a
    switch  to the strategy that is predicted fastest, if that is at least 5% faster than the present one and 16 cycles
            have passed since the last switch; at the very first cycle to the fastest

A strategy without drafts accepts none, so nothing is learnt while it runs: an r below 1 then goes back to 1, by a 256th
of its logarithm a cycle, and in time drafts are tried again. So a stretch of text that the draft does not know costs
little for long, and a pair that is worse than its profile costs a trial now and then.

All numbers are fields of `Rule`. Host arithmetic on what is known when a cycle is enqueued; acceptance is that of the
cycles whose reports have come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from smcjax.decoders import Decoding
from smcjax.planner.laws import law_of
from smcjax.planner.prediction import Planner, Prediction


@dataclasses.dataclass(frozen=True)
class Rule:
    """When to switch.

    Attributes:
        margin: the predicted gain from which on a switch is made.
        dwell: cycles between two switches at least.
        window: cycles over which acceptance is averaged.
        least: cycles since the switch from which on the average counts.
        tolerance: accepted drafts a cycle by which the average may differ from the prediction.
        memory: cycles in which an acceptance that cannot be measured is forgotten.
    """

    margin: float = 0.05
    dwell: int = 16
    window: int = 16
    least: int = 8
    tolerance: float = 0.5
    memory: int = 256


class Switch:
    """The strategy of one batch.

    Args:
        planner: predicts.
        strategies: between which it chooses, all of one law class, which `law` then is.
        rule: when.

    Raises ValueError for strategies that the profile lacks, or of several laws.
    """

    def __init__(self, planner: Planner, strategies: Sequence[Decoding], rule: Rule | None = None) -> None:
        laws = sorted({law_of(one) for one in strategies})
        if len(laws) != 1:
            raise ValueError(f"strategies must be of one law class, got {', '.join(laws) or 'none'}.")
        missing = [one for one in strategies if one not in planner]
        if missing:
            raise ValueError(f"the profile has no {missing[0]}; profile it, or leave it out.")
        (self.law,) = laws
        self.strategies = tuple(strategies)
        self.rule = rule or Rule()
        self.rate = 1.0  # r
        self.switches = 0
        self._planner = planner
        self._present: Decoding | None = None
        self._since = 0  # cycles chosen since the last switch
        self._accepted, self._heard = 0.0, 0  # the average, and cycles in it
        self._ranked: tuple[tuple[int, int, int], list[Prediction]] | None = None  # the last ranking, and of what

    @property
    def present(self) -> Decoding | None:
        """The strategy of the last cycle; None before the first."""
        return self._present

    def choose(self, lanes: int, context: float) -> Decoding:
        """The strategy of the next cycle, of a batch of so many lanes and requests of `context` tokens in the mean."""
        ranking = self._ranking(lanes, context)
        best = ranking[0]
        if self._present is None:
            self._present = best.decoding
        elif best.decoding != self._present and self._since >= self.rule.dwell:
            speeds = {one.decoding: one.tokens_per_second for one in ranking}
            if best.tokens_per_second >= (1 + self.rule.margin) * speeds[self._present]:
                self._present, self._since = best.decoding, 0
                self._accepted, self._heard = 0.0, 0
                self.switches += 1
        self._since += 1
        if not self._present.drafts and self.rate < 1:
            self.rate = math.exp(math.log(self.rate) * (1 - 1 / self.rule.memory))
        return self._present

    def _ranking(self, lanes: int, context: float) -> list[Prediction]:
        """The strategies, fastest first; made anew where lanes, context (by a 16th) or r (by a 64th) have changed."""
        of = (lanes, round(16 * math.log(max(context, 1))), round(64 * math.log(self.rate)))
        if self._ranked is None or self._ranked[0] != of:
            ranking = self._planner.rank(self.law, lanes, context, rate=self.rate, among=self.strategies)
            self._ranked = of, ranking
        return self._ranked[1]

    def heard(self, decoding: Decoding, accepted: float) -> None:
        """Takes a cycle's report: drafts accepted by each request in the mean, under this strategy.

        Those of a strategy that is no longer the present one are left out.
        """
        if decoding != self._present or not decoding.drafts:
            return
        self._heard += 1
        self._accepted += (accepted - self._accepted) / min(self._heard, self.rule.window)
        if self._heard < self.rule.least:
            return
        if abs(self._accepted - self._planner.accepted(decoding, self.rate)) > self.rule.tolerance:
            self.rate = self._planner.rate_of(decoding, self._accepted)
