"""An admitted request as the host follows it, and what its reader hears of each report."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from smcjax.decoding.decoder import CycleHistory, Decoder
from smcjax.decoding.scores import Scores
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.cycles import first_cycle, later_cycle
from smcjax.engine.results.outputs import Cycle, RequestOutput, StreamChunk
from smcjax.engine.results.results import Times
from smcjax.engine.results.scores import Scored, prompt_scores, scores_along
from smcjax.engine.results.stopping import StopStrings
from smcjax.engine.results.streaming import StablePrefixStream
from smcjax.engine.schedule.scheduler import Group


@dataclasses.dataclass(eq=False)
class Running:
    """The host's record of an admitted group."""

    group: Group
    decoder: Decoder[Any, Any, Any]
    certain: StablePrefixStream | None  # of requests that stream
    stops: StopStrings | None  # of requests that have any
    times: Times
    preemptions: int = 0
    aborted: bool = False
    refused: str | None = None  # why it cannot be answered
    last_cycle: int | None = None  # of its own, after which it is concluded: stop strings have settled its answer
    infos: list[Any] = dataclasses.field(default_factory=list)  # the decoder's Info of every cycle, of this group
    first: Scores | None = None  # of first tokens, [N], where they are asked for
    prompt: list[Scores] = dataclasses.field(default_factory=list)  # of the prompt, chunk by chunk
    history: CycleHistory | None = None  # of a population whose cycles are followed
    heard: int = 0  # cycles that its reader has heard of, the first tokens' among them
    heard_prompt: bool = False

    @property
    def request(self) -> Request:
        """The request that the group answers."""
        return self.group.request

    def again(self, group: Group) -> Running:
        """The record of a preempted group that begins anew; its reader and its clock go on."""
        history = self.decoder.history(len(self.request.token_ids)) if self.history is not None else None
        fresh: dict[str, Any] = {"infos": [], "last_cycle": None, "first": None, "prompt": []}
        return dataclasses.replace(self, group=group, history=history, **fresh)

    @property
    def known_length(self) -> int:
        """Tokens of prompt and answer by the last report, of the longest row."""
        return int(np.max(self.infos[-1].length)) if self.infos else len(self.request.token_ids) + 1

    def take(self, kind: str, value: Any) -> None:
        """Keeps what results will be made of, without the scores in a report that are for others in the batch."""
        asked = self.request.params.scores(streams=self.certain is not None)
        if kind == "prompt":
            self.prompt.append(value)
        elif kind == "first":
            self.first = value.scores if asked else None
        elif kind == "cycle":
            self.infos.append(value if asked or value.scores is None else dataclasses.replace(value, scores=None))

    def settled(self, kind: str, value: Any) -> bool:
        """True where every row that may still answer holds a stop string now, or has ended."""
        assert self.stops is not None
        if kind == "first":
            return self.stops.begin(value.tokens.tolist())
        lengths = value.length - len(self.request.token_ids)
        rows = self.decoder.rows_after(value)
        return self.stops.advance(*(x.tolist() for x in (value.tokens, lengths, *rows)))

    def scores(self, row: int, begin: int, end: int) -> Scored | None:
        """The scores of tokens `begin` … `end − 1` of the answer that `row` has now; None where none were asked for."""
        if self.first is None:
            return None
        return scores_along(
            row,
            begin,
            end,
            first=self.first,
            infos=self.infos,
            decoder=self.decoder,
            prompt_length=len(self.request.token_ids),
            count=self.request.params.logprobs or 0,
        )

    def completed(self, output: RequestOutput, selected: int) -> RequestOutput:
        """The output with the scores that were asked for, `selected` being the row that answers."""
        answer = output.outputs[0]
        if self.request.params.logprobs and output.error is None:
            scored = self.scores(selected, 0, len(answer.token_ids))
            answer = dataclasses.replace(answer, top_logprobs=[] if scored is None else scored.top)
        return dataclasses.replace(output, outputs=[answer], **self._prompt_fields())

    def _prompt_fields(self) -> dict[str, Any]:
        """The prompt's log-probabilities as fields of outputs and chunks; none before all of it is read."""
        asked, length = self.request.params.prompt_logprobs, len(self.request.token_ids)
        if asked is None or sum(len(chunk.logprobs) for chunk in self.prompt) < length:
            return {}
        scored = prompt_scores(self.prompt, length, asked)
        return {
            "prompt_logprobs": [None, *scored.logprobs],
            "prompt_top_logprobs": [None, *scored.top] if asked else None,
        }

    # For the reader.

    def news(self, kind: str, value: Any) -> StreamChunk | None:
        """The chunk for what a report brings: text and tokens that are certain now, the prompt's scores, the cycle.

        None where it brings nothing. What was under way when the group left is part of its population, and so of its
        cycles, and of no more text.
        """
        assert self.certain is not None
        said, fields = len(self.certain.token_ids), dict[str, Any]()
        text, token_ids, row = ("", [], 0) if self.times.ended else self._certain(kind, value)
        scored = self.scores(row, said, said + len(token_ids)) if token_ids else None
        if scored is not None:
            fields |= {
                "logprobs": scored.logprobs,
                "top_logprobs": scored.top if self.request.params.logprobs else None,
            }
        if not self.heard_prompt:
            prompt = self._prompt_fields()
            self.heard_prompt = bool(prompt)
            fields |= prompt
        cycle = self._cycle(kind, value)
        if cycle is not None:
            fields["cycle"] = cycle
        return StreamChunk(text, token_ids, finished=False, **fields) if text or token_ids or fields else None

    def _certain(self, kind: str, value: Any) -> tuple[str, list[int], int]:
        """Text and tokens that have become certain, and a row that holds them."""
        assert self.certain is not None
        if kind == "first":
            return (*self.certain.begin(value.tokens), 0)
        rows = self.decoder.rows_after(value)
        lengths = value.length - len(self.request.token_ids)
        said = self.certain.advance(value.tokens, lengths, rows.ancestors, rows.alive)
        return (*said, 0 if len(lengths) == 1 else int(np.argmax(rows.alive)))

    def _cycle(self, kind: str, value: Any) -> Cycle | None:
        """The cycle, for a reader who follows them and has not heard of it before."""
        if not self.request.trace:
            return None
        if kind == "first":
            cycle = first_cycle(self.request, value.tokens)
        elif self.history is not None:
            cycle = Cycle(**self.history.add(value))
        else:
            cycle = later_cycle(self.request, len(self.infos), value, self.decoder.rows_after(value))
        if cycle.index < self.heard:
            return None
        self.heard = cycle.index + 1
        return cycle
