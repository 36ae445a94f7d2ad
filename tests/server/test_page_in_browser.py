"""The page in Debian's Chromium, driven by playwright-core: NODE_PATH says where that is. Skipped without them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serve_page

from smcjax.engine.engine import Engine
from tests.server.conftest import SMC_NAME, Running, idle

DRIVER = Path(__file__).with_name("page_in_browser.cjs")
DEADLINE = 300.0  # seconds
SEED = 21  # page_in_browser.cjs asks with it too; its answer is long enough to be stopped on its way
TAG = "<img src=x onerror=\"document.title='run'\">"


def missing() -> str | None:
    """Names what this machine lacks, None where it has all."""
    for programs in (("node",), serve_page.BROWSERS):
        if not any(map(shutil.which, programs)):
            return f"no {programs[0]}"
    found = subprocess.run(["node", "-e", "require.resolve('playwright-core')"], capture_output=True, check=False)
    return "no playwright-core in NODE_PATH" if found.returncode else None


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no browser to look with: {missing()}")


class Gate:
    """Steps that engines may take: as many as were granted."""

    def __init__(self) -> None:
        self._granted = 0.0
        self._changed = threading.Condition()

    def grant(self, count: str) -> None:
        """Lets so many more be taken, "all" from now on, or "none"."""
        with self._changed:
            self._granted = 0.0 if count == "none" else self._granted + float(count.replace("all", "inf"))
            self._changed.notify_all()

    def pass_one(self) -> None:
        """Waits until a step may be taken, at most until the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._granted > 0, DEADLINE)
            self._granted -= 1

    @contextlib.contextmanager
    def before_steps(self) -> Iterator[None]:
        """Stands before each step of every engine, and is open afterwards."""
        step: Callable[..., Any] = Engine.step

        def gated(engine: Engine, hand_out: Callable[[], None] | None = None) -> Any:
            if hand_out is not None:
                hand_out()  # what the last step has brought does not wait for this one
            self.pass_one()
            return step(engine)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "step", gated)
            try:
                yield
            finally:
                self.grant("all")


def look(command: list[str]) -> dict[str, Any]:
    """Grants the engines' steps that the driver asks for, and returns what it prints at its end."""
    gate, said = Gate(), ""
    pipe = subprocess.PIPE
    with gate.before_steps(), subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as driver:
        timer = threading.Timer(DEADLINE, driver.kill)
        timer.start()
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            for said in driver.stdout:
                if said.startswith("steps "):
                    gate.grant(said.split()[1])
                    driver.stdin.write("\n")
                    driver.stdin.flush()
        finally:
            driver.wait()
            timer.cancel()
    assert driver.returncode == 0, "the driver broke off; it says why above"
    seen: dict[str, Any] = json.loads(said)
    return seen


