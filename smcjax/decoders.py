"""The decoders that a user chooses from: static, hashable, checked once, and without JAX, which takes a second.

`smcjax.engine.loading.make_decoder` builds the `smcjax.decoding.decoder.Decoder` of each, which computes.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from smcjax.checks import check_draft_temperature, check_sizes, check_sparse, is_number
from smcjax.plain import plain_numbers, short, use_plain_numbers
from smcjax.sparse import SparseVerification
from smcjax.trees import ORDERS, DraftTree

SCHEMES = ("systematic", "stratified", "multinomial", "residual")  # of resampling
SELECTIONS = ("sample", "best", "vote")  # of SMC's answer
VERIFICATIONS = ("token", "block")  # of drafts that can be rejected
SIBLINGS = ("sampled", "top")  # of a draft tree

MOST_ALTERNATIVES = 20  # of the likeliest tokens at a position whose log-probabilities are reported

# Beyond these float32 rounds weights by over 1e-3 nats a token: `smcjax.smc.weights`, tests/smc/test_precision.py.
SHARPEST = 1000.0  # α/T at most
ALARM = 3.0  # nats by which evidence falls short of a rate before a control is raised, or a warning given
USUAL_RATE = 0.5  # nats a token: SMC without a watchdog says where evidence falls faster (docs/usage.md, "Control")
COLDEST = 0.01  # T_q at least: a draft's log q is rounded where logits/T_q are, which are not taken relative


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
        """Raises ValueError for `SamplingParams` that this decoder cannot honour exactly, with what to use instead."""
        if params.control is not None:
            raise ValueError(
                f"control is {params.control:g} and decides what SMC rejects, but decoding is {self.name}; leave it "
                "out, or use decoding=SMC()."
            )

    def check_draft(  # noqa: B027
        self,
        draft: str,
        *,
        full_support: bool,
        branches: bool,
        reads_target: bool = False,
        control: float | None = None,
    ) -> None:
        """Raises ValueError for drafts that this decoder cannot use: a `Proposer`, as a string, and its attributes.

        `reads_target` says that it drafts from what the target has computed (`Proposer.taps`).

        `control` is a request's own, None the decoder's.
        """


@dataclasses.dataclass(frozen=True)
class Autoregressive(Decoding):
    """Decoding by the target model alone.

    Attributes:
        sparse: by its `schedule` layers of a sparse target take the blocks of earlier ones behind the prompt. Groups of
            one query, "merged" ones, compute the same by kernels, which an engine takes for None where they apply; with
            None every layer selects.
    """

    name = "autoregressive"
    drafts = False
    agrees = True

    sparse: SparseVerification | None = None

    def __post_init__(self) -> None:
        check_sparse(self.sparse)
        if self.sparse is not None and self.sparse.queries > 1:
            raise ValueError(
                f"sparse has mode {self.sparse.mode!r} for groups of {self.sparse.queries}, and the target alone has "
                "one query at a time; use group=1, or mode='per_query'."
            )

    @property
    def speculation(self) -> Speculation:
        """One token a cycle, without a draft."""
        return Speculation(rows=1, gamma=0, defers=False, sparse=self.sparse)

    def __str__(self) -> str:
        return f"target alone{_in_words(self.sparse)}"


@dataclasses.dataclass(frozen=True)
class SMC(Decoding):
    """Sequential Monte Carlo speculative decoding (arXiv 2604.15672).

    Attributes:
        n_particles: N, sequences kept per request.
        gamma: K, draft tokens per cycle; a cycle advances every particle by K + 1 tokens, with a control at most.
        draft_temperature: T_q ≥ 0.01; None follows the request's temperature.
        power: α > 0, the exponent of the target distribution; 1 is the plain target model. Requests whose
            power/temperature exceeds 1,000 are refused, as float32 would round their weights too much.
        ess_threshold: in [0, 1]; resample when ESS < threshold · N. 0 never resamples.
        resampling: one of `smcjax.smc.SCHEMES`.
        select: "sample" draws the answer from the final weights, "best" takes the largest (a heuristic: neither a
            sample of the target nor its mode), "vote" the heaviest particle of those whose answers, taken together,
            weigh most (`smcjax.engine.vote`; not a sample of the target, also at control 1).
        bonus: draw one more token a cycle from the target's last column.
        defer_bonus: feed the bonus token to the draft together with the token before it in the next cycle's first
            draft forward (K draft forwards a cycle instead of K + 1). Same law, same tokens.
        trace: keep ESS, weights and ancestors of every cycle in the result.
        control: c in [0, 1], where a request brings none. Draft d is accepted with probability min(1, p(d)/(c·q(d))),
            else its particle's block ends with a token of the residual max(p − q, 0), and a token's weight is at least
            c. 0 accepts everything; 1 is speculative sampling of every particle, whose weights are 1 at power 1
            (rejection control: Liu, Chen & Wong 1998). A cycle advances a particle by 1 to K + 1 tokens.
        watchdog: a rate in nats a token, above 0, for power 1; None: no watchdog. Once a request's evidence has fallen
            by `ALARM` nats more than that rate allows, its control is exp(−rate) from the next cycle on, under which
            the evidence cannot fall faster. Results say so (`RequestOutput.smc.control`), and a warning.
        sparse: how the target's selected blocks are read in verification, by a target with Native Sparse Attention;
            None: each query by itself, which an engine does in groups of 16, "merged", where kernels do that.
        approximate: whether `sparse` may be approximate, which makes a particle's weight depend on its siblings.
        vote_by: of select="vote", the function from a particle's text to the answer that it votes for, None where it
            has none; None: `smcjax.engine.vote.marked_answer`, what follows the first "####".
        early_end: once some particles have finished, a coin of their share of the weight ends the request with these,
            or lets the others go on without them, so that it does not wait for the longest particle. Unbiased;
            the others weigh 0 then, until they are resampled.
        branching: λ ≥ 1; None: off. In place of a control's coins every particle offers K + 1 weighted children: one
            leaves its drafts behind each number of them for a token of max(p − λq, 0), one keeps them all, each draft
            with a weight of at most λ (`smcjax.smc.branching`). N of a request's N(K + 1) children are drawn in every
            cycle, by `resampling`; all weights are equal then, and `ess_threshold` is not used. Right for any draft.
        pipelined: draft each block while the target scores the one before it, so that two devices work at the same time
            (`LLM(separate_draft=True)`). Weights then decide about a block a cycle later, which is unbiased as well;
            there is no bonus token (`bonus` is then False), an answer takes one cycle more, and nothing can be
            rejected: no control, no watchdog, no branching.
    """

    name = "smc"
    weighted = True
    rows_argument = "n_particles"

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
    control: float = 0.0
    watchdog: float | None = None
    sparse: SparseVerification | None = None
    approximate: bool = False
    vote_by: Callable[[str], Hashable] | None = None
    early_end: bool = False
    branching: float | None = None
    pipelined: bool = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_sizes(self, "n_particles", "gamma")
        check_draft_temperature(self.draft_temperature, COLDEST)
        if not is_number(self.power, 1e-3, 1e3):
            raise ValueError(f"power must be a number from 0.001 to 1000, got {self.power!r}.")
        if not is_number(self.ess_threshold, 0.0, 1.0):
            raise ValueError(f"ess_threshold must be a number from 0 to 1, got {self.ess_threshold!r}.")
        if not is_number(self.control, 0.0, 1.0):
            raise ValueError(f"control must be a number from 0 to 1, got {self.control!r}.")
        if self.watchdog is not None:
            self._check_watchdog()
        if self.resampling not in SCHEMES:
            raise ValueError(f"resampling must be one of {', '.join(SCHEMES)}, got {self.resampling!r}.")
        if self.select not in SELECTIONS:
            raise ValueError(f"select must be 'sample', 'best' or 'vote', got {self.select!r}.")
        if self.vote_by is not None and not callable(self.vote_by):
            raise ValueError(f"vote_by must be a function from a text to an answer, or None, got {self.vote_by!r}.")
        if self.vote_by is not None and self.select != "vote":
            raise ValueError(f"vote_by is set and select is {self.select!r}; use select='vote', or leave it out.")
        for name in ("bonus", "defer_bonus", "trace", "approximate", "early_end", "pipelined"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.branching is not None:
            self._check_branching()
        if self.pipelined:
            self._check_pipelined()
        check_sparse(self.sparse)
        is_approximate = self.sparse is not None and self.sparse.precision == "approximate"
        if self.sparse is not None and is_approximate and not self.approximate:
            raise ValueError(
                f"sparse has mode {self.sparse.mode!r} for groups of {self.sparse.group}, where a particle's weight "
                "depends on its siblings; use mode='merged', which is exact, or allow it by approximate=True."
            )
        if self.approximate and not is_approximate:
            raise ValueError("approximate is True and nothing is; give sparse a shared mode, or leave it out.")

    def _check_pipelined(self) -> None:
        """Refuses what would reject drafts, on which others have been built by then; sets `bonus` to False."""
        for name in ("control", "watchdog", "branching"):
            if getattr(self, name):
                raise ValueError(
                    f"pipelined is True and {name} {getattr(self, name):g}, which would reject drafts that the next "
                    "block stands on; leave one of them out."
                )
        object.__setattr__(self, "bonus", False)

    def _check_watchdog(self) -> None:
        """Refuses rates out of range, or without a use."""
        if not is_number(self.watchdog, 1e-3, 100.0):
            raise ValueError(
                f"watchdog must be a number of nats a token from 0.001 to 100, or None, got {self.watchdog!r}."
            )
        if self.power != 1.0:
            raise ValueError(
                f"watchdog is {self.watchdog:g} and power {self.power:g}, at which evidence falls by itself; use "
                "power=1, or control without a watchdog."
            )
        if self.control >= self.raised_control:
            raise ValueError(
                f"watchdog is {self.watchdog:g} and control {self.control:g}, under which evidence never falls as fast "
                "as that; leave one of them out."
            )

    def _check_branching(self) -> None:
        """Refuses a λ out of range, and what decides about drafts or ends in another way."""
        if not is_number(self.branching, 1.0, 1e6):
            raise ValueError(f"branching must be a number from 1 to 1000000, or None, got {self.branching!r}.")
        others = {
            f"control {self.control:g}": self.control > 0.0,
            f"watchdog {self.watchdog}": self.watchdog is not None,
            "early_end True": self.early_end,
            "select 'best'": self.select == "best",
        }
        for other in (name for name, is_set in others.items() if is_set):
            raise ValueError(
                f"branching is {self.branching:g} and {other}, but branching decides about drafts by itself, and "
                "resamples in every cycle so that all particles weigh the same; leave one of them out."
            )

    @property
    def raised_control(self) -> float:
        """The control that the watchdog raises a request to; without one the request's."""
        return self.control if self.watchdog is None else math.exp(-self.watchdog)

    @property
    def speculation(self) -> Speculation:
        """The numbers of a cycle that draft and verification need."""
        return Speculation(
            self.n_particles,
            self.gamma,
            self.bonus,
            self.bonus and self.defer_bonus,
            self.draft_temperature,
            sparse=self.sparse,
        )

    @property
    def exact(self) -> bool:
        """True at control 1 and power 1, where a particle drawn by weight is a sample of the target.

        A vote's winner is none, nor is the heaviest particle where coins make weights differ.
        """
        drawn = self.select == "sample" or (self.select == "best" and not self.early_end)
        return self.control == 1.0 and self.power == 1.0 and drawn and super().exact

    @property
    def ragged(self) -> bool:
        """True where drafts can be rejected."""
        return self.control > 0.0 or self.watchdog is not None or self.branching is not None

    @property
    def overlaps(self) -> bool:
        """True of the pipelined cycle."""
        return self.pipelined

    def __str__(self) -> str:
        control = f", control {self.control:g}" if self.control else ""
        control += "" if self.branching is None else f", branching {self.branching:g}"
        watchdog = "" if self.watchdog is None else f", watchdog {self.watchdog:g}"
        vote = ", vote" if self.select == "vote" else ""
        early = ", early end" if self.early_end else ""
        early += ", pipelined" if self.pipelined else ""
        return f"SMC, N={self.n_particles}, K={self.gamma}{control}{watchdog}{early}{vote}{_in_words(self.sparse)}"

    def check_draft(
        self,
        draft: str,
        *,
        full_support: bool,
        branches: bool,
        reads_target: bool = False,
        control: float | None = None,
    ) -> None:
        """Refuses drafts that give probability 0 to tokens of the target, but at control 1 and with branching.

        No weight makes up for what is never drawn, as tokens beside a certain draft that is always accepted: below 1
        such a draft is, where the target likes it. Branching's children that leave have all that drafts lack.
        Pipelined, it refuses drafts that wait for the target.
        """
        if self.pipelined and reads_target:
            raise ValueError(
                f"pipelined is True and draft_model is {draft}, which drafts from what the target has computed; use "
                "pipelined=False, or a draft model that needs none of it."
            )
        if self.branching is not None:
            return
        if not full_support and (self.control if control is None else control) < 1.0:
            raise ValueError(
                f"draft_model is {draft}, whose drafts leave the target's other tokens no probability, and SMC weighs "
                "drafts by target over draft; use decoding=Rejection() or SMC(control=1), which are exact with any "
                "draft, SMC(branching=2), which is unbiased with any, or a model."
            )

    def check(self, params: Any) -> None:
        """Refuses requests at temperature 0 or near it, sharpened beyond float32, or ended by text at α ≠ 1.

        Refuses truncation, penalties and biases at any temperature.
        Strings that name special tokens have become token ids before (`smcjax.engine.requests.told_apart`).
        """
        if params.temperature == 0:
            raise ValueError(
                "temperature is 0, where every draft token that differs from the target's would weigh nothing; "
                "use decoding=Rejection() or Autoregressive(), whose greedy decoding is exact, or a temperature "
                "above 0."
            )
        sharpness = self.power / params.temperature
        if sharpness > SHARPEST:
            raise ValueError(
                f"power / temperature is {sharpness:g}, and beyond {SHARPEST:g} float32 rounds the weights by more "
                "than they may differ; lower power, or raise temperature."
            )
        if self.draft_temperature is None and params.temperature < COLDEST:
            raise ValueError(
                f"temperature is {params.temperature:g} for the draft too, and below {COLDEST:g} float32 rounds its "
                "log-probabilities by more than weights may differ; raise it, set draft_temperature, or use "
                "temperature=0 with decoding=Rejection() or Autoregressive()."
            )
        if params.truncates:
            raise ValueError(
                f"top_k is {params.top_k} and top_p {params.top_p:g}, and draft tokens outside the kept set would "
                "weigh nothing; use decoding=Rejection() or Autoregressive(), which honour them, or leave them out."
            )
        if params.adjusts:
            name = params.adjustments[0]
            raise ValueError(
                f"{name} is {short(getattr(params, name))}, and SMC's weights are not shown to be right for the laws "
                "that it makes; use decoding=Rejection() or Autoregressive(), which honour it, or leave it out."
            )
        if self.branching is not None and params.control is not None:
            raise ValueError(
                f"control is {params.control:g} and decoding branches, which takes the place of a control; leave it "
                "out, or use SMC() without branching."
            )
        if self.pipelined and params.control:
            raise ValueError(
                f"control is {params.control:g} and the decoder pipelined, which cannot reject drafts that the next "
                "block stands on; leave control out, or use SMC(pipelined=False)."
            )
        if self.watchdog is not None and params.expression is not None:
            raise ValueError(
                f"watchdog is {self.watchdog:g}, and under a response_format evidence falls by itself; use a control "
                "without a watchdog, or leave response_format out."
            )
        if params.stop_strings and self.power != 1.0:
            raise ValueError(
                f"stop strings change the law at power {self.power}; use power=1, or stop_token_ids, which are exact."
            )


