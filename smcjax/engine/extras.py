"""Programs beside the plain ones, for what only some requests ask for.

Each extra is a field of `smcjax.decoding.program.Program`, false unless a request in the batch asks for it; the plain
programs do not know of it. A batch runs the program that has the extras of all its requests. It is compiled when it is
first needed, for that size of the batch; where it does not fit, who asks for an extra ends with an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from smcjax.engine.scheduler import Group, Schedule

# What users call them, in the order in which a sentence names them.
WORDS = {
    "truncates": "top_k and top_p",
    "controls": "control",
    "constrains": "response_format",
    "adjusts": "penalties and logit_bias",
    "scores": "logprobs",
    "scores_prompts": "prompt_logprobs",
}


def extras_of(group: Group, *, streams: bool, ragged: bool = False) -> set[str]:
    """The extras that a group asks for, those of its prompt among them; `ragged`: drafts can be rejected anyway."""
    params = group.request.params
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


class ProgramChoice:
    """Chooses a round's program, and remembers which ones do not fit the device."""

    def __init__(self) -> None:
        self._unfit: dict[tuple[int, frozenset[str]], str] = {}  # by size of the batch and extras: why

    def ready(
        self, program: Any, size: int, extras: frozenset[str], compile_programs: Callable[[list[int], Any], None]
    ) -> tuple[Any, str | None]:
        """The compiled program for `size` lanes: with the extras, or plain and the reason why it is.

        `compile_programs` raises ValueError where the programs of some sizes need more memory than the device has.
        """
        if extras and (size, extras) not in self._unfit:
            extended = dataclasses.replace(program, **dict.fromkeys(extras, True))
            try:
                compile_programs([size], extended)
                return extended, None
            except ValueError as error:
                self._unfit[size, extras] = f"{_in_words(extras)} cannot be used here: {error}"
        compile_programs([size], program)
        return program, self._unfit[size, extras] if extras else None


def _in_words(extras: Iterable[str]) -> str:
    """The extras as a user knows them."""
    words = [WORDS[name] for name in WORDS if name in set(extras)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
