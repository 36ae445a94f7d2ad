"""The interface of what a request brings that makes the distribution of its next token depend on the tokens before it.

A cycle asks for distributions behind tokens that are not committed yet: each draft is before those that follow it. A
`RowFeature` is therefore a value, of R rows behind some tokens, and gives the value behind more of them. It may be all
arrays (a pytree), of which `context` are those that tokens change: loops over drafts carry them alone.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class RowFeature(abc.ABC):
    """A change of the logits of R rows' next tokens. Subclasses are frozen dataclasses that `jax.tree_util` knows.

    Attributes:
        only_forbids: whether it only makes tokens impossible, namely those that are not `allowed`. Kernels that draw
            from a model's own logits can be told so.
    """

    only_forbids: ClassVar[bool]

    @property
    @abc.abstractmethod
    def context(self) -> Any:
        """A pytree of the arrays that depend on the tokens so far."""

    @abc.abstractmethod
    def within(self, context: Any) -> Self:
        """The feature behind other tokens, whose `context` is this."""

    @abc.abstractmethod
    def behind(self, tokens: Int[Array, "R T"]) -> Self:
        """The feature behind T more int32 tokens a row; ids of V and beyond stand for none."""

    @abc.abstractmethod
    def __call__(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """The logits, f32, as the feature changes them, before the temperature."""

    def allowed(self) -> Bool[Array, "R V"]:
        """The tokens that may come next, of features that only forbid."""
        raise TypeError(f"{type(self).__name__} does not only forbid tokens.")


def tokens_before(
    tokens: Int[Array, "R T"], columns: Sequence[Sequence[int]], vocab_size: int
) -> Int[Array, "R C most"]:
    """For each of C columns those of the rows' tokens that lie before it, by their places; `vocab_size` fills up."""
    most = max(map(len, columns))
    places = [[*places, *[tokens.shape[1]] * (most - len(places))] for places in columns]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=vocab_size)
    return padded[:, jnp.asarray(places, jnp.int32).reshape(len(columns), most)]
