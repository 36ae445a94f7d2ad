"""Verification and packing on a GPU, three ways that are kept apart: host-visible, on the device, inside a program.

    python -m studies.verification.bench --output verify.json       # two minutes and a half on an H200; tables last
    python -m studies.verification.bench --output verify.json --quick
    python -m studies.verification.plot verify.json -o studies/verification/images    # draws it

Of each case of a grid of b rows, γ drafted tokens, acceptance rate α and width D of KV (bf16):

- host: one call and the wait for its result, median and p95 of 200 calls or more;
- device: what the profiler says its kernels take, summed over a call, likewise;
- program: one of many calls in a `fori_loop`, each depending on the one before, on other inputs each, less what such a
  loop takes with nothing in it (that is `nothing`).

Methods: `op by op` (array operations, nothing compiled as a whole), `xla` (the reference, compiled), our kernels, a
scan with a thread a row and a packer with a block a row (`slow_kernels.py`), ours as one block (`one block`: the
study's structure), PyTorch eager (`torch_eager.py`, in a process of its own; left out where torch is missing). All
results are compared with the oracle first. Calls rotate over buffers, inputs and results, of more than 200 MB; cases
too small for that rotate over 64 sets, and a pass over 256 MB goes before each round. In programs the results of calls
share a buffer, as XLA has it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch runs beside

import jax

from smcjax.device import HOPPER, this_device
from smcjax.pallas import active_implementation
from studies.verification import verify_pack as vp
from studies.verification.cases import (
    METHODS,
    NO_JIT,
    STRESS,
    Batches,
    Call,
    Case,
    grid,
    kind,
    make_pool,
    shapes_of,
    tunings,
)
from studies.verification.synthetic import floor_bytes, rotations
from studies.verification.timing import (
    CALLS,
    SETS_IN_PROGRAM,
    Flush,
    check,
    device_times,
    host_times,
    in_program,
    looped,
    rounds,
    trace_options,
)

CASES_A_TRACE = 20  # a trace file holds a million events
FLUSH_BYTES = 256 << 20
NOISE = 0.03


class Run:
    """All phases; a failure is written down and costs its method at its case only."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.perf_counter()
        self.bandwidth = this_device().bandwidth or HOPPER.bandwidth
        self.cases = grid(args.quick)
        if args.cases:
            self.cases = self.cases[: args.cases]
        self.records: dict[Case, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.tuned: dict[str, float] = {}
        self.notes: list[str] = []
        self.bad: set[tuple[str, Case]] = set()
        largest = max(case.rows * case.gamma * case.dim for case in self.cases)
        self.pool = make_pool(max(largest, 128 << 20 if active_implementation() == "mosaic" else 1 << 16))
        self.flush = Flush(FLUSH_BYTES // 4 if active_implementation() == "mosaic" else 1024)
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
        """The baseline, before anything of ours is on the GPU."""
        scans = [case for case in self.cases if case.rows == 32 and case.dim == 0]
        chosen = scans + [c for c in self.cases if c.rows == 32 and c.gamma in (8, 128) and c.alpha == 0.9 and c.dim]
        if self.args.no_torch:
            self.notes.append("torch left out on request")
            return
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        script = Path(__file__).with_name("torch_eager.py")
        command: dict[str, Any] = {
            "args": [sys.executable, str(script)],
            "input": json.dumps([case.point for case in chosen]),
            "capture_output": True,
            "timeout": self.args.torch_timeout,
            "env": environment,
            "text": True,
        }
        try:
            done = subprocess.run(**command)
            said, problem = done.stdout, (done.stderr.strip().splitlines() or ["?"])[-1]
        except subprocess.TimeoutExpired as stopped:
            said, problem = (stopped.stdout or b"").decode(), f"stopped after {self.args.torch_timeout:.0f} s"
        results = [json.loads(line.removeprefix("RESULT ")) for line in said.splitlines() if line.startswith("RESULT ")]
        for case, times in zip(chosen, results, strict=False):
            for name, values in times.items():
                self.records[case]["times"][f"{name}: torch"] = {k: v for k, v in values.items() if v is not None}
        if results:
            self.notes.append(f"torch {said.splitlines()[0]}")
        if len(results) < len(chosen):
            self.notes.append(f"torch has {len(results)} of {len(chosen)} cases: {problem}")
        self.say("; ".join(self.notes))

    def compile(self) -> None:
        """Everything that is called, lowered here and compiled in threads; a call finds it in the caches of jit."""
        jobs: dict[Any, tuple[Case, str, Call, list[Any]]] = {}
        for case in self.cases:
            for method in case.methods:
                if method in NO_JIT:
                    continue
                shapes = shapes_of(case, method)
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
                self.guarded("compiling", case, method, future.result)
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
                self.guarded("checking", case, method, functools.partial(check, method, METHODS[method], batches))

        self.each("results", self.args.budget - 40, checked)
        if active_implementation() == "xla":
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
                    self.each(f"profile from case {start}", self.args.budget - 22, profiled, some)
                try:
                    found |= device_times(Path(directory))
                except Exception as problem:
                    self.failures.append(f"trace from case {start}: {type(problem).__name__}: {str(problem)[:300]}")
        wanted = [_window(case, method) for case in self.cases for method in case.methods]
        missing = [name for name in wanted if "device" not in found.get(name, {})]
        if missing:
            self.notes.append(f"no device time for {len(missing)} of {len(wanted)} windows, such as {missing[:3]}")
        self.say(f"{len(found)} windows read from the traces")
        for case in self.cases:
            for method in case.methods:
                self.records[case]["times"][method].update(found.get(_window(case, method), {}))
        self.tuned = {label: found[f"tuning {label}"]["device"] for label in tunings() if f"tuning {label}" in found}

    def elsewhere(self) -> None:
        """Host-visible times, and those in a program."""
        calls = CALLS if active_implementation() == "mosaic" else 4

        def host(case: Case, batches: Batches) -> None:
            flush = self.flush if batches.small else None
            for method in case.methods:

                def one(method: str = method) -> None:
                    times = host_times(METHODS[method], batches.of(method), flush, calls)
                    self.records[case]["times"][method] |= times

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

        self.each("host-visible", self.args.budget - 10, host)
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


def _window(case: Case, method: str) -> str:
    return f"{method} {case.rows} {case.gamma} {case.alpha} {case.dim}"


# ------------------------------------------------------------------------------------------------------------ verdicts


def device(record: dict[str, Any], method: str) -> float | None:
    return record["times"].get(method, {}).get("device")


def shipped(record: dict[str, Any]) -> str:
    """Returns the method that the dispatcher takes at the record's shape."""
    one = record["rows"] * record["gamma"] <= vp.MAX_RECOMPUTED
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
    """Returns two rules' losses against always knowing the faster: ours by ids, the study's by expected bytes."""
    pairs = {
        "one launch or two, by ids": ("verify: one launch", lambda r: r["rows"] * r["gamma"], vp.MAX_RECOMPUTED),
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


def is_shown(record: dict[str, Any]) -> bool:
    """The points that the study's tables have, and large batches: the rest is in the JSON."""
    few = record["alpha"] == STRESS["alpha"] and record["gamma"] in (8, 128)
    return few and (record["rows"] == 32 or (record["rows"] > 32 and record["dim"] == 2048))


def report(results: dict[str, Any]) -> None:
    """A short table of many figures, and the verdicts."""

    def figure(times: dict[str, float], key: str) -> str:
        tail = f" ≤ {times[f'{key}, p95']:6.1f}" if f"{key}, p95" in times else 9 * " "
        return f"{times[key]:7.1f}{tail}" if key in times else f"{'–':>7}{9 * ' '}"

    print(f"\n{results['device']}, jax {results['jax']}, {results['seconds']:.0f} s; {'; '.join(results['notes'])}")
    heading = f"{'b':>5} {'γ':>4} {'α':>4} {'D':>5} {'floor':>7}  {'method':<26}"
    print(f"{heading} {'host ≤ p95':>16} {'device ≤ p95':>16} {'program':>7} {'launches':>17} {'of floor':>17}   (µs)")
    for record in filter(is_shown, results["cases"]):
        for method, times in sorted(record["times"].items()):
            ratio = ""
            if method.startswith("verify") and "device" in times:
                ratio = f"{times['device'] / record['floor']:7.2f}×"
            where = f"{record['rows']:5d} {record['gamma']:4d} {record['alpha']:4.1f} {record['dim']:5d}"
            numbers = " ".join(figure(times, key) for key in ("host", "device", "program", "launches"))
            print(f"{where} {record['floor']:7.2f}  {method:<26} {numbers} {ratio:>8}")
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
    parser.add_argument("--quick", action="store_true", help="one acceptance rate of KV, batches up to 64")
    parser.add_argument("--cases", type=int, help="only so many, the first ones")
    parser.add_argument("--budget", type=float, default=150, help="seconds; what does not fit is left out")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--torch-timeout", type=float, default=45)
    args = parser.parse_args()

    run = Run(args)
    for phase in (run.torch, run.compile, run.on_device, run.elsewhere):
        try:
            phase()
        except Exception as problem:
            run.failures.append(f"{phase.__name__}: {type(problem).__name__}: {str(problem)[:500]}")
            print("FAILED", run.failures[-1], flush=True)
        run.write()
    results = run.results()
    report({**results, "goals": goals(results["cases"]), "dispatcher": dispatchers(results["cases"])})


if __name__ == "__main__":
    main()
