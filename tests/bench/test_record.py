"""A record says what ran, where and when, beside its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from smcjax.bench import record


def test_a_record_says_how_to_make_it_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/bin/smcjax", "bench", "table", "--save", "there.json", "--windows", "2"])
    path = tmp_path / "table.json"
    record.save(path, [{"ms": 1.5, "ms_windows": [1.0, 2.0]}], record.this_machine(2))
    saved = json.loads(path.read_text())
    assert list(saved) == ["command", "commit", "dirty", "date", "machine", "rows"]
    assert saved["command"] == "smcjax bench table --windows 2"
    assert saved["date"].startswith("20")
    assert (saved["machine"]["devices"], saved["machine"]["jax"]) == (2, jax.__version__)
    assert saved["rows"] == [{"ms": 1.5, "ms_windows": [1.0, 2.0]}]


def test_keys_are_left_out() -> None:
    said = record.command_line(["smcjax", "bench", "serve", "--api-key", "secret", "-n", "3", "--api-key=secret"])
    assert said == "smcjax bench serve -n 3"
    assert record.command_line(["smcjax", "eval", "--api-keys"]) == "smcjax eval --api-keys"  # a control


def test_a_script_is_named_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(record.ROOT / "scripts")
    assert record.command_line(["benchmarks/x.py", "a b"]) == "python scripts/benchmarks/x.py 'a b'"


def test_a_changed_file_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert (record.commit(), record.dirty()) == (None, None)  # installed, not a checkout
    (tmp_path / "pyproject.toml").write_text("a")
    assert record.commit() is None  # a copy without its history
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    assert len(str(record.commit())) == 12
    (tmp_path / "beside.json").write_text("{}")
    assert record.dirty() is False
    (tmp_path / "pyproject.toml").write_text("b")
    assert record.dirty() is True
