"""Which decoder answers where none is named, and what "auto" chooses. Without JAX, as `smcjax.decoders`.

The rule of an `LLM`, a command and a server that are told no decoder is `Routed`; a server asks `left_to_exact` of each
decoder that it serves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from smcjax.checks import FLAG, Rule, names_unknown, normalize_fields, require
from smcjax.decoders import DECODINGS, SMC, Autoregressive, Decoding, NeedsExact, Rejection
from smcjax.decoders.smc import Selection
from smcjax.planner import Profile, law_of
from smcjax.sparse.verification import SparseVerification

CANDIDATES = 8  # of an exact answer where a cycle's time is that of its weights' stream


def gives_draft(model: object, draft_model: object, draft_drop_layers: object) -> bool:
    """True where these arguments of `LLM` give a draft; the bundled pair, for None, has one."""
    return model is None or draft_model is not None or draft_drop_layers is not None


def left_to_exact(decoding: Decoding, params: Any) -> str | None:
    """Why an exact decoder is to answer a request with these `SamplingParams` in place of this one, in a clause.

    None: this one answers, or refuses what no exact decoder honours either, as a control or a potential.
    """
    try:
        decoding.check(params)
    except NeedsExact as error:
        return error.why if params.control is None and not params.potentials else None
    except ValueError:
        pass
    return None


def exact_beside(decoding: Decoding) -> Decoding:
    """The exact decoder that answers, with the same draft, what this one leaves to it."""
    sparse = decoding.speculation.sparse
    is_approximate = sparse is not None and sparse.precision == "approximate"
    return Autoregressive() if is_approximate else Rejection(sparse=sparse)


@dataclasses.dataclass(frozen=True)
class Routed:
    """The decoders of an `LLM`, a command or a server that is told none.

    there is a draft      `smc` for requests that it can honour, else the exact decoder beside it, with the same
                          draft: at temperature 0, with top_k, top_p, penalties and biases
    drafts deterministic  that exact decoder for all, as "ngram" proposes what SMC cannot weigh
    there is none         the target alone
    """

    name: ClassVar[str] = "smc"
    drafts: ClassVar[bool] = True  # where there is a draft
    weighted: ClassVar[bool] = True

    smc: SMC = dataclasses.field(default_factory=SMC)

    @property
    def power(self) -> float:
        """α, the exponent of the target distribution."""
        return self.smc.power

    def choose(self, *, has_draft: bool, deterministic_drafts: bool = False) -> tuple[Decoding, ...]:
        """The decoders: the first answers what it can, the second, if there is one, the rest."""
        if not has_draft:
            sparse = self.smc.speculation.sparse
            return (Autoregressive(None if sparse is None else sparse.of_single_queries),)
        exact = exact_beside(self.smc)
        return (exact,) if deterministic_drafts else (self.smc, exact)

    def resolved(self, params: Sequence[Any], *, has_draft: bool) -> Routed | Decoding:
        """The exact decoder alone if the rule routes all of these `SamplingParams` to it; otherwise the rule itself."""
        if has_draft and all(left_to_exact(self.smc, one) is not None for one in params):
            return exact_beside(self.smc)
        return self

    def check(self, params: Any) -> None:
        """Raises ValueError for `SamplingParams` that neither decoder can honour."""
        if left_to_exact(self.smc, params) is None:
            self.smc.check(params)


@names_unknown
@dataclasses.dataclass(frozen=True)
class Auto:
    """The decoder that suits what is asked for. An `LLM` chooses when it is made, and `LLM.decoding` is the choice:

        one plain answer a request          `Rejection` with 8 candidates on a GPU and 1 on a CPU or with "ngram";
                                            `Autoregressive` where there is no draft
        a population, a power other         `SMC`, under its usual control of 0.1
        than 1, or the evidence

    For one answer exact decoding is right with any draft, and as fast as SMC under a control
    (docs/how-to/choose-a-decoder.md). Several candidates give more tokens a cycle, and cost little where that is the
    stream of the weights, as on a GPU with few requests; on a CPU they cost what their tokens cost. Weights, evidence
    and powers are what a population is for, and the control keeps a draft's mistakes out of it.

    Attributes:
        n_particles: N of a population; None: none is asked for by it, and 8 where another argument asks for one.
        gamma: K, draft tokens of a row; None: the decoder's own default.
        power: α, the exponent of the target distribution; any but 1 asks for a population.
        evidence: True asks for `log_evidence`, and so for a population.
        trace: True asks for a population's history.
        select: how a population answers, as in `SMC`; None: none is asked for by it, and "sample".
        control: c of a population; None: none is asked for by it, and `SMC`'s own, 0.1.
        sparse: how a target with Native Sparse Attention verifies; None: each query by itself.
        profile: a file of `smcjax profile` of this pair and device. It chooses the exact decoder that is nearest to
            the fastest one in predicted tokens/s, in the mean over sizes of a batch up to `LLM.max_num_seqs` and the
            contexts that were measured. Where the file has further strict readings of a sparse target's blocks for
            that decoder, each cycle takes the fastest one; tokens are the same either way.
    """

    name: ClassVar[str] = "auto"
    drafts: ClassVar[bool] = True  # where there is a draft
    weighted: ClassVar[bool] = True  # where a population is asked for
    rows_argument: ClassVar[str | None] = "n_particles"

    n_particles: int | None = None
    gamma: int | None = None
    power: float = 1.0
    evidence: bool = False
    trace: bool = False
    select: Selection | None = None
    control: float | None = None
    sparse: SparseVerification | None = None
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        normalize_fields(self)
        path = Rule(lambda value: isinstance(value, str | os.PathLike | None), "the path of a file, or None")
        require(vars(self), {"profile": path, "evidence": FLAG})
        self._population()  # whose checks are those of the fields
        self.choose(has_draft=True, candidates_pay=False)

    @property
    def wants_population(self) -> bool:
        """True where what is asked for needs weighted particles."""
        named = (self.n_particles, self.select, self.control)
        return self.power != 1.0 or self.evidence or self.trace or any(one is not None for one in named)

    def choose(self, *, has_draft: bool, candidates_pay: bool) -> Decoding:
        """The decoder for a pair of models, or a target alone, on a machine.

        `candidates_pay` says whether several candidates gain more tokens than they cost time, by the device alone.
        """
        if self.wants_population:
            return self._population()
        if not has_draft:
            if self.gamma is not None:
                raise ValueError(f"gamma is {self.gamma} and there is no draft; give draft_model, or leave gamma out.")
            return Autoregressive(self.sparse)
        return Rejection(self.gamma, n_candidates=CANDIDATES if candidates_pay else 1, sparse=self.sparse)

    def candidates(self, profile: Profile, *, has_draft: bool) -> list[Decoding]:
        """The exact decoders of a profile among which it chooses, in its order.

        Where nothing is said of `sparse`, or only its schedule, any strict way of reading blocks may be among them;
        where `gamma` is given, only drafts of that many tokens. Raises ValueError where a population is asked for, and
        where the profile has nothing that suits.
        """
        if self.wants_population:
            raise ValueError(
                "profile chooses among exact decoders, and a population is asked for, whose size and control are no "
                "question of speed; leave profile out."
            )
        law = law_of(Rejection(sparse=self.sparse))
        of_law = (one.decoding for one in profile.strategies if one.law == law)
        suiting = [one for one in of_law if self._suits(one, has_draft)]
        if not suiting or (self.gamma is not None and not any(one.drafts for one in suiting)):
            drafts = "" if self.gamma is None else f" with gamma {self.gamma}"
            raise ValueError(
                f"profile has no strategy of the law {law!r}{drafts} that this LLM can use; measure one by smcjax "
                "profile, or leave profile out."
            )
        return suiting

    def _suits(self, one: Decoding, has_draft: bool) -> bool:
        """True for a decoder without weights that is as asked for."""
        if one.weighted or (one.drafts and not has_draft):
            return False
        if not one.drafts:
            return True
        sparse = one.speculation.sparse
        as_asked = self.sparse is None or not self.sparse.is_grouped or sparse == self.sparse
        return as_asked and self.gamma in (None, one.speculation.gamma)

    def _population(self) -> SMC:
        given = {name: getattr(self, name) for name in ("n_particles", "gamma", "select", "control")}
        return SMC(
            **{name: value for name, value in given.items() if value is not None},
            power=self.power,
            trace=self.trace,
            sparse=self.sparse,
        )

    def check(self, params: Any) -> None:
        """Raises ValueError for `SamplingParams` that the choice cannot honour, whichever models there are."""
        self.choose(has_draft=True, candidates_pay=False).check(params)


Choice = Decoding | Auto | Routed  # as `LLM(decoding=…)` takes it, beside None
CHOICES: dict[str, type[Decoding] | type[Auto]] = {**DECODINGS, Auto.name: Auto}
