"""Verification and packing on a GPU, three ways that are kept apart: host-visible, on the device, inside a program.

    python scripts/bench_verify.py --output verify.json       # two minutes and a half on an H200; tables last
    python scripts/bench_verify.py --output verify.json --quick
    python -m smcjax.viz.verify verify.json -o docs/images    # draws it

Of each case of a grid of b rows, γ drafted tokens, acceptance rate α and width D of KV (bf16):

- host: one call and the wait for its result, median;
- device: what the profiler says its kernels take, summed over a call, median;
- program: one of many calls in a `fori_loop`, each depending on the one before, on other inputs each, less what such a
  loop takes with nothing in it (that is `nothing`).

Methods: `op by op` (array operations, nothing compiled as a whole), `xla` (the reference, compiled), our kernels, a
scan with a thread a row (`peers/naive_scan.py`), ours as one block (`one block`: the study's structure), PyTorch eager
(`peers/torch_verify.py`, in a process of its own; left out where torch is missing). All results are compared with the
oracle first. Calls rotate over buffers, inputs and results, of more than 200 MB; cases too small for that rotate over
64 sets, and a pass over 256 MB goes before each round. In programs the results of calls share a buffer, as XLA has it.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import concurrent.futures
import dataclasses
import functools
import gzip
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch runs beside

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smcjax.bench.roofline import BANDWIDTH
from smcjax.bench.verification import floor_bytes, rotations, synthetic
from smcjax.pallas import verify_pack as vp
from smcjax.pallas.paged_attention import on_hopper

sys.path.insert(0, str(Path(__file__).parent / "peers"))

WARMUP = 20
CALLS = 64  # timed, at least
IN_PROGRAM = 96
SETS_IN_PROGRAM = 8
SLACK = 250  # µs by which the clocks of host and device may differ in a trace; windows are a millisecond apart
CASES_A_TRACE = 20  # a trace file holds a million events
MOST_ONE_LAUNCH = 40_000  # ids; beyond, one launch is compiled for nothing
STRESS = {"rows": 32, "gamma": 128, "alpha": 0.9, "dim": 2048}
FLUSH_BYTES = 256 << 20
NOISE = 0.03
Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid and what is measured there; `dim` 0 has ids only."""

    rows: int
    gamma: int
    alpha: float
    dim: int = 0
    methods: tuple[str, ...] = ()
    in_program: bool = False

    @property
    def point(self) -> dict[str, Any]:
        return {"rows": self.rows, "gamma": self.gamma, "alpha": self.alpha, "dim": self.dim}


# ------------------------------------------------------------------------------------------------------------- methods

SCANS = ("scan: op by op", "scan: xla", "scan: a thread a row", "scan: ours")
PACKS = ("pack: xla", "pack: ours")
VERIFIES = ("verify: xla", "verify: two launches", "verify: one launch", "verify: one block")
ON_CPU = ("scan: op by op", "scan: xla", "pack: xla", "verify: xla")
NO_JIT = ("scan: op by op",)


def one_block(draft: jax.Array, target: jax.Array, kv: jax.Array) -> Any:
    """The study's structure: a single block scans, sums and copies."""
    rows, gamma, dim = kv.shape
    return vp.verify_and_pack_mosaic(draft, target, kv, tuning=vp.plan(rows, gamma, 2 * dim, blocks=1))


def naive(draft: jax.Array, target: jax.Array) -> Any:
    from naive_scan import naive_scan

    return naive_scan(draft, target)


METHODS: dict[str, Call] = {
    "scan: op by op": vp.op_by_op,
    "scan: xla": jax.jit(vp.acceptance_scan_reference),
    "scan: a thread a row": jax.jit(naive),
    "scan: ours": jax.jit(vp.acceptance_scan_mosaic),
    "pack: xla": jax.jit(vp.pack_reference),
    "pack: ours": jax.jit(lambda kv, lengths: vp.pack_mosaic(kv, lengths)[0]),
    "verify: xla": jax.jit(vp.verify_and_pack_reference),
    "verify: two launches": jax.jit(vp.scan_then_pack_mosaic),
    "verify: one launch": jax.jit(vp.verify_and_pack_mosaic),
    "verify: one block": jax.jit(one_block),
}


