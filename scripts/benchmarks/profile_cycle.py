"""Where a cycle goes: device time by phase and kernel class, by JAX's profiler, of the step that `bench cycle` times.

    python scripts/benchmarks/profile_cycle.py                          # Llama-3.2-1B / 3.1-8B shapes, one H200
    python scripts/benchmarks/profile_cycle.py --requests 32 --context 1024 --max-model-len 1280
    python scripts/benchmarks/profile_cycle.py --implementation xla
    python scripts/benchmarks/profile_cycle.py --tensor-parallel-size 2 --target-shape llama-3.1-70b --target-layers 16

Phases are the parts of `smcjax.smc.cycle.step`; a kernel counts for the phase that XLA names for it. That it does for
kernels that are launched one by one, so there are no graphs here. KV is synthetic.
Of several devices that hold the target together, the first one's kernels count.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from smcjax.bench.cycle import Bench, Case
from smcjax.bench.models import Models
from smcjax.bench.record import save, this_machine
from smcjax.bench.shapes import SHAPES
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.engine.run.programs import enable_compilation_cache
from smcjax.pallas.dispatch import IMPLEMENTATIONS
from smcjax.quantization import QUANTIZATIONS
from smcjax.smc import SMC

CYCLES = 3
WARMUP = 4
PHASES = ("reserve", "propose", "verify", "commit", "end", "resample")


class Kernel(NamedTuple):
    """One launch."""

    name: str  # without XLA's number; those of cuBLAS (nvjet) say which algorithm it is
    phase: str
    microseconds: float


def cycle_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that say which cycle."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--draft-quantization", choices=QUANTIZATIONS)
    parser.add_argument("-N", "--n-particles", type=int, default=8)
    parser.add_argument("-K", "--gamma", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    return parser


def main() -> None:
    """Profiles a few cycles and prints microseconds a cycle by phase, and by kernel name without its number."""
    parser = cycle_parser(__doc__)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--target-layers", type=int, help="of the target's (all)")
    parser.add_argument("--most", type=int, default=30, help="rows to print")
    add_save_option(parser)
    args = parser.parse_args()
    check_files(args)

    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    enable_compilation_cache()
    models = Models(
        args.target_shape,
        args.draft_shape,
        args.quantization,
        args.draft_quantization,
        target_layers=args.target_layers,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    case = Case(
        SMC(n_particles=args.n_particles, gamma=args.gamma, control=0),
        groups=args.requests,
        context=args.context,
        max_model_len=args.max_model_len,
        implementation=args.implementation,
        synthetic_kv=True,
        cycles_per_window=CYCLES,
    )
    params = (models.target_params(args.implementation), models.draft_params(args.implementation))
    kernels = list(profiled(Bench(models, case, *params)))
    _report(kernels, args.most)
    if args.save is not None:
        save(args.save, rows_of(kernels), this_machine(models.devices))


def profiled(bench: Bench) -> Iterable[Kernel]:
    """Every launch of CYCLES cycles of this case, after some to warm up."""
    bench.compile()
    runner = bench.runner
    bench.start()
    step: Any = runner.programs[runner.program, bench.case.groups, "step"]
    for _ in range(WARMUP):
        runner.step(runner.program)
    jax.block_until_ready(runner.state)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(CYCLES):
                runner.step(runner.program)
            jax.block_until_ready(runner.state)
        yield from read_kernels(Path(directory), phases_of(step.as_text()))


def phases_of(hlo: str) -> dict[str, str]:
    """The phase of each instruction of an optimised program, by the instruction's name."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', hlo, re.MULTILINE)
    return {name: next((part for part in path.split("/") if part in PHASES), "other") for name, path in found}


def read_kernels(directory: Path, phases: dict[str, str]) -> Iterable[Kernel]:
    """Everything that ran on a stream of the first GPU."""
    trace = json.loads(gzip.decompress(next(directory.rglob("*.trace.json.gz")).read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e.get("name") == "thread_name"}

    first = min((pid for pid, name in processes.items() if "GPU" in name), default=None)

    def on_stream(event: dict[str, Any]) -> bool:
        return event["pid"] == first and "Stream" in threads.get((event["pid"], event["tid"]), "")

    for event in trace:
        if event.get("ph") == "X" and on_stream(event):
            name = event["name"]
            phase = phases.get(event.get("args", {}).get("hlo_op", name), "other")
            plain = name if name.startswith("nvjet") else re.sub(r"[._]\d+", "", name)
            yield Kernel(plain, phase, event["dur"])


def rows_of(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Returns microseconds and launches a cycle by phase and name, the longest first."""
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        times[kernel.phase, kernel.name].append(kernel.microseconds)
    rows = [
        {"phase": phase, "kernel": name, "microseconds": sum(own) / CYCLES, "launches": len(own) / CYCLES}
        for (phase, name), own in times.items()
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])


def _report(kernels: list[Kernel], most: int) -> None:
    if not kernels:
        raise SystemExit("nothing ran on a GPU stream: this script needs a GPU")
    total = sum(kernel.microseconds for kernel in kernels)

    def row(microseconds: float, launches: int, name: str) -> str:
        return f"{microseconds / CYCLES:10.1f} {launches / CYCLES:9.0f} {100 * microseconds / total:5.1f}%  {name[:90]}"

    if all(kernel.phase == "other" for kernel in kernels):
        print("no kernel's phase is known: the program's text names none of those that ran")
    for heading, names in (
        ("phase", [k.phase for k in kernels]),
        ("kernel", [f"{k.phase}: {k.name}" for k in kernels]),
    ):
        times: dict[str, list[float]] = collections.defaultdict(list)
        for name, kernel in zip(names, kernels, strict=True):
            times[name].append(kernel.microseconds)
        print(f"{'µs a cycle':>10} {'launches':>9} {'share':>6}  {heading}")
        for name, durations in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
            print(row(sum(durations), len(durations), name))
    print(row(total, len(kernels), "all"))


if __name__ == "__main__":
    main()
