"""The page in Debian's Chromium, driven by playwright-core: NODE_PATH says where that is. Skipped without them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import SMC_NAME, Running, idle, slow_steps

DRIVER = Path(__file__).with_name("page_in_browser.cjs")
TAG = "<img src=x onerror=\"document.title='run'\">"


def missing() -> str | None:
    """What this machine lacks."""
    for programs in (("node",), ("chromium", "chromium-browser", "google-chrome")):
        if not any(map(shutil.which, programs)):
            return f"no {programs[0]}"
    found = subprocess.run(["node", "-e", "require.resolve('playwright-core')"], capture_output=True, check=False)
    return "no playwright-core in NODE_PATH" if found.returncode else None


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no browser to look with: {missing()}")


@pytest.fixture(scope="module")
def seen(server: Running, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver saw."""
    files = tmp_path_factory.mktemp("runs")
    trace = http.post("/v1/completions", json={"prompt": "ab", "seed": 9, "max_tokens": 40, "smc": {"trace": True}})
    (files / "trace.json").write_text(json.dumps(trace.json()["smc"]["trace"]))
    event = {"cycle": 0, "token_ids": [[1], [2]], "texts": [TAG, "b"], "lengths": [1, 1], "ancestors": [0, 1],
             "finished": [True, True], "resampled": False, "ess": None, "log_weights": None}  # fmt: skip
    end = {"end": {"selected": 0, "log_evidence": None, "weights": [0.75, 0.25]}}
    (files / "run.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(end)}\n")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    command = ["node", str(DRIVER), server.url, browser, str(files / "run.jsonl"), str(files / "trace.json")]
    with slow_steps():
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "expected": trace.json(), "idle": idle(server.llm(), 2)}


def test_it_draws_while_the_answer_comes(seen: dict[str, Any]) -> None:
    cycles = seen["live"]["cycles"]
    assert len(cycles) >= 4
    assert cycles == sorted(cycles)
    before, after = seen["live"]["ink"]
    assert before == 0
    assert after > 1000


def test_it_ends_with_the_answer(seen: dict[str, Any]) -> None:
    live, expected = seen["live"], seen["expected"]
    answer = expected["choices"][0]["text"]
    assert live["answer"] == answer
    assert live["marked"] == f"answered {answer}"
    assert f"{expected['smc']['cycles']} cycles" in live["status"]
    assert f"particle {expected['smc']['selected']} answered" in live["label"]


def test_its_history_is_that_of_the_population(seen: dict[str, Any]) -> None:
    """Evidence from the weights, texts from the words; and neither where an event is missing."""
    whole, gap, smc = seen["law"]["whole"], seen["law"]["gap"], seen["expected"]["smc"]
    assert smc["resamples"] > 0
    assert whole["evidence"] == pytest.approx(smc["log_evidence"], abs=1e-4)
    assert whole["ended"] == smc["log_evidence"]
    assert whole["texts"] == [one["text"] for one in smc["particles"]]
    assert whole["weights"] == [one["weight"] for one in smc["particles"]]
    assert whole["alive"] == sorted(whole["alive"])
    assert gap["texts"] != whole["texts"]


def test_escape_stops_it(seen: dict[str, Any]) -> None:
    assert seen["aborted"] == "Stopped."
    assert seen["idle"]


def test_markup_stays_text(seen: dict[str, Any]) -> None:
    assert seen["turn"] == TAG
    assert seen["run"]["answer"] == TAG
    assert seen["run"]["texts"] == [f"answered {TAG}", "b"]
    assert seen["images"] == 0
    assert seen["title"] == "smcjax"
    assert seen["controls"]["images"] == 1
    assert seen["controls"]["title"] == "smcjax"  # the policy lets no handler run


def test_stored_runs_are_shown(seen: dict[str, Any]) -> None:
    answer, smc = seen["expected"]["choices"][0]["text"], seen["expected"]["smc"]
    assert seen["trace"]["answer"] == answer
    assert seen["trace"]["evidence"] == f"{smc['log_evidence']:.2f}".replace("-", "−")
    assert sum(answer in text for text in seen["trace"]["texts"]) >= 1
    assert seen["replayed"] == {"selected": 1, "first": "0", "answer": answer}


def test_keys_reach_everything_in_order(seen: dict[str, Any]) -> None:
    assert seen["focused"] == "prompt"
    assert seen["order"] == ["send", "model", "max_tokens", "temperature", "seed", "key", "scroller"]


def test_decoders_are_offered(seen: dict[str, Any]) -> None:
    assert seen["decoders"][0] == SMC_NAME
    assert "N = 4" in seen["described"]
    assert "K = 3" in seen["described"]


def test_nothing_goes_wrong_or_out(seen: dict[str, Any]) -> None:
    """No error in the console, no request elsewhere, and nothing wider than 360 pixels; all of it would be seen."""
    assert seen["errors"] == []
    assert seen["outside"] == []
    assert seen["overflow"] == 0
    assert seen["controls"]["errors"] > 0
    assert seen["controls"]["outside"] > 0
