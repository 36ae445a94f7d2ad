"""Tables of a profile: tokens a second of every strategy at every load, and how near the best fixed one of a law comes.

The best one is that of `Planner.best`, which `decoding="auto"` chooses among exact ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from smcjax.markdown import head, row
from smcjax.planner.prediction import Planner
from smcjax.planner.profile import Profile

QUANTILES = (0.1, 0.5, 0.9)


def laws(profile: Profile) -> list[str]:
    """The law classes of a profile, in its order."""
    return list(dict.fromkeys(one.law for one in profile.strategies))


def markdown(profile: Profile) -> str:
    """Tables of each law class at each context, and what its best strategy and a choice by prompt come to."""
    planner, loads = Planner(profile), profile.loads
    lines: list[str] = []
    for law in laws(profile):
        for context in profile.contexts:
            lines += [
                f"\n{law}; {context:,} tokens of context; tokens/s of all requests together",
                "",
                head(["strategy", "tokens a cycle", *(f"{load} running" for load in loads)]),
            ]
            strategies = planner.strategies(law)
            speeds = {one: [planner.tokens_per_second(one, load, context) for load in loads] for one in strategies}
            fastest = [max(column) for column in zip(*speeds.values(), strict=True)]
            for one, own in speeds.items():
                pairs = zip(own, fastest, strict=True)
                shown = [f"**{speed:,.0f}**" if speed == most else f"{speed:,.0f}" for speed, most in pairs]
                lines.append(row([one, f"{planner.tokens_per_cycle(one, context):.2f}", *shown]))
            best = planner.best(strategies, [(load, context) for load in loads])
            shares = [speed / most for speed, most in zip(speeds[best], fastest, strict=True)]
            lines.append(f"\nBest over the loads: {best}, with {_percent(shares)} of the fastest's speed.")
            gained = gains_by_prompt(planner, law, context)
            if gained is not None:
                lines[-1] += f" By prompt at the least load choosing gains {_percent(gained)} (quantiles 10, 50, 90%)."
    return "\n".join(lines).strip()


def gains_by_prompt(planner: Planner, law: str, context: float) -> tuple[float, ...] | None:
    """Quantiles of the gain of the fastest strategy of each prompt over the one that is fastest on all together.

    Prompts are those that were counted at the context, or nearest to it. None where strategies were not measured on the
    same ones.
    """
    prompts = {
        one.decoding: min(one.counted, key=lambda counted: abs(math.log(counted.context / context))).prompts
        for one in planner.profile.strategies
        if one.law == law
    }
    counts = {len(each) for each in prompts.values()}
    if len(counts) != 1 or counts == {0}:
        return None
    load = planner.profile.loads[0]
    speeds = [
        [tokens / planner.cycle_ms(one, load, context) for tokens in each] for one, each in prompts.items()
    ]  # of each strategy on each prompt
    fixed = min(speeds, key=lambda row: sum(1 / speed for speed in row))
    each = sorted(max(column) / speed - 1 for column, speed in zip(zip(*speeds, strict=True), fixed, strict=True))
    if len(each) == 1:
        return (each[0],) * len(QUANTILES)
    cuts = statistics.quantiles(each, n=10, method="inclusive")
    return tuple(cuts[round(10 * quantile) - 1] for quantile in QUANTILES)


def _percent(numbers: Sequence[float]) -> str:
    return ", ".join(f"{100 * number:.0f}%" for number in numbers)
