"""Times of requests: compiling is in none of them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.clock import SHORT, Clock
from tests.checkpoints import Pair
from tests.engine.conftest import llm_arguments

pytestmark = pytest.mark.compiled_at_once


@given(st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.01, 9)), max_size=6), st.lists(st.floats(0, 150), max_size=9))
def test_it_stands_still_while_programs_compile(spans: list[tuple[float, float]], moments: list[float]) -> None:
    """Between two moments it goes on by what of the time between lies outside the stops."""
    clock, now, stops = Clock(), 0.0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now)
        for work, compiling in spans:
            begin, now = now + work, now + work + compiling
            clock.stood_still(begin)
            stops.append((begin, now))
        now = max([now, *moments])
        assert clock.at() == clock.at(now)
        moments = sorted(moments)
        for before, after in itertools.pairwise(moments):
            still = sum(max(0.0, min(end, after) - max(begin, before)) for begin, end in stops)
            assert clock.at(after) - clock.at(before) == pytest.approx(after - before - still)
        begin, now = now, now + SHORT / 2
        clock.stood_still(begin)
        assert len(clock._stops) == len(stops), "a step that compiles nothing leaves nothing behind"


@pytest.mark.slow
def test_a_request_does_not_queue_while_programs_compile(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, for whose batch size there is no program yet; one that comes meanwhile; one that came before."""
    compile_all = Runner.compile

    def slowly(runner: Runner, *args: Any) -> None:
        time.sleep(2.0)
        compile_all(runner, *args)

    with LLM(**llm_arguments(pair, draft_model=None, decoding=Autoregressive(), max_num_seqs=1)) as llm:
        monkeypatch.setattr(Runner, "compile", slowly)
        names = []
        for earlier in (0.0, 5.0):
            request = llm.request("ab", SamplingParams(seed=1, max_tokens=2))
            llm.engine.add_request(request, arrived=time.perf_counter() - earlier)
            names.append(request.request_id)
        outputs = {output.request_id: output for output in llm.engine.step()}
        while llm.engine.busy:
            outputs |= {output.request_id: output for output in llm.engine.step()}
    first, second = (outputs[name].metrics for name in names)
    assert 0 <= first.queue_seconds < 1.5
    assert 5 <= second.queue_seconds < 6.5 + first.seconds
    assert first.seconds < 1.5
