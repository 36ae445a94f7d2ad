"""Features of the target's auxiliary hidden states, collected in the forwards that score and prefill."""

from __future__ import annotations

from typing import Any, cast

from jaxtyping import Array, Float, Int

from smcjax.decoding.drafts.proposer import FeatureProposer
from smcjax.decoding.groups import PairParams
from smcjax.decoding.program import Program
from smcjax.model.decoder import AuxHiddenStates


def aux_hidden_states_of(program: Program[Any]) -> AuxHiddenStates | None:
    """A collector for one forward of the target; None if the proposer reads no hidden states."""
    proposer = program.proposer
    return None if proposer is None or not proposer.aux_layers else AuxHiddenStates(proposer.aux_layers)


def fused(program: Program[Any], params: PairParams, aux: AuxHiddenStates) -> Float[Array, "R T E"]:
    """The features of the positions of one forward, which `aux` collected."""
    return cast(FeatureProposer, program.proposer).fuse(params.draft, aux.streams)


def write_features(
    program: Program[Any],
    memory: Any,
    features: Float[Array, "R T E"],
    positions: Int[Array, "R T"],
    pages: Int[Array, "R T"],
) -> Any:
    """Writes the features of these positions to the proposer's memory (`FeatureProposer.write_features`)."""
    return cast(FeatureProposer, program.proposer).write_features(memory, features, positions, pages)
