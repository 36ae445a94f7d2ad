"""Drafts without a model: what followed the last time when a row's newest tokens stood in its own text.

Prompt-lookup decoding. A draft is deterministic, q(d) = 1, so a decoder that rejects accepts it with probability p(d)
and otherwise draws from p without it: exact. Importance weights cannot make up for q = 0 elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smcjax.decoders import Speculation
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.groups import Groups
from smcjax.decoding.sequences import Sequences
from smcjax.kv import Copies
from smcjax.model.config import ModelConfig

NGRAM = "ngram"  # the name of this proposer where a draft model is asked for


@dataclasses.dataclass(frozen=True)
class NGram:
    """A `Proposer` that looks up each row's last tokens in the row itself.

    Attributes:
        longest: tokens that are looked for at most. Of the places where most of them stand the newest is taken; where
            not even the last token stands elsewhere, it is proposed again.
    """

    longest: int = 3
    full_support: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def __str__(self) -> str:
        return repr(NGRAM)

    def page_bytes(self, page_size: int) -> int:
        """Nothing is kept."""
        return 0

    def check(self, target: ModelConfig) -> None:
        """Drafts for any target."""

    def create_memory(self, params: Any, num_pages: int, page_size: int) -> None:
        """None: rows hold their tokens already."""

    def prefills_by_kernels(self, memory: Any, columns: int) -> bool:
        """True: no model reads the prompts."""
        return True

    def prefill(self, params: Any, memory: Any, leaders: Sequences, start: Any, chunk: int, cached: Any) -> None:
        """Does nothing: `propose` reads the rows' own tokens."""

    @jax.named_scope("propose")
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
    ) -> tuple[Drafts, None]:
        """The K tokens behind each row's newest earlier match, repeated from there on where the text ends."""
        tokens = lookup(groups.sequences.tokens, groups.sequences.length, speculation.gamma, self.longest)
        return Drafts(tokens, jnp.zeros(tokens.shape, jnp.float32), deterministic=True), None


def lookup(tokens: Int[Array, "R T"], length: Int[Array, " R"], count: int, longest: int) -> Int[Array, "R K"]:
    """K = `count` tokens behind the best earlier match of each row's last `longest` tokens.

    A match is better the more of the last tokens stand there, and of equal ones the newest. `length` ≥ 1 is how many of
    `tokens` belong to a row.
    """
    place = jnp.arange(tokens.shape[1])[None]
    standing = (place < length[:, None] - 1).astype(jnp.int32)  # where the last token might stand earlier
    matched = jnp.zeros_like(tokens)
    for back in range(longest):
        last = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        there = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, : tokens.shape[1]]
        standing *= ((there == last) & (place >= back) & (length[:, None] > back)).astype(jnp.int32)
        matched += standing
    # One maximum says how much of them stands where, so that XLA goes over the places once.
    size = tokens.shape[1]
    found = jnp.max(jnp.where(matched > 0, matched * size + place, 0), axis=1)
    best = jnp.where(found > 0, found % size, length - 2)  # none: the last token again
    period = length - 1 - best
    ahead = best[:, None] + 1 + jnp.arange(count)[None] % period[:, None]
    return jnp.take_along_axis(tokens, ahead, axis=1)
