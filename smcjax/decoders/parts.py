"""The parts of an SMC cycle that a user may replace, as protocols without JAX.

A part is frozen and hashable, as programs are compiled for it. The package's own are in `smcjax.smc.acceptance`,
`smcjax.smc.ending`, `smcjax.smc.resampling` and `smcjax.smc.potential`; `smcjax.testing.battery` holds any part to the
laws that keep SMC unbiased.
"""

from __future__ import annotations

from abc import abstractmethod
from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@runtime_checkable
class Acceptance(Protocol):
    """Decides which drafts a particle keeps. `smcjax.smc.Acceptance` is a base that derives the weights.

    Attributes:
        rejects: whether it can reject drafts, for which the draft's distributions are kept whole.
        suits_any_draft: whether emitted tokens have all of the target's support even if the draft has not.
    """

    @property
    def rejects(self) -> bool: ...

    @property
    def suits_any_draft(self) -> bool: ...

    @abstractmethod
    def judge(self, scored: Any) -> Any:
        """Makes the `smcjax.smc.acceptance.NewBlock` of a `smcjax.smc.acceptance.Scored`."""
        ...


@runtime_checkable
class Ending(Protocol):
    """Changes weights after each cycle, so that a population may end before its slowest particle has finished.

    A group ends once every particle has finished or weighs 0. The mean of every weight over the outcomes must be what
    the weight was.
    """

    @abstractmethod
    def outcomes(self, log_weight: Float[Array, "G N"], finished: Bool[Array, "G N"]) -> Any:
        """Makes the `smcjax.smc.ending.Outcomes` for groups of these log weights."""
        ...


@runtime_checkable
class Resampler(Protocol):
    """Turns uniforms into numbers of offspring whose mean is N·W_i."""

    @abstractmethod
    def num_uniforms(self, n: int) -> int:
        """The number of uniforms that n particles take."""
        ...

    @abstractmethod
    def offspring(self, uniforms: Float[Array, " U"], weights: Float[Array, " N"]) -> Int[Array, " N"]:
        """Numbers of offspring, of sum N, for normalised weights and uniforms in (0, 1); 0 where a weight is 0.

        The sum of float32 weights may be less than a uniform: the last particle may not be taken for it if it weighs 0.
        """
        ...


@runtime_checkable
class Potential(Protocol):
    """A factor of the target, as a function of tokens and of their log-probabilities under the target.

    A potential with an attribute `hidden_size`, the target's E, reads hidden states as well: `Answers.hidden`.
    """

    @abstractmethod
    def log_value(self, answers: Any) -> Float[Array, " R"]:
        """The log of the factor of each row of `smcjax.smc.potential.Answers`, of that row's answer alone.

        −inf kills a particle. NaN and +inf end its request with an error.
        """
        ...


def is_part(value: object, kind: type | UnionType) -> bool:
    """True for an object that has what `kind` asks for; its class, which has that too, is none."""
    return isinstance(value, kind) and not isinstance(value, type)


def hidden_size_of(potential: Potential) -> int | None:
    """The width of the hidden states that a potential reads; None of one that reads none."""
    return getattr(potential, "hidden_size", None)
