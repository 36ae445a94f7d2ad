"""How `bench.py` measures: results against the oracle, and the three kinds of time."""

from __future__ import annotations

import bisect
import collections
import functools
import gzip
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from studies.verification.cases import METHODS, Batches, Call, kind

WARMUP = 20
CALLS = 200  # timed, at least
IN_PROGRAM = 96
SETS_IN_PROGRAM = 8
SLACK = 250  # µs by which the clocks of host and device may differ in a trace; windows are a millisecond apart


@functools.partial(jax.jit, donate_argnums=0)
def _pass_over(x: jax.Array) -> jax.Array:
    return x + 1


class Flush:
    """Empties the L2 of everything else."""

    def __init__(self, size: int) -> None:
        self.array = jnp.zeros(size, jnp.float32)

    def __call__(self) -> None:
        self.array = jax.block_until_ready(_pass_over(self.array))


def check(method: str, call: Call, batches: Batches) -> None:
    """Raises unless lengths are the oracle's and everything else is the reference's, bit for bit."""
    (*arguments,) = batches.of(method)[0]
    got = jax.tree.leaves(call(*arguments))
    if kind(method) == "pack":
        want = [_reference("pack", *arguments)]
    else:
        want = jax.tree.leaves(_reference(kind(method), *arguments))
        if not np.array_equal(np.asarray(got[0]), batches.lengths[0]):
            raise AssertionError(f"{method}: lengths are not the oracle's")
    for number, (a, b) in enumerate(zip(got, want, strict=False)):
        if not bool(_same(a, b)):
            raise AssertionError(f"{method}: result {number} differs from the reference")


def _reference(what: str, *arguments: jax.Array) -> Any:
    return METHODS[f"{what}: xla"](*arguments)


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.dtype == jnp.bfloat16:
        a, b = (lax.bitcast_convert_type(x, jnp.uint16) for x in (a, b))
    return (a == b).all()


def rounds(call: Call, inputs: Sequence[Any], flush: Flush | None, calls: int) -> Iterator[Callable[[], list[Any]]]:
    """Functions that call once on every set and return the results, `calls` in all at least, after warming up."""
    kept = [call(*arguments) for arguments, _ in zip(itertools.cycle(inputs), range(WARMUP), strict=False)]
    jax.block_until_ready(kept)
    for _ in range(-(-calls // len(inputs))):
        if flush is not None:
            flush()
        yield lambda: [call(*arguments) for arguments in inputs]


def spread(name: str, microseconds: Sequence[float]) -> dict[str, float]:
    """The median of single calls, and what 95 of 100 calls do not exceed."""
    return {name: statistics.median(microseconds), f"{name}, p95": float(np.percentile(microseconds, 95))}


def host_times(call: Call, inputs: Sequence[Any], flush: Flush | None, calls: int) -> dict[str, float]:
    """µs from a call until its result is there."""
    times: list[float] = []

    def one(*arguments: Any) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - began)
        return out

    for run in rounds(one, inputs, flush, calls):
        run()
    return spread("host", [1e6 * seconds for seconds in times[WARMUP:]])


@functools.cache
def looped(method: str, sets: int, empty: bool) -> Call:
    """A program that calls about IN_PROGRAM times; if `empty`, only what makes calls depend on each other."""

    @jax.jit
    def program(inputs: Sequence[Any]) -> jax.Array:
        def body(_: Any, carry: jax.Array) -> jax.Array:
            for arguments in inputs:
                changed = list(arguments)
                which = 1 if kind(method) == "pack" else 0
                changed[which] = changed[which] + jnp.minimum(carry, 0)  # 0, which the compiler does not know
                out = changed[which : which + 1] if empty else jax.tree.leaves(METHODS[method](*changed))
                last = lax.optimization_barrier(out)[-1].reshape(-1)[0]  # of the whole result, because of the barrier
                bits = lax.bitcast_convert_type(last, jnp.uint16) if last.dtype == jnp.bfloat16 else last
                carry = jnp.abs(bits.astype(jnp.int32))
            return carry

        return lax.fori_loop(0, -(-IN_PROGRAM // sets), body, jnp.int32(0))

    return program


def in_program(method: str, inputs: Sequence[Any], *, empty: bool) -> float:
    """µs a call inside a compiled loop."""
    inputs = inputs[:SETS_IN_PROGRAM]
    program = looped(method, len(inputs), empty)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        jax.block_until_ready(program(inputs))
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]) / (-(-IN_PROGRAM // len(inputs)) * len(inputs)) * 1e6


def trace_options() -> Any:
    """Kernels and the script's own annotations: files stay small."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    return options


def device_times(directory: Path) -> dict[str, dict[str, float]]:
    """µs and launches a call by window's name, from a trace in which windows are annotations named `window …|calls`."""
    trace = json.loads(gzip.decompress(next(directory.rglob("*.trace.json.gz")).read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e.get("name") == "thread_name"}
    windows, kernels = [], []
    for e in trace:
        if e.get("ph") != "X":
            continue
        if e["name"].startswith("window "):
            windows.append((e["ts"], e["ts"] + e["dur"], e["name"]))
        elif "GPU" in processes.get(e["pid"], "") and "Stream" in threads.get((e["pid"], e["tid"]), ""):
            kernels.append((e["ts"], e["dur"]))
    kernels.sort()
    found: dict[str, list[float]] = collections.defaultdict(list)
    starts = [ts for ts, _ in kernels]
    for begin, end, name in sorted(windows):
        inside = kernels[bisect.bisect_left(starts, begin - SLACK) : bisect.bisect_right(starts, end + SLACK)]
        calls = int(name.rpartition("|")[2])
        durations = [duration for _, duration in inside]
        each, rest = divmod(len(durations), calls)
        if rest or not each:  # not the same kernels in every call: a mean
            found[name] += [sum(durations) / calls] if durations else []
        else:
            found[name] += [sum(durations[i * each : (i + 1) * each]) for i in range(calls)]
        found[f"launches {name}"].append(len(durations) / calls)
    out: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for name, values in found.items():
        if not values:
            continue
        launches = name.startswith("launches ")
        key = name.removeprefix("launches ").removeprefix("window ").rpartition("|")[0]
        out[key] |= {"launches": statistics.median(values)} if launches else spread("device", values)
    return dict(out)
