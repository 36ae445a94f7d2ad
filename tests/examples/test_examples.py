"""The examples run as they are, and print what their first lines say."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = "#### 5"


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


@pytest.mark.slow
def test_a_server_is_asked_by_the_official_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert RIGHT in printed("serve_and_ask", capsys)


def test_a_rule_of_ones_own_is_proved_and_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert RIGHT in printed("own_acceptance", capsys)


def test_evidence_compares_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("evidence", capsys)
    large, small, factor = (float(found) for found in re.findall(r"-?\d+\.\d+", out))
    assert -0.5 < small < large <= 0.01
    assert math.isclose(factor, large - small, abs_tol=0.011)


@pytest.mark.slow
def test_a_verifier_steers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five shares of right answers; the verifier sees what is wrong and nothing else."""
    monkeypatch.setattr(sys, "argv", ["steer.py", "4", "4"])
    assert len(re.findall(r"^ *\d+\.\d%  ", printed("steer", capsys), re.MULTILINE)) == 5
    verify = runpy.run_path(str(EXAMPLES / "steer.py"))["verify"]
    texts = ["", "Tom has 12 - 7 = 5 apples", "Tom has 12 - 7 = 6 apples\nThat makes 3 * 4 = 13", "7 / 0 = 1"]
    assert verify("", texts) == [0, 0, -8, -4]
