"""The decoder of an `LLM`: chosen by its arguments before models are loaded, and a profile's checked after."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from smcjax.auto import Auto, Routed
from smcjax.decoders import Decoding
from smcjax.decoding.drafts.ngram import NGRAM
from smcjax.device import on_cpu
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.engine.load.loading import Models
from smcjax.engine.run.memory import buckets
from smcjax.planner import Planner, Profile, Switch
from smcjax.planner.switch import readings

logger = logging.getLogger("smcjax")

DEFAULT_MAX_MODEL_LEN = 2048


class Chosen(NamedTuple):
    """The decoder that was chosen; an exact one for requests that it leaves to that; the profile that it is from."""

    decoding: Decoding
    exact: Decoding | None = None
    planned: Planned | None = None


def choose(choice: Decoding | Auto | Routed, given: Mapping[str, Any], *, has_draft: bool) -> Chosen:
    """Chooses as `decoding=` says. `given` has the arguments of the `LLM` by name.

    Raises ValueError for a profile that cannot be used.
    """
    deterministic = given["draft_model"] == NGRAM
    if isinstance(choice, Routed):
        decoding, *beside = choice.choose(has_draft=has_draft, deterministic_drafts=deterministic)
        if not has_draft:
            logger.warning(
                "There is no draft, so the target answers alone; SMC and Rejection need draft_model or "
                "draft_drop_layers, and Rejection takes draft_model='ngram' as well."
            )
        return Chosen(decoding, beside[0] if beside else None)
    if not isinstance(choice, Auto):
        return Chosen(choice)
    if choice.profile is None:
        decoding = choice.choose(has_draft=has_draft, candidates_pay=not on_cpu() and not deterministic)
        logger.info("Decoding by %s.", decoding)
        return Chosen(decoding)
    longest = given["max_model_len"] or DEFAULT_MAX_MODEL_LEN
    planned = Planned(choice, has_draft=has_draft, max_num_seqs=given["max_num_seqs"], max_model_len=longest)
    return Chosen(planned.decoding, planned=planned)


def check_draft_arguments(decoding: Decoding, given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments about a draft model where there is none: n-grams draft, or nothing does."""
    if decoding.drafts and given["draft_model"] != NGRAM:
        return
    names = "draft_quantization", "draft_drop_layers", "draft_tensor_parallel_size"
    of_drafts = {name: given[name] for name in names}
    if decoding.drafts:
        of_drafts["draft_temperature"] = decoding.speculation.draft_temperature
    for name, value in of_drafts.items():
        if value is not None:
            without = f"draft_model={NGRAM!r}" if decoding.drafts else f"{type(decoding).__name__}()"
            raise ValueError(f"{name} is {value!r} and {without} has no draft; omit it.")


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
        self._profile.check(**vars(fingerprints(models)))
        if self._profile.jax != jax.__version__:
            logger.warning(
                "The profile was measured with JAX %s and this is %s: times may have changed.",
                self._profile.jax,
                jax.__version__,
            )

    def switch(self) -> Switch | None:
        """The choice of the reading of each cycle; None where there is one reading."""
        return Switch(self._planner, self.readings) if len(self.readings) > 1 else None
