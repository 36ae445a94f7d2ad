"""An answer's text is that of the whole sequence behind its prompt, however it is cut into pieces."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from smcjax import SamplingParams
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.completion import completion_of, first_stop
from smcjax.engine.results.streaming import StablePrefixStream
from smcjax.engine.results.text import AnswerText, answer_text
from tests.tokenizers_like import KINDS

FALLBACK = KINDS["byte_fallback"]
BYTES = {"byte_fallback": 3, "byte_level": 0}  # the id of byte 0


def tokens_of(kind: str, *, most: int = 24) -> st.SearchStrategy[list[int]]:
    """Ids of all sorts: characters as bytes, stray bytes, words, specials, ids that no token has."""
    tokenizer = KINDS[kind]
    some = [st.sampled_from([[id] for id in sorted(tokenizer.vocab.values())]), st.just([9999])]
    some += [st.sampled_from([[id] for id in tokenizer.special_tokens.values()])]
    if kind in BYTES:
        zero = BYTES[kind]
        some.append(st.sampled_from(["\n", "é", "€", "🎈", "🎈🎈"]).map(lambda text: [zero + b for b in text.encode()]))
        some.append(st.sampled_from([[zero + byte] for byte in (0x0A, 0x20, 0x41, 0x80, 0xF0, 0x9F, 0xFF)]))
    others = [[id] for id in tokenizer.vocab.values() if id not in tokenizer.byte_ids]
    some.append(st.sampled_from(others))
    return st.lists(st.one_of(some), max_size=most).map(lambda parts: [id for part in parts for id in part])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    return kind, draw(tokens_of(kind)), draw(tokens_of(kind))


def by_definition(kind: str, prompt: list[int], answer: list[int]) -> str:
    decode = KINDS[kind].decode
    whole = decode([*prompt, *answer])
    before = decode(prompt)
    return whole[next((i for i, c in enumerate(before) if not whole.startswith(c, i)), len(before)) :]


@pytest.mark.slow
@settings(max_examples=200)
@given(cases())
@example(("byte_fallback", [1, FALLBACK.vocab["▁a"]], [FALLBACK.vocab["▁the"]]))
@example(("byte_fallback", [3 + 0xF0, 3 + 0x9F], [3 + 0x8E, 3 + 0x88, FALLBACK.vocab["b"]]))
@example(("byte_fallback", [1], [3 + 0x0A, 2, 3 + 0xF0, 3 + 0xF0]))
@example(("byte_level", [*"🎈".encode()][:3], [*"🎈".encode()][3:]))
def test_the_answer_is_what_the_whole_has_beyond_the_prompt(case: tuple[str, list[int], list[int]]) -> None:
    """With the whole prompt in front, of which `AnswerText` looks at the last tokens."""
    kind, prompt, answer = case
    assert answer_text(KINDS[kind], prompt, answer) == by_definition(kind, prompt, answer)


def test_the_prompt_matters() -> None:
    """Control: the answer by itself has another text, where decoders strip and where a character is begun."""
    the = FALLBACK.vocab["▁the"]
    assert (answer_text(FALLBACK, [FALLBACK.vocab["▁a"]], [the]), FALLBACK.decode([the])) == (" the", "the")
    level = KINDS["byte_level"]
    assert (answer_text(level, [0xC3], [0xA9]), level.decode([0xA9])) == ("é", "\ufffd")


def fewest(kind: str, prompt: list[int], answer: list[int], stops: list[str]) -> list[int]:
    """The leading tokens up to the first stop string of all of them, by trying every number."""
    whole = by_definition(kind, prompt, answer)
    cut = first_stop(whole, stops)
    if cut is None:
        return answer
    end = cut + min(len(stop) for stop in stops if whole.startswith(stop, cut))
    shown = answer[:-1] if answer[-1] == KINDS[kind].vocab["</s>"] else answer
    texts = (by_definition(kind, prompt, shown[:count]) for count in range(len(shown) + 1))
    return next(shown[:count] for count, text in enumerate(texts) if text.startswith(whole[:end]))


@settings(max_examples=200)
@given(cases(), st.data())
def test_streamed_is_whole(case: tuple[str, list[int], list[int]], data: st.DataObject) -> None:
    """For any tokenizer, tokens, stop strings and cycles; nothing that was emitted changes."""
    kind, prompt, answer = case
    tokenizer = KINDS[kind]
    if not answer:
        return
    whole = answer_text(tokenizer, prompt, answer)
    parts = [whole[i : i + size] for size in (1, 2, 3) for i in range(len(whole) - size + 1)]
    stops = data.draw(st.lists(st.sampled_from([*parts, "\ufffd", "zz"]), max_size=2))
    params = SamplingParams(stop=stops or None)
    request = Request("0", None, prompt, params, 10**6, (tokenizer.vocab["</s>"],), 0, 1)
    stream, emitted = StablePrefixStream(request, tokenizer), []
    emitted.append(stream.begin(np.array(answer[:1])))
    at = 1
    while at < len(answer):
        block = answer[at : at + data.draw(st.integers(1, 6))]
        at += len(block)
        emitted.append(stream.advance(np.array([block]), np.array([at]), np.array([0]), np.ones(1, bool)))
        text = "".join(text for text, _ in emitted)
        assert whole.startswith(text)
        assert first_stop(text, stops) is None
    output = completion_of(request, answer, tokenizer)
    assert completion_of(request, answer, tokenizer, stream.text_of) == output
    assert stops or stream.text_of(answer) == whole, "it was to be had from what has been decoded"
    emitted.append(stream.rest(output.text, output.token_ids))
    assert "".join(text for text, _ in emitted) == output.text
    assert [token for _, tokens in emitted for token in tokens] == output.token_ids
    assert not stops or output.token_ids == fewest(kind, prompt, answer, stops)
    cut = first_stop(whole, stops)
    if cut is not None:
        assert output.text == whole[:cut]
        assert first_stop(answer_text(tokenizer, prompt, output.token_ids), stops) is not None


@given(cases())
def test_text_comes_early(case: tuple[str, list[int], list[int]]) -> None:
    """At any time what is not emitted yet is one open character, or a run of byte tokens."""
    kind, prompt, answer = case
    tokenizer = KINDS[kind]
    text, emitted = AnswerText(tokenizer, prompt), ""
    for count, token in enumerate(answer, 1):
        emitted += text.feed(token)
        shown = [t for t in (*prompt, *answer[:count]) if t in tokenizer.text_ids]
        if shown and shown[-1] not in tokenizer.byte_ids:
            assert by_definition(kind, prompt, answer[:count]).removeprefix(emitted) in ("", "\ufffd")


@given(cases(), st.integers(0, 24))
def test_copies_go_on_by_themselves(case: tuple[str, list[int], list[int]], at: int) -> None:
    kind, prompt, answer = case
    text = AnswerText(KINDS[kind], prompt)
    emitted = "".join([text.feed(token) for token in answer[:at]])
    other = text.copy()
    for _ in range(3):
        other.feed(answer[0] if answer else 9999)
    emitted += "".join([text.feed(token) for token in answer[at:]])
    assert emitted + text.rest() == answer_text(KINDS[kind], prompt, answer)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_cost_of_a_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens decoded for each of 6,000, behind a prompt of 3,000, of all sorts and of bytes that make no text."""
    tokenizer, decoded = KINDS[kind], [0]
    decode = type(tokenizer).decode

    def counting(self: object, ids: list[int]) -> str:
        decoded[0] += len(ids)
        return decode(tokenizer, ids)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    rng = np.random.default_rng(0)
    for ids in (sorted(tokenizer.vocab.values()), [BYTES.get(kind, 3) + 0xBF if kind in BYTES else 3]):
        decoded[0] = 0
        text = AnswerText(tokenizer, [int(token) for token in rng.choice(ids, 3000)])
        assert decoded[0] <= 3000
        decoded[0] = 0
        for token in rng.choice(ids, 6000):
            text.feed(int(token))
        assert decoded[0] < 12 * 6000
