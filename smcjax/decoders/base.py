"""A choice of decoder, and the static numbers of its cycle."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

from smcjax.checks import Rule, number, or_none, whole
from smcjax.sparse.verification import SparseVerification
from smcjax.trees import DraftTree

MAX_ALTERNATIVES = 20  # of the likeliest tokens at a position whose log-probabilities are reported
COLDEST = 0.01  # T_q at least: a draft's log q is rounded where logits/T_q are, which are not taken relative
# Rules for options that several decoders have.
SIZES = {"n_particles": whole(1, 1024), "n_candidates": whole(1, 1024), "gamma": whole(1, 64)}
DRAFT_TEMPERATURE = or_none(number(COLDEST, 1e3), ", or None to follow the request's temperature")
SPARSE = Rule(lambda value: isinstance(value, SparseVerification | None), "SparseVerification(...) or None")


class NeedsExact(ValueError):
    """A request that this decoder cannot honour, and an exact one can; `why` says so in a clause."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The static numbers of a cycle.

    Attributes:
        rows: N, rows of a group.
        gamma: K, draft tokens of a row; 0 without a draft.
        bonus: whether the target forward also covers the last draft, so that a token more can be drawn behind it.
        defers: whether the draft lacks the KV of the token before the frontier when a cycle starts, so that its first
            forward is over two tokens.
        draft_temperature: T_q; None: the request's.
        tree: the drafts' tree, K deep, in place of a chain of K; None: a chain.
        siblings: how children of one node of the tree are chosen, one of `SIBLINGS`.
        order: the order in which the target's forward sees the tree's nodes, one of `smcjax.trees.ORDERS`.
        sparse: how the target's selected blocks are read behind the prompt; None: each query by itself.
    """

    rows: int
    gamma: int
    bonus: bool = True
    defers: bool = True
    draft_temperature: float | None = None
    tree: DraftTree | None = None
    siblings: str = "sampled"
    order: str = "bfs"
    sparse: SparseVerification | None = None

    @property
    def width(self) -> int:
        """Tokens of a block: positions that the target's forward covers."""
        return self.gamma + 1 if self.bonus else self.gamma

    @property
    def drafts(self) -> int:
        """Draft tokens of a row."""
        return self.gamma if self.tree is None else self.tree.size - 1

    @property
    def scored(self) -> int:
        """Tokens of a row that the target's forward scores: a block's, or all nodes of a tree."""
        return self.width if self.tree is None else self.tree.size


class Drafting(Protocol):
    """The part of `smcjax.decoding.drafts.proposer.Proposer` that decoders ask about, which needs no JAX."""

    @property
    def full_support(self) -> bool: ...

    @property
    def branches(self) -> bool: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...


class Decoding(abc.ABC):
    """A choice of decoder, as `LLM(decoding=…)` takes it.

    Attributes:
        name: the decoder's, in options and reports.
        drafts: whether it needs a draft model.
        weighted: whether the rows of a request are weighted particles.
        rows_argument: the argument that says how many rows a request has; None where there is one.
        agrees: whether the rows of a request agree between cycles, which is all that they have pages for then.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    weighted: ClassVar[bool] = False
    rows_argument: ClassVar[str | None] = None
    agrees: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def speculation(self) -> Speculation:
        """The numbers of a cycle that draft and verification need."""

    @property
    def exact(self) -> bool:
        """True where answers are distributed exactly as the target's, which approximate sparse modes are not."""
        sparse = self.speculation.sparse
        return sparse is None or sparse.precision != "approximate"

    @property
    def ragged(self) -> bool:
        """True where drafts can be rejected: a cycle may give a row fewer than `tokens_per_cycle` tokens."""
        return False

    @property
    def power(self) -> float:
        """α, the exponent of the target distribution."""
        return 1.0

    @property
    def overlaps(self) -> bool:
        """True where drafting a block and scoring one need nothing of each other, so that two devices can do both."""
        return False

    @property
    def rows(self) -> int:
        """N, rows of a request."""
        return self.speculation.rows

    @property
    def drafts_per_cycle(self) -> int:
        """Draft tokens of a request in a cycle."""
        return self.speculation.rows * self.speculation.drafts

    @property
    def tokens_per_cycle(self) -> int:
        """Tokens by which a cycle advances a row, at most where drafts can be rejected."""
        return self.speculation.width

    @abc.abstractmethod
    def __str__(self) -> str:
        """A few words for a line of figures."""

    def check(self, params: Any) -> None:
        """Raises ValueError for `SamplingParams` that this decoder cannot honour exactly, with what to use instead.

        The error is its kind `NeedsExact` where an exact decoder with the same draft honours them.
        """
        if params.control is not None:
            raise ValueError(
                f"control is {params.control:g} and decides what SMC rejects, but decoding is {self.name}; leave it "
                "out, or use decoding=SMC()."
            )
        if params.potentials:
            raise ValueError(
                f"potentials weigh a population, but decoding is {self.name}; leave them out, or use decoding=SMC()."
            )

    def check_draft(self, draft: Drafting, control: float | None = None) -> None:  # noqa: B027
        """Raises ValueError for drafts that this decoder cannot use.

        `control` is a request's own, None the decoder's.
        """


def in_words(sparse: SparseVerification | None) -> str:
    """How selected blocks are read, as the end of a decoder's few words."""
    return "" if sparse is None else f", {sparse}"
