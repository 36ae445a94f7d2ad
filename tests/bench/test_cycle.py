"""`bench_cycle` on shapes for a CPU, and what it refuses before it makes a weight."""

from __future__ import annotations

from typing import Any

import pytest

from smcjax.bench import cycle
from smcjax.bench.cycle import CycleResult, bench_cycle
from smcjax.smc import SMC


def small(decoding: SMC | None, **changes: Any) -> CycleResult:
    fields: dict[str, Any] = {
        "target": "tiny-target",
        "draft": "tiny-draft",
        "context": 8,
        "max_model_len": 48,
        "page_size": 4,
        "windows": 2,
        "cycles_per_window": 3,
        "bandwidth": 1e10,
    }
    return bench_cycle(decoding=decoding, **{**fields, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("decoding", [SMC(2, 2), None])
def test_figures_belong_together(decoding: SMC | None) -> None:
    result = small(decoding, groups=2)
    advance = 3 if decoding else 1
    assert len(result.ms_windows) == 2
    assert min(result.ms_windows) <= result.ms <= max(result.ms_windows)
    assert result.tokens_per_second == pytest.approx(2 * advance / result.ms * 1e3)
    assert result.weight_roofline_ms == pytest.approx(result.weight_bytes / 1e10 * 1e3)
    assert result.weight_roofline_fraction == pytest.approx(result.weight_roofline_ms / result.ms)
    assert result.roofline_ms >= result.weight_roofline_ms
    assert result.compile_seconds > 0
    assert result.flop_rate > 1e8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target": "gpt-9"}, r"shape 'gpt-9' is unknown; use one of llama"),
    ({"draft": "gpt-9"}, r"shape 'gpt-9' is unknown"),
    ({"context": 40}, r"context 40 and 7 cycles of 3 tokens exceed max_model_len 48; raise"),
    ({"draft": "llama-3.2-1b"}, r"one vocabulary, got 512 and 128256"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_cannot_run_is_refused_at_once(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle, "random_params", None)  # never reached
    with pytest.raises(ValueError, match=reason):
        small(SMC(2, 2), **changes)


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycle, "device_memory", lambda: int(16e9))
    monkeypatch.setattr(cycle, "random_params", None)
    with pytest.raises(ValueError, match=r"take 18\.5 GB and the device has 16\.0 GB; use smaller ones"):
        small(SMC(2, 2), target="llama-3.1-8b", draft="llama-3.2-1b", context=1)
    with pytest.raises(ValueError, match=r"take 16\.1 GB"):
        small(None, target="llama-3.1-8b", context=1)
