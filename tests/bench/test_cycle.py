"""`run_cases` on shapes for a CPU, and what it refuses before it makes a weight."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from smcjax.bench import cycle
from smcjax.bench.cycle import Bench, Case, CycleResult, budget_of, run_cases
from smcjax.bench.models import Models, own_pages
from smcjax.decoders import SMC, Autoregressive
from smcjax.engine.run import memory
from smcjax.kv import TRASH

pytestmark = pytest.mark.compiled_at_once


def small(decoding: SMC | Autoregressive, **changes: Any) -> CycleResult:
    models = {
        name: changes.pop(name, default)
        for name, default in {
            "target": "tiny-target",
            "draft": "tiny-draft",
            "quantization": None,
            "draft_quantization": None,
            "attention": None,
        }.items()
    }
    return run_cases(Models(**models), [small_case(decoding, **changes)], bandwidth=1e10)[0]


def small_case(decoding: SMC | Autoregressive, **changes: Any) -> Case:
    fields = {"context": 8, "max_model_len": 48, "page_size": 4, "windows": 2, "cycles_per_window": 3}
    return Case(decoding, **{**fields, **changes})


@pytest.mark.slow
def test_figures_belong_together() -> None:
    decoding = SMC(2, 2, control=0)
    result = small(decoding, groups=2)
    advance = decoding.tokens_per_cycle
    assert len(result.ms_windows) == 2
    assert min(result.ms_windows) <= result.ms <= max(result.ms_windows)
    assert result.tokens_per_second == pytest.approx(2 * advance / result.ms * 1e3)
    assert result.weight_roofline_ms == pytest.approx(result.weight_bytes / 1e10 * 1e3)
    assert result.weight_roofline_fraction == pytest.approx(result.weight_roofline_ms / result.ms)
    assert result.roofline_ms >= result.weight_roofline_ms
    assert result.compile_seconds > 0
    assert result.flop_rate > 1e8
    assert result.scratch_bytes > 0
    assert result.held_weight_bytes > 1e5
    assert result.collectives is None, "of one device"


@pytest.mark.slow
def test_what_a_device_reads_is_measured_where_records_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cycle.measure_read_bandwidth(rows=1 << 10, sums=1) > 1e8
    monkeypatch.setattr(cycle, "measure_flop_rate", lambda _: 1e12)
    monkeypatch.setattr(cycle, "measure_read_bandwidth", lambda: 2e12)
    rates = []
    for on_cpu in (True, False):
        monkeypatch.setattr(cycle, "on_cpu", lambda: on_cpu)  # noqa: B023 - called at once
        rates.append(cycle.Rates.measure("float32", 3e12))
    assert rates == [cycle.Rates(3e12, 1e12), cycle.Rates(3e12, 1e12, 2e12)]


def test_synthetic_kv_quantised_weights_and_private_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cycle runs."""
    plain, quantised = Models("tiny-target", "tiny-draft"), Models("tiny-target", "tiny-draft", "int8", "int8")
    decoding = SMC(3, 2, control=0, ess_threshold=0.0)
    case = small_case(decoding, groups=2, context=10, private=5, synthetic_kv=True)
    bench = Bench(quantised, case, quantised.target_params("auto"), quantised.draft_params("auto"))
    jobs = {key: job for key, job in bench.wanted().jobs.items() if key[-1] != "step"}
    bench.runner.programs.compile("to begin", jobs)
    bench.start()
    state = bench.runner.state
    table, length = np.asarray(state.sequences.block_table), np.asarray(state.sequences.length)
    assert (length == 11).all()
    # Page 0 of each group's ten tokens is shared; pages 1 and 2 are each row's own.
    assert len(np.unique(table[:, 0])) == 2
    assert len(np.unique(table[:, 1:3])) == 12
    assert (table[:, 3:] == TRASH).all()
    counts = np.bincount(table.reshape(-1), minlength=case.num_pages)
    counts[TRASH] = 0
    np.testing.assert_array_equal(counts, state.memory.pool.refcount)
    assert int(state.memory.pool.num_free) == case.num_pages - 1 - 2 - 12
    keys = np.asarray(state.memory.target.keys[0])
    assert np.isfinite(keys).all()
    assert keys.std() == pytest.approx(1.0, abs=0.05)
    after = own_pages(state, 12)  # pages behind those that rows have
    np.testing.assert_array_equal(after.sequences.block_table, table)
    assert int(after.memory.pool.num_free) == case.num_pages - 1 - 2 - 12, "own pages of nothing change nothing"

    bench.runner.discard()
    monkeypatch.setattr(cycle, "compile_together", lambda benches: None)
    monkeypatch.setattr(Bench, "time_window", lambda bench: 1.0)
    result = bench.measure(cycle.Rates(1e10, 1e12))
    assert result.private == 5
    assert result.kv_bytes == sum(
        times * config.page_bytes(1) * 2 * (5 + 3 * 5)
        for times, config in ((2, plain.draft_config), (1, plain.target_config))
    )
    assert result.weight_bytes < 0.26 * sum(phase.times * phase.weight_bytes for phase in _float32_phases(decoding))
    assert bench.runner.memory is None