def grid(quick: bool) -> list[Case]:
    """The study's grid, its sweep of γ, widths of KV, and batches beyond; first what the goals are stated for."""
    alphas = (0.9,) if quick else (0.3, 0.6, 0.9)
    steps = ("verify: two launches", "verify: one launch")
    cases = [Case(**STRESS, methods=PACKS + VERIFIES, in_program=True)]
    for dim, gamma, alpha in itertools.product((128, 512, 1024, 2048), (8, 128), alphas):
        cases.append(Case(32, gamma, alpha, dim, PACKS + VERIFIES, in_program=alpha == 0.9 and dim in (128, 2048)))
    for gamma, alpha in itertools.product((8, 64, 128), alphas):
        cases.append(Case(32, gamma, alpha, methods=SCANS, in_program=True))
    beyond = (64, 257, 1024)
    for rows, gamma, dim, alpha in itertools.product(beyond, (8, 128), (128, 2048), (0.3, 0.9)):
        if not (quick and rows > 64):
            cases.append(Case(rows, gamma, alpha, dim, (*steps, "verify: xla")))
    for rows, gamma, alpha in itertools.product((1, 4, 16), (8, 64, 128), alphas):
        cases.append(Case(rows, gamma, alpha, methods=SCANS))
    for gamma, alpha in itertools.product((4, 16, 32), (0.3, 0.9)):
        cases.append(Case(32, gamma, alpha, methods=SCANS))
    for rows, gamma, dim, alpha in itertools.product((1, 4, 16, 32), (8, 64, 128), (128, 2048), alphas):
        one = ("verify: one block",) if (rows, gamma) == (4, 8) else ()
        cases.append(Case(rows, gamma, alpha, dim, steps + one))
    merged: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        at = tuple(case.point.values())
        old = merged.get(at)
        merged[at] = (
            case
            if old is None
            else dataclasses.replace(
                old,
                methods=tuple(dict.fromkeys(old.methods + case.methods)),
                in_program=old.in_program or case.in_program,
            )
        )
    return [fitted(case) for case in merged.values()]


def fitted(case: Case) -> Case:
    """Without methods that do not run here or are not worth compiling."""
    too_many = case.rows * case.gamma > MOST_ONE_LAUNCH
    keep = [m for m in case.methods if not (too_many and m == "verify: one launch")]
    if not on_hopper():
        keep = [m for m in keep if m in ON_CPU]
    return dataclasses.replace(case, methods=tuple(keep))


