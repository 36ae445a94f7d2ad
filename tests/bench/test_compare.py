"""The comparison's processes, without their work."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smcjax import SMC
from smcjax.bench import record
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
MACHINE = {"device": "a card", "bandwidth": 1e9}
SPECULATION = SMC(n_particles=2, gamma=3).speculation


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the commands instead of running them; all succeed but those in plain XLA, which exit with code 1."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        *asked_for, option, path = command
        assert option == "--save"
        asked.append(asked_for)
        if asked_for[-1] == "xla":
            return subprocess.CompletedProcess(command, 1)
        Path(path).write_text(json.dumps({"machine": MACHINE, "rows": [FIGURES]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def ran_badly(code: int) -> str:
    return f"it ended with exit code {code}; its message is above"


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
    assert ran[1].reason == ran_badly(1)
    assert commands[0][-6:] == ["bench", "cycle", "--context", "8", "--implementation", "auto"]
    assert commands[2] == [sys.executable, str(BASELINE), "--gamma", "3"]
    assert BASELINE.exists()
    lines = markdown(ran).splitlines()
    assert lines[2] == "| this package | 12.35 | 1,234 | 45.7% |"
    assert lines[3].startswith("| this package, plain XLA | not run: it ended with exit code 1")
    assert lines[4] == "| PyTorch, torch.compile and one CUDA graph | 12.35 | 1,234 | 18.4% |"


def test_the_command(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, smcjax: Command, tmp_path: Path
) -> None:
    has_torch(monkeypatch, False)
    arguments = ["bench", "cycle", "--compare", "--context", "99", "--bandwidth", "7", "--draft-quantization", "int8"]
    saved = tmp_path / "compare.json"
    monkeypatch.setattr(sys, "argv", ["smcjax", *arguments])
    monkeypatch.setattr(record, "commit", lambda: "c0ffee")
    monkeypatch.setattr(record, "dirty", lambda: False)
    result = smcjax(*arguments, "--save", str(saved))
    assert result.code == 1  # plain XLA failed
    assert "torch is not installed" in result.out
    report = json.loads(saved.read_text())
    assert (report["machine"], report["command"]) == (MACHINE, " ".join(["smcjax", *arguments]))
    assert report["rows"][0] == {"contender": "this package", **FIGURES}
    assert report["rows"][1] == {"contender": "this package, plain XLA", "not_run": ran_badly(1)}
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


def foreign_annotations(source: str) -> list[str]:
    """Annotations of Triton kernels that Triton, which looks them up as globals, does not know."""
    functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    kernels = [one for one in functions if any(ast.unparse(by) == "triton.jit" for by in one.decorator_list)]
    found = [ast.unparse(arg.annotation) for one in kernels for arg in one.args.args if arg.annotation is not None]
    return [name for name in found if not name.startswith("tl.")]


def test_kernels_of_the_baselines_have_annotations_of_triton_alone() -> None:
    """No GPU compiles them in CI, and a foreign name ends the comparison there."""
    sources = {path: path.read_text() for path in BASELINE.parents[1].rglob("*.py")}
    assert sum("@triton.jit" in source for source in sources.values()) > 0
    assert {str(path): found for path, source in sources.items() if (found := foreign_annotations(source))} == {}
    assert foreign_annotations("@triton.jit\ndef f(x: Any, N: tl.constexpr): ...") == ["Any"], "negative control"
