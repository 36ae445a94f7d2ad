"""Ways to draft: the interface between a decoder's cycle and whatever proposes its tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoders import Speculation
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.tree_drafts import Path, TreeDrafts
from smcjax.decoding.groups import Groups
from smcjax.decoding.sequences import Sequences
from smcjax.kv import Copies
from smcjax.model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """K proposed tokens a row."""

    tokens: Int[Array, "R K"]
    logprobs: Float[Array, "R K"]  # log q of each
    logits: Float[Array, "R K V"] | None = None  # q = softmax of these, where they were asked for and drafts are drawn
    deterministic: bool = dataclasses.field(default=False, kw_only=True, metadata={"static": True})  # q of each is 1

    def whole(self, vocab_size: int) -> Float[Array, "R K V"]:
        """Logits of q over all tokens, which drafts that are drawn must have been asked for."""
        if self.deterministic:
            return jnp.where(jax.nn.one_hot(self.tokens, vocab_size, dtype=bool), 0.0, -jnp.inf)
        assert self.logits is not None
        return self.logits


class Proposer(Protocol):
    """A way to draft: frozen, hashable, static. Its arrays are `PairParams.draft` and `Memory.draft`, any pytrees.

    Attributes:
        full_support: true where q is above 0 wherever the target may be, as importance weights need.
        branches: true where trees can be drafted: the proposer is a `TreeProposer`.
        aux_layers: layers of the target, ascending, whose inputs (auxiliary hidden states) the proposer reads; it is a
            `FeatureProposer` if there are any. The number of layers stands for the output of the last.
    """

    branches: ClassVar[bool]

    @property
    def full_support(self) -> bool: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def __str__(self) -> str:
        """The draft in an error's words, as "'ngram'"."""
        ...

    def page_bytes(self, page_size: int) -> int:
        """Bytes of `Memory.draft` that one page takes."""
        ...

    def check(self, target: ModelConfig) -> None:
        """Raises ValueError for a target that it cannot draft for."""
        ...

    def create_memory(self, params: Any, num_pages: int, page_size: int) -> Any:
        """Empty memory for the pages of the target's allocator, which numbers these pages too."""
        ...

    def prefills_by_kernels(self, memory: Any, columns: int) -> bool:
        """True where a chunk of `columns` prompt tokens of one row costs no more memory than a short one."""
        ...

    def prefill(
        self,
        params: Any,
        memory: Any,
        leaders: Sequences,
        start: Int[Array, ""] | Int[Array, " G"],
        chunk: int,
        cached: Int[Array, " G"] | None,
    ) -> Any:
        """The memory after positions `start`…`start + chunk − 1` of the prompts of G first rows have been read.

        The first `cached` positions of each prompt (None: 0) have been read before.
        """
        ...

    def propose(
        self,
        speculation: Speculation,
        params: Any,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
        keep_logits: bool = False,
    ) -> tuple[Drafts, Any]:
        """K tokens a row behind its frontier, and the memory after them.

        `keep_logits` asks for q whole, of drafts that are drawn.
        """
        ...


class FeatureProposer(Proposer, Protocol):
    """Drafts from the target's auxiliary hidden states: the residual streams that enter the layers `aux_layers`.

    Its memory has a feature of every position that the target has read, in that position's page slot. So features
    follow pages through forks, prefix caches and preemption, and the tokens up to a page's end determine its content.
    """

    def fuse(self, params: Any, streams: Float[Array, "R T aux_layers S"]) -> Float[Array, "R T E"]:
        """Reduces auxiliary hidden states to one feature a position."""
        ...

    def write_features(
        self,
        memory: Any,
        features: Float[Array, "R T E"],
        positions: Int[Array, "R T"],
        pages: Int[Array, "R T"],
    ) -> Any:
        """Writes the features of these positions to `pages` of the memory; positions in `TRASH` are not written."""
        ...


class TreeProposer(Proposer, Protocol):
    """A way to draft trees too, which `branches` says."""

    def propose_tree(
        self,
        speculation: Speculation,
        params: Any,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
    ) -> tuple[TreeDrafts, Any]:
        """Tokens for all nodes of `speculation.tree` behind each row's frontier, and the memory after them."""
        ...

    def keep_path(self, speculation: Speculation, memory: Any, scratch: Any, path: Path) -> Any:
        """The memory with what `scratch` of the drafts holds of the accepted ones."""
        ...
