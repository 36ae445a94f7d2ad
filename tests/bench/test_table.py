"""The table's rows, what it says of them, and the order in which they are timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax.bench import cycle
from smcjax.bench.cycle import Bench, CycleResult, described, run_cases
from smcjax.bench.models import Models
from smcjax.bench.table import markdown, standard_cases
from smcjax.decoders import SMC, Autoregressive

pytestmark = pytest.mark.compiled_at_once


def result(**changes: Any) -> CycleResult:
    fields: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(CycleResult)}
    fields |= {
        "decoding": "smc",
        "described": str(SMC(8, 8, control=0)),
        "groups": 1,
        "n_particles": 8,
        "gamma": 8,
        "context": 256,
        "private": 0,
    }
    fields |= {"ms": 10.0, "kv_bytes": 10**9, "bandwidth": 1e12, "weight_roofline_fraction": 0.5}
    fields |= {"max_model_len": 1024, "tokens_per_second": 900.0, "roofline_fraction": 0.51}
    fields |= {"ms_windows": [changes.get("ms", 10.0)]}
    return CycleResult(**{**fields, **changes})


def test_the_standard_cases() -> None:
    cases = standard_cases()
    assert all(case.synthetic_kv for case in cases)
    shapes = [
        (case.decoding.rows, case.decoding.tokens_per_cycle - 1, case.groups, case.context, case.private)
        for case in cases
    ]
    assert shapes == [
        (8, 8, 1, 256, 0),
        (8, 8, 1, 4096, 0),
        (8, 8, 1, 4096, 2048),
        (8, 8, 1, 16_384, 0),
        (8, 8, 1, 32_768, 0),
        (16, 8, 1, 256, 0),
        (8, 16, 1, 256, 0),
        (8, 8, 2, 1024, 0),
        (8, 8, 4, 1024, 0),
        (8, 8, 8, 1024, 0),
        (8, 8, 16, 1024, 0),
        (8, 8, 32, 1024, 0),
        (1, 0, 1, 256, 0),
    ]
    assert [case.decoding.ess_threshold for case in cases[:3] if isinstance(case.decoding, SMC)] == [0.5, 0.5, 0.0]
    assert cases[0].max_model_len == 1024
    assert cases[4].max_model_len == 33_024


def test_what_the_table_says() -> None:
    rows = [
        result(),
        result(context=4096, ms=12.5, kv_bytes=3 * 10**9),
        result(context=4096, private=2048, ms=15.0, kv_bytes=9 * 10**9),
        result(groups=32, context=1024, ms=40.0, kv_bytes=9 * 10**9),
        result(decoding="autoregressive", described=str(Autoregressive()), n_particles=1, gamma=0, ms=4.0),
    ]
    lines = markdown(rows).splitlines()
    assert "ms added over 256 tokens" in lines[0]
    assert lines[2] == "| SMC, N=8, K=8, 256 tokens | 1,024 | 10.00 | 900 | 50.0% | 51.0% | – | – |"
    assert lines[3] == "| SMC, N=8, K=8, 4,096 tokens | 1,024 | 12.50 | 900 | 50.0% | 51.0% | 2.50 | 2.00 |"
    assert "2,048 of them private to each particle (no resampling)" in lines[4]
    assert lines[4].endswith("| 5.00 | 8.00 |")
    assert lines[5].startswith("| SMC, N=8, K=8, 32 requests, 1,024 tokens |")
    assert lines[5].endswith("| – | – |")
    assert lines[6].startswith("| target alone, 256 tokens |")


def test_what_a_context_adds_is_the_median_of_differences_of_windows() -> None:
    """Here every window adds 1 ms, and the device slows down between them; medians of the cases differ by 3."""
    rows = [
        result(ms=10.0, ms_windows=[9.0, 10.0, 12.0]),
        result(context=4096, ms=13.0, ms_windows=[10.0, 13.0, 13.0], kv_bytes=3 * 10**9),
    ]
    assert markdown(rows).splitlines()[3].endswith("| 1.00 | 2.00 |")


def test_cases_that_differ_in_context_take_turns_and_all_share_one_set_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[str] = []
    made: list[str] = []
    for name in ("target_params", "draft_params"):
        make = getattr(Models, name)
        monkeypatch.setattr(Models, name, lambda self, how, name=name, make=make: made.append(name) or make(self, how))

    def time_window(bench: Bench) -> float:
        turns.append(described(bench.case))
        return float(len(turns))

    monkeypatch.setattr(Bench, "time_window", time_window)
    monkeypatch.setattr(cycle, "compile_together", lambda _: None)
    monkeypatch.setattr(cycle, "measure_flop_rate", lambda _: 1e12)
    cases = standard_cases(
        n_particles=2, gamma=2, contexts=[8, 16], requests=[1, 2], requests_context=12, page_size=4, windows=2, cycles=2
    )
    results = run_cases(Models("tiny-target", "tiny-draft"), cases, bandwidth=1e10, on_result=lambda _: None)
    contexts = [
        *(f"SMC, N=2, K=2, 1 request, context {what}" for what in ("8", "16")),
        "SMC, N=2, K=2, threshold 0, 1 request, context 16, of which 8 private",
        "SMC, N=2, K=2, 1 request, context 12",
    ]
    assert made == ["target_params", "draft_params"]
    assert turns[:8] == contexts * 2
    others = [name.split(", 1 request")[0].split(", 2 requests")[0] for name in turns[8:]]
    assert others[::2] == others[1::2] == ["SMC, N=4, K=2", "SMC, N=2, K=4", "SMC, N=2, K=2", "target alone"]
    assert [each.ms_windows for each in results] == [
        [1, 5],
        [2, 6],
        [3, 7],
        [9, 10],
        [11, 12],
        [4, 8],
        [13, 14],
        [15, 16],
    ]
