"""An admitted request as the host follows it, and what its reader hears of each report."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from smcjax.decoding.decoder import CycleHistory, Decoder
from smcjax.decoding.scores import Scores
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.cycles import first_cycle, later_cycle
from smcjax.engine.results.outputs import Cycle, StreamChunk, TokenLogprob
from smcjax.engine.results.scores import Scored, entry_at, prompt_scores
from smcjax.engine.results.steering import Steering
from smcjax.engine.results.stopping import StopStrings
from smcjax.engine.results.streaming import StablePrefixStream
from smcjax.engine.schedule.scheduler import Group


@dataclasses.dataclass
class Times:
    """The times of a request's events, by the engine's `Clock`; 0: not yet."""

    arrived: float
    began: float  # first admitted
    first_seen: float = 0.0  # its first tokens
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the request's first admission to its end."""
        return self.ended - self.began


@dataclasses.dataclass(eq=False)
class Running:
    """The host's record of an admitted group."""

    group: Group
    decoder: Decoder[Any, Any, Any]
    stable_prefix: StablePrefixStream | None  # of requests that stream
    stops: StopStrings | None  # of requests that have any
    times: Times
    steering: Steering | None = None  # of requests with text potentials
    preemptions: int = 0
    aborted: bool = False
    refused: str | None = None  # why it cannot be answered
    last_cycle: int | None = None  # of its own, after which it is concluded: stop strings have decided its answer
    infos: list[Any] = dataclasses.field(default_factory=list)  # the decoder's Info of every cycle, of this group
    first: Scores | None = None  # of first tokens, [N], if the request has log-probabilities
    prompt: list[Scores] = dataclasses.field(default_factory=list)  # of the prompt, chunk by chunk
    history: CycleHistory | None = None  # of a population whose cycles are followed
    observed: int = 0  # cycles in the reader's chunks so far; the first tokens count as one
    observed_prompt: bool = False

    @property
    def request(self) -> Request:
        """The request that the group answers."""
        return self.group.request

    def again(self, group: Group) -> Running:
        """The record of a preempted group that begins anew; its reader and its clock go on."""
        history = self.decoder.history(len(self.request.token_ids)) if self.history is not None else None
        fresh: dict[str, Any] = {"infos": [], "last_cycle": None, "first": None, "prompt": []}
        fresh["steering"] = None if self.steering is None else self.steering.again()
        return dataclasses.replace(self, group=group, history=history, **fresh)

    @property
    def known_length(self) -> int:
        """Tokens of prompt and answer by the last report, of the longest row."""
        return int(np.max(self.infos[-1].length)) if self.infos else len(self.request.token_ids) + 1

    def take(self, kind: str, value: Any) -> None:
        """Keeps what results will be made of, without the scores in a report that are for others in the batch."""
        requested = self.request.params.scores(streams=self.stable_prefix is not None)
        if kind == "prompt":
            self.prompt.append(value)
        elif kind == "first":
            self.first = value.scores if requested else None
        elif kind == "cycle":
            self.infos.append(value if requested or value.scores is None else dataclasses.replace(value, scores=None))

    def steer(self, kind: str, value: Any) -> None:
        """Asks text potentials about the rows of a report, of first tokens or a cycle."""
        assert self.steering is not None
        if kind == "first":
            self.steering.begin(value.tokens.tolist())
            return
        self.steering.advance(*self._rows_of(value))

    def _rows_of(self, value: Any) -> Iterator[list[Any]]:
        """Blocks, lengths of the answers, ancestors, and who is alive and finished, by a cycle's report."""
        lengths = value.length - len(self.request.token_ids)
        return (array.tolist() for array in (value.tokens, lengths, *self.decoder.rows_after(value)))

    def is_decided(self, kind: str, value: Any) -> bool:
        """True once every row that may still answer holds a stop string or has ended."""
        assert self.stops is not None
        if kind == "first":
            return self.stops.begin(value.tokens.tolist())
        return self.stops.advance(*self._rows_of(value))

    def scores(self, row: int, begin: int, end: int) -> Scored | None:
        """The scores of tokens `begin` … `end − 1` of the answer that `row` has now; None without log-probabilities.

        A row's tokens are those of its ancestors: the last cycle's block lies in the row that it was a copy of after
        that cycle (or in its own, where copies are made before a cycle's tokens), the block before in that one's
        ancestor, and so on back to the first token. So are their log-probabilities.
        """
        if self.first is None:
            return None
        prompt_length, count = len(self.request.token_ids), self.request.params.logprobs or 0
        found: deque[tuple[float, list[TokenLogprob]]] = deque()
        for cycle in range(len(self.infos) - 1, -1, -1):
            info = self.infos[cycle]
            source = int(self.decoder.rows_after(info).ancestors[row])
            before = 1 if cycle == 0 else int(self.infos[cycle - 1].length[source]) - prompt_length
            after = int(info.length[row]) - prompt_length
            for position in range(min(after, end) - 1, max(before, begin) - 1, -1):
                found.appendleft(entry_at(info.scores, (source, position - before), count))
            row = source
            if before <= begin:
                break
        if begin == 0 < end:
            found.appendleft(entry_at(self.first, (row,), count))
        return Scored.of(found)

    def prompt_fields(self) -> dict[str, Any]:
        """The prompt's log-probabilities as fields of outputs and chunks; none before all of it is read."""
        requested, length = self.request.params.prompt_logprobs, len(self.request.token_ids)
        if requested is None or sum(len(chunk.logprobs) for chunk in self.prompt) < length:
            return {}
        scored = prompt_scores(self.prompt, length, requested)
        return {
            "prompt_logprobs": [None, *scored.logprobs],
            "prompt_top_logprobs": [None, *scored.top] if requested else None,
        }

    # For the reader.

    def news(self, kind: str, value: Any) -> StreamChunk | None:
        """The chunk that a report makes: growth of the stable prefix, scores of the prompt, the cycle; or None.

        A report that was under way when the group left adds a cycle and no text: the population holds its tokens.
        """
        assert self.stable_prefix is not None
        emitted, fields = len(self.stable_prefix.token_ids), dict[str, Any]()
        text, token_ids, row = ("", [], 0) if self.times.ended else self._stable_prefix(kind, value)
        scored = self.scores(row, emitted, emitted + len(token_ids)) if token_ids else None
        if scored is not None:
            fields |= {
                "logprobs": scored.logprobs,
                "top_logprobs": scored.top if self.request.params.logprobs else None,
            }
        if not self.observed_prompt:
            prompt = self.prompt_fields()
            self.observed_prompt = bool(prompt)
            fields |= prompt
        cycle = self._cycle(kind, value)
        if cycle is not None:
            fields["cycle"] = cycle
        return StreamChunk(text, token_ids, finished=False, **fields) if text or token_ids or fields else None

    def _stable_prefix(self, kind: str, value: Any) -> tuple[str, list[int], int]:
        """New text and tokens of the stable prefix, and a row that holds them."""
        assert self.stable_prefix is not None
        if kind == "first":
            return (*self.stable_prefix.begin(value.tokens), 0)
        rows = self.decoder.rows_after(value)
        lengths = value.length - len(self.request.token_ids)
        emitted = self.stable_prefix.advance(value.tokens, lengths, rows.ancestors, rows.alive)
        return (*emitted, 0 if len(lengths) == 1 else int(np.argmax(rows.alive)))

    def _cycle(self, kind: str, value: Any) -> Cycle | None:
        """The cycle, if the request has a trace and no earlier chunk had this cycle; otherwise None."""
        if not self.request.trace:
            return None
        if kind == "first":
            cycle = first_cycle(self.request, value.tokens)
        elif self.history is not None:
            cycle = Cycle(**self.history.add(value))
        else:
            cycle = later_cycle(self.request, len(self.infos), value, self.decoder.rows_after(value))
        if cycle.index < self.observed:
            return None
        self.observed = cycle.index + 1
        return cycle
