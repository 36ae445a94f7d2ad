"""A decoder chosen by what is asked for: `LLM(decoding="auto")`. Without JAX, as `smcjax.decoders`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from smcjax.decoders import DECODINGS, SMC, Autoregressive, Decoding, Rejection
from smcjax.plain import use_plain_numbers
from smcjax.sparse import SparseVerification

CONTROL = 0.1  # of a population that nothing else is said about
CANDIDATES = 8  # of an exact answer where a cycle's time is that of its weights' stream


@dataclasses.dataclass(frozen=True)
class Auto:
    """The decoder that suits what is asked for. An `LLM` chooses when it is made, and `LLM.decoding` is the choice:

        one plain answer a request          `Rejection` with 8 candidates on a GPU and 1 on a CPU or with "ngram";
                                            `Autoregressive` where there is no draft
        a population, a power other         `SMC` with control 0.1
        than 1, or the evidence

    For one answer exact decoding is right with any draft, and as fast as SMC under a control (docs/usage.md, "Which
    decoder"). Several candidates give more tokens a cycle, and cost little where that is the stream of the weights, as
    on a GPU with few requests; on a CPU they cost what their tokens cost. Weights, evidence and powers are what a
    population is for, and the control keeps a draft's mistakes out of it.

    Attributes:
        n_particles: N of a population; None: none is asked for by it, and 8 where another argument asks for one.
        gamma: K, draft tokens of a row; None: the decoder's own default.
        power: α, the exponent of the target distribution; any but 1 asks for a population.
        evidence: True asks for `log_evidence`, and so for a population.
        trace: True asks for a population's history.
        select: how a population answers, as in `SMC`; None: none is asked for by it, and "sample".
        vote_by: of select="vote", as in `SMC`.
        control: c of a population; None: none is asked for by it, and 0.1.
        sparse: how a target with Native Sparse Attention verifies; None: each query by itself.
    """

    name: ClassVar[str] = "auto"
    drafts: ClassVar[bool] = True  # where there is a draft
    weighted: ClassVar[bool] = True  # where a population is asked for

    n_particles: int | None = None
    gamma: int | None = None
    power: float = 1.0
    evidence: bool = False
    trace: bool = False
    select: str | None = None
    vote_by: Callable[[str], Hashable] | None = None
    control: float | None = None
    sparse: SparseVerification | None = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        if not isinstance(self.evidence, bool):
            raise ValueError(f"evidence must be True or False, got {self.evidence!r}.")
        self._population()  # whose checks are those of the fields
        self.choose(has_draft=True, candidates_pay=False)

    @property
    def wants_population(self) -> bool:
        """True where what is asked for needs weighted particles."""
        named = (self.n_particles, self.select, self.vote_by, self.control)
        return self.power != 1.0 or self.evidence or self.trace or any(one is not None for one in named)

    def choose(self, *, has_draft: bool, candidates_pay: bool) -> Decoding:
        """The decoder for a pair of models, or a target alone, on a machine.

        `candidates_pay` says whether several candidates gain more tokens than they cost time: today by the device
        alone, and a planner that knows the load can say it better.
        """
        if self.wants_population:
            return self._population()
        if not has_draft:
            return Autoregressive(self.sparse)
        return Rejection(self.gamma, n_candidates=CANDIDATES if candidates_pay else 1, sparse=self.sparse)

    def _population(self) -> SMC:
        given = {"n_particles": self.n_particles, "gamma": self.gamma, "select": self.select}
        return SMC(
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            power=self.power,
            trace=self.trace,
            vote_by=self.vote_by,
            control=CONTROL if self.control is None else self.control,
            sparse=self.sparse,
        )

    def check(self, params: Any) -> None:
        """Raises ValueError for `SamplingParams` that the choice cannot honour, whichever models there are."""
        self.choose(has_draft=True, candidates_pay=False).check(params)


CHOICES: dict[str, type[Decoding] | type[Auto]] = {**DECODINGS, Auto.name: Auto}
