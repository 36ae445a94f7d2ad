"""Programs beside the plain ones, for what only some requests ask for.

Each extra is a field of `smcjax.decoding.program.Program`, false unless a request in the batch asks for it; the plain
programs do not know of it. A batch runs a program that has the extras of all its requests; one that has more gives the
same tokens and takes longer. Where no such program fits the device, requests for an extra end with an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from smcjax.engine.requests import Request
from smcjax.engine.scheduler import Schedule

# What users call them, in the order in which a sentence names them.
WORDS = {
    "truncates": "top_k and top_p",
    "controls": "control",
    "constrains": "response_format",
    "adjusts": "penalties and logit_bias",
    "scores": "logprobs",
    "scores_prompts": "prompt_logprobs",
}


def extras_of(request: Request, *, streams: bool, ragged: bool = False) -> set[str]:
    """The extras that a request asks for, those of its prompt among them; `ragged`: drafts can be rejected anyway."""
    params = request.params
    asked = {
        "truncates": params.truncates,
        "controls": bool(params.control) and not ragged,
        "adjusts": params.adjusts,
        "constrains": params.expression is not None,
        "scores": params.scores(streams=streams),
        "scores_prompts": params.prompt_logprobs is not None,
    }
    return {name for name, value in asked.items() if value}


def extras_now(schedule: Schedule, asked: Iterable[set[str]]) -> frozenset[str]:
    """The extras of a round's programs, of what its groups ask for; prompts are scored while they are read."""
    extras = {name for one in asked for name in one} - {"scores_prompts"}
    reading = (one.group.request.params for together in schedule.prefill for one in together)
    if any(params.prompt_logprobs is not None for params in reading):
        extras.add("scores_prompts")
    return frozenset(extras)


def extras_in(program: Any) -> frozenset[str]:
    """The extras that a program has."""
    return frozenset(name for name in WORDS if getattr(program, name))


def with_extras(program: Any, extras: Iterable[str]) -> Any:
    """The program with these extras, of one without."""
    return dataclasses.replace(program, **dict.fromkeys(extras, True))


class ProgramChoice:
    """Chooses a round's program. Remembers, by size of the batch and extras, what is compiled and what does not fit."""

    def __init__(self) -> None:
        self._compiled: set[tuple[int, frozenset[str]]] = set()
        self._unfit: dict[tuple[int, frozenset[str]], str] = {}  # why

    def note(self, size: int, extras: frozenset[str], error: ValueError | None = None) -> None:
        """Notes that the programs for `size` lanes are compiled or, with an error, that they do not fit."""
        if error is None:
            self._compiled.add((size, extras))
        else:
            self._unfit[size, extras] = f"{_in_words(extras)} cannot be used here: {error}"

    def sizes(self, extras: frozenset[str]) -> list[int]:
        """The sizes, ascending, for which there are compiled programs with these extras, and maybe more."""
        return sorted({size for size, has in self._compiled if has >= extras})

    def at(self, size: int, extras: frozenset[str]) -> frozenset[str] | None:
        """The extras of the compiled programs for `size` lanes that have these and the fewest others, if there are."""
        return min((has for of, has in self._compiled if of == size and has >= extras), key=len, default=None)

    def missing(self, sizes: Iterable[int], extras: frozenset[str]) -> int | None:
        """The first of the sizes whose programs may fit and are not compiled."""
        return next((at for at in sizes if (at, extras) not in self._compiled | self._unfit.keys()), None)

    def ready(
        self, program: Any, size: int, extras: frozenset[str], compile_programs: Callable[[list[int], Any], None]
    ) -> tuple[Any, str | None]:
        """The program for `size` lanes, compiled now: with the extras, or plain and the reason why it is.

        `compile_programs` raises ValueError where the programs of some sizes need more memory than the device has.
        """
        if extras and (size, extras) not in self._unfit:
            extended = with_extras(program, extras)
            try:
                compile_programs([size], extended)
                return extended, None
            except ValueError as error:
                self.note(size, extras, error)
        compile_programs([size], program)
        return program, self._unfit[size, extras] if extras else None


def _in_words(extras: Iterable[str]) -> str:
    """The extras as a user knows them."""
    words = [WORDS[name] for name in WORDS if name in set(extras)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
