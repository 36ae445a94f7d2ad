"""The figures of `scripts/measure_endings.py`, by hand from made-up answers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from smcjax.engine.results.outputs import CompletionOutput, RequestMetrics, RequestOutput, SMCOutput
from smcjax.tasks.intervals import clustered_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_endings as script


def output(tokens: int, cycles: int, evidence: float | None) -> RequestOutput:
    smc = None if evidence is None else SMCOutput(evidence, [], np.zeros(1, np.float32), 0, 0.1)
    metrics = RequestMetrics(cycles=cycles, resamples=0, generated_tokens=tokens, drafted=8, seconds=1.0)
    answer = CompletionOutput(0, "", [1] * tokens, "stop")
    return RequestOutput("0", None, [1], [answer], finished=True, metrics=metrics, smc=smc)


def test_figures_by_hand() -> None:
    """Two prompts, each answered twice: prompts are the clusters."""
    outputs = [output(5, 2, 0.0), output(9, 4, np.log(0.5)), output(7, 2, np.log(2.0)), output(3, 2, np.log(0.25))]
    row = script.figures("SMC", outputs, np.array([4.0, 8.0]), 1.0)
    assert row.tokens_per_cycle == pytest.approx((4 + 8 + 6 + 2) / 10)
    assert row.cycles == pytest.approx(clustered_mean([2.0, 3.0]))
    assert row.longer == pytest.approx(clustered_mean([2.0, -2.0]))
    assert row.distance_at_most == pytest.approx(clustered_mean([0.0, (0.5 + 0.75) / 2]))
    assert "| SMC | 2.00 | 2.5 (" in script.markdown([row])
    exact = script.figures("rejection", [output(5, 2, None)] * 2, np.array([4.0, 8.0]), 1.0)
    assert script.markdown([exact]).endswith("| – | – |")
