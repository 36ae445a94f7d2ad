"""Context-free grammars as users write them, in Lark's notation or in GBNF, as rules of parts.

    Lark's   start: "(" start ")" | NUMBER        what Lark, llguidance and Outlines read
    GBNF     root ::= "(" root ")" | [0-9]+       what llama.cpp and XGrammar read; a line with ::= tells it

A grammar is the set of texts that its rules derive. Terminals are sets of texts too: no lexer is between them, so
neither priorities nor the longest match decide anything, and a lazy repetition is a repetition. What shapes trees alone
(the ?, ! and _ before names, aliases, priorities) changes nothing. `%ignore` lets what it names stand before each
terminal of a rule and at the end. Anything else is refused by name.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from smcjax.checks import short
from smcjax.structured.byte_automata import Refusal
from smcjax.structured.expressions import ALL, read_expression, without
from smcjax.structured.parts import START, Character, Choice, Part, Reference, Repeat, Sequence, Text, references

SKIPPED = "%ignore"  # the name of a rule for texts of `%ignore`
MAX_DIGITS = 9  # of a number of repetitions

# Terminals of Lark's library whose own definitions look around or repeat lazily, by the texts that they are meant for.
_MEANT = {"ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"', "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/"}

_GBNF = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
# GBNF's syntax as a grammar of Lark's, whose trees have the names of those that Lark's own grammar of Lark makes.
_GRAMMAR_OF_GBNF = r"""
start: rule+
rule: HEAD expansions
?expansions: expansion ("|" expansion)*
?expansion: expr*
?expr: atom [OP]
?atom: "(" expansions ")" | name | STRING -> literal | CLASS -> symbols | "." -> any
name: NAME
HEAD.1: /[A-Za-z_][\w-]*\s*::=/
NAME: /[A-Za-z_][\w-]*/
STRING: /"(\\.|[^"\\\n])*"/
CLASS: /\[(\\.|[^\]\\\n])*\]/
OP: /[?*+]|\{[0-9]+(,[0-9]*)?\}/
COMMENT: /#[^\n]*/
%ignore COMMENT
%ignore /\s+/
"""


def read_grammar(text: str) -> dict[str, Part]:
    """The rules of a grammar by name, `START` among them. Raises Refusal for what is none, or not expressed here."""
    gbnf = _GBNF.search(text) is not None
    reader: _Gbnf | _Lark = _Gbnf() if gbnf else _Lark()
    root = "root" if gbnf else "start"
    try:
        reader.read(_parsed(text, gbnf))
    except Refusal as refusal:
        raise Refusal(f"has a grammar {refusal}") from None
    rules = reader.rules
    if root not in rules:
        raise Refusal(f"has a grammar without a rule {root!r}, from which texts are derived; add it")
    end: tuple[Part, ...] = (Reference(SKIPPED),) if SKIPPED in rules else ()
    rules[START] = Sequence((Reference(root), *end))
    for name, part in rules.items():
        for reference in references(part):
            if reference.name not in rules:
                raise Refusal(
                    f"has a grammar whose rule {short(name)} names {short(reference.name)}, which it lacks; define it"
                )
    if not gbnf:
        _check_terminals(rules)
    return rules


def _check_terminals(rules: Mapping[str, Part]) -> None:
    """Raises Refusal for terminals that need themselves."""
    for name in filter(_is_terminal, rules):
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            fresh = {one.name for one in references(rules[waiting.pop()])} - seen
            if name in fresh:
                raise Refusal(
                    f"has a grammar whose terminal {short(name)} needs itself; make it a rule, in small letters"
                )
            seen |= fresh
            waiting += fresh


@cache
def _parser(gbnf: bool) -> Any:
    import lark

    if gbnf:
        return lark.Lark(_GRAMMAR_OF_GBNF, parser="lalr", maybe_placeholders=False)
    return lark.Lark.open_from_package("lark", "lark.lark", ["grammars"], parser="lalr", maybe_placeholders=False)


def _parsed(text: str, gbnf: bool) -> Any:
    """The tree of a grammar's text."""
    import lark

    try:
        return _parser(gbnf).parse(text)
    except lark.exceptions.UnexpectedInput as error:
        known = f"{'GBNF' if gbnf else 'Lark'}'s notation"
        if error.line < 1:
            raise Refusal(f"that ends within a rule; complete it in {known}") from None
        where = text.split("\n")[error.line - 1].strip()
        raise Refusal(
            f"that goes beyond {known} in line {error.line}, column {error.column} ({short(where)}); mend it"
        ) from None


