"""Automata over vocabularies: they accept what Python's `re` and `json` accept, token by token, however spelled."""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.model.files.hub import packaged_model
from smcjax.structured import automaton, automaton_child
from smcjax.structured.automaton import Automata, Automaton, Undecided, compile_expression
from smcjax.structured.automaton_child import byte_automaton, token_automaton
from smcjax.structured.byte_automata import Refusal, complement, minimal, product, utf8_ranges
from smcjax.structured.grammar import expression_automaton
from smcjax.structured.response_format import JSON_DEPTH, Expression, expression_of
from smcjax.tokenizer.token_bytes import token_bytes
from smcjax.tokenizer.tokenizer import Tokenizer
from tests import tokenizers_like

REGEXES = (
    r"1(\.[0-9]+)?([eE][+-][0-9]+)?",
    "a(bc)?d?",
    "(é|日本)+",
    "[^a]{1,2}",
    "",
    "yes|no|yesterday",
    "(a|b)*a(a|b){3}",
    r"(?i)yes|[^a-e]",
    r"\d+|\w\s?",
    r"^a|b$|a^b|(^|a)b*",
    "(?x) a b # and\n | c {2}",
)


def accepts(automaton: tuple[Any, Any], text: str) -> bool:
    """Walks the bytes."""
    table, ends = automaton
    state = 0
    for byte in text.encode():
        state = table[state, byte]
    return bool(ends[state])


@pytest.mark.parametrize("regex", REGEXES)
def test_bytes_are_those_of_re(regex: str) -> None:
    automaton = expression_automaton(regex, 1000)
    rng, letters = np.random.default_rng(0), "abcd1.eE+-日本é"
    texts = ["", "1", "1.5", "1.5e+2", "1e", "abc", "abcd", "ad", "yes", "yester", "yesterday", "no", "日本é日本", "\n"]
    texts += ["".join(rng.choice(list(letters), rng.integers(1, 6))) for _ in range(300)]
    for text in texts:
        assert accepts(automaton, text) == (re.fullmatch(regex, text) is not None), text
    if regex == "a(bc)?d?":
        assert len(automaton[0]) == 6, "behind nothing, a, ab, abc, and d of either kind; and a dead one"


@pytest.mark.parametrize("regex", ["a)|(b", "a)", "(?x)a #(\n)|b #", "[A-[b])|([x]", "a{2,1}", "a{" + "9" * 5000 + "}"])
def test_what_is_no_expression(regex: str) -> None:
    with pytest.raises(Refusal, match=r"^is no regular expression that has an automaton .*; mend it$") as caught:
        expression_automaton(regex, 100)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "regex", [r"a(?=b)", r"(?<!a)b", r"(a)\1", r"\bx", "a++", "(?>a)b", "(?m)^a", "[a&&b]", "[[:alpha:]]"]
)
def test_what_is_not_kept(regex: str) -> None:
    """Nothing is left out of an expression without a word, nor read where its readers differ."""
    with pytest.raises(Refusal, match="is no regular expression that has an automaton"):
        expression_automaton(regex, 100)


@pytest.mark.parametrize(
    "regex", ["a(?#)|(b)", r"a\)|\(b", "[)]|[(]b", "[]a)]|[^](]", r"(?x)(a) \# # (", r"\p{Lu}\P{L}"]
)
def test_brackets_that_are_none(regex: str) -> None:
    automaton = expression_automaton(regex, 2000)
    for text in ("a)", ")", "(b", "a#", "a", "b", "É1", "Éa", "é1"):
        wants = re.fullmatch(regex.replace(r"\p{Lu}\P{L}", "É1"), text) is not None
        assert accepts(automaton, text) == wants, text


def test_anchors_say_where() -> None:
    """Within an expression, too: what they look at is the whole text."""
    for regex in ("(^|a)b", "a($|b)", "(a$)*b?", "a^b|c", "^^a$$", "$^"):
        for text in ("", "a", "b", "ab", "aa", "c", "ba"):
            assert accepts(expression_automaton(f"(?:{regex})|zz", 100), text) == bool(re.fullmatch(regex, text)), text


