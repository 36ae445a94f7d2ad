"""`smcjax bench acceptance`: exact decoders and SMC at given shapes, as a function of an assumed acceptance rate.

Random weights say what a cycle costs, whose shape never depends on what is accepted, and nothing about how many drafts
a real pair would have accepted. So cycles are timed and acceptance is assumed: with every draft position accepting with
probability a, independently of the others, a cycle of K drafts gives

    E(a) = 1 + a + … + a^K = (1 − a^(K+1)) / (1 − a)   tokens in the mean          (Leviathan et al. 2023, eq. 1)

    tokens/s = requests · E(a) / seconds a cycle

SMC gives K + 1 tokens a cycle and the target alone 1, whatever the drafts. With several candidates a is the rate of a
position with all candidates together: that one of those that are still in the running is accepted there. The rate is
taken as the same at every position, though deeper in the tree fewer candidates are left.
While timed, exact decoders advance by what random weights accept, so SMC's windows end on up to K tokens of KV more a
cycle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from smcjax.bench.cycle import Case, CycleResult
from smcjax.bench.table import synthetic_case
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.markdown import table

ASSUMPTION = (
    "a is assumed, not measured: the probability that a draft position accepts, with all candidates together and "
    "independent of other positions; an exact decoder then gives (1 − a^(K+1))/(1 − a) tokens a cycle, SMC K+1."
)


def acceptance_cases(
    decodings: Sequence[Decoding],
    *,
    requests: int = 1,
    context: int = 256,
    cycles: int = 16,
    **how: Any,
) -> list[Case]:
    """The target alone, and these decoders; one that is given twice is one. `how` is that of `synthetic_case`."""
    chosen = dict.fromkeys((Autoregressive(), *decodings))
    return [synthetic_case(decoding, requests, context, cycles=cycles, **how) for decoding in chosen]


def expected_tokens(acceptance: float, gamma: int) -> float:
    """E(a), tokens a cycle in the mean: the sum rather than the quotient, which is 0/0 at a = 1."""
    return sum(acceptance**accepted for accepted in range(gamma + 1))


def break_even(gamma: int, ms: float, smc_ms: float) -> float | None:
    """The least acceptance rate at which an exact cycle of `ms` gives as many tokens/s as SMC's K + 1 in `smc_ms`.

    None where no rate below 1 suffices, which is where the exact cycle takes as long as SMC's or longer; 0 where the
    one token that a cycle gives anyway is enough.
    """
    wanted = (gamma + 1) * ms / smc_ms  # tokens a cycle
    if wanted >= gamma + 1:
        return None
    if wanted <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # E grows in a: to the last bit
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, gamma) >= wanted else (middle, high)
    return high


def rival(result: CycleResult, results: Sequence[CycleResult]) -> CycleResult | None:
    """The SMC that an exact decoder is held against: of the same K, with as many particles as it has candidates.

    Where there is none of that many, the one whose N is nearest to 8, SMC's default.
    """
    same = [one for one in results if one.decoding == SMC.name and one.gamma == result.gamma]
    default = SMC().n_particles
    return min(
        same,
        key=lambda one: (one.n_particles != result.n_particles, abs(one.n_particles - default)),
        default=None,
    )


def rows_of(results: Sequence[CycleResult], acceptance: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each: all of its result, and what follows from the assumed rates.

    `tokens_per_cycle` and `tokens_per_second` (all requests together) have one number for each of the row's
    `acceptance`, or one in all where that is None: SMC and the target alone.
    """
    rows = []
    for result in results:
        exact = result.decoding == Rejection.name
        rates = list(dict.fromkeys(acceptance))
        tokens = [expected_tokens(rate, result.gamma) for rate in rates] if exact else [result.gamma + 1.0]
        smc = rival(result, results) if exact else None
        rows.append(
            {
                "decoder": result.described,
                **dataclasses.asdict(result),
                "acceptance": rates if exact else None,
                "tokens_per_cycle": tokens,
                "tokens_per_second": [1e3 * result.groups * each / result.ms for each in tokens],
                "break_even_acceptance": None if smc is None else break_even(result.gamma, result.ms, smc.ms),
                "break_even_particles": None if smc is None else smc.n_particles,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    rates: list[float] = next((row["acceptance"] for row in rows if row["acceptance"] is not None), [])
    heads = ["decoder", "ms a cycle", "tokens/s", *(f"at a = {rate:g}" for rate in rates), "as fast as SMC from a ="]
    lines = []
    for row in rows:
        speeds = [f"{speed:,.0f}" for speed in row["tokens_per_second"]]
        even = row["break_even_acceptance"]
        cells = (
            row["decoder"],
            f"{row['ms']:.2f}",
            *([*speeds, *("–" for _ in rates)] if row["acceptance"] is None else ["–", *speeds]),
            "–" if even is None else f"{even:.3f} (N={row['break_even_particles']})",
        )
        lines.append(cells)
    return table(heads, lines)
