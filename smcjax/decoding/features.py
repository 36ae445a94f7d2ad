"""Features of the target for proposers that draft from them, taken from the forwards that score and prefill anyway."""

from __future__ import annotations

from typing import Any, cast

from jaxtyping import Array, Float, Int

from smcjax.decoding.groups import PairParams
from smcjax.decoding.program import Program
from smcjax.decoding.proposer import FeatureProposer
from smcjax.model.decoder import Taps


def taps_of(program: Program[Any]) -> Taps | None:
    """A collector for one forward of the target; None where the proposer reads nothing of it."""
    proposer = program.proposer
    return None if proposer is None or not proposer.taps else Taps(proposer.taps)


def fused(program: Program[Any], params: PairParams, taps: Taps) -> Float[Array, "R T E"]:
    """The features of the forward's positions."""
    return cast(FeatureProposer, program.proposer).fuse(params.draft, taps.streams)


def remember(
    program: Program[Any],
    memory: Any,
    features: Float[Array, "R T E"],
    positions: Int[Array, "R T"],
    pages: Int[Array, "R T"],
) -> Any:
    """The proposer's memory with the features of these positions: `FeatureProposer.remember`."""
    return cast(FeatureProposer, program.proposer).remember(memory, features, positions, pages)