class _Reader:
    """Makes parts of trees."""

    def __init__(self) -> None:
        self.rules: dict[str, Part] = {}
        self._skips = False  # whether texts of `SKIPPED` may stand before what is read

    def _define(self, name: str, part: Part) -> None:
        if name in self.rules:
            raise Refusal(f"that defines {short(name)} twice; keep one")
        self.rules[name] = part

    def part(self, tree: Any) -> Part:
        """A part of a tree. Raises Refusal for trees of another kind."""
        read = getattr(self, f"_{tree.data}", None)
        if read is None:
            raise Refusal(f"with {str(tree.data).replace('_', ' ')}, which is not kept here; write it out")
        made: Part = read(tree.children)
        return made

    def _expansions(self, children: list[Any]) -> Part:
        return Choice(tuple(map(self.part, children)))

    def _expansion(self, children: list[Any]) -> Part:
        return Sequence(tuple(map(self.part, children)))

    def _name(self, children: list[Any]) -> Part:
        return Reference(str(children[0]))

    def _leaf(self, part: Part) -> Part:
        """A terminal in a rule, with what may be skipped before it."""
        return Sequence((Reference(SKIPPED), part)) if self._skips else part


_SIMPLE = {"?": (0, 1), "*": (0, None), "+": (1, None)}


class _Lark(_Reader):
    """Reads Lark's notation."""

    def read(self, tree: Any) -> None:
        """Fills the rules."""
        ignored = [one.children[0] for one in tree.children if one.data == "ignore"]
        if ignored:
            self._define(SKIPPED, Repeat(Choice(tuple(map(self.part, ignored))), 0, None))
        for one in tree.children:
            if one.data in ("rule", "token"):
                self._rule(one)
            elif one.data == "import":
                *path, name = _words(one.children[0])
                self._import(path, name, _words(one.children[1])[0] if len(one.children) > 1 else name)
            elif one.data == "multi_import":
                for name in one.children[1].children:
                    self._import(_words(one.children[0]), *_words(name) * 2)
            elif one.data != "ignore":
                raise Refusal(f"with %{str(one.data).removesuffix('_rule')}, which is not kept here; leave it out")

    def _rule(self, tree: Any, prefix: str = "") -> None:
        name, params, *_, body = tree.children
        name = str(name).lstrip("!").lstrip("?")
        if params.children:
            raise Refusal(f"with parameters of {short(name)}, and templates are not kept here; write it out")
        self._terminal = tree.data == "token"
        self._skips = not self._terminal and SKIPPED in self.rules
        self._prefix = prefix
        self._define(prefix + name, self.part(body))
        self._terminal, self._skips, self._prefix = True, False, ""

    _terminal, _prefix = True, ""  # `%ignore` is read as terminals are

    def _import(self, path: list[str], name: str, alias: str) -> None:
        if path != ["common"] or name not in _common() or name.startswith("_STRING"):
            whole = short(".".join([*path, name]))
            raise Refusal(f"that imports {whole}, and what is known here are the terminals of 'common'; write it out")
        if not _is_terminal(alias):
            raise Refusal(f"that calls the terminal {name} {short(alias)}; use capitals")
        if f"common.{name}" not in self.rules:
            for known, tree in _common().items():
                if known in _MEANT:
                    self._define(f"common.{known}", read_expression(_MEANT[known]))
                elif not known.startswith("_STRING"):
                    self._rule(tree, "common.")
        self._define(alias, Reference(f"common.{name}"))

    def _name(self, children: list[Any]) -> Part:
        name = str(children[0])
        if self._terminal and not _is_terminal(name):
            raise Refusal(
                f"whose terminals name the rule {short(name)}; make it a terminal, in capitals, or them rules"
            )
        reference = Reference(self._prefix + name)
        return self._leaf(reference) if _is_terminal(name) else reference

    def _alias(self, children: list[Any]) -> Part:
        return self.part(children[0])

    def _maybe(self, children: list[Any]) -> Part:
        return Repeat(self.part(children[0]), 0, 1)

    def _expr(self, children: list[Any]) -> Part:
        part, *times = children
        if times[0] in _SIMPLE:
            return Repeat(self.part(part), *_SIMPLE[times[0]])
        least, most = _number(str(times[0])), _number(str(times[-1]))
        if not 0 <= least <= most:
            raise Refusal(f"that repeats a part from {least} to {most} times; mend that")
        return Repeat(self.part(part), least, most)

    def _literal_range(self, children: list[Any]) -> Part:
        first, last = (_unescaped(str(one)) for one in children)
        if not len(first) == len(last) == 1 or first > last:
            written = short(f"{children[0]}..{children[1]}")
            raise Refusal(f"with the range {written}, whose ends are no characters in order; mend it")
        return self._leaf(Character(((ord(first), ord(last)),)))

    def _literal(self, children: list[Any]) -> Part:
        token = str(children[0])
        if token.startswith("/"):
            return self._leaf(_pattern(token))
        text = _unescaped(token.removesuffix("i"))
        return self._leaf(read_expression(f"(?i){re.escape(text)}") if token.endswith("i") else Text(text.encode()))


