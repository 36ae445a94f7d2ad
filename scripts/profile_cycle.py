"""Where a cycle goes: device time by kernel class, from JAX's profiler, for the step that `bench cycle` times.

    python scripts/profile_cycle.py                          # Llama-3.2-1B / 3.1-8B shapes, one H200
    python scripts/profile_cycle.py --implementation xla

Graphs are off while profiling, so the sum is a little more than the cycle that `bench cycle` measures.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from smcjax import smc
from smcjax.bench.cycle import make_runner, random_batch, random_params
from smcjax.bench.shapes import SHAPES

CYCLES = 3


def cycle_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that say which cycle."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("-N", "--n-particles", type=int, default=8)
    parser.add_argument("-K", "--gamma", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    return parser


def main() -> None:
    """Profiles a few cycles and prints microseconds a cycle by kernel name without its number."""
    parser = cycle_parser(__doc__)
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto")
    parser.add_argument("--most", type=int, default=30, help="rows to print")
    args = parser.parse_args()

    target, draft = SHAPES[args.target_shape], SHAPES[args.draft_shape]
    decoding = smc.SMC(n_particles=args.n_particles, gamma=args.gamma)
    program = smc.Program(decoding, target, draft, args.max_model_len, implementation=args.implementation)
    params = smc.PairParams(random_params(target, 0), random_params(draft, 1))
    runner = make_runner(smc, program, params, groups=1, rows=args.n_particles)
    batch = random_batch(1, args.context, args.max_model_len, target.vocab_size)
    runner.compile(batch, program)
    state = runner.prefilled(batch, program)
    step = runner.programs[program, batch.size, "step"]
    for _ in range(4):
        state, _ = step(params, state)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(CYCLES):
                state, _ = step(params, state)
            jax.block_until_ready(state)
        events = kernel_events(Path(directory))
    _report(events, args.most)


def kernel_events(directory: Path) -> list[tuple[str, float]]:
    """(kernel class, microseconds) of everything that ran on a GPU stream."""
    trace = json.loads(gzip.decompress(next(directory.rglob("*.trace.json.gz")).read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e.get("name") == "thread_name"}

    def on_stream(event: dict[str, Any]) -> bool:
        return "GPU" in processes.get(event["pid"], "") and "Stream" in threads.get((event["pid"], event["tid"]), "")

    return [(re.sub(r"[._]\d+", "", e["name"]), e["dur"]) for e in trace if e.get("ph") == "X" and on_stream(e)]


def _report(events: list[tuple[str, float]], most: int) -> None:
    if not events:
        raise SystemExit("nothing ran on a GPU stream: this script needs a GPU")
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, duration in events:
        times[name].append(duration)
    total = sum(duration for _, duration in events)
    print(f"{'µs a cycle':>10} {'launches':>9} {'share':>6}  kernel")
    for name, durations in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        share = sum(durations) / total
        print(f"{sum(durations) / CYCLES:10.1f} {len(durations) / CYCLES:9.0f} {100 * share:5.1f}%  {name[:90]}")
    print(f"{total / CYCLES:10.1f} {len(events) / CYCLES:9.0f} 100.0%  all")


if __name__ == "__main__":
    main()
