"""Grammars as automata: what they accept is what an enumeration of derivations, or Lark's own parser, accepts."""

from __future__ import annotations

import itertools
from typing import Any

import lark
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.structured import automaton, grammar
from smcjax.structured.automaton import compile_expression
from smcjax.structured.automaton_child import token_automaton
from smcjax.structured.byte_automata import Refusal
from smcjax.structured.grammar import grammar_automaton
from smcjax.structured.response_format import GRAMMAR_DEPTH, expression_of
from tests.structured.test_automaton import accepts, walk

MOST = 5  # letters of the texts that are enumerated
RULES = ("start", "one", "two")
Rules = dict[str, list[tuple[str, ...]]]  # the alternatives of each rule: names of rules, and letters

ARITHMETIC = """
    ?start: sum                                   // of numbers
    !sum.2: sum ("+" | "-") product -> add
          | product
    product: (product "*")? _atom
    _atom: NUMBER | "(" sum ")"
    %import common.INT -> NUMBER
"""
ARITHMETIC_IN_GBNF = """
root ::= sum   # of numbers
sum ::= sum [+-] product |
    product
product ::= (product "\\x2a")? atom
atom ::= [0-9]{1,} | "(" sum ")"
"""
JSON = r"""
    start: value
    value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true"i | "null"
    array: "[" [value ("," value)*] "]"
    object: "{" [pair ("," pair)*] "}"
    pair: ESCAPED_STRING ":" value
    %import common (ESCAPED_STRING, SIGNED_NUMBER, WS_INLINE)
    %ignore WS_INLINE
"""


def texts(letters: str, most: int) -> list[str]:
    """All texts of so many letters at most."""
    return ["".join(some) for length in range(most + 1) for some in itertools.product(letters, repeat=length)]


def written(rules: Rules) -> str:
    """The rules in Lark's notation."""
    return "\n".join(
        f"{name}: " + " | ".join(" ".join(one if one in RULES else f'"{one}"' for one in some) for some in alternatives)
        for name, alternatives in rules.items()
    )


def leads_to(places: dict[Any, Any], name: str, cut: set[Any]) -> set[str]:
    """The rule and those that it leads to without what is cut."""
    found = {name}
    for _ in RULES:
        found |= {where[0] for at, where in places.items() if at[0] in found and at not in cut}
    return found


def derived(rules: Rules, depth: int) -> set[str]:
    """The texts of `MOST` letters at most that are derived within `depth`, by the words of `grammar`'s docstring."""
    ends: set[str] = set()
    for _ in RULES:
        ends |= {name for name in rules for some in rules[name] if all(s in ends or s not in RULES for s in some)}
    rules = {name: [some for some in rules[name] if all(s in ends or s not in RULES for s in some)] for name in ends}
    if "start" not in rules:
        return set()
    order = ["start"]
    for name in order:
        order += [s for some in rules[name] for s in some if s in RULES and s not in order]
    places = {
        (name, i, j): (symbol, j == 0, j == len(some) - 1)
        for name in order
        for i, some in enumerate(rules[name])
        for j, symbol in enumerate(some)
        if symbol in RULES
    }

    def cycles(cut: set[Any]) -> dict[str, set[str]]:
        needs = {name: {places[at][0] for at in places if at[0] == name and at not in cut} for name in order}
        for _ in order:
            needs = {name: some | {two for one in some for two in needs[one]} for name, some in needs.items()}
        return {name: {one for one in needs[name] if name in needs[one]} for name in order}

    whole = cycles(set())
    nested = {at for at, (s, left, right) in places.items() if s in whole[at[0]] and not left and not right}
    cycle = cycles(nested)
    inside = {at: where for at, where in places.items() if at not in nested and where[0] in cycle[at[0]]}
    ladder = {
        at
        for at, (_, left, right) in inside.items()
        if right and not left
        if any(one[1] and not one[2] for other, one in inside.items() if other[0] in cycle[at[0]])
    }
    for at in sorted(nested, key=lambda at: (order.index(at[0]), at)):
        if at[0] not in leads_to(places, places[at][0], nested | ladder):
            nested.remove(at)

    levels = [(n, r) for n in range(depth + 1) for r in range(depth + 1)]
    found: dict[Any, set[str]] = {(name, level): set() for name in order for level in levels}
    while True:
        size = sum(map(len, found.values()))
        for name, (n, r) in found:
            for i, some in enumerate(rules[name]):
                here = {""}
                for j, symbol in enumerate(some):
                    at = (name, i, j)
                    if symbol not in RULES:
                        behind = {symbol}
                    elif at in nested:
                        behind = found.get((symbol, (n - 1, depth)), set())
                    elif at in ladder:
                        behind = found.get((symbol, (n, r - 1)), set())
                    elif symbol in whole[name]:
                        behind = found[symbol, (n, r)]
                    else:
                        behind = found[symbol, (depth, depth)]
                    here = {a + b for a in here for b in behind if len(a + b) <= MOST}
                found[name, (n, r)] |= here
        if sum(map(len, found.values())) == size:
            return found["start", (depth, depth)]