def test_a_sparse_target_counts_what_it_must_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cycle runs; such a target's does in `test_bench_sparse.py`."""
    monkeypatch.setattr(cycle, "compile_together", lambda benches: None)
    monkeypatch.setattr(Bench, "time_window", lambda bench: 1.0)
    monkeypatch.setattr(cycle, "measure_flop_rate", lambda dtype: 1e12)
    result = small(Autoregressive(), attention="nsa-shared", groups=2)
    assert result.attention == "nsa-shared"
    token = 2 * 2 * 32 * 4  # of keys and values, of one layer
    assert result.kv_bytes == 2 * 2 * 8 * token  # no token is compressed, and all lie in the window
    assert result.roofline_ms > result.weight_roofline_ms


def _float32_phases(decoding: SMC) -> list[Any]:
    models = Models("tiny-target", "tiny-draft")
    return cycle.cycle_phases(models.target_config, models.draft_config, decoding.speculation, groups=2, context=10)


def test_pages_are_those_that_the_cases_can_need() -> None:
    # 3 pages of the prompt shared and 9 of each row's own, for 2 requests of 4 rows; the trash page.
    smc = SMC(4, 2, control=0)
    assert small_case(smc, groups=2, context=12).num_pages == 1 + 2 * (3 + 4 * 9)
    assert small_case(smc, groups=2, context=12, private=4, synthetic_kv=True).num_pages == 1 + 2 * (2 + 4 * 10)
    assert small_case(Autoregressive(), groups=2, context=12).num_pages == 1 + 2 * 12


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target": "gpt-9"}, r"shape 'gpt-9' is unknown; use one of llama"),
    ({"draft": "gpt-9"}, r"shape 'gpt-9' is unknown"),
    ({"context": 40}, r"context 40 and 7 cycles of 3 tokens exceed max_model_len 48; raise"),
    ({"draft": "llama-3.2-1b"}, r"one vocabulary, got 512 and 128256"),
    ({"private": 4}, r"private must be 0, or less than context 8 with SMC and synthetic KV, got 4"),
    ({"private": 8, "synthetic_kv": True}, r"private must be 0, or less than context 8 .*, got 8"),
    ({"quantization": "int4"}, r"quantization must be 'int8', 'float8' or None .*, got 'int4'"),
    ({"draft_quantization": "fp8"}, r"draft_quantization must be 'int8', 'float8' or None"),
    ({"attention": "linear"}, r"attention 'linear' is unknown; use one of nsa, nsa-shared, or None"),
    ({"attention": "nsa", "page_size": 24}, r"page_size must be a multiple or a divisor of 64, .*, got 24"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_cannot_run_is_refused_at_once(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smcjax.bench.models.random_params", None)  # never reached
    with pytest.raises(ValueError, match=reason):
        small(SMC(2, 2, control=0), **changes)


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda: int(16e9))
    monkeypatch.setattr("smcjax.bench.models.random_params", None)
    with pytest.raises(ValueError, match=r"take 37\.1 GB \(.*\) and the device has 16\.0 GB; use smaller ones"):
        small(SMC(2, 2, control=0), target="llama-3.1-8b", draft="llama-3.2-1b", context=1)
    with pytest.raises(ValueError, match=r"take 32\.1 GB"):
        small(Autoregressive(), target="llama-3.1-8b", context=1)


def test_kv_that_does_not_fit_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    models, case = Models("tiny-target", "tiny-draft"), small_case(Autoregressive(), context=12)
    budget = budget_of(models, case)
    assert budget.kv == 13 * models.target_config.page_bytes(4)
    assert budget.left == budget.device - sum(budget.weights.values()) - budget.kv
    monkeypatch.setattr(memory, "device_memory", lambda: sum(budget.weights.values()) + 5)
    monkeypatch.setattr("smcjax.bench.models.random_params", None)  # never reached
    with pytest.raises(ValueError, match=r"1 request\(s\) of 12 tokens, up to max_model_len 48, .*; lower requests"):
        run_cases(models, [case])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_budget_is_what_the_weights_take(quantization: str | None) -> None:
    models = Models("tiny-target", "tiny-draft", quantization, quantization)
    held = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        for params in (models.target_params("auto"), models.draft_params("auto"))
    ]
    assert list(budget_of(models, small_case(SMC(2, 2, control=0))).weights.values()) == held
