"""Rules for values that users give: what holds, and what a value must be in the sentence where it does not."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from smcjax.normalize import short


class Rule(NamedTuple):
    """A rule for a value: whether one keeps it, and what a value must be, in words."""

    holds: Callable[[Any], bool]
    words: str


def require(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises ValueError for the first of these rules that the value of its name breaks, with name, words and value."""
    for name, rule in rules.items():
        if not rule.holds(values[name]):
            raise ValueError(f"{name} must be {rule.words}, got {short(values[name])}.")


def is_whole(value: Any, least: float, most: float = math.inf) -> bool:
    """True for a whole number within these bounds, which no bool is."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: Any, least: float, most: float = math.inf) -> bool:
    """True for a number within these bounds, which NaN and bools are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def whole(least: int, most: int | None = None) -> Rule:
    """A whole number within these bounds; `most` None: there is no upper one."""
    if most is None:
        return Rule(lambda value: is_whole(value, least), f"a whole number of at least {least}")
    return Rule(lambda value: is_whole(value, least, most), f"a whole number from {least} to {most}")


def number(least: float, most: float) -> Rule:
    """A number within these bounds."""
    return Rule(lambda value: is_number(value, least, most), f"a number from {least:g} to {most:g}")


def one_of(*known: str) -> Rule:
    """One of these texts."""
    return Rule(lambda value: value in known, f"one of {', '.join(known)}")


def either(*known: str) -> Rule:
    """One of these few texts, which the sentence quotes."""
    return Rule(lambda value: value in known, " or ".join(map(repr, known)))


def or_none(rule: Rule, words: str = ", or None") -> Rule:
    """The rule, which None keeps too; `words` say so behind the rule's own."""
    return Rule(lambda value: value is None or rule.holds(value), rule.words + words)


FLAG = Rule(lambda value: isinstance(value, bool), "True or False")
FLAG_OR_NONE = Rule(lambda value: isinstance(value, bool | None), "True, False or None")
SHARE = Rule(lambda value: is_number(value, 0, 1) and value > 0, "above 0 and at most 1")
