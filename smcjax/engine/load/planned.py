"""From a profile file to the decoder of an `LLM`: chosen before models are loaded, checked after."""

from __future__ import annotations

import logging

import jax

from smcjax.auto import Auto
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.engine.load.loading import Models
from smcjax.engine.run.memory import buckets
from smcjax.planner import Planner, Profile, Switch
from smcjax.planner.switch import readings

logger = logging.getLogger("smcjax")


class Planned:
    """The decoder that a profile recommends for what is requested.

    Args:
        requested: the options that the user gave, the profile's path among them; one plain answer a request.
        has_draft: whether there is a draft.
        max_num_seqs: requests that run at once, at most.
        max_model_len: tokens of a request, at most.

    Attributes:
        decoding: the decoder whose tokens/s, divided by those of the fastest one, are largest in the mean over all
            sizes of a batch and all contexts of the profile, these as far as requests are as long.
        readings: it, and the same decoder with other readings of a sparse target's blocks that are faster at times.

    Raises ValueError for a file that cannot be used, or that has no strategy for what is requested.
    """

    def __init__(self, requested: Auto, *, has_draft: bool, max_num_seqs: int, max_model_len: int) -> None:
        assert requested.profile is not None
        self._profile = Profile.load(requested.profile)
        self._planner = Planner(self._profile)
        candidates = requested.candidates(self._profile, has_draft=has_draft)
        contexts = {min(context, max_model_len) for context in self._profile.contexts}
        places = [(slots, context) for slots in buckets(max_num_seqs) for context in contexts]
        self.decoding = self._planner.best(candidates, places)
        self.readings = readings(self._planner, self.decoding, places, candidates)
        logger.info("Decoding by %s.", "; or ".join(map(str, self.readings)))

    def check(self, models: Models) -> None:
        """Raises ValueError unless the profile was measured with these models, on this device."""
        found = fingerprints(models)
        self._profile.check(device=found.device, model=found.model, draft=found.draft)
        if self._profile.jax != jax.__version__:
            logger.warning(
                "The profile was measured with JAX %s and this is %s: times may have changed.",
                self._profile.jax,
                jax.__version__,
            )

    def switch(self) -> Switch | None:
        """The choice of the reading of each cycle; None where there is one reading."""
        return Switch(self._planner, self.readings) if len(self.readings) > 1 else None
