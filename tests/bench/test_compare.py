"""The comparison's processes, without their work."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smcjax import SMC
from smcjax.bench.compare import BASELINE, contenders, markdown
from tests.cli.conftest import Command, smcjax

__all__ = ["smcjax"]

SHAPES = {"target": "tiny-target", "draft": "tiny-draft"}
FIGURES = {
    **SHAPES,
    "groups": 1,
    "context": 8,
    "bandwidth": 1e9,
    "ms": 12.345,
    "tokens_per_second": 1234.5,
    "weight_roofline_fraction": 0.4567,
}
SPECULATION = SMC(n_particles=2, gamma=3).speculation


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the commands instead of running them; all succeed but those in plain XLA, which exit with code 1."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(list(command))
        if command[-1] == "xla":
            return subprocess.CompletedProcess(command, 1, "")
        return subprocess.CompletedProcess(command, 0, "a table\n" + json.dumps(FIGURES) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def has_torch(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if found else None)


def test_all_three_run_in_turn(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    has_torch(monkeypatch, True)
    ran = contenders(["--context", "8"], ["--gamma", "3"], SPECULATION)
    assert [each.result for each in ran[:2]] == [FIGURES, None]
    assert ran[2].result is not None
    # A draft has 69,632 weights that a token goes through, the target 360,448; f32, at 1 GB/s.
    assert ran[2].result["weight_bytes"] == 4 * (3 * 69_632 + 360_448)
    assert ran[2].result["weight_roofline_fraction"] == pytest.approx(2.277376 / 12.345)
    assert "exit code 1" in ran[1].reason
    assert commands[0][-6:] == ["cycle", "--context", "8", "--json", "--implementation", "auto"]
    assert commands[2] == [sys.executable, str(BASELINE), "--gamma", "3"]
    assert BASELINE.exists()
    lines = markdown(ran).splitlines()
    assert lines[2] == "| this package | 12.35 | 1,234 | 45.7% |"
    assert lines[3].startswith("| this package, plain XLA | not run: it ended with exit code 1")
    assert lines[4] == "| PyTorch, torch.compile and one CUDA graph | 12.35 | 1,234 | 18.4% |"


def test_no_peer(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_torch(monkeypatch, False)
    assert contenders([], [], SPECULATION)[2].reason.startswith("torch is not installed")
    has_torch(monkeypatch, True)
    assert "does not exist" in contenders([], [], SPECULATION, baseline_script=tmp_path / "none.py")[2].reason
    assert len(commands) == 4


def test_the_command(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, smcjax: Command) -> None:
    has_torch(monkeypatch, False)
    arguments = ["bench", "cycle", "--compare", "--context", "99", "--bandwidth", "7", "--draft-quantization", "int8"]
    result = smcjax(*arguments, "--json")
    assert result.code == 1  # plain XLA failed
    assert "torch is not installed" in result.out
    report = json.loads(result.out.splitlines()[-1])
    assert report["this package"] == FIGURES
    assert report["this package, plain XLA"] is None
    text = " ".join(commands[0])
    assert "--context 99" in text
    assert "--bandwidth 7.0" in text
    assert "--draft-quantization int8" in text
    assert "shape" not in text  # each process takes those that its device is good for
    assert smcjax("bench", "cycle", "--compare", "--context", "1020").code == 2  # checked before anything runs
    assert len(commands) == 2


def test_the_peer_needs_the_shapes_of_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    has_torch(monkeypatch, True)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, ""))
    assert [each.reason[:15] for each in contenders([], [], SPECULATION)] == [
        "it ended with e",
        "it ended with e",
        "neither of ours",
    ]
