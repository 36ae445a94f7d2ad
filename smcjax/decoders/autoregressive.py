"""The choice of the target alone."""

from __future__ import annotations

import dataclasses

from smcjax.checks import names_unknown, require
from smcjax.decoders.base import SPARSE, Decoding, Speculation, in_words
from smcjax.sparse.verification import SparseVerification


@names_unknown
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
        require(vars(self), {"sparse": SPARSE})
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
        return f"target alone{in_words(self.sparse)}"
