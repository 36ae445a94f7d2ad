"""From a profile file to the decoders that an `LLM` lets take turns: chosen before models are loaded, checked after."""

from __future__ import annotations

import dataclasses
import logging
import os

import jax

from smcjax.auto import Auto
from smcjax.decoders import Decoding, Rejection
from smcjax.decoding.program import Program
from smcjax.engine.fingerprints import fingerprints
from smcjax.engine.loading import Models
from smcjax.engine.memory import buckets
from smcjax.engine.narrowing import can_advance
from smcjax.engine.turns import Turns
from smcjax.planner import Planner, Profile, Switch

logger = logging.getLogger("smcjax")


class Planned:
    """The strategies that a profile recommends for what is asked.

    Args:
        path: of the profile.
        asked: what is asked for, one plain answer a request.
        has_draft: whether there is a draft.
        max_num_seqs: requests that run at once, at most.

    Raises ValueError for a file that cannot be used, or that has no strategy for what is asked.
    """

    def __init__(self, path: str | os.PathLike[str], asked: Auto, *, has_draft: bool, max_num_seqs: int) -> None:
        self.profile = Profile.load(path)
        self.strategies = asked.strategies(self.profile, has_draft=has_draft, loads=buckets(max_num_seqs))

    @property
    def decoding(self) -> Decoding:
        """The decoder whose state holds that of all: the only one, or rejection of their most drafts and rows.

        Every strategy verifies its own way; this one is for prompts, first tokens and memory.
        """
        if len(self.strategies) == 1:
            return self.strategies[0]
        gamma = max(one.tokens_per_cycle for one in self.strategies) - 1
        return Rejection(max(gamma, 1), n_candidates=max(one.rows for one in self.strategies))

    def check(self, models: Models) -> None:
        """Raises ValueError unless the profile was measured with these models, on this device."""
        found = fingerprints(models)
        self.profile.check(device=found.device, model=found.model, draft=found.draft)
        if self.profile.jax != jax.__version__:
            logger.warning(
                "The profile was measured with JAX %s and this is %s: times may have changed.",
                self.profile.jax,
                jax.__version__,
            )

    def turns(self, program: Program[Decoding], *, begin_again: bool) -> Turns | None:
        """The strategies as they take turns on the state of this program; None where there is but one.

        What drafts from the target's hidden states cannot be left behind, since nobody would have kept these: then only
        strategies with drafts take turns. Raises ValueError where one of them cannot use the drafts, and for several
        where requests may `begin_again`.
        """
        kept = list(self.strategies)
        if program.proposer is not None and program.proposer.taps:
            kept = [one for one in kept if one.drafts]
        for one in kept:
            assert can_advance(one, program.decoding)
            if one.drafts:
                dataclasses.replace(program, decoding=one)  # whose checks are those of drafts and of sparse targets
        if len(kept) == 1 and kept[0] == program.decoding:
            return None
        if begin_again:
            raise ValueError(
                "admission is 'optimistic', under which a request may begin again and must give the same tokens, which "
                f"depend on the load where {len(kept)} decoders take turns by a profile; use admission='worst_case'."
            )
        logger.info("Decoding by load: %s.", "; ".join(map(str, kept)))
        return Turns(Switch(Planner(self.profile), kept))
