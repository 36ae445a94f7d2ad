"""Text as it becomes stream: final, whole characters, and in the end exactly the answer."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from smcjax import LLM, SMC, SamplingParams
from smcjax.engine.requests.requests import Request
from smcjax.engine.results import streaming
from smcjax.engine.results.completion import completion_of, first_stop
from smcjax.engine.results.running import Running, Times
from smcjax.engine.results.streaming import StablePrefixStream
from smcjax.engine.schedule.scheduler import Group
from smcjax.smc import SMCDecoder
from smcjax.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import EOS
from tests.helpers import tiny_config
from tests.tokenizers_like import KINDS

BYTES, BYTE_FALLBACK = KINDS["byte_level"], KINDS["byte_fallback"]


def request(*stops: str) -> Request:
    return Request("0", None, [1], SamplingParams(stop=list(stops) or None), 100, (EOS,), 0, 1)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[list[list[int]], list[int]]], int]:
    """Blocks of C tokens a row and ancestors, cycle by cycle; and who answers in the end."""
    n, c = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    token = st.sampled_from([*b"ab", *"é🎈".encode()])
    block = st.lists(st.lists(token, min_size=c, max_size=c), min_size=n, max_size=n)
    ancestors = st.one_of(st.just(list(range(n))), st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    cycles = draw(st.lists(st.tuples(block, ancestors), min_size=1, max_size=20))
    return cycles, draw(st.integers(0, n - 1))


@given(histories(), st.sampled_from([(), ("ab",), ("bab", "é")]))
def test_what_was_said_stays_said(
    history: tuple[list[tuple[list[list[int]], list[int]]], int], stops: tuple[str, ...]
) -> None:
    cycles, selected = history
    stream = StablePrefixStream(request(*stops), BYTES)
    rows = [[97] for _ in cycles[0][0]]
    emitted = [stream.begin(np.array([97] * len(rows)))]
    for block, ancestors in cycles:
        rows = [rows[a] + block[a] for a in ancestors]
        lengths = np.array([len(row) for row in rows])
        emitted.append(stream.advance(np.array(block), lengths, np.array(ancestors), np.ones(len(rows), bool)))
        together = "".join(text for text, _ in emitted)
        for row in rows:
            whole = BYTES.decode(row)
            cut = first_stop(whole, stops)
            answer = whole if cut is None else whole[:cut]
            # Only a character that is still open at the row's own end may be missing from it.
            assert answer.startswith(together) or (whole + "\ufffd").startswith(together)
            assert "\ufffd" not in together or "\ufffd" in whole[: len(together)]
    output = completion_of(request(*stops), rows[selected], BYTES)
    assert completion_of(request(*stops), rows[selected], BYTES, stream.text_of) == output
    assert stops or stream.text_of(rows[selected]) == BYTES.decode(rows[selected])
    assert stream.text_of([98, *rows[selected]]) is None, "that answer begins otherwise"
    emitted.append(stream.rest(output.text, output.token_ids))
    assert "".join(text for text, _ in emitted) == output.text
    assert [token for _, tokens in emitted for token in tokens] == output.token_ids


@pytest.mark.parametrize("resampled", [False, True])
def test_rows_lost_their_weight_only_where_nothing_was_resampled(resampled: bool) -> None:
    """The weights that a cycle reports are those from before its resampling, which gives every row the same again."""
    stream = StablePrefixStream(request(), BYTES)
    stream.begin(np.array([*b"aa"]))
    cycle = SimpleNamespace(
        length=np.array([2, 2]) + len(request().token_ids),
        resampled=resampled,
        log_weight=np.array([0.0, -np.inf]),
        ancestors=np.arange(2),
        finished=np.zeros(2, bool),
        tokens=np.array([[98], [99]]),
    )
    model = tiny_config()
    decoder = SMCDecoder(SMC(2, 1), model, model, 16)
    running = Running(Group(request(), 0), decoder, stream, None, Times(0.0, 0.0))
    chunk = running.news("cycle", cycle)
    assert (chunk.text if chunk else "") == ("" if resampled else "b")


def test_who_stops_reading_aborts(llm: LLM) -> None:
    before = llm.metrics()
    reader = llm.generate_stream("ab", SamplingParams(seed=0, max_tokens=40, ignore_eos=True))
    other = llm.generate_stream("cd", SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    next(reader)
    assert llm.metrics()["num_running"] >= 1
    reader.close()  # type: ignore[attr-defined]
    alone = llm.generate("cd", SamplingParams(seed=1, max_tokens=12, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert "".join(chunk.text for chunk in other) == alone.text
    after = llm.metrics()
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["kv_pages_free"] == before["kv_pages_total"]


def test_a_stream_that_someone_else_aborts_ends(llm: LLM) -> None:
    params = SamplingParams(seed=0, max_tokens=40, ignore_eos=True)
    streams = [llm.generate_stream("ab", params) for _ in range(6)]
    llm.engine.step()  # four of them run, two wait
    for number in range(6):
        llm.engine.abort(str(llm._preparer.count - 6 + number))
    for chunks in streams:
        *_, last = chunks
        assert last.finished
        assert last.output is not None
        assert last.output.outputs[0].finish_reason == "abort"
    assert llm.metrics()["kv_pages_free"] == llm.metrics()["kv_pages_total"]


def test_bad_streams_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt must be text or .*, got \['a', 'b'\]"):
        llm.generate_stream(["a", "b"])
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate_stream("")


@pytest.mark.parametrize("kind", ["alike", "apart", "letters", "junk"])
def test_a_cycle_costs_what_it_brings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens decoded and places made in the tree of rows: a few for each new token, of short answers and long ones."""
    work = {"decoded": 0, "places": 0}
    rng = np.random.default_rng(0)

    class Counting(Tokenizer):
        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            work["decoded"] += len(ids)
            return super().decode(ids)

    class Node(streaming._Node):
        def __init__(self, token: int, parent: streaming._Node | None) -> None:
            work["places"] += 1
            super().__init__(token, parent)

    monkeypatch.setattr(streaming, "_Node", Node)
    stream = StablePrefixStream(request("stop", "zzzz"), Counting(BYTES._inner, BYTES.vocab))
    stream.begin(np.array([97, 97, 97]))
    emitted, cycles = [1], 3000
    for cycle in range(cycles):
        block = {
            "alike": np.full((3, 2), 97 + cycle % 7),
            "apart": np.array([[97, 97], [98, 98], [99, 99]]),
            "letters": rng.integers(97, 122, (3, 2)),
            "junk": np.full((3, 2), 0xBF),
        }[kind]
        together = kind == "letters" and cycle % 5 == 4
        ancestors = np.zeros(3, int) if together else np.arange(3)
        lengths = np.full(3, 1 + 2 * (cycle + 1))
        emitted.append(len(stream.advance(block, lengths, ancestors, np.ones(3, bool))[1]))
    # The last replacement may yet become a character, so where there are stop strings tokens wait for what follows.
    assert (sum(emitted) + len(stream._held) > 5990) is (kind != "apart")
    assert kind == "junk" or not stream._held
    assert work["places"] < 3 * (2 * 3 * cycles)
    assert work["decoded"] < 8 * 2 * cycles


def test_a_stream_collected_in_the_middle_of_a_step_harms_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run anywhere, also where the batch's state is between two programs."""
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    alone = llm.generate("ab", params, use_tqdm=False)[0].outputs[0].token_ids
    cycle = type(llm.engine.runner).step

    def collecting(self: Any, *args: Any) -> Any:
        dropped.clear()
        gc.collect()
        return cycle(self, *args)

    for _ in range(3):
        dropped = [llm.generate_stream("cd", SamplingParams(max_tokens=30, seed=1, ignore_eos=True))]
        next(dropped[0])
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine.runner), "step", collecting)
            assert llm.generate("ab", params, use_tqdm=False)[0].outputs[0].token_ids == alone
    metrics = llm.metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
