"""Potentials that the operator names: asked for in a request's `smc` object, never code from a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from smcjax import SamplingParams
from smcjax.cli.commands.serve import potentials_of
from tests.server.conftest import EXACT_NAME, NAMED, Running, events_of

ASK: dict[str, Any] = {"prompt": "ab", "seed": 3, "max_tokens": 24, "ignore_eos": True}


def test_a_request_names_them(steering: Running) -> None:
    """The answer is the engine's with these potentials."""
    with steering.http() as http:
        reply = http.post("/v1/completions", json={**ASK, "smc": {"potentials": ["vowels", "b"]}}).json()
        plain = http.post("/v1/completions", json={**ASK, "smc": {}}).json()
        listed = http.get("/v1/models").json()["data"][0]["smc"]["potentials"]
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, potentials=list(NAMED.values()))
    output = steering.llm().generate("ab", params, use_tqdm=False)[0]
    assert output.smc is not None
    assert reply["smc"]["log_evidence"] == pytest.approx(output.smc.log_evidence)
    assert reply["choices"][0]["text"] == output.outputs[0].text
    assert plain["smc"]["log_evidence"] != pytest.approx(output.smc.log_evidence)
    assert listed == ["b", "vowels"]


def test_events_say_what_each_particle_has(steering: Running) -> None:
    """What the weights after a cycle have of text potentials is the value of a beginning of the particle's text."""
    ask = {**ASK, "stream": True, "smc": {"potentials": ["vowels"], "events": True}}
    with steering.http() as http, http.stream("POST", "/v1/completions", json=ask) as response:
        events = [json.loads(data) for data in events_of(response) if data != "[DONE]"]
    cycles = [one["smc"]["cycle"] for one in events if one.get("smc", {}).get("cycle")]
    told = [one["log_potentials"] for one in cycles if one.get("log_potentials")]
    assert told
    assert any(any(values) for values in told)
    assert all(value == int(value) for values in told for value in values)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"smc": {"potentials": ["reward"]}}, "smc.potentials names 'reward', which is not here; use b, vowels."),
        ({"smc": {"potentials": ["vowels"]}, "model": EXACT_NAME}, "potentials weigh a population, but decoding is"),
        ({"smc": {"potentials": ["b"]}, "stop": "x"}, "stop strings cut answers behind which potentials of tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(steering: Running, fields: dict[str, Any], words: str) -> None:
    with steering.http() as http:
        response = http.post("/v1/completions", json={**ASK, **fields})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_server_without_any_says_so(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={**ASK, "smc": {"potentials": ["vowels"]}})
    assert response.status_code == 400
    assert "this server has none (serve --potential)" in response.json()["error"]["message"]


def test_the_option_imports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(
        "import smcjax\n"
        "def short(prompt, texts):\n    return [-len(text) for text in texts]\n"
        "lines = smcjax.TextPotential(short, ask='\\n')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    found = potentials_of(["short=rewards:short", "lines=rewards:lines"])
    assert found["short"].values("", ["ab"], whole=True) == [-2.0]
    assert found["lines"].ask == "\n"
    for wrong, words in {
        "rewards:short": "--potential must be NAME=MODULE:OBJECT",
        "x=rewards:nothing": "cannot be imported",
        "x=nowhere:short": "cannot be imported",
        "x=rewards:number": "it must be a potential or a function",
    }.items():
        with pytest.raises(ValueError, match=words):
            potentials_of([wrong])