def check(rules: Rules, depth: int) -> None:
    """Compares the automaton with the enumeration for every text of `MOST` letters at most."""
    want = derived(rules, depth)
    try:
        made = grammar_automaton(written(rules), depth, 1000)
    except Refusal:
        assert not want, (written(rules), depth)
        return
    for text in texts("ab", MOST):
        assert accepts(made, text) == (text in want), (text, written(rules), depth)


symbol = st.sampled_from([*RULES, "a", "b"])
alternatives = st.lists(st.lists(symbol, max_size=3).map(tuple), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.fixed_dictionaries(dict.fromkeys(RULES, alternatives)), st.integers(0, 2))
def test_random_grammars_to_a_depth(rules: Rules, depth: int) -> None:
    check(rules, depth)


SHAPES: dict[str, Rules] = {
    "nested": {"start": [("a", "start", "b"), ("a",)]},
    "left": {"start": [("start", "a"), ("b",)]},
    "mutual to the right": {"start": [("a", "one"), ("b",)], "one": [("b", "start"), ("start",)]},
    "left and right": {"start": [("start", "a", "start"), ("b", "start", "b"), ("a",)]},
    "two cycles": {"start": [("a", "start", "b"), ("one",)], "one": [("b", "one", "a"), ("a",)]},
    "spared": {
        "start": [("a", "one", "b"), ("b", "start", "b"), ("a",)],
        "one": [("start", "a", "start", "a"), ("b",)],
    },
    "by two rules": {"start": [("a", "one")], "one": [("start", "b"), ("b",)]},
    "behind a call": {"start": [("a", "one", "a")], "one": [("b", "start", "b"), ("a",)], "two": [("two",)]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_recursion(name: str) -> None:
    for depth in range(3):
        check(SHAPES[name], depth)


def test_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested references that are taken for loops accept texts that no derivation gives."""
    right = grammar._places
    monkeypatch.setattr(grammar, "_places", lambda *where: ((one, True, True) for one, _, _ in right(*where)))
    with pytest.raises(AssertionError, match="start"):
        check(SHAPES["nested"], 1)


def test_depth_and_loops() -> None:
    """So many brackets and no more; recursion at one end has no bound."""
    for text in (ARITHMETIC, ARITHMETIC_IN_GBNF):
        for depth in range(4):
            made = grammar_automaton(text, depth, 1000)
            assert accepts(made, "(" * depth + "12" + ")" * depth)
            assert not accepts(made, "(" * (depth + 1) + "12" + ")" * (depth + 1))
            assert accepts(made, "1+2*3-" * 50 + "4")
            assert not accepts(made, "1+2*3-" * 50)
    flat = grammar_automaton('start: start "+" start | "(" start ")" | "1"', 1, 1000)
    assert accepts(flat, "1+1+1+1+1+(1+1+1)")
    assert not accepts(flat, "((1))")
    right = grammar_automaton('start: "a" start | ("b" start)? | "c"', 0, 100)
    assert accepts(right, "ab" * 50 + "c")
    json = grammar_automaton(JSON, 2, 1000)
    for good in ('{"a\\"": [1, -2.5e+3], "b": {} }', "[[[]]]", ' [ "日" ,TRUE , null ]  ', "[]"):
        assert accepts(json, good), good
    for bad in ("[[[1]]]", '{"a" 1}', '"a"b"', "[1,]", "[tru]", "\n[]"):
        assert not accepts(json, bad), bad


def test_two_notations_are_one() -> None:
    """Two grammars of arithmetic, one in each notation, have automata of one size that accept the same texts."""
    some = [grammar_automaton(text, 2, 1000) for text in (ARITHMETIC, ARITHMETIC_IN_GBNF)]
    assert len(some[0][0]) == len(some[1][0])
    for text in texts("1+(*)", 5):
        assert accepts(some[0], text) == accepts(some[1], text), text


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # Python's of classes within classes
@pytest.mark.parametrize(
    ("text", "letters"),
    [
        (ARITHMETIC, "1+()"),
        (ARITHMETIC + "\n%ignore /#+/", "1+#)"),
        ('start: start start | "a" start? "b" | ["c"] "d"', "abcd"),
        ('start: A~2..3 ("b" | one)+\none: "c"~2 start | "B"i\nA: "a" | "b".."c"', "abBc"),
        ("start: (/a(b|c)?/ start)* /[^a-b]/i", "abcA"),
        # Classes and repetitions that Rust's crate would read otherwise, or not at all.
        ("start: /[+--]+/", "+,-a"),
        ("start: /[a~~b]+|[--]{2}/", "a~b-"),
        ("start: /x[x[y]]+/", "x[y]"),
        ("start: /[a-z&&[^b]]+/", "ab&]"),
        (r"start: /[^()[\]]+/", "a[]("),
        (r"start: /[[\]]+[\^\-a]?/", "[]^-"),
        (r"start: /[]a\b\101-]{1,}/", "]A-\b"),
        ("start: /ba{,3}/ (/b{/ | /b{,}a/)*", "ab{"),
        (r"start: (/\07/ | /\101/ | /\<\>?/)+", "\aA<>"),
    ],
)
def test_what_lark_parses(text: str, letters: str) -> None:
    """Depth is no bound for texts that short."""
    parser = lark.Lark(text, parser="earley", lexer="dynamic_complete")
    made, count = grammar_automaton(text, 4, 4000), 0
    for one in texts(letters, 4):
        try:
            parser.parse(one)
            parsed = True
        except lark.exceptions.LarkError:
            parsed = False
        assert accepts(made, one) == parsed, one
        count += parsed
    assert count > 3


def test_the_rest_of_gbnf() -> None:
    made = grammar_automaton(
        'root ::= ("é" . | [^a-z\\n\\]] "x"{2}){1,2} Tail-1\nTail-1 ::= "\\"" | "\\u65e5"?', 0, 100
    )
    for good in ("éa", "é\n", "Axx", "éé日", 'Axxéz"', "日xx"):
        assert accepts(made, good), good
    for bad in ("", "é", "axx", "]xx", "Axxx", "éaéaéa"):
        assert not accepts(made, bad), bad


REFUSED = [
    ('start: "a" start', "derives no text, for its derivations never end"),
    ('start: "(" one ")"\none: "[" start "]" | "x" start "y" start', "derives no text, for its"),
    ("start: x", "whose rule 'start' names 'x', which it lacks; define it"),
    ('x: "a"', "without a rule 'start', from which"),
    ('expr ::= "a"', "without a rule 'root', from which"),
    ('start: A\nA: "x" A | "y"', "whose terminal 'A' needs itself"),
    ('start: A\nA: b\nb: "x"', "whose terminals name the rule 'b'"),
    ('start: "x"\nstart: "y"', "that defines 'start' twice"),
    ('start: t{"a"}\nt{x}: x', "with template usage, which is not kept here"),
    ('t{x}: x "a"\nstart: "b"', "with parameters of 't'"),
    ("%declare A\nstart: A", "with %declare, which is not kept here"),
    ("%override start: A", "with %override, which is not kept here"),
    ("%import python.NAME\nstart: NAME", "that imports 'python.NAME', and what is known here"),
    ("%import common.INT -> int\nstart: int", "that calls the terminal INT 'int'"),
    ('start: "a" & "b"', "that goes beyond Lark's notation in line 1, column 12"),
    ('start: "a"\n%json {}', "in line 2, column 1"),
    ("start: (", "that goes beyond Lark's notation"),
    ('root ::= "a" (', "that goes beyond GBNF's notation"),
    ("root ::= [z-a]", "with the range 'z' to 'a'"),
    ("root ::= []", "with the class '\\[\\]' without characters"),
    ('root ::= "a"{3,2}', "that repeats a part \\{3,2} times"),
    ('start: "a"~3..2', "that repeats a part from 3 to 2 times"),
    ('start: "a".."bc"', "whose ends are no characters in order"),
    ('start: "\\d"', r"with the escape '\\\\d', which is not known here"),
    ('start: "\\x00"', "which no text has"),
    ('start: "\\ud800"', "which no text has"),
    ("start: /a/x", "with the flags 'x' of '/a/x'"),
    ("start: /a$/", "whose terminal '/a\\$/' is no regular expression .* an anchor in it"),
    ("start: /\\ba/", "an anchor in it looks at what is beside it"),
    ("start: /a++/", "look-around, back-references and possessive repetitions are not kept here"),
    ("start: /[[:alpha:]]/", "the class \\[:alpha:\\] is not kept here; write it out"),
    ("start: /(?im)^a/", "of flags, i, s, u and x are kept here"),
    (r"start: /[\477]/", "octal escape value .* outside of range"),
    ("start: /a)|(b/", r"whose terminal '/a\)\|\(b/' is no .* unbalanced parenthesis at position 1\); mend it"),
    ("start: /a)|(b/i", "is no regular expression .* unbalanced parenthesis"),
    ('start: "a"~' + "9" * 5000, "that repeats a part '9{76}… times, and 9 digits are the most; lower that"),
    ('root ::= "a"{1,' + "0" * 5000 + "}", "that repeats a part '0{76}… times, and 9 digits are the most; lower that"),
    ('root ::= "a"{' + "9" * 5000 + "}", "and 9 digits are the most"),
    ("start: " + "x" * 5000, "names 'x{76}…, which it lacks"),
    ('start: "' + "x" * 5000 + '\\0"', "with the escape '.*', which is not known here"),
    ('start: "' + "x" * 5000 + '\\x00"', "with the string '\"x{75}…, which no text has"),
    ('root ::= "\\\x1b"', r"with the escape '.*x1b', which"),
    ("start: t\nt{" + "x" * 500 + '}: "a"', "with parameters of 't'"),
    ("start: a\na: A\nA: " + "b" * 500, "whose terminals name the rule 'b{76}…"),
    ("%import common.INT -> i" + "x" * 500, "calls the terminal INT 'ix{75}…"),
    ("%import " + "x" * 500 + ".A\nstart: A", "that imports 'x{76}…, and"),
    ('start: "a".."' + "b" * 500 + '"', 'with the range \'"a".."b*…, whose'),
    ("start: X\nX: X\n".replace("X", "X" * 500), "whose terminal 'X{76}… needs itself"),
    ('x: "a"\nx: "b"\n'.replace("x", "x" * 500), "that defines 'x{76}… twice"),
    ("start: /a(?=b)/", "whose terminal '/a\\(\\?=b\\)/' is no regular expression"),
    ("start: /(a)\\1/", "is no regular expression"),
    ('start: ("a"~1..1000)~1..1000', "has an automaton of over 1000 states"),
    ('start: ("a" | "b")* "a" ("a" | "b")~12', "takes over 64000 steps to be made"),
    ('start: ("a" | "b")* "a" ("a" | "b")~10', "has an automaton of 2048 states, and 1000 are the most"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        grammar_automaton(text, 1, 1000)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_depth_that_is_too_small() -> None:
    text = 'start: "a" one "b"\none: start | "c"'
    with pytest.raises(Refusal, match="derives no text within max_depth=0; raise it"):
        grammar_automaton(text, 0, 1000)
    assert accepts(grammar_automaton(text, 1, 1000), "acb")


def test_a_process_of_its_own_compiles_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of several bytes walk it; what is too large is refused with its sizes, and what to do."""
    tokens = [*(bytes([byte]) for byte in range(128)), b"((", b"1)", b")+2"]
    asked = expression_of({"type": "grammar", "grammar": ARITHMETIC})
    assert asked is not None
    assert asked.depth == GRAMMAR_DEPTH
    made = compile_expression(asked, tokens)
    alike = token_automaton(*grammar_automaton(ARITHMETIC, GRAMMAR_DEPTH, 1000), tokens, 1 << 19)
    np.testing.assert_array_equal(made.following, alike["following"])
    np.testing.assert_array_equal(made.classes, alike["classes"])
    assert made.reach[walk(made, [128, 129])] == 1, "a bracket is to be closed"
    assert made.reach[walk(made, [128, 129, 130])] == 0
    assert walk(made, [128, 130]) == walk(made, [128, 129, 130, 130]) == -1
    monkeypatch.setattr(automaton, "MAX_STATES", 10)
    with pytest.raises(
        ValueError, match=r"^response_format has an automaton of \d+ states, and 10 are the most; lower"
    ):
        compile_expression(asked, tokens)
    nasty = expression_of(
        {"type": "grammar", "grammar": "start: x\n" + 'x: "(" x ")" x | "[" x "]" x |', "max_depth": 99}
    )
    assert nasty is not None
    monkeypatch.setattr(automaton, "MAX_STATES", 1 << 20)
    monkeypatch.setattr(automaton, "SECONDS", 0.5)
    with pytest.raises(
        ValueError, match=r"takes more than 0\.5 s or 4 GiB to be made an automaton; lower max_depth, here 99"
    ):
        compile_expression(nasty, tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar": 1}, "grammar must be a text in Lark's notation or GBNF, got 1"),
        ({"grammar": " \n"}, "grammar must be a text"),
        ({"grammar": "start: \ud800"}, "grammar must be a text"),
        ({"grammar": "x" * 300_000}, "response_format has 300000 characters"),
        ({"grammar": "start:", "max_depth": -1}, "max_depth must be an integer from 0 to 100, got -1"),
        ({"grammar": "start:", "max_depth": True}, "max_depth must be an integer from 0 to 100, got True"),
        ({"grammar": "start:", "depth": 1}, "has the keys grammar, type, and max_depth if you like, got .*; give"),
        ({"max_depth": 1}, "has the keys grammar, type, and max_depth if you like, got"),
    ],
)
def test_formats_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        expression_of({"type": "grammar", **given})
    assert str(caught.value).startswith("response_format")