@dataclasses.dataclass(frozen=True)
class Rejection(Decoding):
    """Exact speculative sampling: drafts are accepted or rejected so that the answer has the target's own law.

    Attributes:
        gamma: K, draft tokens of a candidate and cycle; a cycle advances a request by 1 to K + 1 tokens. None: 4, or
            with a tree its depth, which is what the field then holds.
        verification: "token" decides draft by draft (arXiv 2211.17192, 2302.01318), "block" about all of them together,
            which accepts never fewer in the mean (arXiv 2403.10444).
        n_candidates: N, independent drafts of a request, of which the target accepts along one ("token" only):
            recursive rejection (arXiv 2305.09781), at the cost of SMC's cycle with N particles.
        draft_temperature: T_q > 0; None follows the request's temperature. Any gives the target's law.
        tree: drafts that branch, scored by one forward of the target: how many children a node of each depth has, as
            (4, 2, 1), or every node's parent, as (-1, 0, 0, 1), node 0 being the newest token of the answer
            (`smcjax.trees`; at most 64 nodes). None: a chain of `gamma` tokens.
        siblings: how the draft chooses the k children of a node: "sampled" draws k times independently, "top" takes
            its k likeliest tokens. Greedy requests always take the likeliest: draws would all be one.
        order: the order in which the target's forward sees the nodes, "bfs", "dfs" or "position" (`DraftTree.order`);
            the law is the same.
        sparse: how the target's selected blocks are read in verification, by a target with Native Sparse Attention;
            approximate modes are not exact. None: each query by itself, which an engine does in groups of 16,
            "merged", where kernels do that.
    """

    name = "rejection"
    rows_argument = "n_candidates"
    agrees = True

    gamma: int | None = None
    verification: str = "token"
    n_candidates: int = 1
    draft_temperature: float | None = None
    tree: tuple[int, ...] | None = None
    siblings: str = "sampled"
    order: str = "bfs"
    sparse: SparseVerification | None = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        if self.tree is None and self.gamma is None:
            object.__setattr__(self, "gamma", 4)
        if self.tree is not None:
            self._set_tree()
        check_sizes(self, "gamma", "n_candidates")
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"verification must be 'token' or 'block', got {self.verification!r}.")
        if self.verification == "block" and self.n_candidates > 1:
            raise ValueError(
                f"verification='block' is for one candidate, got n_candidates={self.n_candidates}; "
                "use verification='token' or n_candidates=1."
            )
        for name, known in (("siblings", SIBLINGS), ("order", ORDERS)):
            value, usual = getattr(self, name), known[0]
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
            if self.tree is None and value != usual:
                raise ValueError(f"{name} is {value!r} and is about a tree's nodes; give tree, or leave it out.")
        check_draft_temperature(self.draft_temperature, COLDEST)
        check_sparse(self.sparse)

    def _set_tree(self) -> None:
        """Keeps the tree as a tuple and its depth as `gamma`, refusing what contradicts it."""
        tree = plain_numbers(self.tree)
        depth = DraftTree.of(tree).depth
        object.__setattr__(self, "tree", tree)
        if self.gamma not in (None, depth) or isinstance(self.gamma, bool):
            raise ValueError(f"gamma is {self.gamma!r} and the tree is {depth} deep; leave gamma out.")
        object.__setattr__(self, "gamma", depth)
        if self.n_candidates != 1:
            raise ValueError(
                f"n_candidates is {self.n_candidates!r} and a tree drafts for one row; leave one of them out."
            )
        if self.verification == "block":
            raise ValueError(
                "verification='block' is for a chain of drafts, got a tree; use verification='token' or no tree."
            )

    @property
    def speculation(self) -> Speculation:
        """The numbers of a cycle that draft and verification need."""
        assert self.gamma is not None
        return Speculation(
            self.n_candidates,
            self.gamma,
            draft_temperature=self.draft_temperature,
            tree=None if self.tree is None else DraftTree.of(self.tree),
            siblings=self.siblings,
            order=self.order,
            sparse=self.sparse,
        )

    @property
    def ragged(self) -> bool:
        """True: drafts can be rejected."""
        return True

    def __str__(self) -> str:
        if self.tree is not None:
            shape = f"{'parents' if self.tree[0] < 0 else 'children'} {' '.join(map(str, self.tree))}"
            return f"rejection along a tree, {shape}, {self.siblings}{_in_words(self.sparse)}"
        candidates = f", {self.n_candidates} candidates" if self.n_candidates > 1 else ""
        return f"rejection by {self.verification}, K={self.gamma}{candidates}{_in_words(self.sparse)}"

    def check_draft(
        self,
        draft: str,
        *,
        full_support: bool,
        branches: bool,
        reads_target: bool = False,
        control: float | None = None,
    ) -> None:
        """Refuses a tree of drafts that cannot branch."""
        if self.tree is not None and not branches:
            raise ValueError(
                f"draft_model is {draft}, which proposes one continuation, and decoding asks for a tree of drafts; "
                f"use Rejection(gamma={self.gamma}), or a draft model."
            )


DECODINGS: dict[str, type[Decoding]] = {one.name: one for one in (SMC, Rejection, Autoregressive)}


def _in_words(sparse: SparseVerification | None) -> str:
    return "" if sparse is None else f", {sparse}"
