"""A population's history on the host, by its reports: what a trace keeps, an observer sees, and a warning is about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smcjax.decoders import ALARM
from smcjax.smc.state import Info


class History:
    """Turns one group's `Info` of each cycle, host arrays, into the fields of `smcjax.engine.results.outputs.Cycle`."""

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
        evidence = self._log_evidence + log_mean(np.asarray(info.log_weight, np.float64))
        if info.resampled:
            self._log_evidence = evidence
        steered = info.log_text_potential
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
            "log_potentials": None if steered is None else np.asarray(steered, np.float32),
        }


def alarmed_after(infos: Sequence[Info], prompt_length: int, rate: float) -> int | None:
    """The cycle, from 1, after which log Ẑ lay `ALARM` nats below `rate` a token; None: it never did, or is no number.

    With f_t nats by which the evidence fell in cycle t and n_t the mean tokens of the cycle, by weight, the excess is
    e_t = max(0, e_{t−1} + f_t − rate·n_t), a one-sided CUSUM (Page 1954).
    """
    if not infos:
        return None
    log_weight = np.array([info.log_weight for info in infos], np.float64)  # [C, N], as are those below
    weighed = np.array([info.weighed for info in infos], np.int64)
    resampled = np.array([info.resampled for info in infos], bool)[:-1, None]
    first = np.full_like(weighed[:1], prompt_length + 1)  # one token of the answer, all weights equal
    begun = np.concatenate([first, np.array([info.length for info in infos[:-1]], np.int64).reshape(-1, len(first[0]))])
    before = np.concatenate([np.zeros_like(log_weight[:1]), np.where(resampled, 0.0, log_weight[:-1])])
    with np.errstate(all="ignore"):  # weights of 0, or none at all
        share = np.exp(before - before.max(axis=1, keepdims=True))
        tokens = np.sum(share * (weighed - begun), axis=1) / share.sum(axis=1)
        fallen = np.logaddexp.reduce(before, axis=1) - np.logaddexp.reduce(log_weight, axis=1)
    excess = 0.0
    for cycle, (nats, allowed) in enumerate(zip(fallen.tolist(), (rate * tokens).tolist(), strict=True), 1):
        if not math.isfinite(nats):
            return None  # a failed group, of which its error says more
        excess = max(0.0, excess + nats - allowed)
        if excess > ALARM:
            return cycle
    return None


def trace_of(cycles: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    """Stacks the fields of all cycles C into those of `smcjax.engine.results.outputs.Trace` of N = `n` particles."""

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


def log_mean(log_weights: np.ndarray) -> float:
    """log of the mean weight; −inf where all are 0, NaN where one is no number."""
    top = np.max(log_weights)
    if not np.isfinite(top):
        return float(top)
    return float(top + np.log(np.mean(np.exp(log_weights - top))))
