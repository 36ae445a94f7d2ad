"""What a user chooses about SMC decoding: static, hashable, checked once."""

from __future__ import annotations

import dataclasses

from smcjax.decoding.speculation import Speculation
from smcjax.plain import use_plain_numbers
from smcjax.smc.resampling import SCHEMES
from smcjax.smc.weights import COLDEST


@dataclasses.dataclass(frozen=True)
class SMC:
    """Sequential Monte Carlo speculative decoding (arXiv 2604.15672).

    Attributes:
        n_particles: N, sequences kept per request.
        gamma: K, draft tokens per cycle; a cycle advances every particle by K + 1 tokens.
        draft_temperature: T_q ≥ 0.01; None follows the request's temperature.
        power: α > 0, the exponent of the target distribution; 1 is the plain target model. Requests whose
            power/temperature exceeds 1,000 are refused, as float32 would round their weights too much.
        ess_threshold: in [0, 1]; resample when ESS < threshold · N. 0 never resamples.
        resampling: one of `smcjax.smc.SCHEMES`.
        select: "sample" draws the answer from the final weights, "best" takes the largest (a heuristic: neither a
            sample of the target nor its mode).
        bonus: draw one more token a cycle from the target's last column.
        defer_bonus: feed the bonus token to the draft together with the token before it in the next cycle's first
            draft forward (K draft forwards a cycle instead of K + 1). Same law, same tokens.
        trace: keep ESS, weights and ancestors of every cycle in the result.
    """

    n_particles: int = 8
    gamma: int = 8
    draft_temperature: float | None = None
    power: float = 1.0
    ess_threshold: float = 0.5
    resampling: str = "systematic"
    select: str = "sample"
    bonus: bool = True
    defer_bonus: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        for name, most in (("n_particles", 1024), ("gamma", 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, got {value!r}.")
        if self.draft_temperature is not None and not _is_number(self.draft_temperature, COLDEST, 1e3):
            raise ValueError(
                f"draft_temperature must be a number from {COLDEST:g} to 1000, or None to follow the request's "
                f"temperature, got {self.draft_temperature!r}."
            )
        if not _is_number(self.power, 1e-3, 1e3):
            raise ValueError(f"power must be a number from 0.001 to 1000, got {self.power!r}.")
        if not _is_number(self.ess_threshold, 0.0, 1.0):
            raise ValueError(f"ess_threshold must be a number from 0 to 1, got {self.ess_threshold!r}.")
        if self.resampling not in SCHEMES:
            raise ValueError(f"resampling must be one of {', '.join(SCHEMES)}, got {self.resampling!r}.")
        if self.select not in ("sample", "best"):
            raise ValueError(f"select must be 'sample' or 'best', got {self.select!r}.")
        for name in ("bonus", "defer_bonus", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")

    @property
    def speculation(self) -> Speculation:
        """What draft and verification need to know."""
        return Speculation(
            self.n_particles, self.gamma, self.bonus, self.bonus and self.defer_bonus, self.draft_temperature
        )

    @property
    def tokens_per_cycle(self) -> int:
        """Tokens by which a cycle advances a live particle."""
        return self.speculation.width


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # no NaN
