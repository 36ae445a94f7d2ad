"""Profiles that tests make: from measured figures, and random ones by a law of cycle times that holds everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import hypothesis.strategies as st

from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection, Speculation
from smcjax.planner import Cell, Counted, Measured, Profile
from smcjax.sparse.verification import SparseVerification

LOADS = (1, 2, 4, 8, 16, 32, 64)
ALONE = Autoregressive()
EXACT: tuple[Decoding, ...] = (
    ALONE,
    Rejection(1),
    Rejection(2),
    Rejection(4),
    Rejection(4, n_candidates=8),
    Rejection(8),
    Rejection(tree=(2, 1)),
)
OTHERS: tuple[Decoding, ...] = (
    SMC(8, 8, control=0),
    SMC(4, 8, control=0),
    SMC(8, 8),
    Rejection(4, sparse=SparseVerification("shared", 4)),
    Rejection(4, sparse=SparseVerification("merged", 4, schedule=2)),
)


def reached(gamma: int, rate: float) -> tuple[float, ...]:
    """Fractions of cycles that reach each position where every draft is accepted with the same probability."""
    return tuple(rate**position for position in range(1, gamma + 1))


def measured(decoding: Decoding, times: Mapping[int, float], rate: float = 0.7, context: int = 1024) -> Measured:
    """A strategy at one context; `times` are milliseconds by load."""
    ragged = 1 + sum(reached(decoding.speculation.gamma, rate))
    tokens = ragged if decoding.ragged else float(decoding.tokens_per_cycle)
    counted = Counted(context, tokens, (tokens,))
    return Measured(decoding, (counted,), tuple(Cell(n, context, ms) for n, ms in times.items()))


def profile(*strategies: Measured) -> Profile:
    return Profile("a device", "a target", "a draft", strategies)


@dataclasses.dataclass(frozen=True)
class Blind(Decoding):
    """A decoder that is not of this package: it takes every draft as it is, so it is neither exact nor SMC."""

    name = "blind"
    gamma: int = 2

    @property
    def exact(self) -> bool:
        return False

    @property
    def speculation(self) -> Speculation:
        return Speculation(rows=1, gamma=self.gamma)

    def __str__(self) -> str:
        return f"blind, K={self.gamma}"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Cycle times `streams + each · slots` of strategies, and acceptance of a draft given those before it."""

    costs: dict[Decoding, tuple[float, float]]
    rate: float

    def ms(self, decoding: Decoding, slots: int) -> float:
        streams, each = self.costs[decoding]
        return streams + each * slots

    def speed(self, decoding: Decoding, slots: int, rate: float | None = None) -> float:
        """Tokens a second of a full batch."""
        rate = self.rate if rate is None else rate
        tokens = 1 + sum(reached(decoding.speculation.gamma, rate)) if decoding.ragged else 1.0
        return 1e3 * slots * tokens / self.ms(decoding, slots)

    def profile(self, noise: Sequence[float] = ()) -> Profile:
        """Makes the profile that would be measured; `noise` is each strategy's relative error of its times."""
        errors = noise or [0.0] * len(self.costs)
        return profile(
            *(
                measured(one, {n: self.ms(one, n) * (1 + error) for n in LOADS}, self.rate)
                for one, error in zip(self.costs, errors, strict=True)
            )
        )


@st.composite
def machines(draw: st.DrawFn, strategies: Sequence[Decoding] = EXACT) -> Machine:
    """Machines on which more drafts cost more, a cycle's own time and each slot's."""
    target, draft = draw(st.floats(2.0, 10.0)), draw(st.floats(0.1, 2.0))
    slot, rate = draw(st.floats(0.01, 0.3)), draw(st.floats(0.1, 0.95))
    costs = {
        one: (target + draft * one.speculation.gamma, slot * (1 + one.rows * one.speculation.scored * 0.7))
        for one in strategies
    }
    return Machine(costs, rate)
