"""The figures of `scripts/measure_control.py`, by hand from made-up answers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from smcjax.engine.results.outputs import CompletionOutput, RequestMetrics, RequestOutput, SMCOutput
from smcjax.tasks.intervals import clustered_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_control as script


def output(tokens: list[int], logprob: float, evidence: float) -> RequestOutput:
    return RequestOutput(
        "0",
        None,
        [1],
        [CompletionOutput(0, "", tokens, "length", [logprob] * len(tokens))],
        finished=True,
        metrics=RequestMetrics(cycles=2, resamples=0, generated_tokens=len(tokens), drafted=8, seconds=1.0),
        smc=SMCOutput(evidence, [], np.zeros(1, np.float32), 0, 0.1),
    )


def test_figures_by_hand() -> None:
    """Two prompts, each answered twice: prompts are the clusters, and the target's own figures are subtracted."""
    reference = script.Reference(np.array([-1.0, -2.0]), np.array([2.0, 1.0]), [[5, 6, 7], [8, 9, 9]])
    outputs = [
        *(output([5, 6, 0], -1.5, -1.0), output([8, 0, 0], -2.0, -3.0)),
        *(output([5, 6, 7], -0.5, -2.0), output([0, 9, 9], -4.0, -4.0)),
    ]
    row = script.figures("SMC", 0.1, outputs, reference, 1.0)
    assert row.tokens_per_cycle == pytest.approx(4 * 2 / 8)
    assert row.log_evidence == pytest.approx(clustered_mean([-1.5, -3.5]))
    assert row.log_probability == pytest.approx(clustered_mean([0.0, -1.0]))
    assert row.greedy_prefix == pytest.approx(clustered_mean([0.5, -0.5]))
    assert row.accepted is None
    assert "| SMC | 0.1 | 1.00 | -2.5 (" in script.markdown([row])


def test_common_prefix() -> None:
    assert [script.common_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2], [1, 3, 3], [2])] == [3, 2, 1, 0]


def test_interval_of_a_mean() -> None:
    mean, low, high = clustered_mean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert mean == 3.5
    assert (high - low) / 2 == pytest.approx(2.571 * np.std([1, 2, 3, 4, 5, 6], ddof=1) / 6**0.5, rel=0.01)
    assert clustered_mean([1.0]) == (1.0, -np.inf, np.inf)
    with pytest.raises(ValueError, match="need one number for each"):
        clustered_mean([])