class _Gbnf(_Reader):
    """Reads GBNF."""

    def read(self, tree: Any) -> None:
        """Fills the rules."""
        for rule in tree.children:
            head, body = rule.children
            self._define(str(head)[:-3].rstrip(), self.part(body))

    def _expr(self, children: list[Any]) -> Part:
        part, times = self.part(children[0]), str(children[1])
        if times in _SIMPLE:
            return Repeat(part, *_SIMPLE[times])
        first, comma, last = times[1:-1].partition(",")
        least, most = _number(first), _number(last) if last else None
        if most is not None and most < least:
            raise Refusal(f"that repeats a part {times} times; mend that")
        return Repeat(part, least, most if comma else least)

    def _literal(self, children: list[Any]) -> Part:
        return Text(_unescaped(str(children[0])).encode())

    def _any(self, children: list[Any]) -> Part:
        return Character(ALL)

    def _symbols(self, children: list[Any]) -> Part:
        body = str(children[0])[1:-1]
        excludes = body.startswith("^")
        units = re.findall(_ESCAPE + r"|.", body[1:] if excludes else body)
        ranges: list[tuple[int, int]] = []
        place = 0
        while place < len(units):
            first = last = _character(units[place])
            if units[place + 1 : place + 2] == ["-"] and place + 2 < len(units):
                last = _character(units[place + 2])
                place += 2
            if first > last:
                raise Refusal(f"with the range {first!r} to {last!r} in {short(body)}, which is empty; mend it")
            ranges.append((ord(first), ord(last)))
            place += 1
        if not ranges:
            raise Refusal(f"with the class {short(str(children[0]))} without characters; mend it")
        return Character(without(ALL, tuple(ranges)) if excludes else tuple(ranges))


def _number(digits: str) -> int:
    """A number of repetitions. Raises Refusal for one of more than `MAX_DIGITS` digits."""
    if len(digits.lstrip("+-")) > MAX_DIGITS:
        raise Refusal(f"that repeats a part {short(digits)} times, and {MAX_DIGITS} digits are the most; lower that")
    return int(digits)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _words(tree: Any) -> list[str]:
    """The names of an import's path."""
    leaves = tree.scan_values(lambda _: True)
    return [str(leaf) for leaf in leaves if leaf != "."]


@cache
def _common() -> dict[str, Any]:
    """The trees of the terminals of Lark's library by name."""
    text = importlib.resources.files("lark").joinpath("grammars/common.lark").read_text()
    return {str(one.children[0]): one for one in _parsed(text, False).children}


_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)"
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", **{mark: mark for mark in "\\\"'[]-^/"}}


def _character(unit: str) -> str:
    """The character that an escape, or itself, stands for."""
    if not unit.startswith("\\"):
        return unit
    try:
        return chr(int(unit[2:], 16)) if unit[1] in "xuU" and len(unit) > 2 else _ESCAPED[unit[1]]
    except (KeyError, ValueError, OverflowError):
        raise Refusal(f"with the escape {short(unit)}, which is not known here; write the character") from None


def _unescaped(quoted: str) -> str:
    """The text that a string stands for. Raises Refusal for unknown escapes and for what no text has."""
    text = re.sub(_ESCAPE, lambda found: _character(found[0]), quoted[1:-1])
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise Refusal(f"with the string {short(quoted)}, which no text has; mend it")
    return text


def _pattern(token: str) -> Part:
    """The part for /regex/flags. Raises Refusal for what `read_expression` refuses, and for flags."""
    body, _, flags = token[1:].rpartition("/")
    if set(flags) & set("lx"):
        raise Refusal(
            f"with the flags {short(flags)} of {short(token)}, and i, s, m and u are kept here; leave them out"
        )
    kept = "".join(flag for flag in "is" if flag in flags)
    try:
        return read_expression(f"(?{kept}){body}" if kept else body, anchors=False)
    except Refusal as refusal:
        raise Refusal(f"whose terminal {short(token)} {refusal}") from None
