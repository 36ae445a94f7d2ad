"""Times cycles of exact decoders over loads, at shapes with random weights: the table that a replay of traces needs.

    python scripts/time_strategies.py -o times.jsonl            # Llama 3.1 8B and 3.2 1B, on a GPU
    python scripts/time_strategies.py --tiny -o times.jsonl     # toy shapes on a CPU: that it runs

Strategies are the target alone and rejection of each of `--gammas` drafts, in batches of each of `--requests`. Programs
are those of an engine whose decoders take turns (`smcjax.engine.turns`): one state serves all strategies of a batch
size, and the draft's catching up behind cycles of the target alone is timed too, a chunk of every request's.

Random weights accept what they accept. The time of a cycle does not depend on that: no shape does, and by the GPU's
kernels no cycle has a loop or a branch whose turns data decide, within kernels but by the tokens that requests have.
Nor is a prompt read: KV is random numbers, and requests begin
behind a prompt of `--context` tokens. `scripts/replay_planner.py` gives such a table acceptance.

Lines are written as they come, JSON each: who and where first, then one for each strategy and load, one for each load's
chunk. Loads are compiled and timed in waves of `--wave`, so that a run that is cut off has whole loads. `--budget`: no
wave is begun that, if it took as long as the one before, would end later.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import smcjax
from smcjax.bench.cycle import WARMUP, random_batch
from smcjax.bench.models import Models
from smcjax.bench.profile import commit
from smcjax.bench.synthetic import random_memory
from smcjax.cli.bench_options import ON_CPU, ON_GPU
from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.decoding.groups import PairParams
from smcjax.engine.attached import detach
from smcjax.engine.fingerprints import device_name
from smcjax.engine.loading import make_decoder
from smcjax.engine.page_budget import Footprint
from smcjax.engine.programs import Job, Programs, abstract, enable_compilation_cache
from smcjax.engine.runner import Runner
from smcjax.markdown import table
from smcjax.model.params import Params
from smcjax.planner.laws import as_json

CATCHING_UP = "catching up"
PAGE_SIZE = 16
SIDE_BY_SIDE = 2  # loads, of which each compiles some programs at once


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of what to time."""

    gammas: tuple[int, ...]
    context: int
    windows: int
    cycles: int  # of a window
    implementation: str = "auto"

    @property
    def strategies(self) -> tuple[Decoding, ...]:
        """The target alone, and rejection of each number of drafts."""
        return (Autoregressive(), *(Rejection(gamma) for gamma in self.gammas))

    @property
    def own(self) -> Rejection:
        """The decoder whose state all of them advance (`smcjax.engine.planned`)."""
        return Rejection(max(self.gammas))

    @property
    def max_model_len(self) -> int:
        """The context, and as many tokens as the timed cycles give if all drafts are accepted; whole pages."""
        most = self.context + 1 + (WARMUP + self.windows * self.cycles + 1) * self.own.tokens_per_cycle
        return -(-most // PAGE_SIZE) * PAGE_SIZE


class Load:
    """A batch of so many requests: its programs, compiled by `compile`, and their times."""

    def __init__(self, plan: Plan, models: Models, requests: int, target: Params, draft: Params) -> None:
        self.plan, self.requests = plan, requests
        geometry = (plan.max_model_len, PAGE_SIZE, plan.implementation)
        decoder = make_decoder(plan.own, models.target_config, models.draft_config, *geometry)
        pages = 1 + requests * Footprint.of(plan.own, PAGE_SIZE).worst_case(plan.context, plan.max_model_len)
        self.runner = Runner(decoder, PairParams(target, draft), pages, Programs())
        self.runner.takes_turns = True
        self.batch = random_batch(requests, plan.context, plan.max_model_len, models.target_config.vocab_size)

    def program(self, strategy: Decoding) -> Any:
        """The program whose cycles are this strategy's."""
        own = self.runner.program
        return own if strategy == own.decoding else dataclasses.replace(own, by=strategy)

    def jobs(self) -> dict[Any, Job]:
        """The programs that are run: cycles, one that begins behind a prompt, catching up, and of integers."""
        size, wanted = self.requests, {"step", "empty", "join", "catch up"}
        found: dict[Any, Job] = {}
        for strategy in self.plan.strategies:
            jobs = self.runner.jobs(size, self.program(strategy))
            found |= {key: job for key, job in jobs.items() if key[-1] in wanted}
        _, state = self.runner._jobs.state(size)
        return found | {(size, "begin"): Job(self._begin, (1,), (abstract(self.runner.params), state))}

    def _begin(self, params: Any, state: Any) -> Any:
        """The state whose requests run from behind their prompts, the first tokens drawn."""
        program = self.runner.program
        hidden = jnp.zeros((self.requests, program.target.hidden_size), state.memory.target.keys[0].dtype)
        waiting = dataclasses.replace(state, running=jnp.ones_like(state.running))
        return detach(program.start(params, waiting, hidden))

    def compile(self) -> None:
        """Compiles what is to be run."""
        self.runner.programs.compile(f"for {self.requests} requests", self.jobs())

    def start(self) -> None:
        """Takes memory full of random numbers and puts the requests into it, behind their prompts."""
        runner = self.runner
        runner.take_memory(random_memory)
        runner.resize(self.requests, [-1] * self.requests)
        runner.join(self.batch, {})
        runner.state = runner.programs[self.requests, "begin"](runner.params, runner.state)

    def cycle_ms(self, strategy: Decoding) -> list[float]:
        """Milliseconds a cycle of each window, all behind one prompt. Frees the KV."""
        runner, program = self.runner, self.program(strategy)
        try:
            self.start()
            done = []
            found = self._windows(lambda: done.append(runner.step(program)[0].done))
            if any(bool(one.any()) for one in done):
                raise RuntimeError("a request ended while it was timed: its weights broke, so the timing says nothing")
            return found
        finally:
            runner.discard()

    def catching_up_ms(self) -> list[float]:
        """Milliseconds a chunk that the draft reads of every request's answer, of each window. Frees the KV."""
        behind = self.plan.context  # where answers begin
        try:
            self.start()
            return self._windows(
                lambda: self.runner.catch_up(dict.fromkeys(range(self.requests), (behind, behind + 1)))
            )
        finally:
            self.runner.discard()

    @property
    def chunk(self) -> int:
        """Tokens of a request that the draft reads at a time when it catches up."""
        return self.runner.chunks.together

    def _windows(self, enqueue: Callable[[], Any]) -> list[float]:
        for _ in range(WARMUP):
            enqueue()
        jax.block_until_ready(self.runner.state)
        found = []
        for _ in range(self.plan.windows):
            began = time.perf_counter()
            for _ in range(self.plan.cycles):
                enqueue()
            jax.block_until_ready(self.runner.state)
            found.append(1e3 * (time.perf_counter() - began) / self.plan.cycles)
        return found


def rows_of(load: Load) -> Iterator[dict[str, Any]]:
    """A row for each strategy of a load, and one for a chunk of catching up."""
    for strategy in load.plan.strategies:
        yield {"decoding": as_json(strategy), **_times(load, load.cycle_ms(strategy))}
    yield {CATCHING_UP: load.chunk, **_times(load, load.catching_up_ms())}


def _times(load: Load, windows: Sequence[float]) -> dict[str, Any]:
    return {
        "requests": load.requests,
        "context": load.plan.context,
        "ms": statistics.median(windows),
        "windows": list(windows),
    }


def header(plan: Plan, shapes: Sequence[str]) -> dict[str, Any]:
    """The first line: what was timed, where and by what."""
    settings = {**dataclasses.asdict(plan), "max_model_len": plan.max_model_len}
    return {
        "device": device_name(),
        "model": f"{shapes[0]}, random weights",
        "draft": f"{shapes[1]}, random weights",
        "jax": jax.__version__,
        "smcjax": smcjax.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds a cycle over loads."""
    loads = sorted({one["requests"] for one in rows})
    by: dict[str, dict[int, float]] = {}
    for one in rows:
        name = f"{CATCHING_UP}, {one[CATCHING_UP]} tokens" if CATCHING_UP in one else _name(one["decoding"])
        by.setdefault(name, {})[one["requests"]] = one["ms"]
    cells = [[name, *(f"{ms[load]:.2f}" if load in ms else "–" for load in loads)] for name, ms in by.items()]
    return table(["ms a cycle", *(f"{load} running" for load in loads)], cells)


def _name(decoding: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in decoding.items() if name != "decoder") or "target alone"


def main() -> int:
    """Compiles and times, wave by wave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 2, 4, 16], help="(1 8 32 64 2 4 16)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8], help="draft tokens (2 4 8)")
    parser.add_argument("--context", type=int, default=1024, help="(1024)")
    parser.add_argument("--windows", type=int, default=3, help="(3)")
    parser.add_argument("--cycles", type=int, default=8, help="of a window (8)")
    parser.add_argument("--wave", type=int, default=4, help="loads compiled together (4)")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="(3600)")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    args = parser.parse_args()
    began = time.perf_counter()

    def heard(line: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s: {line}", file=sys.stderr, flush=True)

    enable_compilation_cache()
    shapes = ON_CPU if args.tiny else ON_GPU
    models = Models(*shapes)
    plan = Plan(tuple(args.gammas), args.context, args.windows, args.cycles)
    target, draft = models.target_params("auto"), models.draft_params("auto")
    jax.block_until_ready((target, draft))
    heard("weights are there")
    rows: list[dict[str, Any]] = []
    with args.output.open("w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        write(header(plan, shapes))
        longest = 0.0
        for first in range(0, len(args.requests), args.wave):
            wave, start = args.requests[first : first + args.wave], time.perf_counter()
            if start - began + longest > args.budget:
                heard(f"{wave} running are left out, the budget of {args.budget:g} s")
                break
            loads = [Load(plan, models, requests, target, draft) for requests in wave]
            with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                compiling = [pool.submit(load.compile) for load in loads]
            heard(f"compiled for {wave} running")
            for load, compiled in zip(loads, compiling, strict=True):
                try:
                    compiled.result()
                    for row in rows_of(load):
                        rows.append(row)
                        write(row)
                    heard(f"timed {load.requests} running")
                except (ValueError, RuntimeError) as error:  # memory, mostly; the other loads are worth having
                    heard(f"{load.requests} running are left out: {str(error).splitlines()[0]}")
            longest = max(longest, time.perf_counter() - start)
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
