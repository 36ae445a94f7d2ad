"""Regular expressions as parts: Python's syntax, and ECMA-262's, which JSON schemas have.

Python's own parser reads both. What an automaton cannot keep is refused: looks around but for ^ and $, references to
groups, possessive repetitions, atomic groups. So is what readers of expressions disagree about.

    \\d \\w \\s             Unicode's in Python's; ECMA-262's in a schema, and there \\D, \\W and \\S, and classes that
                         exclude them, exclude Unicode's too, since validators in Python read them so
    \\p{L} \\P{Lu}         characters of a general category
    $                    the end, not what is before a last line feed
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from re import _constants, _parser
from typing import Any

from smcjax.checks import short
from smcjax.structured.byte_automata import Refusal
from smcjax.structured.parts import NOTHING, Anchor, Character, Choice, Part, Ranges, Repeat, Sequence

LAST = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
_LINE_ENDS = {False: "\n", True: "\n\r\u2028\u2029"}
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
# White space of ECMA-262, less the byte order mark, which is none in Python.
_BYTE_ORDER_MARK = (0xFEFF, 0xFEFF)
_SPACE = ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
          (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_ASCII: dict[str, Ranges] = {"DIGIT": ((48, 57),), "WORD": _WORD, "SPACE": _SPACE}
_UNICODE: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "WORD": lambda character: character.isalnum() or character == "_",
    "SPACE": str.isspace,
}
_KNOWN_FLAGS = re.IGNORECASE | re.DOTALL | re.UNICODE | re.VERBOSE
# Units of an expression that Python's parser reads otherwise than others do, or not at all, and single characters.
_ESCAPE = (
    r"\\(?:(?P<category>[pP])\{(?P<name>[A-Za-z_=]*)\}|u\{(?P<code>[0-9A-Fa-f]{1,6})\}|c(?P<control>[A-Za-z])"
    r"|(?P<letter>.))"
)
_OUTSIDE = re.compile(
    rf"{_ESCAPE}|(?P<opening>\[\^?)(?P<first>\]?)|(?P<named>\(\?<(?![=!]))|(?P<group>\(\?(?![:=!<]))|(?P<brace>\{{(?=,))|.",
    re.DOTALL,
)
_INSIDE = re.compile(rf"{_ESCAPE}|(?P<posix>\[:\^?[a-z]+:\])|(?P<closing>\])|.", re.DOTALL)


def read_expression(text: str, *, anchors: bool = True) -> Part:
    """The texts that an expression in Python's syntax matches from end to end; `anchors`: ^ and $ are known.

    Raises Refusal for what is no expression, or cannot be kept.
    """
    tree, flags = _parsed(text, is_shared=anchors)
    return _Reader(text, ALL, anchors=anchors).sequence(tree, flags)


def read_pattern(text: str, alphabet: Ranges) -> tuple[list[Part], list[Part]]:
    """The texts of an alphabet in which an expression of ECMA-262 is found: those that all of the first parts have, and
    none of the second. Raises Refusal.

    A look ahead is kept where the expression begins with it, behind ^.
    """
    tree, flags = _parsed(text, ecma=True)
    reader = _Reader(text, alphabet, ecma=True)
    some = Repeat(Character(alphabet), 0, None)
    wanted: list[Part] = []
    unwanted: list[Part] = []
    rest = list(tree)
    while rest[1:] and rest[0] == (_constants.AT, _constants.AT_BEGINNING) and str(rest[1][0]).startswith("ASSERT"):
        kind, (direction, inner) = rest.pop(1)
        if direction < 0:
            raise _refusal(text, "it looks behind, which is not kept here")
        excludes = kind is _constants.ASSERT_NOT
        part = _Reader(text, alphabet, ecma=True, excludes=excludes).sequence(inner, flags)
        (unwanted if excludes else wanted).append(Sequence((part, some)))
    wanted.append(Sequence((some, reader.sequence(rest, flags), some)))
    return wanted, unwanted


def _parsed(text: str, *, ecma: bool = False, is_shared: bool = False) -> tuple[Any, re.RegexFlag]:
    """Parses an expression by Python's parser; returns the parse and its flags. Raises Refusal.

    `is_shared`: its writer may mean Rust's syntax as well, in which classes have operators.
    """
    written = _for_python(text, ecma)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            tree = _parser.parse(written)
    except (re.error, ValueError, OverflowError) as error:
        said = str(error)[:100]
        raise _refusal(text, said if said.isprintable() else "its syntax is not known here") from None
    if warned and is_shared:
        raise _refusal(text, "a class in it means one thing to Python and another to Rust; escape its [, &&, -- or ~~")
    flags = re.RegexFlag(tree.state.flags)
    if flags & ~_KNOWN_FLAGS:
        raise _refusal(text, "of flags, i, s, u and x are kept here")
    return tree, flags


def without(ranges: Ranges, excluded: Ranges) -> Ranges:
    """The characters of the first that the second lacks."""
    kept, marks = [], sorted(excluded)
    for first, last in ranges:
        for low, high in marks:
            if low <= last and high >= first:
                if low > first:
                    kept.append((first, low - 1))
                first = max(first, high + 1)
        if first <= last:
            kept.append((first, last))
    return tuple(kept)


def within(ranges: Ranges, allowed: Ranges) -> Ranges:
    """The characters that both have."""
    return tuple((max(a, c), min(b, d)) for a, b in ranges for c, d in allowed if max(a, c) <= min(b, d))


def _refusal(text: str, said: str) -> Refusal:
    return Refusal(f"is no regular expression that has an automaton ({short(text)}: {said}); mend it")


def _for_python(text: str, ecma: bool) -> str:
    """The expression as Python's parser reads it. Raises Refusal for what means something else there."""
    made, place, in_class = "", 0, False
    while place < len(text):
        found = (_INSIDE if in_class else _OUTSIDE).match(text, place)
        if found is None:
            raise _refusal(text, "it ends within an escape")
        unit, place = found[0], found.end()
        parts = {kind: value for kind, value in found.groupdict().items() if value is not None}
        if "category" in parts:
            unit = _category(text, parts["name"], parts["category"] == "P", in_class)
        elif "code" in parts:
            unit = f"\\U{int(parts['code'], 16):08x}"
        elif "control" in parts:
            unit = f"\\x{ord(parts['control']) % 32:02x}"
        elif "posix" in parts:
            raise _refusal(text, f"the class {unit} is not kept here; write it out")
        elif ecma and parts.get("letter", "_") in "AZzaNU":
            raise _refusal(text, f"the escape {unit} is not known to ECMA-262")
        elif ecma and parts.get("first"):
            raise _refusal(text, "a class without characters is not kept here")
        elif ecma and "group" in parts:
            raise _refusal(text, "flags and other groups are not known to ECMA-262")
        elif ecma and "named" in parts:
            unit = "(?P<"
        elif ecma and "brace" in parts:
            unit = r"\{"
        in_class = "opening" in parts or (in_class and "closing" not in parts)
        made += unit
    return made


