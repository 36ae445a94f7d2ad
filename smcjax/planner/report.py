"""Tables of a profile: tokens a second of every strategy at every load, and how near the best fixed one of a law comes.

The best one is that of `Planner.best`, which `decoding="auto"` chooses among exact ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from smcjax.decoders import Decoding
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
        gain = gain_of_choosing(planner, law)
        if gain is not None and len(profile.contexts) > 1:
            one, by_context, by_prompt = gain
            lines.append(
                f"\nOver all prompts at the least load, {one} is the best one strategy; choosing by context gains "
                f"{100 * by_context:.1f}%, by prompt with hindsight {100 * by_prompt:.1f}%."
            )
    return "\n".join(lines).strip()


def gains_by_prompt(planner: Planner, law: str, context: float) -> tuple[float, ...] | None:
    """Quantiles of the gain of the fastest strategy of each prompt over the one that is fastest on all together.

    Prompts are those that were counted at the context, or nearest to it. None where strategies were not measured on the
    same ones.
    """
    contexts = {counted.context for one in planner.profile.strategies for counted in one.counted}
    times = _ms_per_token(planner, law, min(contexts, key=lambda one: abs(math.log(one / context))), context)
    if times is None:
        return None
    fixed = min(times.values(), key=sum)
    each = sorted(ms / min(column) - 1 for ms, column in zip(fixed, zip(*times.values(), strict=True), strict=True))
    if len(each) == 1:
        return (each[0],) * len(QUANTILES)
    cuts = statistics.quantiles(each, n=10, method="inclusive")
    return tuple(cuts[round(10 * quantile) - 1] for quantile in QUANTILES)


def gain_of_choosing(planner: Planner, law: str) -> tuple[Decoding, float, float] | None:
    """The one strategy with the shortest time for all prompts of all contexts, and what choosing gains over it.

    The gains are of the fastest strategy of each context, and of each prompt with hindsight, as shares of its speed;
    prompts count alike, as if all had as many tokens to answer. None where strategies were not measured on the same
    prompts.
    """
    contexts = {counted.context for one in planner.profile.strategies for counted in one.counted}
    found = [_ms_per_token(planner, law, context, context) for context in sorted(contexts)]
    times = [one for one in found if one is not None]
    if not times or len(times) < len(found):
        return None
    single = {one: sum(sum(of_context[one]) for of_context in times) for one in times[0]}
    by_context = sum(min(map(sum, of_context.values())) for of_context in times)
    by_prompt = sum(sum(map(min, zip(*of_context.values(), strict=True))) for of_context in times)
    best = min(single, key=single.__getitem__)
    return best, single[best] / by_context - 1, single[best] / by_prompt - 1


def _ms_per_token(planner: Planner, law: str, counted: int, context: float) -> dict[Decoding, list[float]] | None:
    """Milliseconds a token at the least load of each strategy, on each prompt that was counted at a context.

    None where strategies were not counted on the same prompts.
    """
    load, measured = planner.profile.loads[0], [one for one in planner.profile.strategies if one.law == law]
    prompts = {
        one.decoding: [tokens for each in one.counted if each.context == counted for tokens in each.prompts]
        for one in measured
    }
    counts = {len(each) for each in prompts.values()}
    if len(counts) != 1 or counts == {0}:
        return None
    return {one: [planner.cycle_ms(one, load, context) / tokens for tokens in each] for one, each in prompts.items()}


def _percent(numbers: Sequence[float]) -> str:
    return ", ".join(f"{100 * number:.0f}%" for number in numbers)
