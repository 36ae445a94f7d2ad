"""response_format through the engine: every answer has its form, whatever is beside it; refusals before any work."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import time
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.engine.requests.requests import Request
from smcjax.engine.run.constraints import AutomatonPlaces
from smcjax.engine.schedule.scheduler import Schedule
from smcjax.structured import automaton
from smcjax.structured.automaton import Automaton
from tests.engine.test_engine import drain

PROMPT: dict[str, Any] = {"prompt_token_ids": [97, 98, 97, 99]}
NUMBER = {"type": "regex", "regex": r"^-?[0-9]{1,3}(\.[0-9]+)?$"}
CHOICE = {"type": "choice", "choice": ["yes", "no", "maybe not (é)"]}
OBJECT = {"type": "json_object"}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"items": {"type": "boolean"}}},
            "required": ["a", "b"],
        }
    },
}
FORMS: list[dict[str, Any] | None] = [NUMBER, CHOICE, OBJECT, SCHEMA, None]


def params(number: int, **changes: Any) -> SamplingParams:
    """A request's, with a form of its own; the schema's shortest text has 13 tokens."""
    return SamplingParams(
        max_tokens=16 + number % 9, seed=number, response_format=FORMS[number % len(FORMS)], **changes
    )


def has_form(form: dict[str, Any] | None, text: str) -> bool:
    """Judges a text without automata."""
    if form is None:
        return True
    if form["type"] == "regex":
        return re.fullmatch(form["regex"], text) is not None
    if form["type"] == "choice":
        return text in form["choice"]
    value = json.loads(text)
    if form is OBJECT:
        return isinstance(value, dict)
    known = {"a": int, "b": str, "c": list}
    return {"a", "b"} <= set(value) <= set(known) and all(isinstance(x, known[name]) for name, x in value.items())


@pytest.mark.parametrize("name", ["llm", "rejecting", "plain"])
def test_every_answer_has_its_form(name: str, request: pytest.FixtureRequest) -> None:
    """A model of random letters, at temperature 1, forms of all kinds side by side; who has none is as without them."""
    llm: LLM = request.getfixturevalue(name)
    numbers = range(30)
    outputs = llm.generate([PROMPT] * len(numbers), [params(number) for number in numbers], use_tqdm=False)
    stopped, at_the_cap = 0, 0
    for number, output in zip(numbers, outputs, strict=True):
        answer, form = output.outputs[0], FORMS[number % len(FORMS)]
        assert has_form(form, answer.text), (form, answer.text)
        assert len(answer.token_ids) <= 16 + number % 9
        if form is None and name == "llm":
            alone = llm.generate(PROMPT, params(number), use_tqdm=False)[0]
            assert alone.outputs[0].token_ids == answer.token_ids
        elif form is not None:
            assert answer.finish_reason == "stop", "whoever ends at the cap has a whole form too"
            by_token = answer.token_ids[-1] in llm.models.eos_token_ids
            stopped, at_the_cap = stopped + by_token, at_the_cap + (not by_token)
        if output.smc is not None:
            assert np.isfinite(output.smc.log_evidence)
            assert form is None or output.smc.log_evidence < -2, "letters are likely, and forms are not"
            assert form is None or output.smc.warning is None, "of a form that is no wonder"
    assert min(stopped, at_the_cap) > 0
    assert len({output.outputs[0].text for output in outputs}) > 10
    with pytest.raises(AssertionError):
        assert all(has_form(NUMBER, output.outputs[0].text) for output in outputs[4::5]), "control: without a form"


def walked(request: Request, answer: np.ndarray) -> int:
    """The state of a request's automaton behind these tokens, −1 for none, by its definition."""
    automaton, state = request.automaton, 0
    if automaton is None:
        return -1
    for place, token in enumerate(answer):
        left = request.limit - len(request.token_ids) - place
        state = int(automaton.following[state, automaton.classes[token]])
        if token in request.stop_ids or state < 0 or automaton.reach[state] >= left:
            return -1
    return state


def test_states_follow_ancestors_lanes_and_preempted_requests(llm: LLM) -> None:
    """After every step the states are those of walking along each row anew; who begins again gives the same answer."""
    engine, runner = llm.engine, llm.engine.runner
    alone = [llm.generate(PROMPT, params(number), use_tqdm=False)[0].outputs[0].token_ids for number in (3, 2, 8, 4)]
    requests = [llm.request(PROMPT, params(number)) for number in (3, 2, 8, 4)]
    forked, preempted, outputs = 0, False, {}
    for request in requests:
        engine.add_request(request)
        outputs |= {output.request_id: output for output in engine.step()}
    while engine.busy:
        rows = jax.tree.map(np.asarray, runner.state.sequences)
        for group in engine._scheduler.groups:
            own = slice(group.slot * 4, group.slot * 4 + 4)
            begin = len(group.request.token_ids)
            answers = [tokens[begin:end] for tokens, end in zip(rows.tokens[own], rows.length[own], strict=True)]
            if runner.state.running[group.slot]:
                assert rows.automaton[own].tolist() == [walked(group.request, answer) for answer in answers]
                forked += int(np.ptp(rows.automaton[own]) > 0)
        if len(engine._scheduler.groups) > 2 and not preempted and engine._scheduler.groups[-1].cycles > 1:
            preempted = True
            engine._enqueue(Schedule(engine._scheduler._size, preempted=[engine._scheduler._preempt()]))
        outputs |= {output.request_id: output for output in engine.step()}
    assert preempted
    assert forked, "rows of one request were in different states"
    assert [outputs[request.request_id].outputs[0].token_ids for request in requests] == alone
    assert not drain(engine)


