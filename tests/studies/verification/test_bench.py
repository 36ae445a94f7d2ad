"""The plumbing of the verification benchmark, on a CPU: plain XLA only, and no device times."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from studies.verification import bench, cases, timing
from studies.verification.synthetic import rotations

SMALL = [
    cases.Case(3, 4, 0.5, 8, (*cases.PACKS, *cases.VERIFIES), in_program=True),
    cases.Case(3, 4, 0.5, methods=cases.SCANS, in_program=True),
    cases.Case(2, 5, 0.9, 8, ("verify: two launches", "verify: xla")),
]


def test_a_run_writes_host_visible_and_in_program_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "grid", lambda quick: [cases.fitted(case) for case in SMALL])
    output = tmp_path / "verify.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--output", str(output), "--no-torch", "--threads", "2"])
    bench.main()
    results = json.loads(output.read_text())
    assert results["failures"] == []
    assert results["notes"] == ["torch left out on request"]
    assert [set(record["times"]) for record in results["cases"]] == [
        {"pack: xla", "verify: xla"},
        {"scan: op by op", "scan: xla"},
        {"verify: xla"},
    ]
    for record in results["cases"]:
        assert record["floor"] > 0
        assert all(times["host, p95"] >= times["host"] > 0 for times in record["times"].values())
    assert "program" in results["cases"][0]["times"]["verify: xla"]
    assert "program" not in results["cases"][2]["times"]["verify: xla"]
    assert "goals: {}" in capsys.readouterr().out


def test_a_method_that_fails_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(draft: Any, target: Any, kv: Any) -> Any:
        acceptance, packed = bench.vp.verify_and_pack_reference(draft, target, kv)
        return acceptance, packed.at[0, 0].add(1)

    monkeypatch.setitem(cases.METHODS, "verify: wrong", bench.jax.jit(wrong))
    only = [cases.Case(2, 5, 0.9, 8, ("verify: wrong", "verify: xla"))]
    monkeypatch.setattr(bench, "grid", lambda quick: only)
    output = tmp_path / "verify.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--output", str(output), "--no-torch"])
    bench.main()
    results = json.loads(output.read_text())
    assert len(results["failures"]) == 1
    assert "result 4 differs" in results["failures"][0]
    assert results["cases"][0]["times"]["verify: wrong"] == {}
    assert results["cases"][0]["times"]["verify: xla"]["host"] > 0


FAKE_TORCH = """
import json, sys, time
cases = json.load(sys.stdin)
print("2.11 cuda", flush=True)
print('RESULT {"scan": {"host": 50.0, "device": null}}', flush=True)
END
"""


@pytest.mark.parametrize(
    ("end", "notes"),
    [
        ("sys.exit('no GPU left')", ["torch 2.11 cuda", "torch has 1 of 2 cases: no GPU left"]),
        ("time.sleep(60)", ["torch 2.11 cuda", "torch has 1 of 2 cases: stopped after 2 s"]),
        ("print('RESULT {}')", ["torch 2.11 cuda"]),
    ],
)
def test_what_the_peer_managed_is_kept(
    end: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_eager.py").write_text(FAKE_TORCH.replace("END", end))
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    monkeypatch.setattr(bench, "grid", lambda quick: [cases.Case(32, 8, 0.9), cases.Case(32, 8, 0.6)])
    run = bench.Run(bench.argparse.Namespace(quick=True, cases=None, no_torch=False, torch_timeout=2))
    run.torch()
    assert run.notes == notes
    assert run.records[run.cases[0]]["times"] == {"scan: torch": {"host": 50.0}}


def test_the_grid_is_that_of_the_issue() -> None:
    points = {tuple(case.point.values()) for case in cases.grid(quick=False)}
    assert len(points) == len(cases.grid(quick=False))
    for rows in (1, 4, 16, 32):
        for gamma in (8, 64, 128):
            for alpha in (0.3, 0.6, 0.9):
                assert {(rows, gamma, alpha, dim) for dim in (0, 128, 2048)} <= points
    assert {(32, gamma, 0.9, 0) for gamma in (4, 8, 16, 32, 64, 128)} <= points
    assert {(32, 128, 0.9, dim) for dim in (128, 512, 1024, 2048)} <= points
    assert {(rows, 128, 0.9, 2048) for rows in (64, 257, 1024)} <= points


def test_sets_of_buffers_are_more_than_200_mb_where_64_suffice() -> None:
    for shape in [(32, 128, 2048), (32, 128, 512), (1024, 128, 2048), (257, 128, 128)]:
        assert rotations(*shape) * 4 * shape[0] * shape[1] * shape[2] > 200e6
    assert rotations(1, 8, 128) == 64


def test_device_times_are_read_by_window(tmp_path: Path) -> None:
    """Two calls of two kernels each in one window, two of one in another; a kernel outside any; a copy on a stream."""

    def event(pid: int, ts: float, dur: float, name: str) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": pid, "ts": ts, "dur": dur, "name": name}

    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        event(2, 1000, 100, "window two launches 1 2|2"),
        event(2, 3000, 100, "window one 1 2|2"),
        event(2, 3000, 50, "something else"),
        *(event(1, 1000 + 20 * i, dur, "k") for i, dur in enumerate([1, 2, 3, 4])),
        event(1, 2000, 500, "flush"),
        event(1, 3010, 5, "k"),
        event(1, 3200, 9, "MemcpyD2D"),  # the clocks differ a little
    ]
    with gzip.open(tmp_path / "a.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert timing.device_times(tmp_path) == {
        "two launches 1 2": {"device": 5.0, "device, p95": 6.8, "launches": 2.0},
        "one 1 2": {"device": 7.0, "device, p95": 8.8, "launches": 1.0},
    }


def record(rows: int, gamma: int, **device: float) -> dict[str, Any]:
    times = {f"verify: {name.replace('_', ' ')}": {"device": value} for name, value in device.items()}
    return {"rows": rows, "gamma": gamma, "alpha": 0.9, "dim": 2048, "floor": 6.6, "times": times}


def test_goals_and_regret() -> None:
    records = [
        record(32, 128, one_launch=12.0, two_launches=14.0, one_block=300.0),
        record(32, 8, one_launch=4.0, two_launches=6.0, one_block=5.0),
        record(257, 128, one_launch=90.0, two_launches=60.0),
    ]
    goals = bench.goals(records)
    assert goals["stress"] == {"device": 12.0, "floor": 6.6, "ratio": 12 / 6.6, "met": True}
    assert goals["never slower"] == {"worst ratio": 1.0, "at": [257, 128, 0.9, 2048], "points": 3, "met": True}
    ours = bench.dispatchers(records)["one launch or two, by ids"]
    assert ours["as shipped"] == {"threshold": 8192, "mean regret": 0.0, "worst": 0.0}
    assert ours["always fused"]["worst"] == 0.5
    assert ours["best threshold"]["mean regret"] == 0.0
    theirs = bench.dispatchers(records)["one block or two launches, by expected bytes"]
    assert theirs["best threshold"] == {"threshold": 2 * 32 * 8 * 0.9 * 2048, "mean regret": 0.0, "worst": 0.0}
    assert theirs["never fused"]["worst"] == pytest.approx(0.2)


def test_a_trace_on_this_machine_has_the_windows(tmp_path: Path) -> None:
    """Annotations reach the trace with the options that the script sets."""
    options = timing.trace_options()
    with (
        bench.jax.profiler.trace(tmp_path, profiler_options=options),
        bench.jax.profiler.TraceAnnotation("window here|3"),
    ):
        bench.jax.block_until_ready(bench.jax.numpy.ones(3) + 1)
    trace = json.loads(gzip.decompress(next(tmp_path.rglob("*.trace.json.gz")).read_bytes()))["traceEvents"]
    found = [event for event in trace if event.get("name") == "window here|3"]
    assert len(found) == 1
    assert found[0]["ph"] == "X"
