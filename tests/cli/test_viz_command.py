"""`smcjax viz`: the path of the picture on stdout, or one sentence on stderr and nothing written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from smcjax.viz.trace_file import save_trace
from tests.cli.conftest import Command
from tests.cli.test_errors import assert_one_sentence
from tests.traces import history


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    save_trace(path, history(3, 4).output)
    return path


def test_beside_the_trace_by_default(smcjax: Command, trace: Path) -> None:
    result = smcjax("viz", str(trace))
    assert (result.code, result.out, result.err) == (0, f"{trace.with_suffix('.svg')}\n", "")
    assert ElementTree.parse(trace.with_suffix(".svg")).getroot().tag.endswith("svg")


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_where_it_is_told(smcjax: Command, trace: Path, tmp_path: Path, option: str) -> None:
    path = tmp_path / "tree.PNG"
    result = smcjax("viz", str(trace), option, str(path))
    assert (result.code, result.out, result.err) == (0, f"{path}\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "required: trace"),
        (["trace.json", "other.json"], "other.json"),
        (["trace.json", "-o"], "-o/--output"),
        (["trace.json", "--out", "x.svg"], "--out"),
        (["trace.json", "-o", "x.pdf"], "x.pdf is neither .svg nor .png"),
        (["trace.json", "-o", "missing/x.svg"], "missing/x.svg cannot be written"),
        (["trace.json", "-o", "directory.svg"], "directory.svg is not a regular file"),
        (["trace.svg"], "must not be the trace itself"),
        (["nothing.json"], "nothing.json does not exist"),
        (["cut.json"], "cut.json is not valid JSON (Unterminated string"),
        (["other.json"], "other.json is not a trace"),
    ],
)
def test_wrong_usage_is_2(
    smcjax: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.json").write_bytes(trace.read_bytes()[:-50])
    Path("other.json").write_text("{}")
    Path("trace.svg").write_bytes(trace.read_bytes())  # a trace by another name
    Path("directory.svg").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    result = smcjax("viz", *argv)
    assert result.code == 2
    assert reason in result.err
    assert len(result.err.splitlines()) == 1
    assert_one_sentence(result)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before