def is_sum(text: str, depth: int) -> bool:
    """Judges by Python's parser: sums of 1 with so many levels of brackets; a, b, x and c stand for (, ), + and 1."""
    if set(text) - set("abcx"):
        return False
    written = text.translate(str.maketrans("abxc", "()+1"))
    levels = [written[:i].count("(") - written[:i].count(")") for i in range(len(written) + 1)]
    try:
        tree = ast.parse(written, mode="eval")
    except SyntaxError:
        return False
    known = ast.Expression, ast.BinOp, ast.Add, ast.Constant
    return max(levels) <= depth and "11" not in written and all(isinstance(node, known) for node in ast.walk(tree))


def test_answers_by_a_grammar(llm: LLM) -> None:
    """Brackets close by the cap, and no deeper than asked; letters, since the model is one of letters."""
    grammar = 'start: "a" sum "x" sum "b"\nsum: (sum "x")? part\npart: "c" | "a" sum "b"'
    form = {"type": "grammar", "grammar": grammar, "max_depth": 1}
    asked = [SamplingParams(max_tokens=12, seed=seed, response_format=form) for seed in range(20)]
    texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 20, asked, use_tqdm=False)]
    assert all(is_sum(text, 2) for text in texts), texts
    assert all(text[0] == "a" and "x" in text for text in texts), texts
    assert not any(is_sum(text, 2) for text in ("cx", "acb" * 2, "aaacbbb", "xc", "cc", "ac", "+c")), "control"


@pytest.mark.slow
def test_greedy_and_truncated(plain: LLM) -> None:
    """The mask comes first: the likeliest, or the k likeliest, of the allowed tokens."""
    for changes in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        output = plain.generate(PROMPT, params(1, **changes), use_tqdm=False)[0].outputs[0]
        assert output.text == "maybe not (é)", "m is the likeliest letter of y, n and m"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop": "x"}, "stop is 'x' and response_format says where an answer ends"),
        ({"min_tokens": 1}, "min_tokens is 1 and response_format says where an answer may end"),
        ({"ignore_eos": True}, "needs a token that ends the answer, and here is none"),
        ({"max_tokens": 1}, "asks for an answer of 2 tokens at least, and max_tokens and max_model_len leave 1"),
        ({"response_format": {"type": "grammar", "grammar": "start: a"}}, "names 'a', which it lacks; define it"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "is no regular expression that has an automaton"),
        ({"response_format": {"type": "regex", "regex": "a{9}(?=b)"}}, "is no regular expression"),
        ({"response_format": {"type": "regex", "regex": "[a&&b]"}}, "is no regular expression that has an automaton"),
        ({"response_format": "json"}, "must be a mapping such as"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "must be a mapping with a 'schema'"),
        ({"response_format": {"type": "json_object", "more": 1}}, "has the keys type, got"),
    ],
)
def test_refusals(plain: LLM, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain.generate(PROMPT, SamplingParams(**{"response_format": CHOICE, "max_tokens": 20, **change}))


def test_what_is_too_large(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"type": "regex", "regex": "(a|b)*a(a|b){22}"}  # 2²² states
    monkeypatch.setattr(automaton, "SECONDS", 1.0)
    with pytest.raises(ValueError, match="takes more than 1 s or 4 GiB to be made an automaton; simplify it"):
        plain.generate(PROMPT, SamplingParams(response_format=asked))
    began = time.perf_counter()
    with pytest.raises(ValueError, match="takes more than 1 s"):
        plain.generate(PROMPT, SamplingParams(response_format=asked))
    assert time.perf_counter() - began < 1.0, "what is refused is kept as well"
    monkeypatch.setattr(automaton, "MAX_CELLS", 20)
    with pytest.raises(ValueError, match="31 states and 3 classes of tokens, 93 cells, and 20 are the most,"):
        plain.generate(PROMPT, SamplingParams(response_format={"type": "regex", "regex": "[0-9]{1,29}[a-z]"}))


def test_what_is_missing(plain: LLM, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SamplingParams(response_format={"type": "text"}, stop="x").expression is None
    monkeypatch.setattr(plain._preparer.automata, "_tokenizer", None)
    with pytest.raises(ValueError, match="request 0: response_format needs a tokenizer"):
        plain.generate(PROMPT, SamplingParams(response_format=OBJECT))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lark" else find(name))
    with pytest.raises(ValueError, match="request 0: response_format needs lark, which is not installed; run"):
        llm.generate(PROMPT, SamplingParams(response_format={"type": "grammar", "grammar": "start:"}))
    assert llm.generate(PROMPT, SamplingParams(response_format=OBJECT), use_tqdm=False)
    assert isinstance(plain.decoding, Autoregressive)


def test_places_of_automata() -> None:
    """Requests of one form share a place; what was there stays as long as nobody needs the place."""
    some = [Automaton(np.full((1, 1), k, np.int16), np.zeros(4, np.int32), np.zeros(3, np.int32)) for k in range(3)]
    places = AutomatonPlaces(4)
    index, tables = places.place({0: some[0], 1: some[0]}, 2)
    assert index.tolist() == [0, 0]
    assert tables is not None
    index, tables = places.place({1: some[1]}, 2)
    assert index.tolist() == [-1, 1]
    assert tables is not None
    assert tables.following[:, 0].tolist() == [0, 1]
    assert places.place({0: some[0], 1: some[1]}, 2)[1] is None
    index, tables = places.place({0: some[2], 1: some[1]}, 2)
    assert index.tolist() == [0, 1]
    assert tables is not None
    assert tables.following[:, 0].tolist() == [2, 1]
    index, tables = places.place({3: some[2]}, 4)
    assert tables is not None, "another size has tables of its own"
