"""`smc` in requests and replies: the weighted population of `LLM.generate`, its history, and its cycles as they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from smcjax import SamplingParams
from smcjax.engine.results.completion import normalized
from smcjax.engine.results.outputs import Cycle
from smcjax.server.replies.population import Cycles, numbers
from smcjax.viz.trace_file import load_trace
from tests.server.conftest import EXACT_NAME, SMC_NAME, Running, events_of

ASK: dict[str, Any] = {"prompt": "ab", "seed": 3, "max_tokens": 40, "ignore_eos": True}


def asked(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.slow
def test_the_population_is_the_engines(server: Running, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {name: value for name, value in ASK.items() if name != "ignore_eos"}
    reply = client.completions.create(model="pair", **fields, extra_body={"ignore_eos": True, "smc": {}})
    told = (reply.model_extra or {})["smc"]
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    output = server.llm().generate("ab", params, use_tqdm=False)[0]
    assert output.smc is not None
    assert told["log_evidence"] == pytest.approx(output.smc.log_evidence)
    assert told["selected"] == output.smc.selected
    assert told["control"] == 0
    assert told["decoder"] == SMC_NAME
    assert told["routed"] is None
    particles = told["particles"]
    assert [one["token_ids"] for one in particles] == [one.token_ids for one in output.smc.particles]
    assert particles[told["selected"]]["text"] == reply.choices[0].text
    assert sum(one["weight"] for one in particles) == pytest.approx(1)
    np.testing.assert_allclose([one["log_weight"] for one in particles], output.smc.log_weights)
    assert "trace" not in told
    assert len(told["ess"]) == told["cycles"] == output.metrics.cycles


def test_only_who_asks_gets_it(http: httpx.Client) -> None:
    assert "smc" not in asked(http)
    assert "particles" not in asked(http, smc={"particles": False})["smc"]


def test_the_trace_opens_and_tells_the_same(http: httpx.Client, tmp_path: Path) -> None:
    """ESS is that of the weights; events, replayed afterwards, are the trace."""
    reply = asked(http, smc={"trace": True})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(reply["smc"]["trace"]))
    trace = load_trace(path)
    weights = np.array([normalized(row) for row in trace.log_weights])
    np.testing.assert_allclose(1 / (weights**2).sum(axis=1), reply["smc"]["ess"], rtol=1e-4)
    np.testing.assert_allclose(trace.ess, reply["smc"]["ess"])
    for _ in range(2):
        with http.stream("GET", f"/v1/smc/requests/{reply['id']}/events") as response:
            *events, end = [json.loads(event) for event in events_of(response)]
        assert end["end"]["selected"] == reply["smc"]["selected"]
        assert end["end"]["weights"] == [one["weight"] for one in reply["smc"]["particles"]]
        assert [event["cycle"] for event in events] == list(range(trace.cycles + 1))
        for name in ("ancestors", "lengths", "finished", "resampled", "ess"):
            np.testing.assert_allclose([event[name] for event in events[1:]], getattr(trace, name))
        texts, tokens = replayed(events)
        assert tokens == [one["token_ids"] for one in reply["smc"]["particles"]]
        assert texts == [one["text"] for one in reply["smc"]["particles"]]


def replayed(events: list[dict[str, Any]]) -> tuple[list[str], list[list[int]]]:
    """The rows' texts and tokens, each its ancestor's with what the cycle added."""
    rows = [("", list[int]()) for _ in events[0]["texts"]]
    for event in events:
        added = list(zip(event["texts"], event["token_ids"], strict=True))
        rows = [(rows[a][0] + added[a][0], rows[a][1] + added[a][1]) for a in event["ancestors"]]
    return [text for text, _ in rows], [tokens for _, tokens in rows]


def test_cycles_are_streamed_when_asked_for(http: httpx.Client) -> None:
    body = {**ASK, "stream": True}
    for smc, told in (({"events": True}, True), ({"trace": True}, False), ({}, False)):
        with http.stream("POST", "/v1/completions", json={**body, "smc": smc}) as response:
            chunks = [json.loads(event) for event in events_of(response)[:-1]]
        cycles = [chunk["smc"]["cycle"] for chunk in chunks if "cycle" in chunk.get("smc", {})]
        assert bool(cycles) == told
        last = chunks[-1]["smc"]
        assert last["particles"] == asked(http, smc=smc)["smc"]["particles"]
        if told:
            kept = http.get(f"/v1/smc/requests/{chunks[0]['id']}/events").text
            *replayed, end = [json.loads(line[6:]) for line in kept.split("\n") if line.startswith("data: ")]
            assert replayed == cycles
            assert end["end"]["log_evidence"] == last["log_evidence"]


def test_several_choices_have_a_population_each(http: httpx.Client) -> None:
    reply = asked(http, n=2, smc={})
    first, second = reply["smc"]["choices"]
    assert first["particles"][first["selected"]]["text"] == reply["choices"][0]["text"]
    assert second["particles"][second["selected"]]["text"] == reply["choices"][1]["text"]
    assert first["particles"] != second["particles"]


@pytest.mark.slow
def test_an_exact_decoder_answers_what_smc_cannot(server: Running, http: httpx.Client) -> None:
    fields = {"temperature": 0.0}
    reply = asked(http, model=SMC_NAME, **fields)
    assert reply["model"] == EXACT_NAME
    assert reply["smc"]["exact"] is True
    assert "temperature" in reply["smc"]["routed"]
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, **fields)
    exact = server.llm(EXACT_NAME).generate("ab", params, use_tqdm=False)[0].outputs[0]
    assert reply["choices"][0]["text"] == exact.text
    assert asked(http, model=SMC_NAME)["model"] == SMC_NAME  # a control


def test_what_is_not_finite_is_null() -> None:
    weights = np.array([0.0, -np.inf, 1.0], np.float32)
    assert numbers(weights) == [0.0, None, 1.0]
    assert normalized(weights).sum() == pytest.approx(1)
    assert normalized(weights)[1] == 0
    assert numbers(normalized(np.full(2, -np.inf))) == [None, None]


def test_texts_of_cycles_wait_for_whole_characters(server: Running) -> None:
    """Two rows, of which one has half of "é" when it is copied: both go on from there."""
    tokenizer = server.llm().tokenizer
    assert tokenizer is not None
    first, second = tokenizer.encode("é")
    (letter,) = tokenizer.encode("a")
    cycles = Cycles(tokenizer, [letter])

    def event(index: int, blocks: list[list[int]], lengths: list[int], ancestors: list[int]) -> dict[str, Any]:
        done = np.zeros(2, bool)
        return cycles.event(Cycle(index, blocks, np.array(lengths), np.array(ancestors), done))

    assert event(0, [[letter], [letter]], [1, 1], [0, 1])["texts"] == ["a", "a"]
    assert event(1, [[letter, letter], [letter, first]], [3, 3], [1, 1])["texts"] == ["aa", "a"]
    assert event(2, [[second, letter], [second, letter]], [5, 4], [0, 1])["texts"] == ["éa", "é"]
