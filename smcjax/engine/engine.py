"""Continuous batching: requests come and go between cycles, and the device never waits for the host.

    step()   schedule → enqueue → collect

Schedules are made by `smcjax.engine.schedule.scheduler` from what the host knows, programs are enqueued by
`smcjax.engine.run.runner`, and what a program reports is read when the next one is under way: a group that has ended is
noticed one cycle late, in which it is frozen, and costs the others nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

import jax

from smcjax.decoders import Decoding
from smcjax.decoding.program import Feature
from smcjax.device import on_cpu
from smcjax.engine.requests.requests import Request, make_batch
from smcjax.engine.reset_on_error import reset_on_error
from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.engine.results.results import aborted_in_the_queue, assemble
from smcjax.engine.results.running import Running, Times
from smcjax.engine.results.steering import Scorer, Steering, values_of
from smcjax.engine.results.stopping import StopStrings
from smcjax.engine.results.streaming import StablePrefixStream
from smcjax.engine.run.features import features_now, features_of
from smcjax.engine.run.memory import buckets
from smcjax.engine.run.programs import shown
from smcjax.engine.run.ready_programs import ReadyPrograms
from smcjax.engine.run.runner import Chunk, Runner
from smcjax.engine.schedule.clock import Clock
from smcjax.engine.schedule.page_budget import Footprint, Mark
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.scheduler import Group, Schedule, Scheduler
from smcjax.planner import Switch
from smcjax.smc.steering import TextValues
from smcjax.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("smcjax")

BLINK = 0.0005  # seconds between looks at a device that is busy
PATIENCE = 0.01  # seconds that a step with nothing to do waits for a compilation, before it looks for new requests


@dataclasses.dataclass(frozen=True)
class _Reported:
    """Results under way to the host, and whose they are: entry i of the arrays is the group's."""

    round: int  # the step that enqueued it
    kind: str  # "first", "cycle", "population"
    value: Any
    groups: list[tuple[int, Running]]
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
        optimistic: the rule of admission (`smcjax.engine.schedule.scheduler`).
        switch: chooses among the runner's readings, cycle by cycle; None: there is one.
        overlap: whether to enqueue a cycle before the last one's results are read; None: not on a CPU, where nothing
            runs beside the host. Tokens are the same either way.

    Attributes:
        programs: those that are compiled, and how others are.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        tokenizer: Tokenizer | None,
        prefix_caching: bool = True,
        optimistic: bool = False,
        switch: Switch | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.runner, self._switch = runner, switch
        self._decoder, self._tokenizer = runner.program, tokenizer
        decoding, page_size = runner.program.decoding, runner.program.page_size
        self._scheduler = Scheduler(
            buckets(max_num_seqs),
            runner.num_pages - 1,
            runner.chunks,
            PrefixCache(runner.cache_slots if prefix_caching else 0, page_size),
            Footprint.of(decoding, page_size),
            optimistic=optimistic,
        )
        self._lag = int(not on_cpu() if overlap is None else overlap)
        self.dirty = False
        self._clock = Clock()
        self._arrivals: dict[str, float] = {}  # of all that have not ended, by that clock
        self._running: dict[str, Running] = {}
        self._preempted: dict[str, Running] = {}  # as they were when they left
        self._streams: dict[str, list[StreamChunk]] = {}
        self._reported: deque[_Reported] = deque()
        self.programs = ReadyPrograms(runner, self._scheduler, self._clock)
        self._round = 0  # steps so far
        self._outputs: list[RequestOutput] = []  # of requests that ended outside a step
        self._scorer = Scorer()
        self._scoring: list[tuple[Running, Any]] = []  # populations whose whole answers text potentials are asked about
        self.batch_cycles = dict.fromkeys(runner.readings, 0)  # of the whole batch
        self.seconds_waited = 0.0  # for results that the device had not finished
        self.totals = {"requests": 0, "cycles": 0, "resamples": 0, "generated_tokens": 0, "preemptions": 0}

    @property
    def busy(self) -> bool:
        """True while a step has anything to do."""
        self._finish_reset()
        return bool(self._scheduler or self._reported or self._outputs or self._scoring)

    @property
    def all_started(self) -> bool:
        """True where every added request's whole prompt has been enqueued for reading."""
        return not self._scheduler.waiting and all(group.started for group in self._scheduler.groups)

    def request_ids(self) -> list[str]:
        """The ids of the requests that wait or run."""
        scheduler = self._scheduler
        return [r.request_id for r in (*scheduler.waiting, *(group.request for group in scheduler.groups))]

    @reset_on_error
    def add_request(self, request: Request, *, stream: bool = False, arrived: float | None = None) -> None:
        """Queues a checked request; `stream` asks for its text as the stable prefix grows (`chunks`).

        `arrived` is the request's time of arrival by `time.perf_counter()`; None: now.
        """
        self._scheduler.add(request)
        self._arrivals[request.request_id] = self._clock.at(arrived)
        if stream:
            self._streams[request.request_id] = []

    @reset_on_error
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
        for running, _ in self._scoring:
            running.aborted = running.aborted or running.request.request_id == request_id

    def lacks_programs(self, request_id: str) -> bool:
        """True while a request waits until programs that it needs are compiled."""
        return any(request.request_id == request_id for request in self._scheduler.lacking)

    def chunks(self, request_id: str) -> list[StreamChunk]:
        """Takes the chunks that a streaming request has gathered since the last call; none for unknown ids."""
        self._finish_reset()
        if not self._streams.get(request_id):
            return []
        chunks, self._streams[request_id] = self._streams[request_id], []
        return chunks

    def follows(self, request_id: str) -> bool:
        """True while this request's stream is kept: from `add_request` until `forget`, if no error comes between."""
        self._finish_reset()
        return request_id in self._streams

    def holds(self, request_id: str) -> bool:
        """True while this request's output is to come: from `add_request` on, if no error comes between."""
        self._finish_reset()
        return request_id in self._arrivals

    def forget(self, request_id: str) -> None:
        """Drops the stream of a request whose reader has left."""
        self._streams.pop(request_id, None)

    def metrics(self) -> dict[str, float]:
        """Counts of requests and of what they did, and the state of the KV pages.

        Pages that only the prefix cache keeps are free ones too; its queries and hits are in tokens of prompts.
        """
        self._finish_reset()
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
            "waited_seconds": self.seconds_waited,
            **self.totals,
        }

    def warm_up(self, *, use_tqdm: bool) -> None:
        """Compiles the programs of every batch size and of moves between any two, but those for what few ask for."""
        self._finish_reset()
        with contextlib.ExitStack() as stack:
            self.programs.compile(self._scheduler.sizes, self.runner.program, shown(stack, use_tqdm))

    @reset_on_error
    def step(self, meanwhile: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Runs one round: schedule, enqueue, collect. Returns the outputs of requests that have ended.

        `meanwhile` is called when what comes next is enqueued, before results are waited for. It may use nothing of the
        engine; what it raises ends all in flight.
        """
        self._round += 1
        self.programs.take()
        self._await_values()
        schedule = self._scheduler.schedule(self._compiled_sizes if self.programs.in_background else None)
        self._enqueue(schedule)
        if meanwhile is not None:
            meanwhile()
        if schedule.idle and not self._reported:
            (self._scorer if self._steered or self._scoring else self.programs).wait(PATIENCE)
        return self._collect(self._round if schedule.idle else self._round - self._lag)

    def reset(self) -> None:
        """Forgets all requests and the device's state."""
        self.dirty = True
        requests = (self._arrivals, self._running, self._preempted, self._streams)
        for kept in (self._scheduler, *requests, self._reported, self._outputs, self._scoring):
            kept.clear()
        self.runner.discard()
        self.dirty = False

    def close(self) -> None:
        """Forgets everything and deletes it from the device, weights included. Nothing can be called after that."""
        self.programs.abandon()
        self._scorer.close()
        self.reset()
        self.runner.close()

    def _finish_reset(self) -> None:
        """Finishes a reset that was interrupted."""
        if self.dirty:
            self.reset()

    # Enqueue.

    def _enqueue(self, schedule: Schedule) -> None:
        runner = self.runner
        for group in schedule.preempted:
            running = self._running.pop(group.request.request_id)
            self._preempted[group.request.request_id] = running
            running.preemptions += 1
            self.totals["preemptions"] += 1
            self._report("population", runner.leave(group.slot), {})
        if schedule.idle:
            return
        joined = self._scheduler.groups if schedule.joining else []
        features = features_now(schedule, (self._features(group.request) for group in self._scheduler.groups))
        program, refusal = self.programs.of_round(schedule.size, features, len(joined))
        if schedule.sources is not None:
            runner.resize(schedule.size, schedule.sources)
        if schedule.evicted:
            runner.evict(schedule.evicted)
        if schedule.joining:
            requests = {group.slot: group.request for group in schedule.joining}
            geometry = {"max_model_len": program.max_model_len, "vocab_size": program.target.vocab_size}
            cached = {group.slot: group.cache_slots for group in schedule.joining}
            runner.join(make_batch(requests, schedule.size, **geometry), cached)
            for group in schedule.joining:
                self._running[group.request.request_id] = self._admitted(group)
        requests = {group.slot: group.request for group in self._scheduler.groups}
        if "grammar" in program.features:
            runner.constrain(requests)
        if schedule.prefill:
            stored = defaultdict[int, list[tuple[int, int]]](list)
            for group, page, cache_slot in schedule.stored:
                stored[group.slot].append((page, cache_slot))
            for readings in schedule.prefill:
                chunks = [Chunk(g.slot, at, length, g.cached, stored[g.slot]) for g, at, length in readings]
                first = runner.prefill(program, chunks, requests)
                groups = {i: reading.group for i, reading in enumerate(readings)}
                if "prompt_logprobs" in program.features:
                    scored = {i: g for i, g in groups.items() if g.request.params.prompt_logprobs is not None}
                    self._report("prompt", (first.prompt, None), scored)
                first = dataclasses.replace(first, prompt=None)
                self._report("first", (first, None), {i: g for i, g in groups.items() if g.started})
        if schedule.cycle:
            cycling = {g.slot: g for g in self._scheduler.groups if g.cycles_now}
            reading = self._reading(schedule.size, cycling.values())
            values = self._values(schedule.size) if "text_potentials" in program.features else None
            self._report("cycle", runner.step(program, reading, requests, values), cycling)
            self.batch_cycles[reading] += 1
            for running in list(self._running.values()):
                self._conclude_settled(running)
        if refusal is not None:
            self._refuse_features(refusal)

    def _reading(self, slots: int, started: Collection[Group]) -> Decoding:
        """The decoder as it reads a sparse target's blocks in the next cycle."""
        if self._switch is None:
            return self._decoder.decoding
        lengths = [self._running[group.request.request_id].known_length for group in started]
        return self._switch.choose(slots, statistics.fmean(lengths))

    def _features(self, request: Request) -> set[Feature]:
        return features_of(request, streams=request.request_id in self._streams, ragged=self._decoder.ragged)

    def _compiled_sizes(self, requests: list[Request]) -> list[int]:
        """Sizes of a batch for which programs are compiled that can run these requests together."""
        return self.programs.sizes(len(requests), frozenset[Feature]().union(*map(self._features, requests)))

    def _refuse_features(self, error: str) -> None:
        """Ends the requests that ask for features; the others go on without them."""
        for group in [group for group in self._scheduler.groups if self._features(group.request)]:
            self._refuse(self._running[group.request.request_id], error)

    def _refuse(self, running: Running, error: str) -> None:
        """Ends a request with an error."""
        running.refused = error
        self._conclude(running)

    # Text potentials.

    @property
    def _steered(self) -> list[Running]:
        return [running for running in self._running.values() if running.steering is not None]

    @property
    def _busy(self) -> bool:
        """True while the device computes what was enqueued last."""
        last = self._reported[-1].value if self._reported else None
        return not all(leaf.is_ready() for leaf in jax.tree.leaves(last))

    def _await_values(self) -> None:
        """Waits for values that next cycles take as long as the device is busy, which costs no time of its own."""
        self._take_values()
        while any(running.group.waits for running in self._steered) and self._busy:
            self._scorer.wait(BLINK)
            self._take_values()

    def _take_values(self) -> None:
        """Ends requests whose potentials have failed; lets groups wait whose next cycle takes values to come."""
        for running in self._steered:
            assert running.steering is not None
            error = running.steering.error
            if error is not None:
                self._refuse(running, error)
            running.group.waits = not running.steering.knows(running.group.cycles + 1)

    def _values(self, size: int) -> TextValues:
        """Makes the values of text potentials that the scheduled cycle takes."""
        found = {
            running.group.slot: (running.steering, running.group.cycles, running.group.waits)
            for running in self._steered
            if running.steering is not None and running.group.started
        }
        return values_of(size, self.runner.program.rows, found)

    def _scored(self) -> list[RequestOutput]:
        """The outputs of requests about whose whole answers everything is known now."""
        outputs, going = [], []
        for running, population in self._scoring:
            steering = running.steering
            assert steering is not None
            if not running.aborted and not steering.ended:
                going.append((running, population))
                continue
            running.times.ended = self._clock.at()
            if not running.aborted and steering.error is not None:
                running.refused = steering.error
            elif not running.aborted:
                population = steering.final(population, select=self._decoder.decoding.select)
            outputs.append(self._output(running, population))
        self._scoring = going
        return outputs

    def _admitted(self, group: Group) -> Running:
        """Makes the record of a group that joins. A preempted group begins again; its reader and clock go on."""
        name = group.request.request_id
        if name in self._preempted:
            return self._preempted.pop(name).again(group)
        request, tokenizer = group.request, self._tokenizer
        stable_prefix = StablePrefixStream(request, tokenizer) if name in self._streams else None
        stops = StopStrings(request, tokenizer) if request.params.stop_strings and tokenizer is not None else None
        times = Times(self._arrivals[name], began=self._clock.at())
        steering = None
        if request.params.text_potentials and tokenizer is not None:
            steering = Steering(request, tokenizer, self._scorer)
        running = Running(group, self._decoder, stable_prefix, stops, times, steering)
        if stable_prefix is not None and request.trace:
            running.history = self._decoder.history(len(request.token_ids))
        return running

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

    def _leave(self, running: Running) -> None:
        """Frees a group's slot and pages, and sends for its population."""
        running.times.ended = self._clock.at()
        self._report("population", self.runner.leave(running.group.slot), {0: running.group})
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
            leaves, tree = jax.tree.flatten(value)
            for index, running in reported.groups:
                if reported.kind == "population":
                    outputs += self._ended(running, value)
                    continue
                self._follow(reported, running, jax.tree.unflatten(tree, [leaf[index] for leaf in leaves]))
        outputs += self._scored()
        for output in outputs:
            self._count(output)
        return outputs

    def _ended(self, running: Running, population: Any) -> list[RequestOutput]:
        """The output of a request that has left; none yet where potentials are asked about its whole answers."""
        if running.steering is None or running.aborted or running.refused is not None or population.failed[0]:
            return [self._output(running, population)]
        running.steering.end(population)
        self._scoring.append((running, population))
        return []

    def _follow(self, reported: _Reported, running: Running, value: Any) -> None:
        """Follows one group by a report, of a chunk of prefill or a cycle: streams, stop strings, its end."""
        kind = reported.kind
        if kind == "cycle" and not value.ran:
            return
        running.take(kind, value)
        if kind == "prompt":
            return
        name = running.request.request_id
        if running.stable_prefix is not None and name in self._streams:
            chunk = running.news(kind, value)
            if chunk is not None:
                self._streams[name].append(chunk)
        if running.times.ended:  # what was under way when it left is part of its population; its stream has ended
            return
        if running.steering is not None:
            running.steer(kind, value)
        if kind == "first" and not running.times.first_seen:
            running.times.first_seen = self._clock.at()
        if value.done:
            self._conclude(running)
        elif running.stops is not None and running.last_cycle is None and running.is_decided(kind, value):
            # The first cycle is enqueued in the first tokens' round, so who reads late knows of these after the second.
            running.last_cycle = max(len(running.infos), 1) + 1
            self._conclude_settled(running)

    def _conclude(self, running: Running) -> None:
        """Takes a group out, whose population is to be its answer."""
        self._scheduler.withdraw(running.group.request.request_id)
        self._leave(running)

    def _conclude_settled(self, running: Running) -> None:
        """Takes a group out whose last cycle is enqueued, neither earlier nor later."""
        if running.last_cycle is not None and running.group.cycles >= running.last_cycle:
            assert running.group.cycles == running.last_cycle
            self._conclude(running)

    def _output(self, running: Running, population: Any) -> RequestOutput:
        output = assemble(running, population, self._tokenizer)
        if output.smc is not None and output.smc.warning is not None:
            logger.warning("Request %s: %s.", output.request_id, output.smc.warning)
        if running.stable_prefix is not None:
            answer = output.outputs[0]
            self._end_stream(output, *running.stable_prefix.rest(answer.text, answer.token_ids))
        return output

    def _ended_in_the_queue(self, request: Request) -> RequestOutput:
        """The output of a request that was aborted while it waited, for the first time or since it was preempted."""
        running = self._preempted.pop(request.request_id, None)
        if running is not None:
            running.times.ended = self._clock.at()
        return aborted_in_the_queue(request, self._decoder.decoding, running)

    def _end_stream(self, output: RequestOutput, text: str, token_ids: list[int]) -> None:
        """Adds the last chunk to the request's stream, if the request streams."""
        if output.request_id in self._streams:
            answer, emitted = output.outputs[0], len(output.outputs[0].token_ids) - len(token_ids)
            chunk = StreamChunk(
                text,
                token_ids,
                finished=True,
                output=output,
                logprobs=None if answer.logprobs is None else answer.logprobs[emitted:],
                top_logprobs=None if answer.top_logprobs is None else answer.top_logprobs[emitted:],
            )
            self._streams[output.request_id].append(chunk)

    def _count(self, output: RequestOutput) -> None:
        del self._arrivals[output.request_id]
        self.totals["requests"] += 1
        self.totals["cycles"] += output.metrics.cycles
        self.totals["resamples"] += output.metrics.resamples
        self.totals["generated_tokens"] += output.metrics.generated_tokens
