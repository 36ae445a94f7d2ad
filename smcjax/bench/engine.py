"""`smcjax bench engine`: what the engine costs beside the cycles that it runs, on random weights.

The same requests twice, in steady state (all prompts read, none ended): once through `Engine.step`, which schedules,
enqueues, reads results and follows every request; once as *bare* cycles, enqueued one after the other and never read.

    idle = 1 − bare/engine      the share of the engine's time in which the device has nothing to do
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import jax

from smcjax.bench.models import Models
from smcjax.bench.serving import Load, build_engine, make_requests
from smcjax.engine.engine import Engine
from smcjax.markdown import table

WARMUP = 4  # cycles; the first runs of a program on a GPU are eager, then record the graph


@dataclasses.dataclass(frozen=True)
class Overhead:
    """One measurement of the engine with a number of requests at once; times in milliseconds."""

    device: str
    requests: int
    input_len: int
    cycles: int  # that were timed
    bare_ms: float  # a cycle
    engine_ms: float  # a cycle
    host_ms: float  # a cycle, of Python that does not wait for the device
    prefill_ms: float  # until all have drawn their first tokens: prompts and the cycles between their chunks
    tokens_per_second: float  # through the engine, all requests together

    @property
    def idle(self) -> float:
        """Share of the engine's time; below 0 where the difference is noise."""
        return 1 - self.bare_ms / self.engine_ms


def measure(
    models: Models, load: Load, requests: Sequence[int], *, cycles: int, on_result: Callable[[Overhead], None]
) -> list[Overhead]:
    """One result for each number of requests at once; `on_result` hears of each.

    `load` says decoder, prompts and pages; its answers must last 2·WARMUP + `cycles` cycles and more.
    """
    engine = build_engine(models, load)
    results = []
    seeds = itertools.count(load.seed)  # other prompts each time: they would be in the prefix cache
    for count in requests:
        many = dataclasses.replace(load, num_prompts=count)
        _start(engine, models, many, next(seeds))  # the first run of all programs
        _bare(engine, WARMUP)
        end_all(engine)
        prefill = _start(engine, models, many, next(seeds))
        bare = _bare(engine, cycles)
        end_all(engine)
        _start(engine, models, many, next(seeds))
        through, host = _through(engine, cycles)
        end_all(engine)
        results.append(
            Overhead(
                device=jax.devices()[0].device_kind,
                requests=count,
                input_len=load.input_len,
                cycles=cycles,
                bare_ms=1e3 * bare / cycles,
                engine_ms=1e3 * through / cycles,
                host_ms=1e3 * host / cycles,
                prefill_ms=1e3 * prefill,
                tokens_per_second=count * load.decoding.tokens_per_cycle * cycles / through,
            )
        )
        on_result(results[-1])
    return results


def _start(engine: Engine, models: Models, load: Load, seed: int) -> float:
    """Admits the load's requests and runs until all have had WARMUP cycles; seconds until the last first token."""
    began = time.perf_counter()
    for _, request in make_requests(models, dataclasses.replace(load, seed=seed)):
        engine.add_request(request)
    while not engine.all_started:
        engine.step()
    jax.block_until_ready(engine.runner.state)
    seconds = time.perf_counter() - began
    for _ in range(WARMUP):
        engine.step()
    jax.block_until_ready(engine.runner.state)
    return seconds


def _bare(engine: Engine, cycles: int) -> float:
    """Seconds of cycles whose results the host does not read."""
    runner = engine.runner
    began = time.perf_counter()
    for _ in range(cycles):
        runner.step(runner.program)
    jax.block_until_ready(runner.state)
    return time.perf_counter() - began


def _through(engine: Engine, cycles: int) -> tuple[float, float]:
    """Seconds of as many through the engine, and of them the host's own."""
    waited = engine.seconds_waited
    began = time.perf_counter()
    for _ in range(cycles):
        if engine.step():
            raise RuntimeError("a request ended inside the benchmark: its weights broke, so the timing says nothing")
    seconds = time.perf_counter() - began
    host = seconds - (engine.seconds_waited - waited)
    jax.block_until_ready(engine.runner.state)
    return time.perf_counter() - began, host


def end_all(engine: Engine) -> None:
    """Ends all requests of an engine."""
    for name in engine.request_ids():
        engine.abort(name)
    while engine.busy:
        engine.step()


def markdown(results: Sequence[Overhead]) -> str:
    """A row a number of requests."""
    heads = ["requests", "bare cycle, ms", "in the engine, ms", "idle", "host a cycle, ms", "tok/s"]
    rows = [
        (
            one.requests,
            f"{one.bare_ms:.2f}",
            f"{one.engine_ms:.2f}",
            f"{100 * one.idle:.1f}%",
            f"{one.host_ms:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.prefill_ms:.1f}",
        )
        for one in results
    ]
    return table([*heads, "prompts read in, ms"], rows)
