"""The batch as a forward over pages sees it: new tokens, where their KV goes, and which pages each row reads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smcjax.kv import TRASH, Copies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchView:
    """T new tokens in each of R rows over their pages.

    One view made when a cycle begins serves `plan_attention`; the view of a step is `dataclasses.replace` of it with
    the step's tokens, positions and pages.

    Attributes:
        tokens: int32.
        positions: int32, places in the sequence. Ascending in a row.
        block_table: int32, each row's physical pages in order, `TRASH` from its last on.
        write_pages: int32, the physical page of each new token's KV: the one that `block_table` names for its position,
            or `TRASH` where nothing is written, because KV is there already or the token's output means nothing.
        lengths: int32, slots of a row that hold KV when the last forward of the plan's life is done; 0 for a row that
            reads nothing. `paged_hidden_states` reads what its own forward has, `written()`, instead.
        num_immutable: int32, slots of a row that hold KV before the first forward and that every query sees but for
            windows.
        copies: shared pages to copy before rows write to their copies (`smcjax.kv.make_room`); None for none.
        rows: N, consecutive rows that form a group and may share pages.
        page_size: B, slots of a page.
    """

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    block_table: Int[Array, "R M"]
    write_pages: Int[Array, "R T"]
    lengths: Int[Array, " R"]
    num_immutable: Int[Array, " R"]
    copies: Copies | None = None
    rows: int = dataclasses.field(default=1, metadata={"static": True})
    page_size: int = dataclasses.field(kw_only=True, metadata={"static": True})

    @property
    def slots(self) -> Int[Array, "R T"]:
        """The slot of its page that each new token's KV goes to."""
        return self.positions % self.page_size

    def written(self) -> Int[Array, " R"]:
        """Slots of each row that hold KV after this forward; 0 for a row that writes nothing."""
        return jnp.max(jnp.where(self.write_pages == TRASH, 0, self.positions + 1), axis=1)
