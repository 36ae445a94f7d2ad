"""Values that users give: as Python's own, as rules want them, and in the sentence that refuses them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_SHORT = 80  # characters of a value in an error message


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: "; did you mean gamma?", or nothing where none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def names_unknown[K: type](kind: K) -> K:
    """Decorates a class, which then refuses an unknown keyword by a TypeError that names the nearest known one."""
    made = kind.__init__  # type: ignore[misc]
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                near = did_you_mean(name, known) or f"; it has {', '.join(known)}."
                raise TypeError(f"{kind.__name__} has no argument {name}{near}")
        made(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[misc]
    return kind


def normalize_fields(options: Any) -> None:
    """Replaces NumPy's scalars in the fields of a frozen dataclass by Python's: np.int64(8) is as good as 8."""
    numpy = sys.modules.get("numpy")
    if numpy is None:  # where it has not been imported, there are none
        return
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, numpy.generic):
            object.__setattr__(options, field.name, value.item())


def normalize_numbers(values: Any) -> Any:
    """A list, tuple or array of numbers as a tuple of Python's own; anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(values, numpy.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return values
    return tuple(value.item() if numpy is not None and isinstance(value, numpy.generic) else value for value in values)


def is_unicode(text: str) -> bool:
    """True for a text free of lone surrogates, which stand for undecodable bytes of a command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: object) -> str:
    """repr of a value for an error message, on one line, cut to 78 characters where it is longer than 80."""
    text = " ".join(line.strip() for line in repr(_beginning(value, [_SHORT])).splitlines())  # an array's has several
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "…"


def _beginning(value: object, left: list[int]) -> object:
    """A value of JSON without what stands behind its first `left` items, of which nothing would be shown."""
    left[0] -= 1
    if type(value) is str:
        return value[:_SHORT]
    if type(value) is list:
        return [_beginning(one, left) for one in itertools.islice(value, max(left[0], 0))]
    if type(value) is dict:
        return {
            _beginning(name, left): _beginning(one, left)
            for name, one in itertools.islice(value.items(), max(left[0], 0))
        }
    return value
