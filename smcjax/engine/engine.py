"""Continuous batching: requests come and go between cycles, and the device never waits for the host.

    step()   schedule → enqueue → collect

Schedules are made by `smcjax.engine.scheduler` from what the host knows, programs are enqueued by
`smcjax.engine.runner`, and what a program reports is read when the next one is under way: a group that has ended is
noticed one cycle late, in which it is frozen, and costs the others nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

from smcjax.device import on_cpu
from smcjax.engine.clock import Clock
from smcjax.engine.cycles import first_cycle, later_cycle
from smcjax.engine.memory import buckets
from smcjax.engine.outputs import RequestOutput, StreamChunk
from smcjax.engine.page_budget import Footprint, Mark
from smcjax.engine.prefix_cache import PrefixCache
from smcjax.engine.programs import Progress
from smcjax.engine.requests import Request, make_batch
from smcjax.engine.results import Times, aborted_in_the_queue, assemble
from smcjax.engine.runner import Chunk, Runner
from smcjax.engine.scheduler import Group, Schedule, Scheduler
from smcjax.engine.stopping import StopStrings
from smcjax.engine.streaming import StablePrefixStream
from smcjax.engine.whole import whole
from smcjax.tokenizer import Tokenizer

logger = logging.getLogger("smcjax")


@dataclasses.dataclass(eq=False)
class _Running:
    """The host's record of an admitted group."""

    group: Group
    certain: StablePrefixStream | None  # of requests that stream
    stops: StopStrings | None  # of requests that have any
    times: Times
    preemptions: int = 0
    aborted: bool = False
    refused: str | None = None  # why it cannot be answered
    last_cycle: int | None = None  # of its own, after which it is concluded: stop strings have settled its answer
    infos: list[Any] = dataclasses.field(default_factory=list)  # the decoder's Info of every cycle, of this group


@dataclasses.dataclass(frozen=True)
class _Reported:
    """Results under way to the host, and whose they are: entry i of the arrays is the group's."""

    round: int  # the step that enqueued it
    kind: str  # "first", "cycle", "population"
    value: Any
    groups: list[tuple[int, _Running]]
    free: tuple[Mark, Any] | None  # the number of free pages after it


