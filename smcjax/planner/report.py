"""Reports what choosing gains, in a profile's own numbers: over loads and prompts, and regret.

    regret   1 − (speed of what was chosen) / (speed of the best fixed strategy), over the same loads: below 0 where
             choosing beats every fixed strategy
    gain     (speed of what was chosen) / (speed of the best fixed strategy) − 1, of each load, and of each prompt

The best fixed strategy is the one with the largest harmonic mean of speeds, which is that of equal numbers of tokens at
each load.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from smcjax.decoders import Decoding
from smcjax.markdown import head, row
from smcjax.planner.prediction import Planner
from smcjax.planner.profile import Profile

QUANTILES = (0.1, 0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Gains:
    """The outcome of choosing within one law class.

    Attributes:
        law: the class.
        fixed: the best fixed strategy.
        choices: the fastest strategy at each load of the profile, and its tokens a second.
        loads: the gain over the fixed one at each load.
        regret: of the choices, over all loads.
        prompts: quantiles 10, 50 and 90% of the gain of choosing prompt by prompt, at the least load; None where
            strategies were not measured on the same prompts.
    """

    law: str
    fixed: Decoding
    choices: tuple[tuple[int, Decoding, float], ...]
    loads: tuple[float, ...]
    regret: float
    prompts: tuple[float, ...] | None


def best_fixed(planner: Planner, law: str, loads: Sequence[int], context: float) -> Decoding:
    """The strategy of this law with the largest harmonic mean of speeds over the loads."""

    def seconds(decoding: Decoding) -> float:
        return sum(1 / planner.tokens_per_second(decoding, load, context) for load in loads)

    return min(planner.strategies(law), key=seconds)


def regret(planner: Planner, chosen: Sequence[Decoding], loads: Sequence[int], context: float, law: str) -> float:
    """The regret of a strategy for each load, against the best fixed one of the law; of equal tokens at each load."""
    fixed = best_fixed(planner, law, loads, context)
    mine = sum(1 / planner.tokens_per_second(one, load, context) for one, load in zip(chosen, loads, strict=True))
    return 1 - sum(1 / planner.tokens_per_second(fixed, load, context) for load in loads) / mine


def gains(planner: Planner, law: str, context: float) -> Gains:
    """The gains of choosing by load, and by prompt, over the best fixed strategy of a law."""
    profile = planner.profile
    loads = profile.loads
    ranking = [planner.rank(law, load, context)[0] for load in loads]
    fixed = best_fixed(planner, law, loads, context)
    over = [
        one.tokens_per_second / planner.tokens_per_second(fixed, load, context) - 1
        for one, load in zip(ranking, loads, strict=True)
    ]
    return Gains(
        law,
        fixed,
        tuple((load, one.decoding, one.tokens_per_second) for load, one in zip(loads, ranking, strict=True)),
        tuple(over),
        regret(planner, [one.decoding for one in ranking], loads, context, law),
        _by_prompt(planner, law, context),
    )


def _by_prompt(planner: Planner, law: str, context: float) -> tuple[float, ...] | None:
    """Quantiles of the gain of the fastest strategy of each prompt over the one that is fastest on all together."""
    measured = [one for one in planner.profile.strategies if one.law == law]
    counts = {len(one.prompts) for one in measured}
    if len(counts) != 1 or counts == {0}:
        return None
    load = planner.profile.loads[0]
    speeds = [
        [tokens / planner.cycle_ms(one.decoding, load, context) for tokens in one.prompts] for one in measured
    ]  # of each strategy on each prompt
    fixed = min(speeds, key=lambda row: sum(1 / speed for speed in row))
    each = sorted(max(column) / speed - 1 for column, speed in zip(zip(*speeds, strict=True), fixed, strict=True))
    if len(each) == 1:
        return (each[0],) * len(QUANTILES)
    cuts = statistics.quantiles(each, n=10, method="inclusive")
    return tuple(cuts[round(10 * quantile) - 1] for quantile in QUANTILES)


def laws(profile: Profile) -> list[str]:
    """The law classes of a profile, in its order."""
    return list(dict.fromkeys(one.law for one in profile.strategies))


def markdown(profile: Profile) -> str:
    """Tables: tokens a second of every strategy at every load, a law class after the other, and what choosing gains."""
    planner, lines = Planner(profile), []
    loads = profile.loads
    for law in laws(profile):
        for context in profile.contexts:
            lines += [
                f"\n{law}; {context:,} tokens of context; tokens/s of all requests together",
                "",
                head(["strategy", "tokens a cycle", *(f"{load} running" for load in loads)]),
            ]
            fastest = [planner.rank(law, load, context)[0].decoding for load in loads]
            for one in planner.strategies(law):
                speeds = [planner.tokens_per_second(one, load, context) for load in loads]
                shown = [
                    f"**{speed:,.0f}**" if one == best else f"{speed:,.0f}"
                    for speed, best in zip(speeds, fastest, strict=True)
                ]
                lines.append(row([one, f"{planner.tokens_per_cycle(one):.2f}", *shown]))
            lines.append(_in_words(gains(planner, law, context)))
    return "\n".join(lines).strip()


def _in_words(gained: Gains) -> str:
    by_load = ", ".join(f"{100 * gain:.0f}%" for gain in gained.loads)
    text = f"\nBest fixed: {gained.fixed}. Choosing by load gains {by_load}; regret {100 * gained.regret:.1f}%."
    if gained.prompts is not None:
        each = ", ".join(f"{100 * gain:.0f}%" for gain in gained.prompts)
        text += f" By prompt, at the least load: {each} (quantiles 10, 50, 90%), with hindsight."
    return text
