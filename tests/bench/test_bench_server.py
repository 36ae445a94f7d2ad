"""`scripts/bench_server.py`: rounds that count, and a server's own figures."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_server


@pytest.mark.parametrize(
    ("compiling", "counted"),
    [([], [1, 2]), ([0], [1, 2]), ([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0, 1, 2, 3, 4, 5, 6], [7, 8])],
)
def test_rounds_that_compile_do_not_count(
    compiling: list[int], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does the first one, whatever it does; each other one has the share of it that was spent waiting."""
    clock = itertools.count(0, 4)  # seconds: a round asks at its beginning and at its end
    monkeypatch.setattr(bench_server, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    state = {"compilations": 5.0, "waited_seconds": 1.0}

    def one(number: int) -> bench_server.Round:
        state["compilations"] += 2 * (number in compiling)
        state["waited_seconds"] += 1.0
        return {"output_throughput": number}

    rounds = bench_server.counted(2, one, lambda: dict(state))
    assert [each["output_throughput"] for each in rounds] == counted
    assert [each["waiting"] for each in rounds] == [0.25, 0.25], "one second of four"


def test_rounds_that_go_on_compiling() -> None:
    state = {"compilations": 0.0, "waited_seconds": 0.0}

    def one(number: int) -> bench_server.Round:
        state["compilations"] += 1
        return {"output_throughput": 1.0}

    with pytest.raises(RuntimeError, match="fewer than 3 had nothing to compile"):
        bench_server.counted(3, one, lambda: dict(state))