class Engine:
    """Requests in flight on one runner.

    Whatever raises in a method that changes what is in flight, an interruption too, ends all of it, on the host and on
    the device together: at once, or where the clean-up is interrupted as well, first thing in the next call.

    Args:
        runner: the programs and the device's state.
        max_num_seqs: requests that run at once, at most.
        tokenizer: for text; None where the model has none.
        prefix_caching: whether full pages of prompts stay for later requests that begin alike.
        optimistic: the rule of admission (`smcjax.engine.scheduler`).
        overlap: whether to enqueue a cycle before the last one's results are read; None: not on a CPU, where nothing
            runs beside the host. Tokens are the same either way.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        tokenizer: Tokenizer | None,
        prefix_caching: bool = True,
        optimistic: bool = False,
        overlap: bool | None = None,
    ) -> None:
        self.runner = runner
        self._decoder, self._tokenizer = runner.program, tokenizer
        decoding, page_size = runner.program.decoding, runner.program.page_size
        self._scheduler = Scheduler(
            buckets(max_num_seqs),
            runner.num_pages - 1,
            runner.chunks,
            PrefixCache(runner.cache_slots if prefix_caching else 0, page_size),
            Footprint(decoding.rows, page_size, decoding.tokens_per_cycle, ragged=decoding.ragged),
            optimistic=optimistic,
        )
        self._lag = int(not on_cpu() if overlap is None else overlap)
        self.torn = False
        self._clock = Clock()
        self._arrivals: dict[str, float] = {}  # of all that have not ended, by that clock
        self._running: dict[str, _Running] = {}
        self._preempted: dict[str, _Running] = {}  # as they were when they left
        self._streams: dict[str, list[StreamChunk]] = {}
        self._reported: deque[_Reported] = deque()
        self._plain_only: dict[int, str] = {}  # batch sizes without programs for what few requests ask for, and why
        self._round = 0  # steps so far
        self._outputs: list[RequestOutput] = []  # of requests that ended outside a step
        self.seconds_waited = 0.0  # for results that the device had not finished
        self.totals = {"requests": 0, "cycles": 0, "resamples": 0, "generated_tokens": 0, "preemptions": 0}

    @property
    def busy(self) -> bool:
        """True while a step has anything to do."""
        self._settle()
        return bool(self._scheduler or self._reported or self._outputs)

    @property
    def all_started(self) -> bool:
        """True where every added request's whole prompt has been enqueued for reading."""
        return not self._scheduler.waiting and all(group.started for group in self._scheduler.groups)

    def request_ids(self) -> list[str]:
        """The ids of the requests that wait or run."""
        scheduler = self._scheduler
        return [r.request_id for r in (*scheduler.waiting, *(group.request for group in scheduler.groups))]

    @whole
    def add_request(self, request: Request, *, stream: bool = False, arrived: float | None = None) -> None:
        """Queues a checked request; `stream` asks for its text as it becomes certain (`chunks`).

        `arrived` is the request's time of arrival by `time.perf_counter()`; None: now.
        """
        self._scheduler.add(request)
        self._arrivals[request.request_id] = self._clock.at(arrived)
        if stream:
            self._streams[request.request_id] = []

    @whole
    def abort(self, request_id: str) -> None:
        """Ends a request at once; its output, with finish_reason "abort", comes with the next step.

        Does nothing for a request that has ended.
        """
        if request_id not in self._arrivals:
            return
        withdrawn = self._scheduler.withdraw(request_id)
        if isinstance(withdrawn, Request):
            self._outputs.append(self._ended_in_the_queue(withdrawn))
        elif withdrawn is not None:
            running = self._running[request_id]
            running.aborted = True
            self._leave(running)

    def chunks(self, request_id: str) -> list[StreamChunk]:
        """Takes the chunks that a streaming request has gathered since the last call; none for unknown ids."""
        self._settle()
        if not self._streams.get(request_id):
            return []
        chunks, self._streams[request_id] = self._streams[request_id], []
        return chunks

    def follows(self, request_id: str) -> bool:
        """True while this request's stream is kept: from `add_request` until `forget`, if no error comes between."""
        self._settle()
        return request_id in self._streams

    def holds(self, request_id: str) -> bool:
        """True while this request's output is to come: from `add_request` on, if no error comes between."""
        self._settle()
        return request_id in self._arrivals

    def forget(self, request_id: str) -> None:
        """Drops the stream of a request that nobody reads any more."""
        self._streams.pop(request_id, None)

    def metrics(self) -> dict[str, float]:
        """Counts of requests and of what they did, and the state of the KV pages.

        Pages that only the prefix cache keeps are free ones too; its queries and hits are in tokens of prompts.
        """
        self._settle()
        cache = self._scheduler.cache
        return {
            "kv_pages_total": self.runner.num_pages - 1,
            "kv_pages_free": self.runner.free_pages(),
            "kv_pages_cached": len(cache),
            "prefix_cache_queries": cache.queries,
            "prefix_cache_hits": cache.hits,
            "num_running": len(self._scheduler.groups),
            "num_waiting": len(self._scheduler.waiting),
            "steps": self._round,
            "compilations": len(self.runner.programs),
            "compile_seconds": self.runner.programs.seconds,
            **self.totals,
        }

    def warm_up(self, *, use_tqdm: bool) -> None:
        """Compiles the programs of every batch size and of moves between any two, but those for what few ask for."""
        self._settle()
        with contextlib.ExitStack() as stack:
            bar: Any = None

            def heard(done: int, total: int) -> None:
                nonlocal bar
                if bar is None:  # not if there is nothing to compile
                    bar = stack.enter_context(
                        tqdm(total=total, desc="Compiling", disable=not use_tqdm, dynamic_ncols=True)
                    )
                bar.update(done - bar.n)

            self._compile(self._scheduler.sizes, self.runner.program, heard)

    @whole
    def step(self) -> list[RequestOutput]:
        """Runs one round: schedule, enqueue, collect. Returns the outputs of requests that have ended."""
        self._round += 1
        schedule = self._scheduler.schedule()
        self._enqueue(schedule)
        return self._collect(self._round if schedule.idle else self._round - self._lag)

    def reset(self) -> None:
        """Forgets all requests and the device's state."""
        self.torn = True
        self._scheduler.clear()
        self._arrivals.clear()
        self._running.clear()
        self._preempted.clear()
        self._streams.clear()
        self._reported.clear()
        self._outputs.clear()
        self.runner.discard()
        self.torn = False

    def close(self) -> None:
        """Forgets everything and deletes it from the device, weights included. Nothing can be called after that."""
        self.reset()
        self.runner.close()

    def _settle(self) -> None:
        """Ends a clean-up that was interrupted."""
        if self.torn:
            self.reset()

    # Enqueue.

    def _enqueue(self, schedule: Schedule) -> None:
        runner = self.runner
        for group in schedule.preempted:
            running = self._running.pop(group.request.request_id)
            self._preempted[group.request.request_id] = running
            running.preemptions += 1
            self.totals["preemptions"] += 1
            self._report("population", runner.leave(group.lane), {})
        if schedule.idle:
            return
        program, refusal = self._ready_program(schedule.size)
        if schedule.sources is not None:
            runner.resize(schedule.size, schedule.sources)
        if schedule.evicted:
            runner.evict(schedule.evicted)
        if schedule.joining:
            requests = {group.lane: group.request for group in schedule.joining}
            geometry = {"max_model_len": program.max_model_len, "vocab_size": program.target.vocab_size}
            cached = {group.lane: group.slots for group in schedule.joining}
            runner.join(make_batch(requests, schedule.size, **geometry), cached)
            for group in schedule.joining:
                self._running[group.request.request_id] = self._admitted(group)
        if schedule.prefill:
            stored = defaultdict[int, list[tuple[int, int]]](list)
            for group, page, slot in schedule.stored:
                stored[group.lane].append((page, slot))
            for readings in schedule.prefill:
                chunks = [Chunk(g.lane, at, length, g.cached, stored[g.lane]) for g, at, length in readings]
                first = runner.prefill(program, chunks)
                self._report("first", (first, None), {i: g for i, (g, *_) in enumerate(readings) if g.started})
        if schedule.cycle:
            self._report("cycle", runner.step(program), {g.lane: g for g in self._scheduler.groups if g.started})
            for running in list(self._running.values()):
                self._conclude_settled(running)
        if refusal is not None:
            self._refuse_special(refusal)

    def _ready_program(self, size: int) -> tuple[Any, str | None]:
        """The compiled program for those in a batch of this size; and why it is not one for what few ask for, if
        somebody does and it is not."""
        program = self.runner.program
        asked = [group.request.params for group in self._scheduler.groups if self._is_special(group.request)]
        if asked and size not in self._plain_only:
            truncates = any(params.truncates for params in asked)
            special = dataclasses.replace(program, truncates=truncates, controls=not truncates)  # no decoder has both
            try:
                self._compile([size], special)
                return special, None
            except ValueError as error:  # it needs more memory than the device has
                self._plain_only[size] = f"{'top_k and top_p' if truncates else 'control'} cannot be used here: {error}"
        self._compile([size], program)
        return program, self._plain_only[size] if asked else None

    def _is_special(self, request: Request) -> bool:
        """True for requests with top_k, top_p or a control that the usual program does not honour."""
        return request.params.truncates or (bool(request.params.control) and not self._decoder.ragged)

    def _refuse_special(self, error: str) -> None:
        """Ends the requests that the usual program does not honour; the others go on without them."""
        for group in [group for group in self._scheduler.groups if self._is_special(group.request)]:
            running = self._running[group.request.request_id]
            running.refused = error
            self._scheduler.withdraw(group.request.request_id)
            self._leave(running)

    def _admitted(self, group: Group) -> _Running:
        """Makes the record of a group that joins. A preempted group begins again; its reader and clock go on."""
        name = group.request.request_id
        if name in self._preempted:
            return dataclasses.replace(self._preempted.pop(name), group=group, infos=[], last_cycle=None)
        request, tokenizer = group.request, self._tokenizer
        certain = StablePrefixStream(request, tokenizer) if name in self._streams else None
        stops = StopStrings(request, tokenizer) if request.params.stop_strings and tokenizer is not None else None
        return _Running(group, certain, stops, Times(self._arrivals[name], began=self._clock.at()))

    def _compile(self, sizes: Sequence[int], program: Any, progress: Progress | None = None) -> None:
        """Compiles the missing programs of these sizes; the clocks of requests stand still meanwhile.

        Sizes that are ready have all moves between them, so none of these waits for a compilation.
        """
        began = time.perf_counter()
        try:
            self.runner.compile(sizes, program, self._scheduler.ready | ({self.runner.size} - {0}), progress)
        finally:
            self._clock.stood_still(began)
        self._scheduler.ready.update(sizes)

    def _report(self, kind: str, results: tuple[Any, Any], groups: dict[int, Group]) -> None:
        """Sends for a program's results, and for the number of free pages where it says that."""
        value, free = results
        if not groups and free is None:
            return
        for leaf in jax.tree.leaves((value, free) if groups else free):
            leaf.copy_to_host_async()
        whose = [(index, self._running[group.request.request_id]) for index, group in groups.items()]
        marked = None if free is None else (self._scheduler.mark(), free)
        self._reported.append(_Reported(self._round, kind, value, whose, marked))

    def _leave(self, running: _Running) -> None:
        """Frees a group's lane and pages, and sends for its population."""
        running.times.ended = self._clock.at()
        self._report("population", self.runner.leave(running.group.lane), {0: running.group})
        del self._running[running.group.request.request_id]

    # Collect.

    def _collect(self, last: int) -> list[RequestOutput]:
        """Reads what was enqueued up to round `last`; returns the requests that ended."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self._end_stream(output, "", [])
        while self._reported and self._reported[0].round <= last:
            reported = self._reported.popleft()
            began = time.perf_counter()
            if reported.free is not None:
                mark, free = reported.free
                self._scheduler.free.report(mark, int(jax.device_get(free)))
            value = jax.device_get(reported.value) if reported.groups else None
            self.seconds_waited += time.perf_counter() - began
            for index, running in reported.groups:
                if reported.kind == "population":
                    outputs.append(self._output(running, value))
                else:
                    self._follow(reported.kind, running, jax.tree.map(lambda leaf, i=index: leaf[i], value))
        for output in outputs:
            self._count(output)
        return outputs

    def _follow(self, kind: str, running: _Running, value: Any) -> None:
        """Follows one group by a report, of a chunk of prefill or a cycle: streams, stop strings, its end."""
        if kind == "cycle" and not value.ran:
            return
        if kind == "cycle":
            running.infos.append(value)
        if running.times.ended:  # what was under way when it left is part of its population; nobody reads on
            return
        if kind == "first" and not running.times.first_seen:
            running.times.first_seen = self._clock.at()
        if running.certain is not None:
            self._stream(running.certain, running.group.request, kind, value, len(running.infos))
        if value.done:
            self._conclude(running)
        elif running.stops is not None and running.last_cycle is None and self._settled(running, kind, value):
            running.last_cycle = len(running.infos) + 1
            self._conclude_settled(running)

    def _conclude(self, running: _Running) -> None:
        """Takes a group out, whose population is to be its answer."""
        self._scheduler.withdraw(running.group.request.request_id)
        self._leave(running)

    def _conclude_settled(self, running: _Running) -> None:
        """Takes a group out whose last cycle is enqueued, neither earlier nor later."""
        if running.last_cycle is not None and running.group.cycles >= running.last_cycle:
            assert running.group.cycles == running.last_cycle
            self._conclude(running)

    def _settled(self, running: _Running, kind: str, value: Any) -> bool:
        """True where every row that may still answer holds a stop string now, or has ended."""
        assert running.stops is not None
        if kind == "first":
            return running.stops.begin(value.tokens.tolist())
        lengths = value.length - len(running.group.request.token_ids)
        rows = self._decoder.rows_after(value)
        return running.stops.advance(*(x.tolist() for x in (value.tokens, lengths, *rows)))

    def _stream(self, certain: StablePrefixStream, request: Request, kind: str, value: Any, cycles: int = 0) -> None:
        if kind == "first":
            text, token_ids = certain.begin(value.tokens)
            cycle = first_cycle(request, value.tokens) if request.trace else None
        else:
            rows = self._decoder.rows_after(value)
            lengths = value.length - len(request.token_ids)
            text, token_ids = certain.advance(value.tokens, lengths, rows.ancestors, rows.alive)
            cycle = later_cycle(request, cycles, value, rows) if request.trace else None
        if (text or token_ids or cycle) and request.request_id in self._streams:
            self._streams[request.request_id].append(StreamChunk(text, token_ids, finished=False, cycle=cycle))

    def _output(self, running: _Running, population: Any) -> RequestOutput:
        request = running.group.request
        output = assemble(
            request,
            population,
            running.infos,
            running.times,
            self._decoder,
            self._tokenizer,
            num_cached_tokens=running.group.cached,
            preemptions=running.preemptions,
            aborted=running.aborted,
            refused=running.refused,
        )
        if output.smc is not None and output.smc.warning is not None:
            logger.warning("Request %s: %s.", request.request_id, output.smc.warning)
        if running.certain is not None:
            answer = output.outputs[0]
            if len(answer.token_ids) < len(running.certain.token_ids) and (running.aborted or output.error is not None):
                # It had begun again, or failed: what its reader has got is what there is.
                text, token_ids = running.certain.text, running.certain.token_ids
                answer = dataclasses.replace(answer, text=text, token_ids=list(token_ids), logprobs=None)
                start, control = len(request.token_ids), request.params.control
                report = self._decoder.report(running.infos, start, len(token_ids), control=control)
                metrics = dataclasses.replace(
                    output.metrics,
                    generated_tokens=len(token_ids),
                    accepted=report.accepted,
                    accepted_at=report.accepted_at,
                )
                output = dataclasses.replace(output, outputs=[answer], metrics=metrics)
            self._end_stream(output, *running.certain.rest(answer.text, answer.token_ids))
        return output

    def _ended_in_the_queue(self, request: Request) -> RequestOutput:
        """The output of a request that was aborted while it waited, for the first time or since it was preempted."""
        running = self._preempted.pop(request.request_id, None)
        if running is None:
            return aborted_in_the_queue(request)
        running.times.ended = self._clock.at()
        text, token_ids = ("", []) if running.certain is None else (running.certain.text, running.certain.token_ids)
        return aborted_in_the_queue(request, running.times, text, token_ids, running.preemptions)

    def _end_stream(self, output: RequestOutput, text: str, token_ids: list[int]) -> None:
        """Adds the last chunk to the request's stream, if anybody reads it."""
        if output.request_id in self._streams:
            self._streams[output.request_id].append(StreamChunk(text, token_ids, finished=True, output=output))

    def _count(self, output: RequestOutput) -> None:
        del self._arrivals[output.request_id]
        self.totals["requests"] += 1
        self.totals["cycles"] += output.metrics.cycles
        self.totals["resamples"] += output.metrics.resamples
        self.totals["generated_tokens"] += output.metrics.generated_tokens
