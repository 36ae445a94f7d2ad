"""The examples run as they are, and print what their first lines say."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smcjax
from smcjax import LLM
from tests.checkpoints import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = "#### 5"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example's LLM has programs for one request at a time and for short answers, where it names neither."""
    monkeypatch.setattr(smcjax, "LLM", lambda *of, **how: LLM(*of, **{"max_num_seqs": 1, "max_model_len": 256, **how}))


def of_tiny_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layers: int = 1, **changes: Any) -> None:
    """An example's LLM has random models of bytes, whose programs take a tenth of the time; words are as they come."""
    pair = [write_model(tmp_path / name, 264, seed, num_layers=layers) for seed, name in enumerate(("target", "draft"))]

    def llm(*_: Any, **arguments: Any) -> LLM:
        return LLM(pair[0], **{"max_model_len": 640, **arguments, "draft_model": pair[1], **changes})

    monkeypatch.setattr(smcjax, "LLM", llm)


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the example as Python does, and returns what it prints."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_generate_prints_the_whole_population(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("generate", capsys)
    weights = [float(found) for found in re.findall(r"^ *([\d.]+)%", out, re.MULTILINE)]
    assert len(weights) == 8
    assert math.isclose(sum(weights), 100, abs_tol=0.5)
    assert RIGHT in out.partition("%")[0]


def test_stream_prints_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("stream", capsys).strip().endswith("#### 16")


def test_a_server_is_asked_by_the_official_client(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server decodes by the target alone, whose programs are compiled soonest."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as this process has it, `tests/passes.py` says why
    begin = subprocess.Popen
    more = ["--decoding", "autoregressive", "--max-num-seqs", "1"]
    monkeypatch.setattr(subprocess, "Popen", lambda command: begin([*command, *more]))
    assert RIGHT in printed("serve_and_ask", capsys)


def test_a_rule_of_ones_own_is_proved_and_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert RIGHT in printed("own_acceptance", capsys)


def test_evidence_compares_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("evidence", capsys)
    large, small, factor = (float(found) for found in re.findall(r"-?\d+\.\d+", out))
    assert -0.5 < small < large <= 0.01
    assert math.isclose(factor, large - small, abs_tol=0.011)


def test_a_verifier_steers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four shares of right answers, two at equal seconds, and a picture; the verifier sees what is wrong."""
    of_tiny_models(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "argv", ["verifier.py", "2", "2", "1.8", str(tmp_path / "verifier.svg")])
    alike, as_long = printed("verifier", capsys).split("as long:\n")
    found = [re.findall(r"^N = ([12]): (\d+\.\d{3}) s, +\d+\.\d% \(", part, re.MULTILINE) for part in (alike, as_long)]
    assert [n for n, _ in found[0]] == ["2"] * 4
    assert len(found[1]) == 2
    steered, fits = float(found[0][1][1]), float(found[1][0][1])
    assert fits <= 2 * steered or found[1][0][0] == "1", "no more of the target's answers than the time allows"
    assert "best of N by the verifier" in (tmp_path / "verifier.svg").read_text()
    verify = runpy.run_path(str(EXAMPLES / "verifier.py"))["verify"]
    texts = ["", "Tom has 12 - 7 = 5 apples", "Tom has 12 - 7 = 6 apples\nThat makes 3 * 4 = 13", "7 / 0 = 1"]
    assert verify("", texts) == [0, 0, -8, -4]


def test_a_judge_steers_a_style(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verdicts without the judge and with it, and a picture; `test_real_model.py` asks the real judge."""
    of_tiny_models(monkeypatch, tmp_path, layers=3, draft_model=None, draft_drop_layers=(1,))
    monkeypatch.setattr(sys, "argv", ["style.py", "2", "2", "1", str(tmp_path / "style.svg")])
    found = re.findall(r"^exponent (\d): [-+]\d+\.\d\d\. ", printed("style", capsys), re.MULTILINE)
    assert found == ["0", "1"]
    assert "<svg" in (tmp_path / "style.svg").read_text()


def test_enumeration_says_what_populations_near(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean evidence is the exact one, which is not 1 as without a potential; shares with the word rise with N."""
    monkeypatch.setattr(sys, "argv", ["enumerated.py", "64", "2", str(tmp_path / "enumerated.svg")])
    out = printed("enumerated", capsys)
    listed = re.search(r"^\d+ answers have ([\d.]+)% of the probability", out, re.MULTILINE)
    assert listed is not None
    assert 99.9 < float(listed[1]) <= 100
    rows = re.findall(r"^N = (\d): (\w+).* ([\d.]+) ± ([\d.]+), exactly ([\d.]+)$", out, re.MULTILINE)
    shares, evidences = (
        [tuple(map(float, row[2:])) for row in rows if row[1] == name] for name in ("share", "evidence")
    )
    assert len(shares) == len(evidences) == 2
    assert all(abs(mean - exact) < 2 * half for mean, half, exact in evidences), "within four standard errors"
    mean, half, _ = evidences[-1]
    assert mean - 1 > 2 * half, "negative control"
    assert shares[0][0] < shares[-1][0] < shares[-1][2]
    assert "<svg" in (tmp_path / "enumerated.svg").read_text()
