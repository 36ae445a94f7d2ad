"""Texts of JSON as parts: values, and strings by their content.

There is at most one space between tokens, and strings have no \\u escapes, so characters that need one are never said.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np

from smcjax.structured.byte_automata import Empty, complement, minimal, product
from smcjax.structured.expressions import ALL, read_expression, read_pattern, without
from smcjax.structured.formats import FORMATS
from smcjax.structured.grammar import part_automaton
from smcjax.structured.parts import Character, Choice, Listed, Made, Part, Repeat, Sequence, Text

ESCAPES = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
# Characters of a JSON string's content: those that stand for themselves or have a short escape.
SPELLED = without(ALL, ((0, 7), (0xB, 0xB), (0xE, 0x1F), (0x7F, 0x9F)))
SPACE = Repeat(Text(b" "), 0, 1)
COMMA = Sequence((Text(b","), SPACE))  # behind an element, which ends with its own space
COLON = Sequence((SPACE, Text(b":"), SPACE))


def element(part: Part) -> Part:
    """A part of an array or an object, before a comma or a bracket."""
    return Sequence((part, SPACE))


def array(elements: Part) -> Part:
    """An array of these elements."""
    return Sequence((Text(b"["), SPACE, elements, Text(b"]")))


def object_(pairs: Part) -> Part:
    """An object of these elements, which are pairs."""
    return Sequence((Text(b"{"), SPACE, pairs, Text(b"}")))


def pair(name: Part, value: Part) -> Part:
    """An element of an object."""
    return Sequence((name, COLON, value, SPACE))


def literal(value: Any) -> Part:
    """The texts of one value, an object's properties in its order."""
    if isinstance(value, list):
        return array(_all(tuple(element(literal(one)) for one in value)))
    if isinstance(value, dict):
        return object_(_all(tuple(pair(literal(name), literal(one)) for name, one in value.items())))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # as all readers take it for an integer
    return Text(json.dumps(value, ensure_ascii=False).encode())


def _all(elements: tuple[Part, ...]) -> Part:
    return Listed(COMMA, elements, (True,) * len(elements))


@dataclasses.dataclass(frozen=True)
class Strings:
    """Strings by what their content is: its length in characters, patterns found in it, formats, and what it is not."""

    least: int = 0
    most: int | None = None
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()

    def part(self) -> Part:
        """The texts of these strings, quotes and escapes among them."""
        return Made(partial(_quoted, self))


@cache
def content(strings: Strings, most_states: int) -> tuple[Any, Any]:
    """The automaton of the strings' content. Raises Refusal for a pattern that cannot be kept; Empty, TooLarge."""
    some: list[tuple[Any, Any]] = []
    for pattern in sorted(strings.patterns):
        wanted, unwanted = read_pattern(pattern, SPELLED)
        some += [part_automaton(part, most_states) for part in wanted]
        for part in unwanted:
            with suppress(Empty):
                some.append(complement(part_automaton(part, most_states)))
    some += [_format(one, most_states) for one in sorted(strings.formats)]
    if (strings.least, strings.most) != (0, None) or not some:
        some.append(part_automaton(Repeat(Character(SPELLED), strings.least, strings.most), most_states))
    if strings.excluded:
        texts = Choice(tuple(Text(one.encode(errors="surrogatepass")) for one in sorted(strings.excluded)))
        some.append(complement(part_automaton(texts, most_states)))
    whole = some[0]
    for one in some[1:]:
        whole = product(whole, one, most_states)
    return whole


@cache
def _format(name: str, most_states: int) -> tuple[Any, Any]:
    """The automaton of a format's texts."""
    return part_automaton(read_expression(FORMATS[name]), most_states)


@cache
def _quoted(strings: Strings, most_states: int) -> tuple[Any, Any]:
    table, accepts = content(strings, most_states)
    dead = table.shape[0] - 1
    # States: the content's, behind a backslash from each, the first, the last, and the dead one.
    first, last, none = 2 * dead, 2 * dead + 1, 2 * dead + 2
    quoted = np.full((none + 1, 256), none, np.int32)
    quoted[:dead] = np.where(table[:dead] == dead, none, table[:dead])
    for character, letter in ESCAPES.items():
        quoted[dead : 2 * dead, ord(letter)] = quoted[:dead, ord(character)]
        if character != "/":
            quoted[:dead, ord(character)] = none
    quoted[:dead, ord("\\")] = np.arange(dead, 2 * dead)
    quoted[:dead, ord('"')] = np.where(accepts[:dead], last, none)
    quoted[first, ord('"')] = 0
    order = np.array([first, *range(first), last, none])  # the first state is to be 0
    number = np.argsort(order)
    ends = np.zeros(none + 1, bool)
    ends[last] = True
    return minimal(number[quoted[order]].astype(np.int32), ends[order], most_states)


def holds(strings: Strings, text: str, most_states: int) -> bool:
    """True for a string that is one of these."""
    try:
        table, accepts = content(strings, most_states)
    except Empty:
        return False
    state = 0
    for byte in text.encode(errors="surrogatepass"):
        state = table[state, byte]
    return bool(accepts[state])