def _category(text: str, name: str, excludes: bool, in_class: bool) -> str:
    """A general category as a class, or as members of one, in Python's syntax."""
    short_name = name.rpartition("=")[2]
    ranges = _ranges_of(lambda character: unicodedata.category(character).startswith(short_name))
    if not 1 <= len(short_name) <= 2 or not ranges:
        raise _refusal(text, f"the category {name} is not known here; L, Lu, N, P and so on are")
    members = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in (without(ALL, ranges) if excludes else ranges))
    return members if in_class else f"[{members}]"


def _ranges_of(belongs: Callable[[str], bool]) -> Ranges:
    """The characters of which a predicate holds."""
    ranges: list[tuple[int, int]] = []
    for code in range(LAST + 1):
        if belongs(chr(code)):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1] = (ranges[-1][0], code)
            else:
                ranges.append((code, code))
    return tuple(ranges)


@cache
def _unicode(name: str) -> Ranges:
    return _ranges_of(_UNICODE[name])


class _Reader:
    """Makes parts of what Python's parser makes of an expression."""

    def __init__(
        self, text: str, alphabet: Ranges, *, ecma: bool = False, anchors: bool = True, excludes: bool = False
    ) -> None:
        self._text, self._alphabet, self._ecma, self._anchors = text, alphabet, ecma, anchors
        self._excludes = excludes  # what is read is excluded from texts

    def sequence(self, tree: Any, flags: re.RegexFlag) -> Part:
        """The part of a sequence."""
        parts = tuple(self._part(str(kind), given, flags) for kind, given in tree)
        return parts[0] if len(parts) == 1 else Sequence(parts)

    def _part(self, kind: str, given: Any, flags: re.RegexFlag) -> Part:
        if kind == "SUBPATTERN":
            _, more, fewer, tree = given
            if more & ~_KNOWN_FLAGS:
                raise _refusal(self._text, "of flags, i, s, u and x are kept here")
            return self.sequence(tree, (flags | more) & ~fewer)
        if kind == "BRANCH":
            return Choice(tuple(self.sequence(tree, flags) for tree in given[1]))
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, tree = given
            part = self.sequence(tree, flags)
            return Repeat(part, int(least), None if most is _constants.MAXREPEAT else int(most)) if most else NOTHING
        if kind == "AT":
            where = str(given)
            if not self._anchors or where not in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
                raise _refusal(self._text, "an anchor in it looks at what is beside it; leave it out")
            return Anchor("END" in where)
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return Character(within(self._characters(kind, given, flags), self._alphabet))
        raise _refusal(self._text, "look-around, back-references and possessive repetitions are not kept here")

    def _characters(self, kind: str, given: Any, flags: re.RegexFlag) -> Ranges:
        """The characters of a class, or of what stands for one."""
        if kind == "ANY":
            ends = "" if flags & re.DOTALL else _LINE_ENDS[self._ecma and not self._excludes]
            return without(ALL, tuple((ord(end), ord(end)) for end in ends))
        members = [(kind.removeprefix("NOT_"), given)] if kind != "IN" else [(str(one), what) for one, what in given]
        excludes = kind == "NOT_LITERAL" or members[0][0] == "NEGATE"
        ranges: list[tuple[int, int]] = []
        for one, what in members:
            if one == "LITERAL":
                ranges.append((what, what))
            elif one == "RANGE":
                ranges.append(what)
            elif one == "CATEGORY":
                ranges += self._named(str(what).removeprefix("CATEGORY_"), excludes)
        if flags & re.IGNORECASE:
            ranges += [(ord(other), ord(other)) for low, high in ranges if high - low < 1 << 14
                       for code in range(low, high + 1) for other in _other_cases(chr(code))]  # fmt: skip
        return without(ALL, tuple(ranges)) if excludes else tuple(ranges)

    def _named(self, name: str, excluded: bool) -> Ranges:
        """The characters of \\d, \\w, \\s and what excludes them; of a schema's, those that all dialects agree on."""
        plain = name.removeprefix("NOT_")
        excluded ^= (plain != name) ^ self._excludes
        ranges = _ASCII[plain] if self._ecma and not excluded else _unicode(plain)
        if self._ecma and excluded:
            ranges = (*ranges, *_ASCII[plain], *((_BYTE_ORDER_MARK,) if plain == "SPACE" else ()))
        return ranges if plain == name else without(ALL, ranges)


def _other_cases(character: str) -> set[str]:
    """Single characters that are this one in another case."""
    return {one for one in (character.lower(), character.upper(), character.title()) if len(one) == 1} - {character}