@pytest.fixture(scope="module")
def seen(steering: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the driver on a trace and on live answers, and returns its report."""
    files = tmp_path_factory.mktemp("runs")
    ask = {"prompt": "ab", "seed": SEED, "max_tokens": 40, "smc": {"trace": True}}
    with steering.http() as http:
        trace = http.post("/v1/completions", json=ask)
    assert trace.json()["smc"]["cycles"] > 8, "another seed is needed, whose answer takes more cycles"
    (files / "trace.json").write_text(json.dumps(trace.json()["smc"]["trace"]))
    event = {"cycle": 0, "token_ids": [[1], [2]], "texts": [TAG, "b"], "lengths": [1, 1], "ancestors": [0, 1],
             "finished": [True, True], "resampled": False, "ess": None, "log_weights": None}  # fmt: skip
    end = {"end": {"selected": 0, "log_evidence": None, "weights": [0.75, 0.25]}}
    (files / "run.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(end)}\n")
    browser = next(filter(None, map(shutil.which, serve_page.BROWSERS)))
    command = ["node", str(DRIVER), steering.url, browser, str(files / "run.jsonl"), str(files / "trace.json")]
    return {**look(command), "expected": trace.json(), "idle": idle(steering.llm(), 60)}


def test_it_draws_while_the_answer_comes(seen: dict[str, Any]) -> None:
    """Five cycles were shown before the engine was let run to the end."""
    cycles = seen["live"]["cycles"]
    assert len(cycles) == 5
    assert cycles == sorted(set(cycles))
    assert cycles[-1] < seen["expected"]["smc"]["cycles"] - 1
    before, after = seen["live"]["ink"]
    assert before == 0
    assert after > 1000


def test_it_ends_with_the_answer(seen: dict[str, Any]) -> None:
    live, expected = seen["live"], seen["expected"]
    answer = expected["choices"][0]["text"]
    assert live["answer"] == answer
    assert live["marked"] == f"the answer, drawn {answer}"
    assert f"{expected['smc']['cycles']} cycles" in live["status"]
    assert f"particle {expected['smc']['selected']} answered" in live["label"]


def test_the_answer_stands_first_and_says_how_it_was_chosen(seen: dict[str, Any]) -> None:
    """Above the form in larger letters, with the weight of its text; without a population no weight is told."""
    live, expected = seen["live"], seen["expected"]
    answer, particles = expected["choices"][0]["text"], expected["smc"]["particles"]
    weight = 100 * sum(one["weight"] for one in particles if one["text"] == answer)
    share = f"{weight:.{int(weight < 9.95)}f}%"
    assert live["chosen"] == f"drawn from {len(particles)} particles; this text had weight {share}"
    below, larger = live["above"]
    assert below < 0
    assert larger > 1.2
    assert seen["controlled"]["chosen"] == ""


def test_the_picture_of_the_docs_can_be_made(steering: Running, tmp_path: Path) -> None:
    """As large as the one that is kept, of an answer as long as this pair gives."""
    made = tmp_path / "made.png"
    serve_page.photograph(steering.url, made, prompt="ab", seed=SEED, max_tokens=40)
    head = slice(24)  # signature, name and size
    assert made.read_bytes()[head] == serve_page.PICTURE.read_bytes()[head]
    assert made.stat().st_size > 30_000


def test_the_heaviest_is_not_called_drawn(seen: dict[str, Any]) -> None:
    assert seen["heaviest"] == "the heaviest of 2 particles; this text had weight 75%"


def test_the_whole_run_is_in_view(seen: dict[str, Any]) -> None:
    """Over a run wider than its window, and a click leads there; a run that fits has none."""
    whole = seen["work"]["whole"]
    assert whole["label"].startswith("The whole run: 300 cycles, resampled after ")
    assert all(whole["ink"])
    assert whole["middles"] == pytest.approx([0.25, 0.75], abs=0.01)
    assert seen["trace"]["overview"]
    assert not seen["run"]["overview"]


def test_a_control_is_sent_where_there_are_weights(seen: dict[str, Any]) -> None:
    told = seen["controlled"]
    assert told["said"] == [{"events": True}, {"events": True, "control": 0.5}, {"events": True}]
    assert told["disabled"]


def test_values_of_potentials_are_drawn(seen: dict[str, Any]) -> None:
    """A mark for each value, between the highest and the lowest; marks upside down, or none, would be seen."""
    told = seen["steered"]
    assert told["offered"] == ["b", "vowels"]
    assert told["said"] == {"events": True, "potentials": ["vowels"]}
    values, rows = set(told["values"]), told["rows"]
    high, low = max(values), min(values)
    places = [32 * (high - value) / (high - low) for value in values]  # pixels below the highest

    def drawn(places: list[float]) -> bool:
        alone = [row for row in rows if min(abs(row - place) for place in places) > 2]
        return not alone and all(min(abs(row - place) for row in rows) < 1 for place in places)

    assert drawn(places)
    assert not drawn([32 - place for place in places])
    assert told["undrawn"] == []


def test_the_bundled_pair_has_examples(seen: dict[str, Any]) -> None:
    """A click asks one; another pair has neither them nor the sentence."""
    assert seen["bundled"][0] is False
    assert "word problems" in seen["bundled"][1]
    texts, request = seen["example"]
    assert len(texts) == 3
    assert texts[0] == (request.get("prompt") or request["messages"][-1]["content"])


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
    assert seen["run"]["texts"] == [f"the answer {TAG}", "b"]
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


def test_dark_and_light_follow_the_system_or_the_button(seen: dict[str, Any]) -> None:
    """In the document and on the canvas."""
    light, dark, chosen = (seen["themes"][name] for name in ("light", "dark", "chosen"))
    assert light["body"] == chosen["body"] != dark["body"]
    assert light["canvas"] > 140 > 110 > dark["canvas"]
    assert chosen["canvas"] > 140


def test_a_frame_costs_the_same_however_long_the_run_is(seen: dict[str, Any]) -> None:
    """300 cycles of 64 particles: calls and changes of a frame stay, and it is laid out once; mistakes would show."""
    work, mistaken = seen["work"], seen["work"]["mistaken"]
    third, whole = work["calls"]
    assert third > 1000
    assert whole < 1.3 * third
    assert work["layouts"] < 1.5
    assert mistaken["calls"][1] > 2 * mistaken["calls"][0]
    assert mistaken["layouts"] > 1.5


def test_keys_reach_everything_in_order(seen: dict[str, Any]) -> None:
    assert seen["focused"] == "prompt"
    fields = ["max_tokens", "temperature", "seed", "control", "potentials", "key"]
    assert seen["order"] == ["send", "model", "", *fields, "scroller"]  # the nameless one folds the fields away


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
