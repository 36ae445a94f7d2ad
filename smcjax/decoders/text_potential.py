"""Potentials of text: Python functions that steer a request's population from the host, beside the device."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from smcjax.checks import is_number, names_unknown, short


@names_unknown
@dataclasses.dataclass(frozen=True)
class TextPotential:
    """A factor of a request's target, as a function of text: π(x) ∝ p(x)^α·Φ(x).

    The values of beginnings steer the population and cancel in the end, so an answer's weight has Φ of the whole answer
    whatever they were: asking seldom costs variance and no bias.

    Attributes:
        score: log ψ of beginnings of answers, called as `score(prompt, texts)` with the prompt's text and a list of
            new texts; returns one number a text, below +inf, where −inf ends a particle. A function, or a coroutine
            function. It runs in a thread, beside the device and maybe beside itself.
        ask: when particles are asked for their value on the way to the answer's end, where they are in any case: after
            each so many tokens, or behind each match of a regular expression, as "\\n" is at a line's end. None: never.
        complete: log Φ of whole answers, called alike; None: `score`.
        exponent: the power of the factor; 0.5 takes the root of it.
    """

    score: Callable[[str, list[str]], Any]
    ask: int | str | None = None
    complete: Callable[[str, list[str]], Any] | None = None
    exponent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("score", "complete"):
            function = getattr(self, name)
            if not callable(function) and (name == "score" or function is not None):
                raise ValueError(f"{name} must be a function of a prompt and a list of texts, got {short(function)}.")
        if isinstance(self.ask, str):
            try:
                pattern = re.compile(self.ask)
            except re.error as error:
                raise ValueError(f"ask must be a regular expression, got {self.ask!r}: {error}.") from None
            if pattern.match(""):
                raise ValueError(f"ask is {self.ask!r}, which matches where nothing is; let it match a character.")
        elif self.ask is not None and not (isinstance(self.ask, int) and self.ask is not True and self.ask >= 1):
            raise ValueError(f"ask must be a number of tokens, a regular expression, or None, got {self.ask!r}.")
        if not is_number(self.exponent, 0.0, 1e6):
            raise ValueError(f"exponent must be a number from 0 to 1,000,000, got {self.exponent!r}.")

    @property
    def name(self) -> str:
        """The name of its function, which stands in errors."""
        return getattr(self.score, "__qualname__", type(self.score).__name__)

    def values(self, prompt: str, texts: list[str], *, whole: bool) -> list[float]:
        """log ψ of beginnings of answers or, `whole`, log Φ of answers, to the power `exponent`.

        Waits for a coroutine function. Raises ValueError, with the function's name, for what are no log values, and
        what the function itself raises.
        """
        function = self.complete if whole and self.complete is not None else self.score
        found = function(prompt, list(texts))
        if inspect.isawaitable(found):
            import asyncio

            found = asyncio.run(_awaited(found))
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError):
            raise ValueError(f"it returned {short(found)}; return a list of numbers") from None
        if len(values) != len(texts):
            raise ValueError(f"it returned {len(values)} values for {len(texts)} texts; return one for each")
        for value, text in zip(values, texts, strict=True):
            if not value < float("inf"):
                raise ValueError(f"it gave {value} for {short(text)}; a log value is below +inf, −inf or a number")
        if self.exponent == 0:
            return [0.0] * len(values)
        return [self.exponent * value for value in values]


async def _awaited(found: Any) -> Any:
    return await found
