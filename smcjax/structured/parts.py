"""Parts of which sets of texts are made: what grammars, expressions and JSON schemas are read as.

`smcjax.structured.grammar` makes an automaton of rules, which are parts by name. Parts that look alike are different
ones: they are compared and kept by identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

START = "%start"  # the name of the rule that all others follow from
Ranges = tuple[tuple[int, int], ...]  # code points from the first to the last of each pair


class Part:
    """A set of texts."""


@dataclasses.dataclass(frozen=True, eq=False)
class Text(Part):
    """One text."""

    data: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Character(Part):
    """The texts of one character among these; surrogates are none."""

    ranges: Ranges


@dataclasses.dataclass(frozen=True, eq=False)
class Anchor(Part):
    """The empty text, at the beginning or at the end of the whole."""

    at_end: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Made(Part):
    """The texts of an automaton over bytes, which `make` makes of the most states that it may have."""

    make: Callable[[int], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Reference(Part):
    """The texts of a rule."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Sequence(Part):
    """A text of each part, one behind another."""

    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Part):
    """The texts of any of the parts."""

    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Part):
    """From `least` to `most` texts of a part, one behind another; None: any number."""

    part: Part
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Listed(Part):
    """Texts of some of the items in their order, then any number of texts of `others`, with `separator` between them.

    Items that are required are among them, and there are from `least` to `most` texts in all; None: any number.
    """

    separator: Part
    items: tuple[Part, ...]
    required: tuple[bool, ...]
    others: Part | None = None
    least: int = 0
    most: int | None = None

    @property
    def counted(self) -> int:
        """How far texts have to be counted: beyond it, one more makes no difference."""
        return max(self.least, 1) if self.most is None else self.most


NOTHING = Sequence(())
NEVER = Choice(())


def parts_of(part: Part) -> tuple[Part, ...]:
    """The parts that a part is made of."""
    if isinstance(part, Sequence | Choice):
        return part.parts
    if isinstance(part, Repeat):
        return (part.part,)
    if isinstance(part, Listed):
        return (part.separator, *part.items, *(() if part.others is None else (part.others,)))
    return ()


def references(part: Part) -> Iterator[Reference]:
    """The references within a part, from left to right."""
    if isinstance(part, Reference):
        yield part
    for inner in parts_of(part):
        yield from references(inner)
