"""The choice of exact speculative sampling, with all its options."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from smcjax.checks import names_unknown, normalize_fields, normalize_numbers, one_of, require
from smcjax.decoders.base import DRAFT_TEMPERATURE, SIZES, SPARSE, Decoding, Drafting, Speculation, in_words
from smcjax.sparse.verification import SparseVerification
from smcjax.trees import ORDERS, DraftTree, Order

Siblings = Literal["sampled", "top"]  # of a draft tree
SIBLINGS = get_args(Siblings)

_RULES = {
    "gamma": SIZES["gamma"],
    "n_candidates": SIZES["n_candidates"],
    "siblings": one_of(*SIBLINGS),
    "order": one_of(*ORDERS),
    "draft_temperature": DRAFT_TEMPERATURE,
    "sparse": SPARSE,
}


@names_unknown
@dataclasses.dataclass(frozen=True)
class Rejection(Decoding):
    """Exact speculative sampling: drafts are accepted or rejected so that the answer has the target's own law.

    Draft by draft until the first rejection (arXiv 2211.17192, 2302.01318).

    Attributes:
        gamma: K, draft tokens of a candidate and cycle; a cycle advances a request by 1 to K + 1 tokens. None: 4, or
            with a tree its depth, which is what the field then holds.
        n_candidates: N, independent drafts of a request, of which the target accepts along one: recursive rejection
            (arXiv 2305.09781), at the cost of SMC's cycle with N particles.
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
    n_candidates: int = 1
    draft_temperature: float | None = None
    tree: tuple[int, ...] | None = None
    siblings: Siblings = "sampled"
    order: Order = "bfs"
    sparse: SparseVerification | None = None

    def __post_init__(self) -> None:
        normalize_fields(self)
        if self.tree is None and self.gamma is None:
            object.__setattr__(self, "gamma", 4)
        if self.tree is not None:
            self._set_tree()
        require(vars(self), _RULES)
        for name, known in (("siblings", SIBLINGS), ("order", ORDERS)):
            value = getattr(self, name)
            if self.tree is None and value != known[0]:
                raise ValueError(f"{name} is {value!r} and is about a tree's nodes; give tree, or leave it out.")

    def _set_tree(self) -> None:
        """Keeps the tree as a tuple and its depth as `gamma`, refusing what contradicts it."""
        tree = normalize_numbers(self.tree)
        depth = DraftTree.of(tree).depth
        object.__setattr__(self, "tree", tree)
        if self.gamma not in (None, depth) or isinstance(self.gamma, bool):
            raise ValueError(f"gamma is {self.gamma!r} and the tree is {depth} deep; leave gamma out.")
        object.__setattr__(self, "gamma", depth)
        if self.n_candidates != 1:
            raise ValueError(
                f"n_candidates is {self.n_candidates!r} and a tree drafts for one row; leave one of them out."
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
            order = "" if self.order == ORDERS[0] else f", nodes {self.order}"
            return f"rejection along a tree, {shape}, {self.siblings}{order}{in_words(self.sparse)}"
        candidates = f", {self.n_candidates} candidates" if self.n_candidates > 1 else ""
        return f"rejection, K={self.gamma}{candidates}{in_words(self.sparse)}"

    def check_draft(self, draft: Drafting, control: float | None = None) -> None:
        """Refuses a tree of drafts that cannot branch."""
        if self.tree is not None and not draft.branches:
            raise ValueError(
                f"draft_model is {draft}, which proposes one continuation, and decoding asks for a tree of drafts; "
                f"use Rejection(gamma={self.gamma}), or a draft model."
            )
