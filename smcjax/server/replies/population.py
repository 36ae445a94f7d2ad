"""A population and its cycles as JSON: what `smc` in a reply holds. −inf, which JSON lacks, is null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from smcjax.engine.results.outputs import Cycle, RequestOutput
from smcjax.engine.results.text import AnswerText
from smcjax.server.requests.schemas import SMCAsk
from smcjax.tokenizer.tokenizer import Tokenizer
from smcjax.viz.trace_file import trace_fields


def population_of(output: RequestOutput, ask: SMCAsk, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The weighted population behind an answer; empty where the decoder has none.

    `ess` has an entry a cycle; `weight` is the chance that a particle had to answer.
    """
    smc = output.smc
    if smc is None:
        return {}
    found: dict[str, Any] = {
        "log_evidence": number(smc.log_evidence),
        "ess": [] if smc.trace is None else numbers(smc.trace.ess),
        "selected": smc.selected,
        "control": smc.control,
        "warning": smc.warning,
        "cycles": output.metrics.cycles,
        "resamples": output.metrics.resamples,
    }
    if ask.particles:
        found["particles"] = [
            {
                "text": None if tokenizer is None else particle.text,
                "token_ids": particle.token_ids,
                "weight": number(particle.weight),
                "log_weight": number(particle.log_weight),
                "finish_reason": particle.finish_reason,
            }
            for particle in smc.particles
        ]
    if ask.trace and smc.trace is not None:
        found["trace"] = trace_fields(output)
    return found


def end_of(output: RequestOutput) -> dict[str, Any]:
    """The last event of a replay: the answer's row and the rows' weights; row 0 where there is no population."""
    smc = output.smc
    if smc is None:
        return {"selected": 0, "log_evidence": None, "weights": None}
    weights = numbers([particle.weight for particle in smc.particles])
    return {"selected": smc.selected, "log_evidence": number(smc.log_evidence), "weights": weights}


def number(value: float) -> float | None:
    """A number of JSON; null for −inf, and for the NaN and +inf that only a failed request has."""
    return float(value) if math.isfinite(value) else None


def numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Likewise a list of numbers."""
    return [number(float(value)) for value in values]


class Cycles:
    """Turns the cycles of one request into events, with the text that each row's tokens add to it.

    A row's text is its ancestor's and then the event's `texts` of the ancestor, as far as `lengths` goes. Bytes that
    are no whole character wait for those that complete it.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._rows: list[AnswerText] = []
        self._lengths: list[int] = []

    def event(self, cycle: Cycle) -> dict[str, Any]:
        """The event of the next cycle."""
        if cycle.index == 0:
            self._lengths = [0] * len(cycle.blocks)
        blocks = self._kept(cycle)
        found = {
            "cycle": cycle.index,
            "token_ids": blocks,
            "texts": self._texts(cycle, blocks),
            "lengths": cycle.lengths.tolist(),
            "ancestors": cycle.ancestors.tolist(),
            "finished": cycle.finished.tolist(),
            "resampled": cycle.resampled,
            "ess": None if cycle.ess is None else number(cycle.ess),
            "log_weights": None if cycle.log_weights is None else numbers(cycle.log_weights),
            "log_potentials": None if cycle.log_potentials is None else numbers(cycle.log_potentials),
        }
        self._lengths = found["lengths"]
        return found

    def _kept(self, cycle: Cycle) -> list[list[int]]:
        """The blocks as far as some descendant has them; all of it of rows without any."""
        kept: dict[int, int] = {}
        for ancestor, length in zip(cycle.ancestors.tolist(), cycle.lengths.tolist(), strict=True):
            kept[ancestor] = max(kept.get(ancestor, 0), length - self._lengths[ancestor])
        return [block[: kept.get(row, len(block))] for row, block in enumerate(cycle.blocks)]

    def _texts(self, cycle: Cycle, blocks: list[list[int]]) -> list[str] | None:
        if self._tokenizer is None:
            return None
        if cycle.index == 0:
            self._rows = [AnswerText(self._tokenizer, self._prompt) for _ in blocks]
        texts = ["".join(map(row.copy().feed, block)) for row, block in zip(self._rows, blocks, strict=True)]
        after = []
        for ancestor, length in zip(cycle.ancestors.tolist(), cycle.lengths.tolist(), strict=True):
            row = self._rows[ancestor].copy()
            for token in blocks[ancestor][: length - self._lengths[ancestor]]:
                row.feed(token)
            after.append(row)
        self._rows = after
        return texts