def tunings() -> dict[str, vp.Tuning]:
    """Other ways to divide the stress point, for whoever sets the constants."""
    rows, gamma, row_bytes = STRESS["rows"], STRESS["gamma"], 2 * STRESS["dim"]
    base = vp.plan(rows, gamma, row_bytes)
    change = functools.partial(dataclasses.replace, base)
    return {
        "as planned": base,
        "looks ahead, γ/8": change(ahead=gamma // 8),
        "looks ahead, γ/4": change(ahead=gamma // 4),
        "tiles of 1 row": change(tile=1, slots=8),
        "tiles of 4 rows": change(tile=4, slots=3),
        "2 slots": change(slots=2),
        "2 warpgroups": change(warpgroups=2, slots=8),
        "8 warpgroups": change(warpgroups=8, slots=2),
        "264 blocks of 2 warpgroups": change(blocks=264, warpgroups=2, slots=5),
    }


# -------------------------------------------------------------------------------------------------------------- inputs


class Batches:
    """Inputs of one case, several sets, kept for the next phase."""

    def __init__(self, pool: jax.Array, case: Case) -> None:
        count = rotations(case.rows, case.gamma, case.dim)
        ids = _ids(case.rows, case.gamma, case.alpha, count)
        self.lengths = [lengths for _, _, lengths, _ in ids]
        self.accepted = statistics.fmean(int(lengths.sum()) for lengths in self.lengths)
        scan = [(draft, target) for draft, target, _, _ in ids]
        self.inputs: dict[str, list[tuple[jax.Array, ...]]] = {"scan": scan}
        if case.dim:
            kv = _kv(pool, (case.rows, case.gamma, case.dim), count)
            self.inputs["pack"] = [(one, lengths) for one, (_, _, _, lengths) in zip(kv, ids, strict=True)]
            self.inputs["verify"] = [(*two, one) for two, one in zip(scan, kv, strict=True)]
        self.small = count == 64

    def of(self, method: str) -> list[tuple[jax.Array, ...]]:
        return self.inputs[kind(method)]


@functools.cache
def _ids(rows: int, gamma: int, alpha: float, count: int) -> list[tuple[Any, ...]]:
    """Draft and target on the device; lengths on the host and on the device."""
    made = [synthetic(rows, gamma, alpha, seed=7 + i) for i in range(count)]
    return [(*jax.device_put((one.draft, one.target)), one.lengths, jax.device_put(one.lengths)) for one in made]


_pieces: dict[tuple[int, ...], list[jax.Array]] = {}


def _kv(pool: jax.Array, shape: tuple[int, ...], count: int) -> list[jax.Array]:
    """Pieces of the pool, which is of random numbers between −1 and 1."""
    size = math.prod(shape)
    if shape not in _pieces:
        starts = [i * size % max(1, pool.size - size) for i in range(count)]
        _pieces[shape] = [_piece(pool, start, shape) for start in starts]
    return _pieces[shape]


def kind(method: str) -> str:
    return method.partition(":")[0]


@functools.partial(jax.jit, static_argnums=2)
def _piece(pool: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(pool, (start,), (math.prod(shape),)).reshape(shape)


@functools.partial(jax.jit, static_argnums=0)
def make_pool(size: int) -> jax.Array:
    i = lax.iota(jnp.uint32, size) * jnp.uint32(2654435761)
    i = (i ^ (i >> 15)) * jnp.uint32(2246822519)
    i = (i ^ (i >> 13)) * jnp.uint32(3266489917)
    return ((i ^ (i >> 16)).astype(jnp.float32) * 2.0**-31 - 1).astype(jnp.bfloat16)


@functools.partial(jax.jit, donate_argnums=0)
def _pass_over(x: jax.Array) -> jax.Array:
    return x + 1


class Flush:
    """Empties the L2 of everything else."""

    def __init__(self, size: int) -> None:
        self.array = jnp.zeros(size, jnp.float32)

    def __call__(self) -> None:
        self.array = jax.block_until_ready(_pass_over(self.array))


# ----------------------------------------------------------------------------------------------------------- measuring


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


def host_time(call: Call, inputs: Sequence[Any], flush: Flush | None, calls: int) -> float:
    """µs from a call until its result is there."""
    times: list[float] = []

    def one(*arguments: Any) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - began)
        return out

    for run in rounds(one, inputs, flush, calls):
        run()
    return statistics.median(times[WARMUP:]) * 1e6


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
        out[key]["launches" if launches else "device"] = statistics.median(values)
    return dict(out)


# ----------------------------------------------------------------------------------------------------------------- run


class Run:
    """All phases; a failure is written down and costs its method at its case only."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.perf_counter()
        self.bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind, 4.8e12)
        self.cases = grid(args.quick)
        if args.cases:
            self.cases = self.cases[: args.cases]
        self.records: dict[Case, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.tuned: dict[str, float] = {}
        self.notes: list[str] = []
        self.bad: set[tuple[str, Case]] = set()
        largest = max(case.rows * case.gamma * case.dim for case in self.cases)
        self.pool = make_pool(max(largest, 128 << 20 if on_hopper() else 1 << 16))
        self.flush = Flush(FLUSH_BYTES // 4 if on_hopper() else 1024)
        for case in self.cases:
            self.records[case] = {**case.point, "times": {method: {} for method in case.methods}}

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def say(self, what: str) -> None:
        print(f"[{self.seconds():6.1f} s] {what}", flush=True)

    def guarded(self, what: str, case: Case, method: str, work: Callable[[], None]) -> None:
        if (method, case) in self.bad:
            return
        try:
            work()
        except Exception as problem:
            self.bad.add((method, case))
            self.failures.append(f"{what}, {method}, {case.point}: {type(problem).__name__}: {str(problem)[:300]}")
            print("FAILED", self.failures[-1], flush=True)

    def torch(self) -> None:
        """The peer, before anything of ours is on the GPU."""
        scans = [case for case in self.cases if case.rows == 32 and case.dim == 0]
        chosen = scans + [c for c in self.cases if c.rows == 32 and c.gamma in (8, 128) and c.alpha == 0.9 and c.dim]
        if self.args.no_torch:
            self.notes.append("torch left out on request")
            return
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        script = Path(__file__).parent / "peers" / "torch_verify.py"
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                input=json.dumps([case.point for case in chosen]),
                capture_output=True,
                text=True,
                timeout=self.args.torch_timeout,
                env=environment,
            )
            lines = done.stdout.strip().splitlines()
            results = json.loads(lines[-1])
        except Exception as problem:
            reason = done.stderr.strip().splitlines()[-1:] if "done" in locals() else problem
            self.notes.append(f"no torch: {reason}")
            self.say(self.notes[-1])
            return
        self.notes.append(f"torch {lines[0]}")
        for case, times in zip(chosen, results, strict=True):
            for name, values in times.items():
                self.records[case]["times"][f"{name}: torch"] = {k: v for k, v in values.items() if v is not None}
        self.say("torch is done")

    def compile(self) -> None:
        """Everything that is called, lowered here and compiled in threads; a call finds it in the caches of jit."""
        jobs: dict[Any, tuple[Case, str, Call, list[Any]]] = {}
        for case in self.cases:
            for method in case.methods:
                if method in NO_JIT:
                    continue
                shapes = _shapes(case, method)
                jobs.setdefault((method, str(shapes)), (case, method, METHODS[method], shapes))
                if case.in_program:
                    sets = min(SETS_IN_PROGRAM, rotations(case.rows, case.gamma, case.dim))
                    for empty in (False, True):
                        name = f"{kind(method)}: xla" if empty else method  # an empty loop serves all of its kind
                        program = looped(name, sets, empty)
                        given = [[tuple(shapes)] * sets]
                        jobs.setdefault((name, empty, str(shapes)), (case, method, program, given))
        with concurrent.futures.ThreadPoolExecutor(self.args.threads) as pool:
            running = []
            for case, method, call, shapes in jobs.values():

                def lower(case: Case = case, method: str = method, call: Any = call, shapes: Any = shapes) -> None:
                    running.append((case, method, pool.submit(call.lower(*shapes).compile)))

                self.guarded("lowering", case, method, lower)
            self.say(f"{len(jobs)} programs lowered")
            for case, method, future in running:
                self.guarded("compiling", case, method, lambda future=future: future.result() and None)
        self.say("all compiled")

    def each(self, what: str, until: float, work: Callable[[Case, Batches], None], cases: Any = None) -> None:
        """`work` at every case, as long as there is time."""
        cases = self.cases if cases is None else cases
        for number, case in enumerate(cases):
            if self.seconds() > until:
                self.notes.append(f"{what}: out of time at case {number} of {len(cases)}")
                self.say(self.notes[-1])
                return
            try:
                batches = Batches(self.pool, case)
            except Exception as problem:
                self.failures.append(f"inputs, {case.point}: {str(problem)[:300]}")
                continue
            self.records[case]["accepted"] = batches.accepted
            moved = floor_bytes(case.rows, case.gamma, case.dim, round(batches.accepted))
            self.records[case]["floor"] = moved / self.bandwidth * 1e6
            work(case, batches)
        self.say(f"{what}: done")

    def on_device(self) -> None:
        """Checks results, then profiles all methods in one trace."""

        def checked(case: Case, batches: Batches) -> None:
            for method in case.methods:
                self.guarded("checking", case, method, lambda m=method: check(m, METHODS[m], batches))

        self.each("results", 0.45 * self.args.budget, checked)
        if not on_hopper():
            return

        def window(name: str, call: Call, inputs: Sequence[Any], batches: Batches) -> None:
            for run in rounds(call, inputs, self.flush if batches.small else None, CALLS):
                time.sleep(0.0005)
                with jax.profiler.TraceAnnotation(f"window {name}|{len(inputs)}"):
                    jax.block_until_ready(run())
                time.sleep(0.0005)

        def profiled(case: Case, batches: Batches) -> None:
            for method in case.methods:

                def one(method: str = method) -> None:
                    window(_window(case, method), METHODS[method], batches.of(method), batches)

                self.guarded("profiling", case, method, one)
            for label, tuning in tunings().items() if case.point == STRESS else ():
                call = functools.partial(vp.verify_and_pack_mosaic, tuning=tuning)

                def tuned(label: str = label, call: Call = call) -> None:
                    check("verify: " + label, call, batches)
                    window(f"tuning {label}", call, batches.of("verify"), batches)

                self.guarded("tuning", case, label, tuned)

        found: dict[str, dict[str, float]] = {}
        for start in range(0, len(self.cases), CASES_A_TRACE):
            with tempfile.TemporaryDirectory() as directory:
                with jax.profiler.trace(directory, profiler_options=trace_options()):
                    some = self.cases[start : start + CASES_A_TRACE]
                    self.each(f"profile from case {start}", 0.75 * self.args.budget, profiled, some)
                found |= device_times(Path(directory))
        self.say(f"{len(found)} windows read from the trace")
        for case in self.cases:
            for method in case.methods:
                self.records[case]["times"][method].update(found.get(_window(case, method), {}))
        self.tuned = {label: found[f"tuning {label}"]["device"] for label in tunings() if f"tuning {label}" in found}

    def elsewhere(self) -> None:
        """Host-visible times, and those in a program."""
        calls = CALLS if on_hopper() else 4

        def host(case: Case, batches: Batches) -> None:
            flush = self.flush if batches.small else None
            for method in case.methods:

                def one(method: str = method) -> None:
                    times = self.records[case]["times"][method]
                    times["host"] = host_time(METHODS[method], batches.of(method), flush, calls)

                self.guarded("host-visible", case, method, one)

        def program(case: Case, batches: Batches) -> None:
            if not case.in_program:
                return
            nothing: dict[str, float] = {}
            for method in case.methods:
                if method in NO_JIT:
                    continue

                def one(method: str = method) -> None:
                    what, inputs = kind(method), batches.of(method)
                    if what not in nothing:
                        nothing[what] = in_program(f"{what}: xla", inputs, empty=True)
                    taken = in_program(method, inputs, empty=False)
                    self.records[case]["times"][method]["program"] = taken - nothing[what]

                self.guarded("program", case, method, one)
            self.records[case]["nothing"] = nothing

        self.each("host-visible", 0.9 * self.args.budget, host)
        self.each("program", self.args.budget, program)

    def results(self) -> dict[str, Any]:
        return {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "bandwidth": self.bandwidth,
            "seconds": self.seconds(),
            "notes": self.notes,
            "failures": self.failures,
            "cases": [record for record in self.records.values() if "floor" in record],
            "tunings": self.tuned,
        }

    def write(self) -> None:
        results = self.results()
        results["goals"] = goals(results["cases"])
        results["dispatcher"] = dispatchers(results["cases"])
        if self.args.output:
            self.args.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _shapes(case: Case, method: str) -> list[jax.ShapeDtypeStruct]:
    draft, target, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((case.rows, case.gamma), (case.rows, case.gamma + 1), (case.rows,))
    )
    kv = jax.ShapeDtypeStruct((case.rows, case.gamma, case.dim), jnp.bfloat16)
    return {"scan": [draft, target], "pack": [kv, lengths], "verify": [draft, target, kv]}[kind(method)]


def _window(case: Case, method: str) -> str:
    return f"{method} {case.rows} {case.gamma} {case.alpha} {case.dim}"


# ------------------------------------------------------------------------------------------------------------ verdicts


def device(record: dict[str, Any], method: str) -> float | None:
    return record["times"].get(method, {}).get("device")


def shipped(record: dict[str, Any]) -> str:
    """What the dispatcher takes at this shape."""
    one = record["rows"] * record["gamma"] <= vp.MOST_RECOMPUTED
    return "verify: one launch" if one else "verify: two launches"


def goals(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The two that issue 4 states, in device time."""
    out: dict[str, Any] = {}
    for record in records:
        taken = device(record, "verify: one launch")
        if all(record[k] == v for k, v in STRESS.items()) and taken is not None:
            floor = record["floor"]
            out["stress"] = {"device": taken, "floor": floor, "ratio": taken / floor, "met": taken <= 2 * floor}
    ratios = []
    for record in records:
        two, ours = device(record, "verify: two launches"), device(record, shipped(record))
        if two and ours:
            ratios.append((ours / two, [record[k] for k in ("rows", "gamma", "alpha", "dim")]))
    if ratios:
        worst, where = max(ratios)
        out["never slower"] = {"worst ratio": worst, "at": where, "points": len(ratios), "met": worst <= 1 + NOISE}
    return out


def dispatchers(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a rule loses against always knowing the faster: ours by ids, and the study's by expected bytes."""
    pairs = {
        "one launch or two, by ids": ("verify: one launch", lambda r: r["rows"] * r["gamma"], vp.MOST_RECOMPUTED),
        "one block or two launches, by expected bytes": (
            "verify: one block",
            lambda r: 2 * r["rows"] * r["gamma"] * r["alpha"] * r["dim"],
            None,
        ),
    }
    out = {}
    for name, (fused, size, threshold) in pairs.items():
        points = [
            (size(r), a, b) for r in records if (a := device(r, fused)) and (b := device(r, "verify: two launches"))
        ]
        if not points:
            continue

        def regret(limit: float, points: list[Any] = points) -> list[float]:
            return [(a if s <= limit else b) / min(a, b) - 1 for s, a, b in points]

        limits = sorted({0, *(s for s, _, _ in points)})
        best = min(limits, key=lambda limit: statistics.fmean(regret(limit)))
        rules = {"best threshold": best, "never fused": 0, "always fused": float(limits[-1])}
        if threshold is not None:
            rules["as shipped"] = threshold
        out[name] = {
            "points": len(points),
            **{
                rule: {"threshold": limit, "mean regret": statistics.fmean(regret(limit)), "worst": max(regret(limit))}
                for rule, limit in rules.items()
            },
        }
    return out


def report(results: dict[str, Any]) -> None:
    """Tables."""

    def figure(times: dict[str, float], key: str) -> str:
        return f"{times[key]:9.1f}" if key in times else f"{'–':>9}"

    print(f"\n{results['device']}, jax {results['jax']}, {results['seconds']:.0f} s; {'; '.join(results['notes'])}")
    heading = f"{'b':>5} {'γ':>4} {'α':>4} {'D':>5} {'floor':>7}  {'method':<22} {'host':>9} {'device':>9}"
    print(f"{heading} {'program':>9} {'launches':>9} {'of floor':>8}   (µs)")
    for record in results["cases"]:
        for method, times in sorted(record["times"].items()):
            ratio = ""
            if method.startswith("verify") and "device" in times:
                ratio = f"{times['device'] / record['floor']:7.2f}×"
            where = f"{record['rows']:5d} {record['gamma']:4d} {record['alpha']:4.1f} {record['dim']:5d}"
            numbers = " ".join(figure(times, key) for key in ("host", "device", "program", "launches"))
            print(f"{where} {record['floor']:7.2f}  {method:<22} {numbers} {ratio:>8}")
    print("\ntunings at the stress point, µs on the device")
    for label, taken in sorted(results["tunings"].items(), key=lambda item: item[1]):
        print(f"{taken:8.2f}  {label}")
    print("\ndispatchers:", json.dumps(results["dispatcher"], ensure_ascii=False))
    print("failures:", len(results["failures"]), *results["failures"][:10], sep="\n  ")
    print("goals:", json.dumps(results["goals"], ensure_ascii=False))


def main() -> None:
    """Runs, writes after each phase, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write results there, as JSON")
    parser.add_argument("--quick", action="store_true", help="one acceptance rate, batches up to 64")
    parser.add_argument("--cases", type=int, help="only so many, the first ones")
    parser.add_argument("--budget", type=float, default=150, help="seconds; what does not fit is left out")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--torch-timeout", type=float, default=60)
    args = parser.parse_args()

    run = Run(args)
    for phase in (run.torch, run.compile, run.on_device, run.elsewhere):
        phase()
        run.write()
    results = run.results()
    report({**results, "goals": goals(results["cases"]), "dispatcher": dispatchers(results["cases"])})


if __name__ == "__main__":
    main()
