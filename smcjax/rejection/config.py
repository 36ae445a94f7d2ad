"""What a user chooses about speculative sampling: static, hashable, checked once."""

from __future__ import annotations

import dataclasses

from smcjax.decoding.speculation import Speculation
from smcjax.plain import use_plain_numbers

VERIFICATIONS = ("token", "block")


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Exact speculative sampling: drafts are accepted or rejected so that the answer has the target's own law.

    Attributes:
        gamma: K, draft tokens of a candidate and cycle; a cycle advances a request by 1 to K + 1 tokens.
        verification: "token" decides draft by draft (arXiv 2211.17192, 2302.01318), "block" about all of them together,
            which accepts never fewer in the mean (arXiv 2403.10444).
        n_candidates: N, independent drafts of a request, of which the target accepts along a tree ("token" only):
            recursive rejection (arXiv 2305.09781), at the cost of SMC's cycle with N particles.
        draft_temperature: T_q > 0; None follows the request's temperature. Any gives the target's law.
    """

    gamma: int = 4
    verification: str = "token"
    n_candidates: int = 1
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        for name, most in (("gamma", 64), ("n_candidates", 1024)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, got {value!r}.")
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"verification must be 'token' or 'block', got {self.verification!r}.")
        if self.verification == "block" and self.n_candidates > 1:
            raise ValueError(
                f"verification='block' is for one candidate, got n_candidates={self.n_candidates}; "
                "use verification='token' or n_candidates=1."
            )
        temperature = self.draft_temperature
        if temperature is not None and not (
            isinstance(temperature, int | float) and not isinstance(temperature, bool) and 1e-3 <= temperature <= 1e3
        ):
            raise ValueError(
                f"draft_temperature must be a number from 0.001 to 1000, or None to follow the request's temperature, "
                f"got {temperature!r}."
            )

    @property
    def speculation(self) -> Speculation:
        """What draft and verification need to know."""
        return Speculation(self.n_candidates, self.gamma, draft_temperature=self.draft_temperature)

    @property
    def tokens_per_cycle(self) -> int:
        """Tokens by which a cycle advances a request at most."""
        return self.speculation.width
