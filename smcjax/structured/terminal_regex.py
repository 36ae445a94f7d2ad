"""Regular expressions of a grammar's terminals, from Python's syntax, which Lark has, to that of Rust's regex crate.

    [x[y] [a~~b] [+--]     within a class [ is a character, as are && and ~~, and -- may end a range
    a{,3} {                no least number is 0; a { that begins no repetition is a character
    \\07 \\<                 a character by its octal number; an escaped mark stands for itself

Escapes for letters are left to Rust's crate. Anchors, verbose expressions, possessive repetitions and POSIX' names of
classes are refused: the first depend on what a rule has beside a terminal, and the others would mean something else.
"""

from __future__ import annotations

import re

from smcjax.plain import short
from smcjax.structured.byte_automata import Refusal

_ESCAPE = r"\\(?:[pPxuU]\{[^{}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|%s|.)"
_TOKEN = re.compile(
    rf"(?P<escape>{_ESCAPE % '0[0-7]{0,2}|[1-7][0-7]{2}'})"
    r"|(?P<members>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<verbose>\(\?[A-Za-z]*x[A-Za-z-]*[:)])"
    r"|(?P<opening>\(\??)"
    r"|(?P<times>(?:[*+?]|\{(?!\})[0-9]*(?:,[0-9]*)?\})[+?]?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_MEMBER = re.compile(rf"{_ESCAPE % '[0-7]{1,3}'}|.", re.DOTALL)
_ANCHORS = [*"^$", *(f"\\{letter}" for letter in "bBAzZG")]


def rust_regex(body: str, literal: str) -> str:
    """The expression in Rust's syntax. Raises Refusal, in which `literal` is the terminal as its grammar writes it."""
    made = ""
    for found in _TOKEN.finditer(body):
        kind, token = found.lastgroup, found[0]
        if token in _ANCHORS:
            raise Refusal(f"with an anchor in {short(literal)}, which looks at what is beside it; leave it out")
        if kind == "verbose":
            raise Refusal(f"with the flag x in {short(literal)}, and i, s, m and u are kept here; leave it out")
        if kind == "times" and len(token) > 1 and token.endswith("+"):
            raise Refusal(
                f"with the possessive repetition {short(token)} in {short(literal)}, which is not kept here; leave its "
                "last + out"
            )
        if kind == "escape":
            made += _character(token, literal)
        elif kind == "members":
            made += _members(token, literal)
        elif kind == "times":
            made += token.replace("{,", "{0,")
        else:
            made += r"\{" if token == "{" else token
    return made


def _members(text: str, literal: str) -> str:
    """A class of characters in Rust's syntax."""
    named = re.search(r"\[:\^?[a-z]+:\]", text)
    if named is not None:
        raise Refusal(f"with the class {short(named[0])} in {short(literal)}, which is not kept here; write it out")
    body = text[1:-1]
    excludes = body.startswith("^")
    units: list[str] = _MEMBER.findall(body[1:] if excludes else body)
    made, place = "", 0
    while place < len(units):
        made += _member(units[place], literal)
        place += 1
        if units[place : place + 1] == ["-"] and place + 1 < len(units):
            made += f"-{_member(units[place + 1], literal)}"
            place += 2
    return f"[{'^' if excludes else ''}{made}]"


def _member(unit: str, literal: str) -> str:
    """One character of a class, or one end of its ranges, in Rust's syntax."""
    if unit == r"\b":
        return r"\x08"
    if re.fullmatch(r"\\[0-7]+", unit):
        return _octal(unit, literal)
    character = _character(unit, literal) if unit.startswith("\\") else unit
    return f"\\{character}" if character in list("[]^-&~") else character


def _character(escape: str, literal: str) -> str:
    """An escape in Rust's syntax; a reference to a group, which Rust lacks, stays what it is."""
    if re.fullmatch(r"\\(0[0-7]*|[0-7]{3})", escape):
        return _octal(escape, literal)
    escaped = escape[1:]
    return escaped if escaped in ("<", ">") or not escaped.isascii() else escape


def _octal(escape: str, literal: str) -> str:
    """An octal escape in Rust's syntax."""
    number = int(escape[1:], 8)
    if number > 0o377:
        raise Refusal(f"with the octal escape {short(escape)} in {short(literal)}, which is beyond 377; mend it")
    return f"\\x{{{number:x}}}"