@pytest.mark.parametrize("regex", ['"[a-z]{17,}"', '"([^"\\\\]|\\\\.){30}"', "a[^c]{40}b"])
def test_counts_within_quotes(regex: str) -> None:
    """They took 2ⁿ steps where the automaton could have begun anywhere in a text."""
    begin = time.process_time()
    expression_automaton(regex, 10_000)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("regex", ["a{1000000}", "((a{1000}){1000}){1000}", "(a{0,999}b?){9999}"])
def test_sizes_are_counted_before_anything_is_built(regex: str) -> None:
    begin = time.process_time()
    with pytest.raises(Refusal, match="has an automaton of over 32000 states"):
        expression_automaton(regex, 32_000)
    assert time.process_time() - begin < 0.1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_characters_of_a_range(one: int, two: int) -> None:
    """Each character is in one row of byte ranges where it is in the range, and in none elsewhere; surrogates never."""
    low, high = sorted((one, two))
    rows = list(utf8_ranges(low, high))
    for code in {0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF, low, high, (low + high) // 2}:
        if not 0xD800 <= code <= 0xDFFF:
            data = chr(code).encode()
            found = [
                row
                for row in rows
                if len(row) == len(data) and all(a <= x <= b for x, (a, b) in zip(data, row, strict=True))
            ]
            assert len(found) == (low <= code <= high)


def test_two_automata_at_once() -> None:
    """A product has what both have, and a complement all other texts."""
    one, two = expression_automaton("(ab|é)*", 100), expression_automaton(".{2,4}", 100)
    both, rest = product(one, two, 100), product(one, complement(two), 100)
    for text in ("", "ab", "é", "éé", "abé", "abab", "ababab", "ba", "éabé"):
        in_one, in_two = (re.fullmatch(regex, text) is not None for regex in ("(ab|é)*", ".{2,4}"))
        assert accepts(both, text) == (in_one and in_two)
        assert accepts(rest, text) == (in_one and not in_two)
    with pytest.raises(Refusal, match="matches no text"):
        product(one, complement(one), 100)


def test_a_hash_that_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of an even number of letters, whose two states have equal hashes: the exact comparison tells them apart."""
    table, ends = np.full((3, 256), 2, np.int32), np.array([True, False, False])
    table[0, ord("a")], table[1, ord("a")] = 1, 0
    ones = SimpleNamespace(integers=lambda *arguments: np.ones(arguments[2], np.uint64))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: ones)
    made = minimal(table, ends, 10)
    assert [accepts(made, "a" * count) for count in range(4)] == [True, False, True, False]


def walk(automaton: Automaton, tokens: list[int]) -> int:
    """The state behind the tokens, −1 where they lead nowhere."""
    state = 0
    for token in tokens:
        state = -1 if state < 0 else int(automaton.following[state, automaton.classes[token]])
    return state


def test_every_spelling_of_a_text_is_one() -> None:
    """Tokens within and across characters lead where their bytes lead; `reach` is the fewest tokens to an end."""
    spelled = [b"a", b"b", b"ab", b"\xe6\x97", b"\xa5", b"b\xe6", b"\x97\xa5", "日".encode(), b"", b"zz"]
    made = Automaton(**token_automaton(*expression_automaton("(ab日)+", 100), spelled, 1000))
    texts = [[0, 1, 3, 4], [2, 7], [0, 5, 6], [2, 3, 4, 2, 7]]
    ends = {walk(made, tokens) for tokens in texts}
    assert len(ends) == 1
    assert made.reach[ends.pop()] == 0
    assert made.reach[0] == 2
    for wrong in ([1], [0, 0], [8], [9], [2, 3, 3], [2, 7, 8]):
        assert walk(made, wrong) == -1
    assert made.following.shape[1] <= len(spelled)
    with pytest.raises(Refusal, match="no text that this model's tokens can spell"):
        token_automaton(*expression_automaton("c", 100), spelled, 1000)
    # Bytes of a dead end: tokens lead into "日" of which no token has the rest.
    dead_end = token_automaton(*expression_automaton("日|a", 100), [b"\xe6", b"a"], 1000)
    assert (dead_end["following"][0, dead_end["classes"]] >= 0).tolist() == [False, True]


def test_a_long_chain_takes_its_length() -> None:
    """A thousand required properties took 8 s, since each step looked at all states; this took 20 s."""
    length, kinds = 16_000, 30
    table = np.full((length + 2, 256), length + 1, np.int32)
    table[np.arange(length), np.arange(length) % kinds] = np.arange(1, length + 1)
    begin = time.process_time()
    made = token_automaton(table, np.arange(length + 2) == length, [bytes([byte]) for byte in range(kinds)], 1 << 19)
    assert time.process_time() - begin < 5
    np.testing.assert_array_equal(made["reach"], np.arange(length, -1, -1))


def test_json_to_a_depth() -> None:
    """Any value that Python writes, of so many levels; and nothing that it does not read."""
    an_object, a_list = (
        byte_automaton("json_schema", f'{{"type": "{kind}"}}', JSON_DEPTH - 1, 1 << 15) for kind in ("object", "array")
    )
    rng = np.random.default_rng(1)

    def value(depth: int) -> Any:
        kind = rng.integers(7 if depth else 5)
        if kind < 5:
            return ['é"\\/日', -1.5e30, 0, None, True][kind]
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.integers(3))]
        return {f"k{i}": value(depth - 1) for i in range(rng.integers(3))}

    for one in [value(JSON_DEPTH) for _ in range(300)]:
        text = json.dumps(one, ensure_ascii=False)
        assert accepts(a_list, text) == isinstance(one, list)
        assert accepts(an_object, text) == isinstance(one, dict)
        for mutation in (text[:-1], text + "}", text.replace(":", ""), text.replace(",", ",,", 1)):
            try:
                json.loads(mutation)
            except ValueError:
                assert not accepts(a_list, mutation), mutation
                assert not accepts(an_object, mutation), mutation
    deep: Any = 1
    for _ in range(JSON_DEPTH):
        deep = [deep]
    assert accepts(a_list, json.dumps(deep))
    assert not accepts(a_list, json.dumps([deep])), "a level too many"


def test_a_process_of_its_own_compiles_alike() -> None:
    tokens = [bytes([byte]) for byte in range(128)]
    forms = [
        expression_of({"type": "json_object"}),
        Expression("a+(b|c)"),
        expression_of({"type": "choice", "choice": ["a", "a|b", 'c"']}),
    ]
    for asked in forms:
        assert asked is not None
        made = compile_expression(asked, tokens)
        alike = token_automaton(*byte_automaton(asked.kind, asked.text, asked.depth, 32_000), tokens, 1 << 19)
        np.testing.assert_array_equal(made.following, alike["following"])
        np.testing.assert_array_equal(made.classes, alike["classes"])
        np.testing.assert_array_equal(made.reach, alike["reach"])
    assert made.reach[walk(made, [*b"a|b"])] == 0
    assert walk(made, [*b"b"]) == -1
    with pytest.raises(ValueError, match=r"^response_format is no regular expression .*; mend it\.$"):
        compile_expression(Expression("(a"), tokens)


ENDINGS = {  # what the child does: the error, its words, and whether it is kept
    "import os, signal; os.kill(os.getpid(), signal.SIGPROF)": (ValueError, "takes more than 10 s or 4 GiB", True),
    "import os; os.abort()": (ValueError, "takes more than 10 s or 4 GiB", True),
    f"import os; os._exit({automaton_child.OUT_OF_MEMORY})": (ValueError, "takes more than 10 s or 4 GiB", True),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (Undecided, "signal 9 ended that; ask again", False),
    "import time; time.sleep(600)": (Undecided, r"within 0\.5 s on a busy machine; ask again later", False),
    "raise KeyError('x')": (RuntimeError, r"response_format: \"KeyError: 'x'\"\.$", False),
}


@pytest.mark.parametrize("program", ENDINGS)
def test_how_the_process_ends(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts that are the machine's are forgotten; those that are the expression's are given again."""
    kind, words, kept = ENDINGS[program]
    automata = Automata(tokenizers_like.byte_level(), 300)
    with monkeypatch.context() as patch:
        patch.setattr(automaton, "CHILD", program)
        patch.setattr(automaton, "PATIENCE", 0.5 if "sleep" in program else 60)
        with pytest.raises(kind, match=words) as caught:
            automata.of(Expression("a+"), {0})
    assert caught.type is kind
    assert automata.keeps(Expression("a+"), {0}) == kept
    if kept:
        with pytest.raises(ValueError, match=words):
            automata.of(Expression("a+"), {0})
    elif kind is RuntimeError:
        assert automata.of(Expression("a+"), {0}).reach[0] == 1
        assert automata.keeps(Expression("a+"), {0})


def test_memory_that_python_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    np.savez(written, data=np.zeros(0, np.uint8), ends=np.zeros(0, np.int64))
    setup = b'{"bytes": -1, "seconds": 0, "kind": "regex", "text": "a", "depth": 0, "most_states": 9}'
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"%d\n%s" % (len(setup), setup + written.getvalue())))
    )
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: None)
    monkeypatch.setattr(automaton_child, "byte_automaton", lambda *request: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(SystemExit) as caught:
        automaton_child.main()
    assert caught.value.code == automaton_child.OUT_OF_MEMORY


@pytest.mark.parametrize("make", [tokenizers_like.byte_level, tokenizers_like.byte_fallback, tokenizers_like.metaspace])
def test_bytes_of_tokens_are_their_text(make: Any) -> None:
    """Any run of text tokens, in the middle of a text, is decoded as its bytes are."""
    tokenizer: Tokenizer = make()
    spelled, rng = token_bytes(tokenizer, len(tokenizer) + 3), np.random.default_rng(0)
    assert [spelled[id] for id in tokenizer.special_tokens.values()] == [b""] * len(tokenizer.special_tokens)
    assert spelled[-1] == b""
    before = tokenizer.encode("b")
    text_ids = sorted(tokenizer.text_ids)
    for _ in range(200):
        ids = rng.choice(text_ids, 6).tolist()
        want = b"".join(spelled[id] for id in [*before, *ids])
        try:
            text = want.decode()
        except UnicodeDecodeError:
            continue
        if "\ufffd" not in text:
            assert tokenizer.decode([*before, *ids]).strip() == text.strip()


def test_tokenizers_that_are_not_of_bytes() -> None:
    with pytest.raises(ValueError, match="has the decoder WordPiece; leave it out"):
        token_bytes(tokenizers_like.wordpiece(), 10)


def test_a_real_vocabulary() -> None:
    """SmolLM2's 49,152 tokens: JSON of a schema, as its own tokenizer splits it, is walked to an end."""
    tokenizer = Tokenizer.load(packaged_model("smollm2"))
    assert tokenizer is not None
    automata = Automata(tokenizer, 49_152)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["alpha", "beta"]},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "more": {"type": "object"},
        },
        "required": ["name", "kind", "zip"],
    }
    expression = expression_of({"type": "json_schema", "json_schema": {"schema": schema}})
    assert expression is not None
    made = automata.of(expression, {2})
    assert automata.of(expression, {2, 0}) is made, "special tokens are no text: the same automaton"
    good = {"name": 'Zoë 東京 "q"', "kind": "beta", "zip": "01234", "tags": ["a b", ""], "more": {"x": [1, None]}}
    for value in (good, {k: good[k] for k in ("name", "kind", "zip")}):
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            state = walk(made, tokenizer.encode(text))
            assert state >= 0
            assert made.reach[state] == 0
    for wrong in ({**good, "zip": "1234"}, {**good, "kind": "gamma"}, {"kind": "beta"}, {**good, "tags": ["a"] * 3}):
        state = walk(made, tokenizer.encode(json.dumps(wrong)))
        assert state < 0 or made.reach[state] > 0
    stop = tokenizer.encode('"')[0]
    with pytest.raises(ValueError, match="no text that this model's tokens can spell"):
        automata.of(Expression('"'), {stop})
