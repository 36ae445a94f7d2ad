"""Figures of the pages are those of the records in `scripts/benchmarks/results/`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pages
import pytest

from smcjax.bench.cycle import CycleResult


def test_no_page_is_stale() -> None:
    assert not pages.stale(), "run python scripts/benchmarks/pages.py"


def test_every_record_says_how_to_make_it_again() -> None:
    for path in pages.RESULTS.glob("*.json"):
        if path.stem != "rivals":
            read = json.loads(path.read_text())
            assert {"command", "commit", "dirty", "date", "machine", "rows"} <= read.keys(), path
            assert read["rows"], path


@pytest.mark.parametrize(
    ("page", "written", "false"),
    [
        ("docs/explanation/performance.md", r"(?<=\| )\d+(?= \| \d+\.\d%)", "901"),
        ("README.md", r"\d+(?=<!--compare_h200 0 tokens_per_second)", "900"),
    ],
)
def test_a_wrong_figure_is_seen(page: str, written: str, false: str) -> None:
    text = (pages.ROOT / page).read_text()
    wrong = re.sub(written, false, text, count=1)
    assert wrong != text
    assert pages.figured(wrong) == text


def test_a_number_of_a_cell_is_found() -> None:
    cells = ["16 requests, 32 tokens each", "1.10 (1,465)", "**.27**", "-0.4%"]
    assert [pages.value_of(cells, field) for field in ("0.1", "1", "1.1", "2", "3")] == [32, 1.1, 1465, 0.27, -0.4]
    assert pages.value_of({"ms": 2}, "ms") == 2.0
    text = "9<!--cpu_epyc 1 3.1 .0f--> tokens/s, 9<!--cpu_epyc 1/0 3.1 .1f--> times"
    assert pages.figured(text) == "465<!--cpu_epyc 1 3.1 .0f--> tokens/s, 8.9<!--cpu_epyc 1/0 3.1 .1f--> times"


def test_the_command_says_what_is_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("1<!--compare_h200 0 groups .0f--> and 3<!--compare_h200 0 gamma .0f-->")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PICTURE", tmp_path / "cycle.svg")
    assert pages.main(["--check"]) == 1
    assert capsys.readouterr().out == "README.md is stale\ncycle.svg is stale\n"
    assert pages.main([]) == 0
    assert page.read_text() == "1<!--compare_h200 0 groups .0f--> and 8<!--compare_h200 0 gamma .0f-->"
    assert pages.main(["--check"]) == 0


def test_records_of_the_benchmarks_take_the_place_of_transcribed_ones() -> None:
    result: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(CycleResult)}
    result |= {"described": "SMC, N=8, K=8", "groups": 2, "private": 16, "context": 4096}
    machine = {"device": "a card", "devices": 2, "bandwidth": None, "jax": "1.0"}
    made = {"command": "smcjax x", "commit": None, "dirty": True, "date": "2026-11-28", "machine": machine}
    compared = [{"contender": "ours", **result, "groups": 1}, {"contender": "theirs", "not_run": "no torch"}]
    lines = pages.cycles(made | {"rows": [result]}, made | {"rows": compared}).splitlines()
    assert lines[2:4] == [
        "| SMC, N=8, K=8, 2 requests, 4,096, 16 of them private | 1.00 | 1 | – | 100.0% |",
        "| ours, 1 request, 4,096 | 1.00 | 1 | 100.0% | 100.0% |",
    ]
    assert lines[5] == "*2 × a card, JAX 1.0, 2026-11-28, no commit and changes: `smcjax x`*"
