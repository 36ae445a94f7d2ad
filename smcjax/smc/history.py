"""A population's history on the host, cycle by cycle: what a trace keeps and an observer sees, made in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smcjax.smc.state import Info


class History:
    """Turns one group's `Info` of each cycle, as host arrays, into the fields of `smcjax.engine.outputs.Cycle`."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._lengths: np.ndarray | None = None  # [N] after the last cycle; None: one token each
        self._log_evidence = 0.0  # up to the last resampling
        self.cycles = 0

    def add(self, info: Info) -> dict[str, Any]:
        """The fields of the next cycle."""
        n = len(info.length)
        before = np.ones(n, np.int32) if self._lengths is None else self._lengths
        grown = np.asarray(info.weighed) - self._prompt_length - before
        self._lengths = np.asarray(info.length, np.int32) - self._prompt_length
        self.cycles += 1
        evidence = self._log_evidence + _log_mean(np.asarray(info.log_weight, np.float64))
        if info.resampled:
            self._log_evidence = evidence
        return {
            "index": self.cycles,
            "blocks": [row[:count].tolist() for row, count in zip(np.asarray(info.tokens), grown, strict=True)],
            "resampled": bool(info.resampled),
            "ancestors": np.asarray(info.ancestors, np.int32),
            "lengths": self._lengths,
            "finished": np.asarray(info.finished, np.bool_),
            "ess": float(info.ess),
            "log_weights": np.asarray(info.log_weight, np.float32),
            "log_evidence": evidence,
        }


def trace_of(cycles: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    """Stacks the fields of all cycles C into those of `smcjax.engine.outputs.Trace` of N = `n` particles."""

    def stacked(name: str, dtype: type, *shape: int) -> np.ndarray:
        return np.array([cycle[name] for cycle in cycles], dtype).reshape(len(cycles), *shape)

    return {
        "ess": stacked("ess", np.float32),
        "resampled": stacked("resampled", np.bool_),
        "ancestors": stacked("ancestors", np.int32, n),
        "log_weights": stacked("log_weights", np.float32, n),
        "lengths": stacked("lengths", np.int32, n),
        "finished": stacked("finished", np.bool_, n),
        "tokens": [cycle["blocks"] for cycle in cycles],
        "log_evidences": stacked("log_evidence", np.float64),
    }


def _log_mean(log_weights: np.ndarray) -> float:
    """log of the mean weight; −inf where all are 0, NaN where one is no number."""
    top = np.max(log_weights)
    if not np.isfinite(top):
        return float(top)
    return float(top + np.log(np.mean(np.exp(log_weights - top))))
