"""Programs beside the plain ones, for features that only some requests ask for (`Program.features`).

A batch runs a program that has the features of all its requests; one that has more gives the same tokens and takes
longer. Where no such program fits the device, requests for a feature end with an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from smcjax.decoding.program import Feature, Name
from smcjax.engine.requests.requests import Request
from smcjax.engine.schedule.scheduler import Schedule

MAX_SETS = 4  # of features that have programs of their own beside a running engine: each takes 0.1 GiB and more a size

# What users call them, in the order in which a sentence names them.
WORDS: dict[Name, str] = {
    "truncation": "top_k and top_p",
    "control": "control",
    "grammar": "response_format",
    "adjustments": "penalties and logit_bias",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "text_potentials": "potentials",
}


def features_of(request: Request, *, streams: bool, ragged: bool = False) -> set[Feature]:
    """The features that a request asks for, those of its prompt among them; `ragged`: drafts can be rejected anyway."""
    params = request.params
    requested: dict[Name, bool] = {
        "truncation": params.truncates,
        "control": bool(params.control) and not ragged,
        "adjustments": bool(params.adjustments),
        "grammar": params.expression is not None,
        "logprobs": params.scores(streams=streams),
        "prompt_logprobs": params.prompt_logprobs is not None,
        "text_potentials": bool(params.text_potentials),
    }
    return {name for name, value in requested.items() if value} | set(params.device_potentials)


def features_now(schedule: Schedule, requested: Iterable[set[Feature]]) -> frozenset[Feature]:
    """The features of a round's programs, of what its groups ask for; prompts are scored while they are read."""
    features = {name for one in requested for name in one} - {"prompt_logprobs"}
    reading = (one.group.request.params for together in schedule.prefill for one in together)
    if any(params.prompt_logprobs is not None for params in reading):
        features.add("prompt_logprobs")
    return frozenset(features)


class ProgramVariants:
    """Chooses a round's program. Remembers, by size of the batch and features, what is compiled and what is unfit."""

    def __init__(self) -> None:
        self._compiled: set[tuple[int, frozenset[Feature]]] = set()
        self._unfit: dict[tuple[int, frozenset[Feature]], str] = {}  # why
        self._asked: frozenset[Feature] = frozenset()

    def register(self, size: int, features: frozenset[Feature], error: ValueError | None = None) -> None:
        """Registers that the programs for `size` slots are compiled or, with an error, that they do not fit."""
        if error is None:
            self._compiled.add((size, features))
        else:
            self._unfit[size, features] = f"{_in_words(features)} cannot be used here: {error}"

    def sizes(self, features: frozenset[Feature]) -> list[int]:
        """The sizes, ascending, for which there are compiled programs with these features, and maybe more."""
        return sorted({size for size, has in self._compiled if has >= features})

    def at(self, size: int, features: frozenset[Feature]) -> frozenset[Feature] | None:
        """The features of the compiled programs for `size` slots that have these and the fewest others, if any."""
        return min((has for of, has in self._compiled if of == size and has >= features), key=len, default=None)

    def shared(self, features: frozenset[Feature]) -> frozenset[Feature]:
        """The features of the programs that are to be compiled for these.

        Beyond `MAX_SETS` sets they are all that have been asked for, as programs of many features serve many sets.
        """
        self._asked |= features
        sets = {has for _, has in self._compiled}
        return features if features in sets or len(sets) < MAX_SETS else self._asked

    def missing(self, sizes: Iterable[int], features: frozenset[Feature]) -> int | None:
        """The first of the sizes whose programs may fit and are not compiled."""
        return next((at for at in sizes if (at, features) not in self._compiled | self._unfit.keys()), None)

    def ready(
        self, program: Any, size: int, features: frozenset[Feature], compile_programs: Callable[[list[int], Any], None]
    ) -> tuple[Any, str | None]:
        """The program for `size` slots, compiled now: with the features, or plain and the reason why it is.

        `compile_programs` raises ValueError where the programs of some sizes need more memory than the device has.
        """
        if features and (size, features) not in self._unfit:
            extended = dataclasses.replace(program, features=features)
            try:
                compile_programs([size], extended)
                return extended, None
            except ValueError as error:
                self.register(size, features, error)
        compile_programs([size], program)
        return program, self._unfit[size, features] if features else None


def _in_words(features: Iterable[Feature]) -> str:
    """The features as a user knows them."""
    known = {name if isinstance(name, str) else "text_potentials" for name in features}
    words = [WORDS[name] for name in WORDS if name in known]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
