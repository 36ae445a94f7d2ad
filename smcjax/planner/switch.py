"""The choice of a strategy cycle by cycle, for one batch: who is fastest now, and whether it is worth a change.

    r_i     of a request: (accepted drafts + 8) / (expected ones + 8). Of every draft up to the first that is rejected
            the profile expects a fraction, its chance given those before it, so that r_i means the same whoever drafts
            how many. Drafts count less the longer they are past, 64 in all
    r       the mean over the requests that run; one that nothing is known of counts as 1
    switch  to the strategy that is predicted fastest at r, if that is at least 5% faster than the present one and 4
            cycles have passed since the last switch; at the very first cycle to the fastest

Acceptance is a matter of the text, so it comes and goes with a request: what others before it have had says nothing.
A strategy without drafts asks about none, so nothing is learnt while it runs: what is known then fades, by a 256th a
cycle, and in time drafts are tried again. So a text that the draft does not know costs little for long, and a pair that
is worse than its profile costs a trial now and then.

All numbers are fields of `Rule`. Host arithmetic on what is known when a cycle is enqueued; acceptance is that of the
cycles whose reports have come.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence

from smcjax.decoders import Decoding
from smcjax.planner.laws import law_of
from smcjax.planner.prediction import RATES, Planner, Prediction

ANYONE = (None,)  # the requests of a batch of which nothing is known


@dataclasses.dataclass(frozen=True)
class Rule:
    """When to switch.

    Attributes:
        margin: the predicted gain from which on a switch is made.
        dwell: cycles between two switches at least.
        window: drafts over which a request's acceptance is averaged.
        prior: drafts that the profile's acceptance counts as.
        memory: cycles in which an acceptance that cannot be measured is forgotten.
    """

    margin: float = 0.05
    dwell: int = 4
    window: float = 64.0
    prior: float = 8.0
    memory: float = 256.0


@dataclasses.dataclass
class _Seen:
    """Drafts of a request that were accepted, and how many would be by the profile; recent ones count most."""

    accepted: float = 0.0
    expected: float = 0.0

    def fade(self, share: float) -> None:
        self.accepted *= share
        self.expected *= share


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
        self._chances = {one: planner.chances(one) for one in strategies}
        self._present: Decoding | None = None
        self._since = 0  # cycles chosen since the last switch
        self._seen: dict[Hashable, _Seen] = {}  # of requests
        self._ranked: tuple[tuple[int, int, int], list[Prediction]] | None = None  # the last ranking, and of what

    @property
    def present(self) -> Decoding | None:
        """The strategy of the last cycle; None before the first."""
        return self._present

    def choose(self, lanes: int, context: float, running: Collection[Hashable] = ANYONE) -> Decoding:
        """The strategy of the next cycle, of a batch of so many lanes and requests of `context` tokens in the mean.

        `running` names the requests, as `heard` does.
        """
        self._seen = {one: self._seen[one] for one in running if one in self._seen}
        self.rate = statistics.fmean(map(self._rate, running)) if running else 1.0
        ranking = self._ranking(lanes, context)
        best = ranking[0]
        if self._present is None:
            self._present = best.decoding
        elif best.decoding != self._present and self._since >= self.rule.dwell:
            speeds = {one.decoding: one.tokens_per_second for one in ranking}
            if best.tokens_per_second >= (1 + self.rule.margin) * speeds[self._present]:
                self._present, self._since = best.decoding, 0
                self.switches += 1
        self._since += 1
        if not self._present.drafts:
            for seen in self._seen.values():
                seen.fade(1 - 1 / self.rule.memory)
        return self._present

    def _rate(self, request: Hashable) -> float:
        """r of a request."""
        seen, prior = self._seen.get(request, _NOTHING), self.rule.prior
        rate = (seen.accepted + prior) / (seen.expected + prior)
        return min(max(rate, RATES[0]), RATES[1])

    def _ranking(self, lanes: int, context: float) -> list[Prediction]:
        """The strategies, fastest first; made anew where lanes, context (by a 16th) or r (by a 64th) have changed."""
        of = (lanes, round(16 * math.log(max(context, 1))), round(64 * math.log(self.rate)))
        if self._ranked is None or self._ranked[0] != of:
            ranking = self._planner.rank(self.law, lanes, context, rate=self.rate, among=self.strategies)
            self._ranked = of, ranking
        return self._ranked[1]

    def heard(self, decoding: Decoding, accepted: Mapping[Hashable, int]) -> None:
        """Takes a cycle's report: the drafts that each request has accepted, under this strategy."""
        chances = self._chances.get(decoding, ())
        if not chances:
            return
        for request, count in accepted.items():
            asked = chances[: count + 1]
            seen = self._seen.setdefault(request, _Seen())
            seen.fade((1 - 1 / self.rule.window) ** len(asked))
            seen.accepted += count
            seen.expected += sum(asked)


_NOTHING = _Seen()
