"""A decoder as the engine holds it: its programs' static description, a group's life on the device, and reports."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from smcjax.decoders import Decoding
from smcjax.decoding import admission
from smcjax.decoding.groups import Groups, Info, Memory, PairParams
from smcjax.decoding.program import Program
from smcjax.decoding.scores import Scores
from smcjax.decoding.sequences import Population, Requests


class RowsAfter(NamedTuple):
    """The rows of one group after a cycle, on the host."""

    ancestors: np.ndarray  # [N] int32: the row that each was a copy of
    alive: np.ndarray  # [N] bool: rows that may still answer, or be ancestors of one that does
    finished: np.ndarray  # [N] bool


class CycleHistory(Protocol):
    """Follows one group's cycles on the host."""

    cycles: int  # so far

    def add(self, info: Any) -> dict[str, Any]:
        """The fields of `smcjax.engine.results.outputs.Cycle` of the next cycle, by its `Info`."""
        ...


@dataclasses.dataclass(frozen=True)
class Report:
    """A decoder's account of one request, on the host. None: no such figure."""

    resamples: int = 0
    mean_ess: float | None = None
    control: float | None = None  # c of rejection control
    warning: str | None = None  # one sentence about the answer
    accepted: int | None = None  # drafts among the tokens that were kept
    accepted_at: tuple[int, ...] | None = None  # cycles whose accepted drafts reach each position
    trace: Mapping[str, Any] | None = None  # fields of `smcjax.engine.results.outputs.Trace`


class Decoder[D: Decoding, S: Groups, I: Info](Program[D], abc.ABC):
    """A decoder's functions: begin → prefill (chunk by chunk) → start → step … step → conclude.

    Every function is pure and has shapes that depend on the program only; nothing reads a value on the host.
    """

    @abc.abstractmethod
    def begin(self, memory: Memory, prompts: Any, requests: Requests, present: Any, prefix: Any = None) -> S:
        """Makes groups for prompts [G, L] int32: `smcjax.decoding.admission.begin`."""

    def prefill(
        self, params: PairParams, state: S, start_at: Any, chunk: int, last_hidden: Any, cached: Any = None
    ) -> tuple[S, Any]:
        """Reads a chunk of the prompts: `smcjax.decoding.admission.prefill`."""
        return admission.prefill(self, params, state, start_at, chunk, last_hidden, cached)

    def prefill_scored(
        self, params: PairParams, state: S, start_at: Any, chunk: int, last_hidden: Any, cached: Any = None
    ) -> tuple[S, Any, Scores]:
        """Reads a chunk of the prompts and scores it: `smcjax.decoding.admission.prefill_scored`."""
        return admission.prefill_scored(self, params, state, start_at, chunk, last_hidden, cached)

    @abc.abstractmethod
    def start(self, params: PairParams, state: S, last_hidden: Any) -> S:
        """Draws the rows' first tokens from the hidden states [G, E] at the prompts' ends."""

    @abc.abstractmethod
    def step(self, params: PairParams, state: S) -> tuple[S, I]:
        """Advances all running groups by one cycle."""

    @abc.abstractmethod
    def conclude(self, state: S) -> tuple[Population, Memory]:
        """The ended groups' rows, and the memory with every page given back."""

    def rows_after(self, info: I) -> RowsAfter:
        """Reads one group's entry of a cycle's `Info`, as host arrays."""
        return _going_on(len(info.length))

    def history(self, prompt_length: int) -> CycleHistory | None:
        """A follower of one group's cycles; None for decoders whose rows are no population."""
        return None

    def report(
        self,
        infos: Sequence[I],
        prompt_length: int,
        kept: int,
        *,
        control: float | None = None,
        trace: bool = False,
        constrained: bool = False,
    ) -> Report:
        """Accounts for a request from its group's entry of every cycle's `Info`; `kept` tokens are the answer.

        `control` is the request's own, None the decoder's; `trace` asks for the population's history, where there is a
        population; `constrained` says that the answer has a given form.
        """
        return Report()


@functools.cache
def _going_on(n: int) -> RowsAfter:
    """n rows that all go on as they are. Shared, and so read-only."""
    own = np.arange(n, dtype=np.int32)
    rows = RowsAfter(own, np.ones(n, bool), np.zeros(n, bool))
    for array in rows:
        array.setflags(write=False)
    return rows
